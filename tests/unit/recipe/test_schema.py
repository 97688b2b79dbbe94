"""Recipes: every mistake at once, with its line and a suggestion."""

import re

import pytest

from compressor.errors import CompressorError, Problems
from compressor.recipe.formats import PRESETS, to_spec
from compressor.recipe.schema import load_recipe, unavailable
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
    text = """\
rules:
  - match: fnn
    formt: int4
    format: int44
    passes: [{gptq: {dmap: 1}}, gtpq]
  - match: {role: ffn, layrs: 3}
    format: {bits: '4', group_size: 64}
  - match: ffn
  - ffn
nme: mine
"""
    path = tmp_path / "r.yaml"
    formats = (
        "int2, int3, int4, int4_asym, int5, int6, int7, int8, w4a16, w8a16, w8a8, fp8, fp8_tensor, fp8_block,"
        " fp8_dynamic, fp16, bf16, float, keep"
    )
    assert (
        message(tmp_path, text).replace(f"{path}", "r.yaml")
        == f"""\
r.yaml: not a valid recipe
- r.yaml:2: unknown role 'fnn'
  expected: embedding, attention, ffn, lm_head
  try: did you mean 'ffn'?
- r.yaml:3: unknown key 'formt'
  try: did you mean 'format'?
- r.yaml:4: unknown format 'int44'
  expected: {formats}
  try: did you mean 'int4'?
- r.yaml:5: gptq: unknown option 'dmap'
  try: did you mean 'damp'?
- r.yaml:5: unknown pass 'gtpq'
  expected: awq, gptq, ptq_symmetric, smoothquant
  try: did you mean 'gptq'?
- r.yaml:6: unknown key 'layrs'
  try: did you mean 'layers'?
- r.yaml:7: rule 2: format.bits: Input should be a valid integer
  got: '4'
- r.yaml:8: rule 3: key 'format' is missing
- r.yaml:9: rule 4: Input should be a valid dictionary
  got: 'ffn'
- r.yaml:10: unknown key 'nme'
  try: did you mean 'name'?"""
    )


