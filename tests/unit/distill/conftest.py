"""A finished run on the tiny llama, the float model it came from, and tokens to train on."""

import pytest
from fixtures_artifacts import build_artifact

from compressor.calibration.data import load_tokenizer, load_tokens
from compressor.models import open_model


@pytest.fixture(scope="session")
def artifact(tiny_llama, tmp_path_factory):
    return build_artifact(tiny_llama, tmp_path_factory.mktemp("distill") / "run")


@pytest.fixture(scope="session")
def reference(tiny_llama):
    return open_model(str(tiny_llama))


@pytest.fixture(scope="session")
def tokens(reference):
    return load_tokens("default", load_tokenizer(reference), samples=16, sequence_length=32, seed=0)
