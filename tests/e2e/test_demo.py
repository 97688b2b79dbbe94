"""The demo as a whole on the embedded model: table, foreign judges, GPTQ against RTN on every linear."""

import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def demo(demo_available, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "demo"
    command = [sys.executable, "-m", "compressor", "demo", "--out", str(out), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return out, json.loads(result.stdout)


@pytest.mark.slow
def test_the_table(demo):
    _, result = demo
    original, artifact, gguf = result["rows"]
    print(f"\n{json.dumps(result, indent=1)}")
    assert artifact["bytes"] < 0.45 * original["bytes"]
    assert gguf["bytes"] < 0.45 * original["bytes"]
    assert 0.01 < artifact["kld"] < 0.2
    assert artifact["top1"] > 0.7
    assert original["perplexity"] < artifact["perplexity"] < 1.25 * original["perplexity"]


@pytest.mark.slow
def test_gptq_beats_rtn_on_every_linear(demo):
    out, _ = demo
    tensors = json.loads((out / "report.json").read_text())["tensors"]
    ratios = sorted(facts["error"] / facts["error_rtn"] for facts in tensors.values())
    print(f"\nGPTQ / RTN Hessian-weighted error, {len(ratios)} linears: {ratios[0]:.3f} to {ratios[-1]:.3f}")
    assert len(ratios) == 210
    assert ratios[-1] < 1
    assert all(facts["rounding"] == "gptq" for facts in tensors.values())


@pytest.mark.slow
def test_foreign_judges(demo):
    from tests.oracle.judge import judge_all

    out, _ = demo
    verdict = judge_all(out)
    print("\n" + "\n".join(verdict.lines))
    assert len(verdict.lines) == 7
    assert not verdict.failures