def test_mistakes_in_the_short_form_come_at_once(tmp_path):
    text = """\
quantization_config:
  ffn_layer: {precision: int8}
  lm_head: {precision: int9, method: gtpq}
  attention_layers: {precison: int4}
  embedding_layer: {precision: fp16, group_size: 3}
  kv_cache: {precision: int3}
"""
    lines = message(tmp_path, text).replace(f"{tmp_path}/", "").splitlines()
    assert [line for line in lines if line.startswith("- ")] == [
        "- r.yaml:2: unknown key 'ffn_layer'",
        "- r.yaml:3: unknown method 'gtpq'",
        "- r.yaml:3: unknown format 'int9'",
        "- r.yaml:4: quantization_config.attention_layers: key 'precision' is missing",
        "- r.yaml:4: unknown key 'precison'",
        "- r.yaml:5: fp16 takes no group_size",
        "- r.yaml:6: unknown precision 'int3'",
    ]


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("a: " + "[" * 100_000, 1, "nested more than 20 deep"),
        ("a: 1\nb: " + "9" * 5000, 2, "not a value of its type: '99999"),
        ("\n\na: 2024-99-99\n", 3, "not a value of its type: '2024-99-99'"),
        ("a: !!int abc\n", 1, "not a value of its type: 'abc'"),
        ("a: !!timestamp abc\n", 1, "not a value of its type: 'abc'"),
        ("a: !!python/object/apply:os.system [ls]\n", 1, "could not determine a constructor for the tag"),
        ("? [a, b]\n: x\n", 1, "found unhashable key"),
        ("a: 1\n---\nb: 2\n", 2, "another document"),
        ("a: &x [1]\nb: *x\n", 2, "anchors and aliases are not allowed"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_hostile_yaml_is_refused_with_its_line(tmp_path, text, line, why):
    found = message(tmp_path, text)
    assert f"r.yaml:{line}: not valid YAML\n  got: " in found
    assert why in found


def test_a_file_that_is_no_recipe(tmp_path):
    assert "at most 1000000 bytes" in message(tmp_path, "#" * 1_000_001)
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    with pytest.raises(CompressorError, match="cannot be read as a recipe"):
        load_recipe(path)


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
        ("rules:\n  - {match: {layers: 0-99999999999999999999}, format: int4}\n", "10-20"),
        ("rules:\n  - {match: {layers: true}, format: int4}\n", "a number, a list of numbers"),
        ("rules:\n  - {match: {layers: {}}, format: int4}\n", "first or last is missing"),
        ("rules:\n  - {match: {layers: [-1]}, format: int4}\n", "greater than or equal to 0"),
        ("rules:\n  - {match: {role: []}, format: int4}\n", "at least 1 item"),
        ("rules:\n  - {match: {modules: []}, format: int4}\n", "at least 1 item"),
        ("rules:\n  - {match: {}, format: int4}\n", "role, modules or layers is missing"),
        ("rules:\n  - {match: {modules: 're:*x('}, format: int4}\n", "'re:*x(' is no usable regular expression"),
        ("rules:\n  - {match: ffn, format: int4, passes: []}\n", "no pass rounds the weight"),
        ("rules:\n  - {match: ffn, format: int4, passes: [{gptq: {}, awq: {}}]}\n", "one pass per list item"),
        ("rules:\n  - {match: ffn, format: int4, passes: [3]}\n", "a pass is a name"),
        (
            "rules:\n  - {match: ffn, format: int4, passes: [{gptq: {damp: 2}}]}\n",
            "gptq: damp: Input should be less",
        ),
        ("rules:\n  - {match: ffn, format: {bits: 4, scale_dtype: BF16}}\n", "did you mean 'bf16'?"),
        ("quantization_config: {}\n", "at least one section is wanted"),
        ("quantization_config: {lm_head: {precision: fp16}}\nrules: []\n", "unknown key 'rules'"),
        ("1: x\nrules:\n  - {match: ffn, format: int4}\n", "Keys should be strings"),
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
    assert len(told) == 1
    assert "KV-cache calibration is not available yet" in told[0]
    assert "--substitute kv_cache=fp16" in told[0]


def test_substitutions_make_it_runnable():
    recipe = load_recipe("mixed_70b", {"awq": "gptq", "kv_cache": "fp16"})
    assert unavailable(recipe) == []
    assert [call.name for call in recipe.rules[1].passes] == ["gptq"]
    assert any("awq substituted by gptq" in note for note in recipe.notes)


def test_a_substitution_of_something_absent_is_an_error(tmp_path):
    told = message(tmp_path, LONG, awq="gptq", kv_cache="fp16").replace(str(tmp_path), "")
    assert "- --substitute awq=gptq: /r.yaml does not use awq\n" in told
    assert told.endswith("- --substitute kv_cache=fp16: /r.yaml does not use kv_cache")


def test_substitutes_are_checked_too(tmp_path):
    text = "rules:\n  - {match: ffn, format: int4_asym, passes: [awq]}\n"
    assert "r.yaml:2: unknown pass 'gtpq'" in message(tmp_path, text, awq="gtpq")
    assert "ptq_symmetric rounds symmetric formats only" in message(tmp_path, text, awq="ptq_symmetric")
    with pytest.raises(CompressorError, match="expected: fp16 or bf16"):
        load_recipe("mixed_70b", {"kv_cache": "int4"})


def test_a_substitute_that_is_named_anyway_runs_once(tmp_path):
    text = "rules:\n  - {match: ffn, format: int4, passes: [awq, {gptq: {damp: 0.5}}]}\n"
    (rule,) = load_recipe(write(tmp_path, text), {"awq": "gptq"}).rules
    assert [(call.name, call.options["damp"]) for call in rule.passes] == [("gptq", 0.5)]


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ("[awq]", "no pass rounds the weight"),
        ("[gptq, awq]", "awq comes after gptq"),
        ("[awq, gptq, ptq_symmetric]", "a weight is rounded once"),
    ],
)
def test_rescaling_passes_come_first_and_one_pass_rounds(tmp_path, listed, why):
    assert why in message(tmp_path, f"rules:\n  - {{match: ffn, format: int4, passes: {listed}}}\n")


def test_awq_of_the_short_form_rounds_to_nearest():
    recipe = load_recipe("mixed_70b")
    assert [call.name for call in recipe.rules[1].passes] == ["awq", "ptq_symmetric"]


def test_a_preset_fills_in_what_the_recipe_leaves_open(tmp_path):
    text = "rules:\n  - {match: ffn, format: int4, passes: [{gptq: {damp: 0.5, propagate: 0.25}}]}\n"
    text += "  - {match: attention, format: int4}\n"
    ffn, attention = load_recipe(write(tmp_path, text), preset="fast").rules
    assert [call.options["propagate"] for call in (*ffn.passes, *attention.passes)] == [0.25, 0.0]
    assert ffn.passes[0].options["damp"] == 0.5
    usual = load_recipe(write(tmp_path, text)).rules[1].passes[0].options
    assert usual["propagate"] > 0
    with pytest.raises(CompressorError, match="--preset fats: no such preset"):
        load_recipe(write(tmp_path, text), preset="fats")


