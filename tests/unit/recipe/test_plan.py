"""Plans: first match wins, sizes exact, everything that does not fit at once."""

from dataclasses import replace

import pytest
from fixtures_codes import random_codes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.arch import find_family
from compressor.checkpoint.base import TensorInfo
from compressor.core.spec import Spec
from compressor.errors import CompressorError, Problems
from compressor.export.compressed_tensors import encode
from compressor.recipe.estimate import BASELINE_BYTES, RunShape, artifact_nbytes
from compressor.recipe.formats import to_spec
from compressor.recipe.matching import matches
from compressor.recipe.plan import headers_from_config, make_plan
from compressor.recipe.schema import Rule, load_recipe
from compressor.recipe.written import Layers

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
SMOLLM = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def plan(config, recipe, **substitutions):
    family = find_family(config, "test")
    return make_plan(
        label="test",
        config=config,
        family=family,
        tensors=None,
        recipe=load_recipe(recipe, substitutions),
        run=RunShape(128, 512),
    )


def test_the_70b_recipe_has_its_honest_size():
    found = plan(LLAMA_70B, "mixed_70b")
    assert found.source_nbytes == 141_107_412_992
    ffn = 80 * 3 * 8192 * 28672 + 80 * 2 * (28672 * 2 + 8192) + 240 * 16  # codes, bf16 row scales, shapes
    attention = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192) // 8 * 33 // 8 + 320 * 16  # 4.125 bits
    ends = 2 * 2 * 128256 * 8192 + 2 * 161 * 8192
    assert found.nbytes == ffn + attention + ends
    assert 66e9 < found.nbytes < 68e9
    assert any("KV-CACHE is NOT AVAILABLE YET" in note for note in found.notes)
    attention = {tuple(call.name for call in t.passes) for t in found.tensors if t.role == "attention"}
    assert attention == {("awq", "ptq_symmetric")}


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("group", [-1, 0, 32, 64])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale_dtype", ["BF16", "F32"])
def test_sizes_equal_what_is_written(bits, group, symmetric, scale_dtype):
    spec = Spec(bits, group, symmetric, scale_dtype)
    for rows, columns in ((192, 576), (33, 192), (7, 64)):
        parts = encode("x", random_codes(rows, columns, spec))
        assert artifact_nbytes(spec, rows, columns) == sum(part.nbytes for part in parts.values())


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (Spec(8, -1, kind="float"), 192 * 576 + 2 * 192),
        (Spec(8, 0, scale_dtype="F32", kind="float"), 192 * 576 + 4),
        (Spec(8, 0, kind="float", block=(128, 128)), 192 * 576 + 2 * 2 * 5),
        (Spec(8, -1, activations="int8"), 192 * 576 + 2 * 192),
        (Spec(4, 64, activations="int8"), 192 * 576 + 2 * 192 * 9),
        (Spec(8, -1, kind="float", activations="fp8"), 192 * 576 + 2 * 192),
    ],
    ids=lambda value: value.label() if isinstance(value, Spec) else "",
)
def test_sizes_of_formats_with_a_byte_per_weight(spec, nbytes):
    assert artifact_nbytes(spec, 192, 576) == nbytes
    assert sum(part.nbytes for part in encode("x", random_codes(192, 576, spec)).values()) == nbytes


