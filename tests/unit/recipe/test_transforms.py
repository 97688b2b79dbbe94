"""``transforms`` in a recipe: read strictly, part of what bytes depend on, planned with their sizes."""

import json
from pathlib import Path

import pytest

from compressor.errors import CompressorError
from compressor.pipeline import Job, plan_model, prepare
from compressor.recipe.schema import load_recipe

RULES = "rules:\n  - {match: ffn, format: int8, passes: [ptq_symmetric]}\n"


def write(tmp_path, first):
    path = tmp_path / "r.yaml"
    path.write_text(f"{first}\n{RULES}")
    return str(path)


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("[rotate]", {}),
        ("[rotate: {}]", {}),
        (
            "[{rotate: {seed: 4, kind: orthogonal, values: false}}]",
            {"seed": 4, "kind": "orthogonal", "values": False},
        ),
    ],
)
def test_options_are_completed_and_part_of_the_recipe(tmp_path, written, options):
    found = load_recipe(write(tmp_path, f"transforms: {written}")).canonical()
    assert found["transforms"] == [{"rotate": {"kind": "hadamard", "seed": 0, "values": True, **options}}]


@pytest.mark.parametrize("written", ["transforms: []", "transforms:", ""])
def test_none_is_none(tmp_path, written):
    found = load_recipe(write(tmp_path, written))
    assert found.transforms == ()
    assert "transforms" not in found.canonical()


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[rotat]", ["r.yaml:1: unknown transform 'rotat'", "did you mean 'rotate'?"]),
        ("[gptq]", ["unknown transform 'gptq'", "gptq is a pass of a rule"]),
        ("[rotate, rotate]", ["rotate stands twice"]),
        ("[rotate: {sed: 1}]", ["rotate: unknown option 'sed'", "did you mean 'seed'?"]),
        ("[rotate: {seed: -1}]", ["rotate: seed", "greater than or equal to 0"]),
        ("[rotate: {kind: hadamar}]", ["rotate: kind", "'hadamard' or 'orthogonal'"]),
        ("[{rotate: {}, gptq: {}}]", ["one transform per list item"]),
        ("rotate", ["transforms"]),
        ("[3]", ["transforms"]),
    ],
)
def test_mistakes_are_told(tmp_path, written, said):
    with pytest.raises(CompressorError) as caught:
        load_recipe(write(tmp_path, f"transforms: {written}"))
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("bare", [False, True])
def test_a_plan_has_the_untied_head(tiny_model, tmp_path, bare):
    model = tiny_model("llama", tie_word_embeddings=True)
    source = str(model / "config.json") if bare else str(model)
    recipe = write(tmp_path, "transforms: [rotate]")
    plan = plan_model(Job(str(source), str(recipe), Path(), samples=4, sequence_length=64))
    plain = plan_model(Job(str(source), str(write(tmp_path, "")), Path(), samples=4, sequence_length=64))
    assert plan.nbytes == plain.nbytes + 2 * 256 * 64
    assert [t.shape for t in plan.tensors if t.role == "lm_head"] == [(256, 64)]
    assert not [t for t in plain.tensors if t.role == "lm_head"]
    assert len([note for note in plan.notes if "unties the head" in note]) == 1
    assert plan.peak_ram_bytes > plain.peak_ram_bytes
    assert "transforms" in plan.peak_parts
    assert "transforms" not in plain.peak_parts


def test_an_untied_head_takes_a_rule(tiny_model, tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    path = tmp_path / "r.yaml"
    path.write_text(f"transforms: [rotate]\n{RULES}  - {{match: lm_head, format: int8, passes: [ptq_symmetric]}}\n")
    ready = prepare(Job(str(model), str(path), tmp_path / "out"))
    (head,) = [tensor for tensor in ready.plan.quantized() if tensor.role == "lm_head"]
    assert head.spec.bits == 8


def test_a_model_it_does_not_fit_is_told_before_any_work(tiny_model, tmp_path):
    model = tiny_model("llama", hidden_size=56, head_dim=14)
    recipe = write(tmp_path, "transforms: [rotate]")
    bare = tmp_path / "config.json"
    bare.write_text(json.dumps(json.loads((model / "config.json").read_text())))
    for source in (model, bare):
        with pytest.raises(CompressorError, match="no Hadamard matrix for head_dim 14"):
            plan_model(Job(str(source), str(recipe), Path(), samples=4, sequence_length=64))


def test_the_model_of_a_run_key_is_the_rotated_one(tiny_model, tmp_path):
    def fingerprint(first):
        return prepare(
            Job(str(tiny_model("llama")), write(tmp_path, first), tmp_path / "out")
        ).checkpoint.fingerprint()

    found = [fingerprint(first) for first in ("", "transforms: [rotate]", "transforms: [rotate: {seed: 1}]")]
    assert len(set(found)) == 3
