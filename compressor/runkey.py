"""What the bytes of an artifact depend on: a run resumes only where all of it is the same."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from compressor import __version__
from compressor.checkpoint.base import Checkpoint
from compressor.checkpoint.files import file_sha256
from compressor.recipe.rules import Recipe

if TYPE_CHECKING:
    from compressor.calibration.data import TokenSet
    from compressor.pipeline import Job


def run_key(job: Job, recipe: Recipe, checkpoint: Checkpoint, tokens: TokenSet) -> dict[str, str]:
    """Everything the bytes of the artifact depend on, by the name a user knows it under."""
    import numpy
    import torch

    written = json.dumps(recipe.canonical(), sort_keys=True)
    return {
        "recipe": hashlib.sha256(written.encode()).hexdigest(),
        "model": checkpoint.fingerprint(),
        "calibration": tokens.sha256,
        "samples": str(job.samples),
        "sequence-length": str(job.sequence_length),
        "seed": str(job.seed),
        "device": job.device,
        "threads": str(torch.get_num_threads()),
        "side files": _side_digest(checkpoint),
        "libraries": f"torch {torch.__version__}, numpy {numpy.__version__}",
        "processor": _processor(),
        "version": __version__,
    }


def _processor() -> str:
    """What decides which bits a matrix product has."""
    import torch

    from compressor.calibration.linear import bf16_is_faster, onednn_is_faster

    parts = torch.backends.cpu.get_cpu_capability(), onednn_is_faster() and "oneDNN", bf16_is_faster() and "bf16"
    return ", ".join(part for part in parts if part)


def _side_digest(checkpoint: Checkpoint) -> str:
    """sha256 over names and contents of everything copied beside the weights."""
    digest = hashlib.sha256()
    for name, source in sorted(checkpoint.side_files().items()):
        content = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else file_sha256(source)
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()
