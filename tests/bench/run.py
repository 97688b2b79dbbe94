"""Timings, each with its validator and a baseline: ``python -m tests.bench.run`` (make bench).

Kernels on named shapes against their numpy twins and against memory copy; then one GPTQ layer. Writes
bench/results/<commit>.json. Ratios are what to compare: absolute times belong to the machine.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path

import numpy as np

SHAPES = {"SmolLM2 down_proj": (576, 1536), "1B down_proj": (2048, 8192), "8B o_proj": (4096, 4096)}


def best(function, repeats=3):
    """Result and the shortest of some runs, the first (compiling) one not counted."""
    result = function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return result, min(times)


def packing(shape):
    from compressor.kernels.bitpack import pack_rows, pack_rows_numpy, unpack_rows

    codes = np.random.default_rng(0).integers(0, 16, shape, dtype=np.uint8)
    packed, fast = best(lambda: pack_rows(codes, 4))
    twin, slow = best(lambda: pack_rows_numpy(codes, 4), 1)
    assert np.array_equal(packed, twin)
    assert np.array_equal(unpack_rows(packed, 4, shape[1]), codes)
    _, copy = best(codes.copy)
    return {
        "s": fast,
        "GB/s of codes": codes.nbytes / fast / 1e9,
        "of memcpy": copy / fast,
        "numpy/numba": slow / fast,
    }


def gptq(shape):
    import torch

    from compressor.calibration.stats import LayerStats
    from compressor.core.spec import Spec
    from compressor.passes import gptq as gptq_pass

    rows, columns = shape
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    stats = LayerStats.empty(columns)
    stats.add(inputs / columns**0.5)
    weight = torch.randn(rows, columns, generator=generator).numpy()
    options = gptq_pass.Options()
    result, seconds = best(lambda: gptq_pass.run(weight, Spec(4, 64), stats, options, "cpu"), 1)
    assert result.facts["error"] < result.facts["error_rtn"]
    return {
        "s": seconds,
        "Mweights/s": rows * columns / seconds / 1e6,
        "error/RTN": result.facts["error"] / result.facts["error_rtn"],
    }


def main():
    found = {f"pack int4 {name}": packing(shape) for name, shape in SHAPES.items()}
    found |= {f"gptq int4 g64 {name}": gptq(shape) for name, shape in list(SHAPES.items())[:2]}
    for name, row in found.items():
        print(f"{name:32s} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    folder = Path("bench/results")
    folder.mkdir(parents=True, exist_ok=True)
    record = {"machine": platform.processor() or platform.machine(), "commit": commit, "rows": found}
    (folder / f"{commit or 'unknown'}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
