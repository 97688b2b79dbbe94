"""transformers with compressed-tensors loads what we write, and computes what our codes say."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.checkpoint.safetensors import SafetensorsCheckpoint
from compressor.core.spec import Spec
from compressor.core.tensors import QTensor, RawTensor
from compressor.export import compressed_tensors as ct
from compressor.kernels.floats import round_to_dtype

TORCH_DTYPES = {
    "BF16": torch.bfloat16, "F32": torch.float32,
    "F16": torch.float16, "I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
INT4, INT8 = Spec(4, 32), Spec(8, -1)
FP8, FP8_TENSOR = Spec(8, -1, kind="float"), Spec(8, 0, kind="float")
FP8_BLOCK = Spec(8, 0, kind="float", block=(128, 128))
W8A8 = Spec(8, -1, activations="int8")
FP8_DYNAMIC = Spec(8, -1, kind="float", activations="fp8")
TOLERANCE = 1e-5
Choose = Callable[[str], Spec | None]


def absmax(weight: np.ndarray, spec: Spec) -> QTensor:
    """Round to nearest; scales span the largest magnitude, or min..max for asymmetric formats."""
    if spec.kind == "float":
        return absmax_float(weight, spec)
    shape = spec.scales_shape(*weight.shape)
    grouped = weight.reshape(shape[0], shape[1], -1)
    high, low = grouped.max(2).clip(0), grouped.min(2).clip(None, 0)
    span = high - low if not spec.symmetric else 2 * np.maximum(high, -low)
    scales = round_to_dtype((span / (2**spec.bits - 1)).astype(np.float32), spec.scale_dtype)
    zeros = None if spec.symmetric else np.clip(np.rint(spec.qmin - low / scales), spec.qmin, spec.qmax)
    codes = np.rint(grouped / scales[..., None]) + (0 if zeros is None else zeros[..., None])
    codes = np.clip(codes, spec.qmin, spec.qmax).astype(np.int8).reshape(weight.shape)
    return QTensor(codes, scales, None if zeros is None else zeros.astype(np.int8), spec)


def absmax_float(weight: np.ndarray, spec: Spec) -> QTensor:
    """The largest magnitude of every tile at 448; torch rounds."""
    height, width = spec.tile(*weight.shape)
    scales = np.empty(spec.scales_shape(*weight.shape), np.float32)
    codes = np.empty(weight.shape, np.uint8)
    for i, j in np.ndindex(*scales.shape):
        tile = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        scales[i, j] = round_to_dtype(np.abs(weight[tile]).max() / np.float32(448), spec.scale_dtype)
        ratio = torch.from_numpy(weight[tile] / scales[i, j]).clamp(-448, 448)
        codes[tile] = ratio.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return QTensor(codes, scales, None, spec)


def round_linears(source: SafetensorsCheckpoint, choose: Choose) -> dict[str, QTensor | None]:
    """Every linear's codes by module (None where it stays float)."""
    rounded: dict[str, QTensor | None] = {}
    for name, info in source.tensors.items():
        module = name.removesuffix(".weight")
        if len(info.shape) == 2 and "embed" not in name:
            spec = choose(module)
            rounded[module] = absmax(source.read(name), spec) if spec else None
    return rounded


def write(source: Path, out: Path, rounded: Mapping[str, QTensor | None], tied: bool) -> None:
    """The artifact's files, made with the foreign safetensors library."""
    from safetensors.torch import save_file

    checkpoint = SafetensorsCheckpoint(source)
    raws: dict[str, RawTensor] = {}
    for name in checkpoint.tensors:
        tensor = rounded.get(name.removesuffix(".weight"))
        raws |= {name: checkpoint.raw(name)} if tensor is None else ct.encode(name.removesuffix(".weight"), tensor)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    save_file(
        {n: torch.from_numpy(r.data.copy()).view(TORCH_DTYPES[r.dtype]).reshape(r.shape) for n, r in raws.items()},
        out / "model.safetensors",
        {"format": "pt"},
    )
    specs = {module: tensor and tensor.spec for module, tensor in rounded.items()}
    section = ct.quantization_config(specs, tied=tied)
    (out / "config.json").write_text(json.dumps({**checkpoint.config, "quantization_config": section}))