EXTRAS = {
    "w8a8": {"activations": "int8"},
    "fp8": {"kind": "float"},
    "fp8_tensor": {"kind": "float", "group_size": 0},
    "fp8_block": {"kind": "float", "group_size": 0, "block": [128, 128]},
    "fp8_dynamic": {"kind": "float", "activations": "fp8"},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_spell_formats(tmp_path, preset):
    (rule,) = load_recipe(write(tmp_path, f"rules:\n  - {{match: ffn, format: {preset}}}\n")).rules
    bits = int(re.search(r"\d", preset)[0])
    group = -1 if bits == 8 else 64 if bits < 4 else 128
    assert rule.format == {
        "bits": bits,
        "group_size": group,
        "symmetric": not preset.endswith("asym"),
        "scale_dtype": None,
        **EXTRAS.get(preset, {}),
    }


def one_rule(tmp_path, spec, passes=""):
    return write(tmp_path, f"rules:\n  - {{match: ffn, format: {spec}{passes}}}\n")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("{kind: float}", {"bits": 8, "group_size": -1, "kind": "float"}),
        ("{kind: float, group_size: 0}", {"bits": 8, "group_size": 0, "kind": "float"}),
        ("{kind: float, block: [64, 32]}", {"bits": 8, "group_size": 0, "kind": "float", "block": [64, 32]}),
        ("{bits: 4, group_size: 32, activations: int8}", {"bits": 4, "group_size": 32, "activations": "int8"}),
    ],
)
def test_float_formats_spelled_out(tmp_path, spec, expected):
    (rule,) = load_recipe(one_rule(tmp_path, spec)).rules
    assert rule.format == {"symmetric": True, "scale_dtype": None, **expected}
    assert to_spec(rule.format, "BF16").bits == expected["bits"]


def test_the_default_pass_of_fp8(tmp_path):
    (rule,) = load_recipe(one_rule(tmp_path, "fp8")).rules
    assert [call.name for call in rule.passes] == ["gptq"]


@pytest.mark.parametrize(
    ("spec", "passes", "why"),
    [
        ("fp8", ", passes: [awq, gptq]", "awq is for integer formats only"),
        ("{preset: fp8, group_size: 64}", "", "fp8 takes group_size -1 (row) or 0 (tensor), or block, got 64"),
        ("{preset: fp8, symmetric: false}", "", "a float format has 8 bits and is symmetric"),
        ("{preset: fp8, bits: 4}", "", "a float format has 8 bits and is symmetric"),
        ("{preset: fp8_block, group_size: -1}", "", "block takes two positive sizes and group_size 0"),
        ("{preset: int4, block: [128, 128]}", "", "blocks are for float formats"),
        ("{preset: fp8_block, block: [128]}", "", "at least 2 items"),
        ("{preset: int4, activations: fp8}", "", "activations must be int8 for int and fp8 for float, got fp8"),
        ("{preset: fp8_block, activations: fp8}", "", "symmetric formats without blocks"),
        ("{preset: int4_asym, activations: int8}", "", "symmetric formats without blocks"),
    ],
)
def test_parts_that_do_not_go_together(tmp_path, spec, passes, why):
    one_rule(tmp_path, spec, passes)
    found = message(tmp_path, (tmp_path / "r.yaml").read_text())
    assert why in found
    assert "r.yaml:2: " in found


def test_the_short_form_takes_sizes(tmp_path):
    text = "quantization_config:\n  ffn_layers: {precision: int4, method: gptq, group_size: 32, symmetric: false}\n"
    (rule,) = load_recipe(write(tmp_path, text)).rules
    assert (rule.where, rule.roles) == ("ffn_layers (r.yaml:2)", ("ffn",))
    assert rule.format == {"bits": 4, "group_size": 32, "symmetric": False, "scale_dtype": None}
    text = text.replace("gptq", "ptq_symmetric")
    assert "r.yaml:2: ptq_symmetric rounds symmetric formats only" in message(tmp_path, text)


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


def test_problems_is_what_several_mistakes_raise(tmp_path):
    with pytest.raises(Problems) as caught:
        load_recipe(write(tmp_path, "rules:\n  - {match: fnn, format: int44}\n"))
    assert len(caught.value.problems) == 2