def test_fp8_scales_follow_the_model(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("rules:\n  - {match: attention, format: fp8_dynamic}\n  - {match: ffn, format: fp8_block}\n")
    formats = {t.spec for t in plan(SMOLLM, path).tensors if t.spec}
    assert formats == {
        Spec(8, -1, scale_dtype="BF16", kind="float", activations="fp8"),
        Spec(8, 0, scale_dtype="BF16", kind="float", block=(128, 128)),
    }
    assert to_spec({"bits": 8, "group_size": -1, "kind": "float", "scale_dtype": None}, "F16").scale_dtype == "F32"
    assert to_spec({"bits": 8, "group_size": -1, "scale_dtype": None}, "F16").scale_dtype == "F16"


def test_indivisible_groups_come_all_at_once(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("rules:\n  - match: {role: [attention, ffn]}\n    format: int4\n")
    with pytest.raises(CompressorError) as caught:
        plan(SMOLLM, path)
    text = str(caught.value)
    assert text.count("576 is not a multiple of group_size 128 in rule 1 (r.yaml:2)") == 6
    assert "model.layers.*.mlp.gate_proj (30 tensors)" in text
    assert "16, 32, 64, 96" in text
    assert "down_proj" not in text  # 1536 is a multiple of 128


UNFIT = [
    (
        '{match: {modules: "*.down_pro"}, format: int8}',
        "pattern '*.down_pro' matches nothing",
        "did you mean '*.down_proj'?",
    ),
    (
        '{match: {modules: "*.down_pro"}, format: keep}',
        "pattern '*.down_pro' matches nothing",
        "did you mean '*.down_proj'?",
    ),
    (
        '{match: {modules: ["*.up_proj", model.layer.*.mlp.up_proj]}, format: int8}',
        "pattern 'model.layer.*.mlp.up_proj' matches nothing",
        "did you mean 'model.layers.*.mlp.up_proj'?",
    ),
    (
        '{match: {modules: "re:zzz"}, format: int8}',
        "pattern 're:zzz' matches nothing",
        "modules end in down_proj, embed_tokens, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
    ),
    (
        '{match: {modules: "*.input_layernorm"}, format: keep}',
        "pattern '*.input_layernorm' matches nothing",
        "it fits only norms, biases and the like, which are always kept as stored",
    ),
    (
        "{match: {role: attention, modules: model.embed_tokens}, format: int8}",
        "matches nothing\n  got: role attention, modules model.embed_tokens",
        "its conditions hold for no tensor together",
    ),
    (
        "{match: lm_head, format: int8}",
        "matches nothing\n  got: role lm_head",
        "this model's head is its embedding table (tie_word_embeddings): leave the rule out",
    ),
]


@pytest.mark.parametrize(("written", "problem", "way_out"), UNFIT)
def test_a_rule_that_matches_nothing_says_why(tmp_path, written, problem, way_out):
    path = tmp_path / "r.yaml"
    path.write_text(f"rules:\n  - {written}\n")
    with pytest.raises(CompressorError) as caught:
        plan(SMOLLM, path)
    assert str(caught.value) == (
        f"test: the recipe {path} does not fit this model\n- rule 1 (r.yaml:2): {problem}\n  try: {way_out}"
    )


@pytest.mark.parametrize(("layers", "got"), [("30", 30), ("[0, 31]", 31), ('"28-30"', 30)])
def test_blocks_the_model_has_not(tmp_path, layers, got):
    path = tmp_path / "r.yaml"
    path.write_text(f"rules:\n  - {{match: {{layers: {layers}}}, format: int8}}\n")
    with pytest.raises(CompressorError) as caught:
        plan(SMOLLM, path)
    assert f"got: block {got}\n  expected: 0 to 29" in str(caught.value)


def test_what_does_not_fit_comes_all_at_once(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "rules:\n"
        '  - {match: {modules: "*.down_pro"}, format: int8}\n'
        "  - {match: ffn, format: {bits: 4, group_size: 1024}}\n"
        "  - {match: {role: ffn, layers: 0-3}, format: int8}\n"
        "  - {match: lm_head, format: fp16}\n"
    )
    with pytest.raises(Problems) as caught:
        plan(SMOLLM, path)
    told = [str(problem).splitlines()[0] for problem in caught.value.problems]
    assert told == [
        "rule 1 (r.yaml:2): pattern '*.down_pro' matches nothing",
        "rule 3 (r.yaml:4): earlier rules take all 12 tensors it matches",
        *(
            f"model.layers.*.mlp.{name}_proj (30 tensors): in_features {width} is not a multiple of"
            " group_size 1024 in rule 2 (r.yaml:3)"
            for name, width in (("gate", 576), ("up", 576), ("down", 1536))
        ),
    ]


def test_keeping_a_head_that_is_tied_is_a_note(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "rules:\n"
        "  - {match: lm_head, format: fp16}\n"
        "  - {match: {modules: [lm_head, model.embed_tokens]}, format: keep}\n"
        "  - {match: ffn, format: int8}\n"
    )
    assert plan(SMOLLM, path).notes == (
        "rule 1 (r.yaml:2) matches nothing in this model: the head is the embedding table (tie_word_embeddings)",
    )
    assert plan({**SMOLLM, "tie_word_embeddings": False}, path).notes == (
        "fp16 keeps tensors as they are stored: bf16",
    )


def test_a_section_for_a_tied_head_is_a_note(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("quantization_config:\n  lm_head: {precision: int8}\n  kv_cache: {precision: bf16}\n")
    assert plan(SMOLLM, path).notes == (
        "lm_head (r.yaml:2) matches nothing in this model: the head is the embedding table (tie_word_embeddings)",
        "this recipe quantizes nothing",
    )


def rule(index, roles, layers):
    return Rule(f"rule {index}", roles, None, layers, None, ())


ROLES = st.sampled_from([None, ("attention",), ("ffn",), ("attention", "ffn")])
LAYERS = st.sampled_from([None, 3, [0, 2], "1-4", Layers(first=2), Layers(last=1), Layers(first=1, last=2)])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(ROLES, LAYERS), min_size=1, max_size=5),
    st.integers(0, 5),
    st.sampled_from(["attention", "ffn"]),
)
def test_matching_is_what_it_says(conditions, layer, role):
    for index, (roles, layers) in enumerate(conditions):
        got = matches(rule(index, roles, layers), f"model.layers.{layer}.x", role, layer, 6)
        chosen = {
            "None": range(6),
            "3": [3],
            "[0, 2]": [0, 2],
            "1-4": range(1, 5),
            "first=2 last=None": [0, 1],
            "first=None last=1": [5],
            "first=1 last=2": [0, 4, 5],
        }[str(layers)]
        assert got == ((roles is None or role in roles) and layer in chosen)


WRITTEN = st.tuples(
    st.sampled_from(["attention", "ffn", "[attention, ffn]"]),
    st.sampled_from(["0", "[1, 3]", '"2-4"', "{first: 2}", "{last: 1}", None]),
    st.sampled_from(["q_proj", "*_proj", "up_proj", None]),
    st.sampled_from(["int8", "fp16", "{bits: 3, group_size: 64}", "{bits: 4, group_size: 32}"]),
)
LAYER_SETS = {"0": {0}, "[1, 3]": {1, 3}, '"2-4"': {2, 3, 4}, "{first: 2}": {0, 1}, "{last: 1}": {4}}
LABELS = {"int8": "int8 channel", "fp16": "bf16", "{bits: 3, group_size: 64}": "int3 g64"}
LABELS["{bits: 4, group_size: 32}"] = "int4 g32"


LINEARS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "ffn": ("gate_proj", "up_proj", "down_proj")}