def logits(
    folder: Path, weights: Mapping[str, QTensor | None] | None = None, product: str = "F32", **options
) -> torch.Tensor:
    """Float32 logits of a model loaded by transformers, with ``weights`` put in if given.

    ``product`` is the dtype in which the engine multiplies codes by scales.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    tokens = torch.arange(48).reshape(2, 24) * 7 % model.config.vocab_size
    with torch.no_grad():
        for module, tensor in (weights or {}).items():
            if tensor is not None:
                weight = round_to_dtype(tensor.dequantize(), product)
                model.get_submodule(module).weight.copy_(torch.from_numpy(weight))
        return model(tokens).logits


def check(source: Path, out: Path, choose: Choose, tied: bool = False, product: str = "F32", **options) -> None:
    rounded = round_linears(SafetensorsCheckpoint(source), choose)
    write(source, out, rounded, tied)
    ours, theirs = logits(source, rounded, product), logits(out, **options)
    scale = ours.abs().max().item()
    assert (ours - theirs).abs().max().item() <= TOLERANCE * scale
    assert (logits(source) - theirs).abs().max().item() > 100 * TOLERANCE * scale  # it is quantized
    again = ct.ArtifactCheckpoint(SafetensorsCheckpoint(out))
    assert again.specs == {module: tensor.spec for module, tensor in rounded.items() if tensor}


def blocks(spec: Spec | None, head: Spec | None = None, **special: Spec | None) -> Choose:
    """Every linear of the blocks in one format, except modules whose name holds a special's key."""

    def choose(module: str) -> Spec | None:
        if module == "lm_head":
            return head
        return next((other for part, other in special.items() if part in module), spec)

    return choose


