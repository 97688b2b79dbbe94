"""Recipes: every mistake at once, with its line and a suggestion."""

import pytest

from compressor.errors import CompressorError, Problems
from compressor.recipe.schema import load_recipe, shipped_recipes, unavailable
from compressor.recipe.written import parse_range


def write(tmp_path, text):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return path


def message(tmp_path, text, **substitutions):
    with pytest.raises(CompressorError) as caught:
        load_recipe(write(tmp_path, text), substitutions)
    return str(caught.value)


LONG = """\
name: mine
rules:
  - match: {role: ffn, modules: "*.down_proj", layers: {first: 4}}
    format: int8
    passes: [ptq_symmetric]
  - match: attention
    format: {preset: int4, group_size: 32, scale_dtype: fp16}
    passes:
      - gptq: {damp: 0.05, act_order: false}
  - match: {role: lm_head}
    format: fp16
"""


def test_the_long_form_resolves(tmp_path):
    recipe = load_recipe(write(tmp_path, LONG))
    first, second, third = recipe.rules
    assert recipe.name == "mine"
    assert (first.roles, first.modules, first.layers.first) == (("ffn",), ("*.down_proj",), 4)
    assert first.format == {"bits": 8, "group_size": -1, "symmetric": True, "scale_dtype": None}
    assert second.where == "rule 2 (r.yaml:6)"
    assert second.format == {"bits": 4, "group_size": 32, "symmetric": True, "scale_dtype": "F16"}
    assert second.passes[0].options["damp"] == 0.05
    assert second.passes[0].options["act_order"] is False
    assert (third.format, third.passes) == (None, ())


def test_the_default_pass_is_gptq_with_its_defaults(tmp_path):
    (rule,) = load_recipe(write(tmp_path, "rules:\n  - {match: ffn, format: int4}\n")).rules
    assert [call.name for call in rule.passes] == ["gptq"]
    assert rule.passes[0].options["act_order"] is True


def test_several_mistakes_come_at_once_with_lines(tmp_path):
    text = "rules:\n  - match: {role: atention}\n    formt: int4\n    format: int4\n  - match: ffn\n"
    found = message(tmp_path, text)
    assert "r.yaml:3: unknown key 'formt'\n  try: did you mean 'format'?" in found
    assert "r.yaml:2" in found
    assert "did you mean 'attention'?" in found
    assert "r.yaml:5: rule 2: key 'format' is missing" in found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rules:\n  - {match: fnn, format: int4}\n", "r.yaml:2: unknown role 'fnn'"),
        ("rules:\n  - {match: ffn, format: int44}\n", "did you mean 'int4'?"),
        ("rules:\n  - {match: ffn, format: int4, passes: [gtpq]}\n", "did you mean 'gptq'?"),
        ("rules:\n  - match: ffn\n    format: int4\n    passes: [{gptq: {dmap: 0.1}}]\n", "did you mean 'damp'?"),
        ("rules:\n  - {match: ffn, format: {bits: 9}}\n", "less than or equal to 8"),
        ("rules:\n  - {match: ffn, format: {group_size: 32}}\n", "needs bits or a preset"),
        ("rules:\n  - {match: ffn, format: {preset: fp16, group_size: 32}}\n", "fp16 takes no group_size"),
        ("rules:\n  - {match: ffn, format: fp16, passes: [gptq]}\n", "kept as stored"),
        ("rules:\n  - {match: ffn, format: int4, passes: [gptq, ptq_symmetric]}\n", "rounded once"),
        ("rules:\n  - {match: ffn, format: int4_asym, passes: [ptq_symmetric]}\n", "symmetric formats only"),
        ("rules:\n  - {match: {layers: 5-x}, format: int4}\n", "10-20"),
        ("rules: []\n", "at least 1 item"),
        ("rules:\n  - {match: ffn, format: int4}\nname: a\nname: b\n", "r.yaml:4: key 'name' stands twice"),
        ("rules: [\n", "r.yaml:2: not valid YAML"),
        ("a: &x [1]\nrules: *x\n", "anchors and aliases are not allowed"),
        ("- 1\n", "not a valid recipe"),
        ("", "not a valid recipe"),
        ("rules:\n  - {match: {role: ffn}, format: {bits: '4'}}\n", "valid integer"),
    ],
)
def test_each_mistake_is_explained(tmp_path, text, expected):
    assert expected in message(tmp_path, text)


def test_the_short_form_of_the_70b_recipe():
    recipe = load_recipe("mixed_70b")
    by_role = {rule.roles[0]: rule for rule in recipe.rules}
    assert by_role["embedding"].format is None
    assert by_role["lm_head"].format is None
    assert by_role["attention"].format["bits"] == 4
    assert by_role["ffn"].format == {"bits": 8, "group_size": -1, "symmetric": True, "scale_dtype": None}
    assert [call.name for call in by_role["ffn"].passes] == ["ptq_symmetric"]
    told = [str(problem) for problem in unavailable(recipe)]
    assert len(told) == 2
    assert "AWQ" in told[0]
    assert "--substitute awq=gptq" in told[0]
    assert "KV-cache calibration is not available yet" in told[1]


def test_substitutions_make_it_runnable():
    recipe = load_recipe("mixed_70b", {"awq": "gptq", "kv_cache": "fp16"})
    assert unavailable(recipe) == []
    assert [call.name for call in recipe.rules[1].passes] == ["gptq"]
    assert any("awq substituted by gptq" in note for note in recipe.notes)


def test_a_substitution_of_something_absent_is_an_error(tmp_path):
    assert "does not use awq" in message(tmp_path, LONG, awq="gptq")


def test_the_canonical_form_ignores_layout(tmp_path):
    plain = load_recipe(write(tmp_path, LONG)).canonical()
    other = tmp_path / "other.yaml"
    other.write_text("# comment\n\n" + LONG)
    assert load_recipe(other).canonical() == plain


def test_unknown_recipe_name():
    with pytest.raises(CompressorError, match="did you mean 'mixed_70b'"):
        load_recipe("mixed_70")


def test_ranges():
    assert parse_range("10-12") == range(10, 13)
    assert parse_range("12-10") is None
    assert parse_range("x-3") is None


def test_every_shipped_recipe_loads():
    assert len(shipped_recipes()) >= 6
    for path in shipped_recipes().values():
        assert load_recipe(path).rules


def test_problems_is_what_several_mistakes_raise(tmp_path):
    with pytest.raises(Problems) as caught:
        load_recipe(write(tmp_path, "rules:\n  - {match: fnn, format: int44}\n"))
    assert len(caught.value.problems) == 2