def first_match(rules, role, leaf, layer):
    """Index of the first rule whose conditions hold, or None."""
    for index, (roles, layers, name, _) in enumerate(rules):
        named = name in (None, leaf, "*_proj")
        if role in roles and named and (layers is None or layer in LAYER_SETS[layers]):
            return index
    return None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(WRITTEN, min_size=1, max_size=4))
def test_the_first_match_wins(tmp_path, rules):
    path, lines = tmp_path / "r.yaml", ["rules:"]
    for roles, layers, name, form in rules:
        more = (f", layers: {layers}" if layers else "") + (f', modules: "*.{name}"' if name else "")
        lines.append(f"  - {{match: {{role: {roles}{more}}}, format: {form}}}")
    path.write_text("\n".join(lines))
    expected = {
        (layer, leaf): first_match(rules, role, leaf, layer)
        for role, leaves in LINEARS.items()
        for leaf in leaves
        for layer in range(5)
    }
    if set(range(len(rules))) - set(expected.values()):
        with pytest.raises(Problems, match=r"earlier rules take all|hold for no tensor together"):
            plan({**SMOLLM, "num_hidden_layers": 5}, path)
        return
    for t in plan({**SMOLLM, "num_hidden_layers": 5}, path).tensors:
        index = expected.get((t.layer, t.module.rpartition(".")[2]))
        assert t.rule == ("no rule" if index is None else f"rule {index + 1} (r.yaml:{index + 2})")
        assert t.format_label == ("bf16" if index is None else LABELS[rules[index][3]])


