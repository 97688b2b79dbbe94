"""What every readable model looks like: names, shapes, one tensor at a time, and the files beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compressor.core.tensors import RawTensor


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header tells it.

    Attributes:
        name: Hugging Face checkpoint name, e.g. ``model.layers.0.self_attn.q_proj.weight``.
        dtype: safetensors name of the dtype ``Checkpoint.raw`` delivers.
        shape: Row-major shape.
        nbytes: Size of what ``raw`` delivers.
        file: File it lives in, relative to the model.
        stored_as: How the file stores it when that differs from dtype (a ggml type such as
            ``Q4_1``), else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    stored_as: str | None = None


class Checkpoint(ABC):
    """A model on disk. Nothing is loaded until asked for, one tensor at a time.

    Attributes:
        label: What the user called it, for messages.
        path: File or directory it lives in.
        config: Parsed config.json (never with a ``quantization_config`` we did not read).
        tensors: TensorInfo by name, floats only in HF names.
        notes: Loud facts about the source (``dequantized from Q4_1``), shown to the user.
    """

    label: str
    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    notes: list[str]

    @abstractmethod
    def raw(self, name: str) -> RawTensor:
        """The stored bytes of one tensor (memory-mapped where possible).

        Raises:
            KeyError: no such tensor.
        """

    @abstractmethod
    def read(self, name: str) -> NDArray[np.float32]:
        """One float tensor as float32 in its shape; a fresh, writable, contiguous array.

        Raises:
            CompressorError: a value is NaN or infinite (naming the tensor), or the dtype is no float.
        """

    @abstractmethod
    def side_files(self) -> dict[str, Path | bytes]:
        """Every other file of the model by relative name: tokenizer, templates, configs.

        Without weights, weight indexes and config.json. Bytes are given where the file had to be made.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """sha256 (hex) over config, names, shapes, dtypes and content samples of every tensor.

        Tensors up to 1 MiB are hashed whole, larger ones by the first 4 KiB of every MiB.
        """
