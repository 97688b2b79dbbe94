"""A finished run on the tiny llama, and the command line called in this process."""

import sys

import pytest
from fixtures_artifacts import build_artifact

from compressor.cli.app import main


@pytest.fixture(scope="session")
def artifact(tiny_llama, tmp_path_factory):
    return build_artifact(tiny_llama, tmp_path_factory.mktemp("artifact") / "run")


@pytest.fixture
def compress(monkeypatch, capsys):
    """``compress("inspect", path) -> (exit code, stdout, stderr)``."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["compress", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return ended.value.code or 0, printed.out, printed.err

    return run