def test_rules_are_named_where_they_stand(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "rules:\n"
        "  - {match: {role: ffn, layers: {first: 2}}, format: int8}\n"
        '  - {match: {modules: "re:.*gate_proj$"}, format: {bits: 3, group_size: 64}}\n'
        "\n"
        "  - match: {role: [attention, ffn]}\n"
        "    format: {bits: 4, group_size: 64}\n"
    )
    rules = {t.module: t.rule for t in plan(SMOLLM, path).tensors}
    assert rules["model.layers.1.mlp.gate_proj"] == "rule 1 (r.yaml:2)"
    assert rules["model.layers.2.mlp.gate_proj"] == "rule 2 (r.yaml:3)"
    assert rules["model.layers.2.mlp.up_proj"] == "rule 3 (r.yaml:5)"
    assert rules["model.embed_tokens"] == "no rule"


@pytest.mark.parametrize(("written", "scales"), [("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F16")])
def test_scales_follow_the_model(written, scales):
    found = plan({**SMOLLM, "dtype": written}, "int4")
    assert {t.spec.scale_dtype for t in found.quantized()} == {scales}
    assert found.source_nbytes == 134515008 * (4 if written == "float32" else 2)


def test_tensors_no_family_names_are_kept():
    family = find_family(SMOLLM, "test")
    headers = headers_from_config(SMOLLM, family)
    headers["lm_head.weight"] = replace(headers["model.embed_tokens.weight"], name="lm_head.weight")
    headers["model.rotary.inv_freq"] = TensorInfo("model.rotary.inv_freq", "F32", (32,), 128, "x")
    recipe = load_recipe("int4")
    found = make_plan(
        label="t", config=SMOLLM, family=family, tensors=headers, recipe=recipe, run=RunShape()
    ).tensors
    assert [(t.name, t.role, t.nbytes) for t in found[-2:]] == [
        ("lm_head.weight", "other", 2 * 49152 * 576),
        ("model.rotary.inv_freq", "other", 128),
    ]


def test_peak_memory_lists_its_parts():
    found = plan(LLAMA_70B, "gptq_int4_g128")
    assert sum(found.peak_parts.values()) == found.peak_ram_bytes
    block = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192
    assert dict(found.peak_parts) == {
        "interpreter and libraries": BASELINE_BYTES,
        "embedding or head, as stored": 2 * 128256 * 8192,
        "one block (float32, and as stored)": 2 * 6 * block,
        "Hessians": 2 * 4 * 28672**2,
        "rounding the largest tensor": 4 * (4 * 8192 * 28672 + 3 * 28672**2),
        "hidden states": 2 * 4 * 128 * 512 * 8192,
        "activations of one batch": 4 * 2048 * (4 * 8192 + 3 * 28672),
    }
    assert found.disk_bytes == found.nbytes + 4 * 4 * 128 * 512 * 8192 + 50_000_000


def test_rounding_to_nearest_needs_no_hessians():
    parts = plan(LLAMA_70B, "int8").peak_parts
    assert parts["Hessians"] == 0
    assert parts["rounding the largest tensor"] == 16 * 8192 * 28672


def test_a_quantized_head_counts(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("rules:\n  - {match: lm_head, format: int8}\n")
    parts = plan(LLAMA_70B, path).peak_parts
    assert parts["Hessians"] == 0
    assert parts["rounding the largest tensor"] == 4 * (4 * 128256 * 8192 + 3 * 8192**2)


def test_tensors_of_surplus_blocks_are_carried_not_lost():
    family = find_family(SMOLLM, "test")
    headers = headers_from_config(SMOLLM, family)
    config = {**SMOLLM, "num_hidden_layers": 29}
    found = make_plan(
        label="test", config=config, family=family, tensors=headers, recipe=load_recipe("int4"), run=RunShape()
    )
    surplus = [t for t in found.tensors if t.name.startswith("model.layers.29.")]
    assert len(found.tensors) == len(headers)
    assert len(surplus) == 9
    assert all(t.layer is None and t.spec is None for t in surplus)
    assert any("9 tensors of blocks beyond num_hidden_layers" in note for note in found.notes)
