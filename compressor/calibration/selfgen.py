"""Calibration text the model writes itself: sampled in batches, with a key-value cache, by seed.

Text of its own lies where the model's activations lie, whatever it was trained on. A window begins with a
document boundary or with a word texts often begin with; the first tokens of a document are drawn at
temperature 1, for variety, the rest at 0.8, for sense. Nothing is cut from the distribution.
"""

from __future__ import annotations

import inspect
import math
import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compressor.arch import find_family
from compressor.calibration.packing import Marks
from compressor.calibration.walk import Walk
from compressor.core.report import Progress, no_progress
from compressor.errors import CompressorError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from compressor.checkpoint.base import Checkpoint

BATCH = 32
"""Windows sampled at a time: part of what the text depends on, so never chosen by memory."""
FREE_TOKENS = 8
"""Tokens of a document drawn at temperature 1."""
TEMPERATURE = 0.8
OPENINGS = (
    "The", "A", "In", "I", "It", "We", "When", "What", "How", "If", "This", "For", "On", "There", "After",
    "Question", "1", "#", "def", "import", "//", "<", "Le", "La", "Der", "El", "Il", "Let", "Dear", "Once",
)  # fmt: skip
SHARE = 0.9
"""Share of the available memory that may be used."""


def sample_self(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    marks: Marks,
    *,
    count: int,
    length: int,
    seed: int,
    device: str = "cpu",
    memory_limit: int | None = None,
    progress: Progress = no_progress,
) -> list[list[int]]:
    """``count`` windows of exactly ``length`` token ids, written by the model.

    The same seed, device and number of threads give the same tokens.

    Args:
        checkpoint: The model; it is held in memory whole, in float32.
        tokenizer: Its tokenizer: ids beyond its vocabulary are never drawn.
        marks: Its boundary tokens.
        count, length: Windows and tokens in each.
        seed: Of every draw.
        device: torch device.
        memory_limit: Bytes the model and its cache may take; None takes what the machine has to spare.
        progress: Told the tokens sampled.

    Raises:
        CompressorError: the model does not fit, or its logits are not finite.
    """
    needed = memory_needed(checkpoint, min(count, BATCH), length)
    limit = memory_limit if memory_limit is not None else int(SHARE * available_memory(device))
    if needed > limit:
        raise CompressorError(
            f"--calibration self: {checkpoint.label} does not fit in memory whole",
            got=f"{needed / 1e9:.2f} GB needed",
            expected=f"at most {limit / 1e9:.2f} GB",
            hint="a smaller --sequence-length, more memory, or --calibration default",
        )
    model, generator = whole_model(checkpoint, device), torch.Generator().manual_seed(seed)
    opening = random.Random(seed)
    rows: list[list[int]] = []
    while len(rows) < count:
        batch = min(BATCH, count - len(rows))
        starts = [_start(len(rows) + i, tokenizer, marks, opening) for i in range(batch)]

        def told(position: int, before: int = len(rows), batch: int = batch) -> None:
            progress("sampling calibration text", before * length + batch * position, count * length)

        found = _sample(model, starts, length, marks.eos, tokenizer.get_vocab_size(), generator, told)
        rows += found
    return rows


def _start(index: int, tokenizer: Tokenizer, marks: Marks, opening: random.Random) -> list[int]:
    """First tokens of a window: a boundary for every second one, else a word that begins texts."""
    word = tokenizer.encode(opening.choice(OPENINGS), add_special_tokens=False).ids[:1]
    bos = [] if marks.bos is None else [marks.bos]
    if index % 2 == 0 and (bos or marks.eos is not None):
        return bos or [int(marks.eos or 0)]
    return [*bos, *word]


@torch.inference_mode()
def _sample(
    model: Any,
    starts: list[list[int]],
    length: int,
    eos: int | None,
    vocabulary: int,
    generator: torch.Generator,
    told: Any,
) -> list[list[int]]:
    """One batch: rows of ``length`` ids that go on from their first tokens."""
    ids = torch.full((len(starts), length), -1, dtype=torch.int64)
    for row, start in enumerate(starts):
        ids[row, : len(start)] = torch.tensor(start[:length])
    age = torch.ones(len(starts))  # tokens since the document began
    cache = _empty_cache(model)
    for position in range(1, length):
        step = ids[:, position - 1 : position].to(model.device)
        logits = model(input_ids=step, use_cache=True, **cache).logits[:, -1, :vocabulary]
        drawn = _draw(logits.float().cpu(), age, generator)
        ids[:, position] = torch.where(ids[:, position] >= 0, ids[:, position], drawn)
        age = torch.where(ids[:, position] == (-1 if eos is None else eos), 0.0, age + 1)
        told(position + 1)
    return ids.tolist()


def _empty_cache(model: Any) -> dict[str, Any]:
    """A key-value cache that grows in place, under the name this transformers gives the argument."""
    from transformers import DynamicCache

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: DynamicCache(config=model.config)}


def _draw(logits: torch.Tensor, age: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token per row of logits float32 [b, vocab], by the temperature of its age."""
    if not torch.isfinite(logits).all():
        raise CompressorError("--calibration self: the model's logits are NaN or infinite")
    temperature = torch.where(age < FREE_TOKENS, 1.0, TEMPERATURE)
    probabilities = torch.softmax(logits / temperature[:, None], dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def whole_model(checkpoint: Checkpoint, device: str = "cpu") -> Any:
    """The transformers model with every weight in float32, through the walk's own blocks."""
    family = find_family(checkpoint.config, checkpoint.label)
    walk = Walk(checkpoint, family, device)
    for layer in range(walk.layers):
        walk.block(layer)
    model = walk.model
    outside = [name for name, value in model.state_dict().items() if value.is_meta and name in checkpoint.tensors]
    state = {name: torch.from_numpy(checkpoint.read(name)).clone().to(device) for name in outside}
    model.load_state_dict(state, strict=False, assign=True)
    head = model.get_submodule(family.head)
    if family.tied(checkpoint.config) or f"{family.head}.weight" not in checkpoint.tensors:
        head.weight = model.get_submodule(family.embedding).weight
    return model.eval()


def memory_needed(checkpoint: Checkpoint, batch: int, length: int) -> int:
    """Bytes: weights in float32, the cache of a batch, one layer's copy of it, and its logits."""
    dims = find_family(checkpoint.config, checkpoint.label).dims(checkpoint.config)
    weights = 4 * sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    cache = 2 * 4 * batch * length * dims["kv"] * (dims["layers"] + 1)
    return weights + cache + 4 * 4 * batch * dims["vocab"]


def available_memory(device: str = "cpu") -> int:
    """Bytes this process may still take: the device's, or the machine's within its control group."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_meminfo(), _group_room()]
    return min((bytes_ for bytes_ in found if bytes_ is not None), default=_physical())


def _meminfo() -> int | None:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _group_room(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdecimal() else None


def _physical() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
