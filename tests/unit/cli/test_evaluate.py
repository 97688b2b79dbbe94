"""``compress eval``: figures, JSON, gates."""

import hashlib
import json

import pytest

TEXT = "On the east side of the island the sand turns red in the evening, and no one is there.\n" * 3


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_json_has_every_figure_and_says_how_it_was_made(compress, artifact, tiny_llama, text):
    code, out, _ = compress(
        "eval", artifact, "--reference", tiny_llama, "--text", text, "--context", 32, "--chunks", 3, "--json", "-"
    )
    found = json.loads(out)
    assert code == 0
    assert isinstance(found["perplexity"], float)
    assert isinstance(found["top1"], float)
    assert set(found["kld"]) == {"mean", "mean_error", "median", "p99", "p999", "max"}
    errors = ("perplexity_error", "reference_perplexity_error", "ln_ppl_ratio_error", "top1_error")
    assert all(found[name] > 0 for name in errors)
    assert 0 < found["kld"]["median"] <= found["kld"]["p99"] <= found["kld"]["p999"] <= found["kld"]["max"]
    assert (found["protocol"], found["context"], found["chunks"], found["tokens"]) == ("llama.cpp", 32, 3, 45)
    assert (found["target"], found["reference"], found["text"]) == (str(artifact), str(tiny_llama), str(text))
    assert found["text_sha256"] == hashlib.sha256(TEXT.encode()).hexdigest()
    assert found["versions"].keys() == {"compressor", "torch", "transformers", "tokenizers"}


def test_a_gguf_scores_as_the_artifact_it_came_from(compress, artifact, text):
    figures = []
    for target in (artifact, artifact.with_suffix(".gguf")):
        _, out, _ = compress("eval", target, "--text", text, "--context", 32, "--chunks", 2, "--json", "-")
        figures.append(json.loads(out))
    assert figures[1]["perplexity"] == pytest.approx(figures[0]["perplexity"], rel=0.02)
    assert "dequantized from Q4_0" in figures[1]["notes"][0]
    assert "kld" not in figures[0]


def test_figures_on_the_screen_and_in_a_file(compress, artifact, tiny_llama, text, tmp_path):
    path = tmp_path / "scores.json"
    options = ("--text", text, "--context", 32, "--chunks", 2, "--protocol", "gptq", "--json", path)
    code, out, _ = compress("eval", artifact, "--reference", tiny_llama, *options)
    found = json.loads(path.read_text())
    assert code == 0
    assert found["tokens"] == 2 * 31
    assert f"perplexity      {found['perplexity']:.4f} ± {found['perplexity_error']:.4f}" in out
    assert f"KLD mean        {found['kld']['mean']:.5f}" in out
    assert "top-1 agreement" in out


@pytest.mark.parametrize("gate", ["--max-kld", "--max-ppl-increase"])
def test_gates_fail_with_exit_code_1_after_the_figures(compress, artifact, tiny_llama, text, gate):
    common = ("eval", artifact, "--reference", tiny_llama, "--text", text, "--context", 32, "--chunks", 2)
    code, out, err = compress(*common, gate, "-1", "--json", "-")
    assert code == 1
    assert json.loads(out)["perplexity"] > 1
    assert "above the limit" in err
    assert compress(*common, gate, "nan")[0] == 1
    assert compress(*common, gate, "1000")[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-kld", "1"], "add --reference"),
        (["--protocol", "strided"], "--protocol"),
        (["--context", "4096"], "at least 4096 (one window)"),
        (["--device", "abacus"], "--device abacus: torch cannot compute on it"),
        (["--json", "no/such/folder/x.json"], "its directory does not exist"),
        (["--reference", "no/such/model"], "no such file or directory"),
    ],
)
def test_wrong_options_are_one_error_each(compress, tiny_llama, text, options, words):
    if "--context" not in options:
        options = [*options, "--context", 32]
    code, out, err = compress("eval", tiny_llama, "--text", text, *options)
    assert (code, out) == (2, "")
    assert words in err


def test_unreadable_texts(compress, tiny_llama, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8" in compress("eval", tiny_llama, "--text", tmp_path / "latin.txt")[2]
    code, _, err = compress("eval", tiny_llama, "--text", tmp_path / "nothing.txt")
    assert code == 2
    assert "cannot be read" in err
