"""A finished run on the tiny llama and its GGUF, built once per session."""

import pytest
from fixtures_artifacts import build_artifact


@pytest.fixture(scope="session")
def artifact(tiny_llama, tmp_path_factory):
    return build_artifact(tiny_llama, tmp_path_factory.mktemp("artifact") / "run")