CASES: dict[str, Choose] = {
    "int4 group": blocks(INT4),
    "int8 channel": blocks(INT8),
    "int8 tensor": blocks(Spec(8, 0)),
    "int8 tensor asymmetric": blocks(Spec(8, 0, symmetric=False)),
    **{f"int{bits} group": blocks(Spec(bits, 16)) for bits in (2, 3, 5, 6, 7)},
    "int4, int8 and float": blocks(INT4, None, down_proj=INT8, o_proj=None),
    "int4 with int8 in one block": blocks(INT4, None, **{"layers.1.mlp": INT8}),
    "one block float": blocks(INT4, None, **{"layers.0": None}),
    "int8 with int8 head": blocks(INT8, INT8),
    "int4 with int8 head": blocks(INT4, INT8),
    "fp8 channel": blocks(FP8),
    "fp8 tensor": blocks(FP8_TENSOR),
    "fp8 block": blocks(FP8_BLOCK),
    "fp8 with fp8 head": blocks(FP8, FP8),
    "int4, fp8, fp8 block, int8 tensor and float": blocks(
        INT4, None, down_proj=FP8, o_proj=FP8_BLOCK, up_proj=Spec(8, 0), k_proj=None
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_dequantized_model(tiny_model, tmp_path, name):
    check(tiny_model("llama"), tmp_path / "a", CASES[name])


def test_tied_model(tiny_model, tmp_path):
    source = tiny_model("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in SafetensorsCheckpoint(source).tensors
    check(source, tmp_path / "a", blocks(INT4), tied=True)


def test_biases_stay_in_place(tiny_model, tmp_path):
    check(tiny_model("qwen2"), tmp_path / "a", blocks(INT4))


def test_fp8_blocks_at_the_edges(tiny_model, tmp_path):
    """192 x 64, 64 x 192 and 64 x 64 in blocks of 128: those at the edges are smaller."""
    source = tiny_model("llama", intermediate_size=192)
    check(source, tmp_path / "a", blocks(FP8_BLOCK))
    stored = SafetensorsCheckpoint(tmp_path / "a").tensors
    assert stored["model.layers.0.mlp.up_proj.weight_scale"].shape == (2, 1)
    assert stored["model.layers.0.mlp.down_proj.weight_scale"].shape == (1, 2)


@pytest.mark.parametrize("scale_dtype", ["F32", "F16"])
def test_fp8_scales_in_other_dtypes(tiny_model, tmp_path, scale_dtype):
    check(tiny_model("llama"), tmp_path / "a", blocks(Spec(8, -1, scale_dtype=scale_dtype, kind="float")))


def walked(folder: Path) -> torch.Tensor:
    """Float32 logits of the tokens of ``logits``, by our own walk."""
    from compressor.arch import find_family
    from compressor.calibration.walk import Walk

    artifact = ct.ArtifactCheckpoint(SafetensorsCheckpoint(folder))
    walk = Walk(artifact, find_family(artifact.config, artifact.label))
    streams = walk.embed([torch.arange(48).reshape(2, 24) * 7 % artifact.config["vocab_size"]])
    for layer in range(walk.layers):
        walk.forward(walk.block(layer), layer, streams)
    return walk.logits(streams[0])


ACTIVATIONS: dict[str, Choose] = {
    "w8a8": blocks(W8A8),
    "fp8 dynamic": blocks(FP8_DYNAMIC),
    "w8a8 tensor with its head": blocks(Spec(8, 0, activations="int8"), W8A8),
    "w4a8 groups": blocks(Spec(4, 32, activations="int8")),
    "w8a8, fp8 dynamic, int4 and float": blocks(W8A8, None, down_proj=FP8_DYNAMIC, o_proj=None, up_proj=INT4),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_quantized_activations(tiny_model, tmp_path, monkeypatch, name):
    """Our walk rounds inputs token by token as compressed-tensors does; a model with float inputs differs.

    Both through the same matrix products: a last bit may decide which code an input gets.
    """
    monkeypatch.setattr("compressor.calibration.linear.onednn_is_faster", lambda: False)
    source, out = tiny_model("llama"), tmp_path / "a"
    rounded = round_linears(SafetensorsCheckpoint(source), ACTIVATIONS[name])
    write(source, out, rounded, tied=False)
    theirs = logits(out)
    scale = theirs.abs().max().item()
    assert (walked(out) - theirs).abs().max().item() <= 1e-4 * scale
    assert (logits(source, rounded) - theirs).abs().max().item() > 1e-3 * scale  # inputs are quantized


@pytest.mark.parametrize("scale_dtype", ["BF16", "F32"])
@pytest.mark.parametrize("bits_and_group", [(4, 32), (8, -1), (3, 16)])
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
def test_asymmetric(tiny_model, tmp_path, bits_and_group, scale_dtype):
    """transformers 5.24 expects unpacked zero points on its default path, so load dequantized.

    There it multiplies codes by scales in the dtype the scales are stored in.
    """
    from transformers import CompressedTensorsConfig

    config = CompressedTensorsConfig(dequantize=True)
    choose = blocks(Spec(*bits_and_group, symmetric=False, scale_dtype=scale_dtype))
    check(tiny_model("llama"), tmp_path / "a", choose, product=scale_dtype, quantization_config=config)


def test_exported_directory_loads(tiny_model, tmp_path):
    source = tiny_model("llama")
    rounded = round_linears(SafetensorsCheckpoint(source), CASES["int4, int8 and float"])
    write(source, tmp_path / "a", rounded, tied=False)
    artifact = ct.ArtifactCheckpoint(SafetensorsCheckpoint(tmp_path / "a"))
    ct.export(artifact, tmp_path / "b")
    assert torch.equal(logits(tmp_path / "b"), logits(tmp_path / "a"))
