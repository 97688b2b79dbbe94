"""What compressed-tensors cannot hold of a plan, and what engines will not run of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from compressor.arch.base import Family
from compressor.core.plan import PlannedTensor
from compressor.core.spec import Spec, dividing_group_sizes
from compressor.errors import CompressorError


def check_plan(tensors: Iterable[PlannedTensor], tied: bool) -> list[CompressorError]:
    """What this format cannot hold of a plan, every tensor at once.

    Args:
        tensors: The plan's tensors.
        tied: The head shares the embedding table.
    """
    found = (_problem(tensor, tensor.spec, tied) for tensor in tensors if tensor.spec is not None)
    return [problem for problem in found if problem is not None]


def _problem(tensor: PlannedTensor, spec: Spec, tied: bool) -> CompressorError | None:
    where = f"{tensor.name} ({tensor.rule})"
    if tensor.role == "embedding":
        return CompressorError(
            f"{where}: engines that read this format take no quantized embedding",
            got=spec.label(),
            expected="the embedding as stored",
            hint="give role embedding the format keep",
        )
    if tensor.role == "lm_head" and tied:
        return CompressorError(
            f"{where}: the head shares the embedding table, which stays float in this format",
            got=f"{spec.label()}, tie_word_embeddings true",
            expected="the head as stored",
            hint="give role lm_head the format keep",
        )
    if len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
        return CompressorError(
            f"{where}: not the weight of a linear layer",
            got=f"{tensor.role} {list(tensor.shape)}",
            expected="a matrix [out, in] whose name ends in .weight",
            hint="give it the format keep",
        )
    return _width_problem(where, tensor.shape[1], spec)


def _width_problem(where: str, width: int, spec: Spec) -> CompressorError | None:
    if spec.group_size <= 0 or width % spec.group_size == 0:
        return None
    sizes = [str(size) for size in dividing_group_sizes(width)]
    return CompressorError(
        f"{where}: in_features {width} is not a multiple of group_size {spec.group_size}",
        hint=f"use {', '.join([*sizes, '-1 (one scale per row)'])}",
    )


def engine_warnings(tensors: Iterable[PlannedTensor], family: Family) -> list[str]:
    """What the file holds but some engine will not run as planned, one sentence each."""
    planned = [(tensor, tensor.spec) for tensor in tensors if tensor.spec is not None]
    integers = [spec for _, spec in planned if spec.kind == "int"]
    lines = []
    for bits in sorted({spec.bits for spec in integers} - {4, 8}):
        count = sum(spec.bits == bits for spec in integers)
        lines.append(f"int{bits} ({count} tensors) loads in transformers only: vLLM runs 4 and 8 bits")
    if any(spec.strategy == "tensor" and not spec.activations for spec in integers):
        lines.append("one scale per tensor loads in transformers only: vLLM runs group and channel scales")
    if any(spec.activations and (spec.bits != 8 or spec.strategy == "group") for spec in integers):
        lines.append("int8 activations run in vLLM with 8-bit weights and channel or tensor scales only")
    lines += _float_warnings(planned)
    lines += _asymmetric_warnings({spec for _, spec in planned})
    cast = {(spec.scale_dtype, t.dtype) for t, spec in planned if t.dtype not in (spec.scale_dtype, "F32")}
    lines += [
        f"scales are stored in {scale}, the model in {dtype}: engines cast scales when they load them"
        for scale, dtype in sorted(cast)
    ]
    return lines + _fused_warnings({tensor.module: spec for tensor, spec in planned}, family)


def _float_warnings(planned: list[tuple[PlannedTensor, Spec]]) -> list[str]:
    lines = []
    floats = [(tensor, spec) for tensor, spec in planned if spec.kind == "float"]
    if any(spec.strategy == "tensor" and spec.activations for _, spec in floats):
        lines.append("vLLM rounds q/k/v and gate/up again where each has one fp8 scale: channel scales are kept")
    cut = [t for t, spec in floats if spec.block and any(n % b for n, b in zip(t.shape, spec.block, strict=True))]
    if cut:
        lines.append(
            f"{len(cut)} tensors are no whole number of fp8 blocks: transformers runs that, vLLM may refuse"
        )
    return lines


def _asymmetric_warnings(specs: set[Spec]) -> list[str]:
    if all(spec.symmetric or spec.strategy == "tensor" for spec in specs):
        return []
    if len(specs) > 1:
        return ["asymmetric beside other formats does not load in transformers 5.24; vLLM runs it"]
    return ["asymmetric formats load in transformers 5.24 only with CompressedTensorsConfig(dequantize=True)"]


def _fused_warnings(specs: Mapping[str, Spec], family: Family) -> list[str]:
    """Linears that read one input are one matrix in vLLM: they must share one format."""
    layers = sorted({layer for module in specs if (layer := family.layer_of(f"{module}.")) is not None})
    lines = []
    for names in family.inputs:
        differing = [
            str(layer)
            for layer in layers
            if len({specs.get(f"{family.block(layer)}.{name}") for name in names}) > 1
        ]
        if differing:
            lines.append(
                f"vLLM will refuse the file: {', '.join(names)} must share one format, "
                f"but differ in block {', '.join(differing)}"
            )
    return lines
