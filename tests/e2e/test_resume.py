"""kill -9 at any moment, run again: the same bytes as an uninterrupted run."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPE = """
rules:
  - match: {role: [attention, ffn]}
    format: {preset: int4, group_size: 32}
    passes: [gptq]
"""


def command(model, recipe, out, *more):
    base = [sys.executable, "-m", "compressor", "quantize", model, "--recipe", recipe, "--out", out]
    return [str(part) for part in (*base, *more)]


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def kill_and_resume(model, recipe, work: Path, kills: int, more=(), seed=0) -> list[str]:
    """One whole run, then runs killed at random moments and resumed; returns a line per kill."""
    whole = work / "whole"
    started = time.monotonic()
    subprocess.run(command(model, recipe, whole, *more), check=True, capture_output=True)
    length = time.monotonic() - started
    expected, out, lines, rng = digest(whole), work / "killed", [], random.Random(seed)
    for _ in range(kills):
        moment = rng.uniform(0.3, 0.98) * length
        process = subprocess.Popen(
            command(model, recipe, out, *more), stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            process.wait(moment)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        partial = out.with_name("killed.partial")
        done = len(list(partial.glob("*.safetensors"))) if partial.exists() else 0
        subprocess.run(command(model, recipe, out, *more), check=True, capture_output=True)
        found = digest(out)
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        same = not differing
        outcome = "same" if same else f"DIFFERENT: {differing}"
        lines.append(f"killed after {moment:.1f} of {length:.1f} s, {done} shards written: {outcome}")
        assert same, lines[-1]
        assert not partial.exists()
        shutil.rmtree(out)
    return lines


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def test_two_kills_on_a_tiny_model(tiny_model, recipe, tmp_path):
    model = tiny_model("llama", num_hidden_layers=12)
    kill_and_resume(model, recipe, tmp_path, kills=2, more=("--samples", 8, "--sequence-length", 64))


@pytest.mark.slow
def test_ten_kills_on_the_embedded_model(demo_available, tmp_path):
    lines = kill_and_resume("demo", "demo", tmp_path, kills=10, more=("--samples", 1, "--sequence-length", 128))
    print("\n" + "\n".join(lines))


def test_another_recipe_or_seed_does_not_resume(tiny_model, recipe, tmp_path):
    model = tiny_model("llama", num_hidden_layers=12)
    out = tmp_path / "out"
    more = ("--samples", 8, "--sequence-length", 64)
    script = "import os, compressor.rounding.run as p; old = p._write_rest; p._write_rest = lambda *a: os._exit(9);"
    script += "from compressor.cli.app import main; main()"
    argv = command(model, recipe, out, *more)[3:]
    assert subprocess.run([sys.executable, "-c", script, *argv], capture_output=True).returncode == 9
    partial = out.with_name("out.partial")
    assert len(list(partial.glob("*.safetensors"))) == 12
    result = subprocess.run(command(model, recipe, out, *more, "--seed", 5), capture_output=True, text=True)
    assert result.returncode == 2
    assert "seed" in result.stderr
    assert "--fresh" in result.stderr
    assert partial.exists()
    subprocess.run(command(model, recipe, out, *more, "--seed", 5, "--fresh"), check=True, capture_output=True)
    assert out.exists()
    assert not partial.exists()
