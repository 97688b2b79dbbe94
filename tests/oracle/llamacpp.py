"""llama.cpp as a judge: the shared object inside the xllamacpp wheel, called through cffi.

The declarations are read as text from the llama-cpp-py-sync package, which is not imported: its own
library may need a newer C library than the machine has. Parameter structs go by value, so declarations
and library must agree; ``library`` checks known defaults before anything is trusted.

One model at a time, from one thread: the library's state is global.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray


class Unavailable(Exception):
    """The wheel, the declarations or cffi is missing, or they do not fit together."""


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise Unavailable(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


@functools.cache
def library() -> tuple[Any, Any]:
    """(ffi, lib), log silenced.

    Raises:
        Unavailable: something is not installed or does not fit.
    """
    if importlib.util.find_spec("cffi") is None:
        raise Unavailable("cffi is not installed")
    import cffi

    bindings = (_package("llama_cpp_py_sync") / "_cffi_bindings.py").read_text(encoding="utf-8")
    declarations = re.search(r'_LLAMA_H_CDEF = """(.*?)"""', bindings, re.DOTALL)
    objects = sorted(_package("xllamacpp").glob("xllamacpp*.so"))
    if declarations is None or not objects:
        raise Unavailable("no llama.h declarations or no shared object found")
    ffi = cffi.FFI()
    ffi.cdef(declarations.group(1))
    lib = ffi.dlopen(str(objects[0]))
    silence = ffi.callback("void(enum ggml_log_level, const char *, void *)", lambda *_: None)
    library.keep = silence  # type: ignore[attr-defined]
    lib.llama_log_set(silence, ffi.NULL)
    lib.llama_backend_init()
    params = lib.llama_context_default_params()
    known = (params.n_ctx, params.n_batch, params.type_k, params.type_v, params.flash_attn_type)
    if known != (512, 2048, 1, 1, -1):
        raise Unavailable(f"the declarations do not fit the library: defaults read as {known}")
    return ffi, lib


def require() -> None:
    """Skip the calling test when llama.cpp is not available."""
    try:
        library()
    except Unavailable as error:
        if os.environ.get("COMPRESS_REQUIRE_JUDGES"):
            pytest.fail(f"llama.cpp: {error}")
        pytest.skip(f"llama.cpp: {error}")


class LlamaCpp:
    """A GGUF loaded by llama.cpp with a float32 cache and plain attention.

    Use as a context manager. Not for concurrent use.
    """

    def __init__(self, path: Path, context: int = 512, threads: int = 2) -> None:
        require()
        self.ffi, self.lib = library()
        model_params = self.lib.llama_model_default_params()
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), model_params)
        if self.model == self.ffi.NULL:
            raise RuntimeError(f"llama.cpp refuses {path}")
        self.vocab = self.lib.llama_model_get_vocab(self.model)
        self.size = int(self.lib.llama_vocab_n_tokens(self.vocab))
        params = self.lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = 0  # F32
        params.flash_attn_type = 0  # off
        self.context = self.lib.llama_init_from_model(self.model, params)
        if self.context == self.ffi.NULL:
            self.lib.llama_model_free(self.model)
            raise RuntimeError(f"llama.cpp cannot make a context for {path}")

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context and the model."""
        if self.model is not None:
            self.lib.llama_free(self.context)
            self.lib.llama_model_free(self.model)
            self.model = self.context = None

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text, by llama.cpp's own tokenizer."""
        raw = text.encode()
        room = len(raw) + 16
        ids = self.ffi.new("llama_token[]", room)
        count = self.lib.llama_tokenize(self.vocab, raw, len(raw), ids, room, add_special, parse_special)
        assert count >= 0, "the buffer is larger than any tokenization"
        return list(ids[0:count])

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Teacher forced: float32 [n, vocab], row i predicts token i + 1."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        return self._decode(tokens, 0)

    def greedy(self, prompt: str | list[int], n: int) -> list[int]:
        """The n tokens llama.cpp puts after a prompt, always the likeliest."""
        tokens = self.tokenize(prompt, parse_special=True) if isinstance(prompt, str) else list(prompt)
        last, found = self.logits(tokens)[-1], []
        for position in range(len(tokens), len(tokens) + n):
            found.append(int(last.argmax()))
            last = self._decode(found[-1:], position)[-1]
        return found

    def text(self, tokens: list[int]) -> str:
        """The text of some tokens."""
        ids = self.ffi.new("llama_token[]", tokens)
        room = 64 * len(tokens) + 64
        buffer = self.ffi.new("char[]", room)
        count = self.lib.llama_detokenize(self.vocab, ids, len(tokens), buffer, room, False, True)
        assert count >= 0
        return bytes(self.ffi.buffer(buffer, count)).decode(errors="replace")

    def _decode(self, tokens: list[int], start: int) -> NDArray[np.float32]:
        count = len(tokens)
        batch = self.lib.llama_batch_init(count, 0, 1)
        try:
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.logits[i] = token, start + i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.n_tokens = count
            status = self.lib.llama_decode(self.context, batch)
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status} for {count} tokens at {start}")
            view = self.ffi.buffer(self.lib.llama_get_logits(self.context), 4 * count * self.size)
            return np.frombuffer(view, np.float32).reshape(count, self.size).copy()
        finally:
            self.lib.llama_batch_free(batch)
