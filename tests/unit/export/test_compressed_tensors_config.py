import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.arch.llama import FAMILY
from compressor.core.plan import PlannedTensor
from compressor.core.spec import Spec
from compressor.errors import Problems
from compressor.export import compressed_tensors as ct

INT4 = Spec(4, 32)
INT8 = Spec(8, -1)
FP8, FP8_BLOCK = Spec(8, -1, kind="float"), Spec(8, 0, kind="float", block=(128, 128))
W8A8 = Spec(8, -1, activations="int8")
ANY = [None, INT4, INT8, Spec(4, 32, False), FP8, FP8_BLOCK, W8A8]

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FFN = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def model(attention, ffn, head=None, layers=12, special=None):
    specs = {}
    for layer in range(layers):
        specs.update({f"model.layers.{layer}.{name}": attention for name in ATTENTION})
        specs.update({f"model.layers.{layer}.{name}": ffn for name in FFN})
    specs.update(special or {})
    return specs | {"lm_head": head}


PARTIAL = {f"model.layers.{n}.mlp.down_proj": INT8 for n in (0, 1, 11)}
MODELS = {
    "uniform": model(INT4, INT4),
    "uniform with head": model(INT4, INT4, INT4),
    "by role": model(INT4, INT8),
    "head of its own": model(INT4, INT4, INT8),
    "ffn float": model(INT4, None),
    "some layers": model(INT4, INT4, special=PARTIAL),
    "layer 1 float": model(INT4, INT8, special=dict.fromkeys(
        (f"model.layers.1.{n}" for n in (*ATTENTION, *FFN)), None)),
    "layer 0 float, one format": model(INT4, INT4, special={"model.layers.0.mlp.up_proj": None}),
    "three and asymmetric": model(Spec(3, 64, False), Spec(8, 0), INT8, special=PARTIAL),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_config_round_trip(name):
    specs = MODELS[name]
    config = json.loads(json.dumps(ct.quantization_config(specs, tied=False)))
    assert ct.specs_from_config(config, specs) == specs
    assert config["ignore"] == [module for module, spec in specs.items() if spec is None]
    assert len(config["config_groups"]) == len({spec for spec in specs.values() if spec})


def assert_foreign_library_reads(specs) -> None:
    """One target matches each quantized module, and its group is the format that was planned."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import is_match, match_targets

    parsed = QuantizationConfig.model_validate(ct.quantization_config(specs, tied=False))
    linear = torch.nn.Linear(1, 1)
    schemes = {target: group for group in parsed.config_groups.values() for target in group.targets}
    for module, spec in specs.items():
        assert is_match(module, linear, parsed.ignore) == (spec is None)
        if spec is None:
            continue
        found = match_targets(module, linear, list(schemes))
        both = module == "lm_head" and len(parsed.config_groups) == 1
        assert found == (["re:.*lm_head", "Linear"] if both else found[:1])
        weights = schemes[found[0]].weights
        assert (weights.num_bits, weights.symmetric) == (spec.bits, spec.symmetric)
        assert weights.strategy == spec.strategy
        assert weights.group_size == (spec.group_size if spec.group_size > 0 else None)
        assert (weights.type, weights.block_structure) == (spec.kind, list(spec.block) if spec.block else None)
        inputs = schemes[found[0]].input_activations
        assert (inputs is not None) == (spec.activations is not None)
        if inputs is not None:
            assert (inputs.type, inputs.strategy, inputs.dynamic) == (spec.kind, "token", True)


@pytest.mark.parametrize("name", MODELS)
def test_the_foreign_library_reads_the_same_formats(name):
    assert_foreign_library_reads(MODELS[name])


@given(st.lists(st.sampled_from(ANY), min_size=22, max_size=22))
@settings(max_examples=60, deadline=None)
def test_any_assignment_of_formats_survives(choices):
    specs = dict(zip(model(INT4, INT4, INT4, layers=3), choices, strict=True))
    config = ct.quantization_config(specs, tied=False)
    assert ct.specs_from_config(config, specs) == specs
    assert_foreign_library_reads(specs)


def test_uniform_config_literally():
    assert ct.quantization_config({"model.layers.0.mlp.up_proj": INT4, "lm_head": None}, tied=False) == {
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "observer": "minmax",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def targets(specs):
    groups = ct.quantization_config(specs, tied=False)["config_groups"]
    return [group["targets"] for group in groups.values()]


def test_targets_are_regexes_over_shared_parents():
    assert targets(model(INT4, INT8)) == [
        [r"re:^model\.layers\.\d+\.self_attn\.(q_proj|k_proj|v_proj|o_proj)$"],
        [r"re:^model\.layers\.\d+\.mlp\.(gate_proj|up_proj|down_proj)$"],
    ]
    int4, int8 = targets(model(INT4, INT4, special=PARTIAL))
    assert int8 == [r"re:^model\.layers\.(0|1|11)\.mlp\.down_proj$"]
    assert r"re:^model\.layers\.(2|3|4|5|6|7|8|9|10)\.mlp\.down_proj$" in int4
    assert targets(model(INT4, INT4, INT8))[1] == ["re:.*lm_head"]
    assert targets(model(INT4, INT4, INT4)) == [["Linear", "re:.*lm_head"]]


def test_tied_head_is_ignored_by_name_even_when_it_has_no_tensor():
    specs = {"model.layers.0.mlp.up_proj": INT4}
    assert ct.quantization_config(specs, tied=True)["ignore"] == ["lm_head"]
    assert ct.quantization_config(specs, tied=False)["ignore"] == []
    assert ct.quantization_config(specs | {"lm_head": None}, tied=True)["ignore"] == ["lm_head"]


def written_elsewhere(**changes):
    """A section as another tool writes it, newer keys included."""
    weights = {
        "actorder": "static", "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
        "observer": "mse", "observer_kwargs": {}, "scale_dtype": None, "strategy": "group",
        "symmetric": True, "type": "int", "zp_dtype": None,
    }  # fmt: skip
    group = {
        "format": "pack-quantized", "input_activations": None, "output_activations": None,
        "targets": ["Linear"], "weights": weights,
    }  # fmt: skip
    group |= {"weights": weights | changes.pop("weights", {})} | changes.pop("group", {})
    return {
        "config_groups": {"group_0": group},
        "format": "pack-quantized", "global_compression_ratio": None, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "sparsity_config": {}, "transform_config": {}, "version": "0.14.0", **changes,
    }  # fmt: skip


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def float_elsewhere(layout="float-quantized", weights=None, **group):
    weights = {"type": "float", "num_bits": 8, "strategy": "channel", "group_size": None} | (weights or {})
    return written_elsewhere(format=layout, group={"format": None, **group}, weights=weights)


def test_fp8_and_quantized_activations_of_other_tools_are_read():
    (module,) = modules = ["model.layers.0.mlp.up_proj"]
    block = {"strategy": "block", "block_structure": [128, 128]}
    for layout in ("float-quantized", "naive-quantized"):
        assert ct.specs_from_config(float_elsewhere(layout), modules) == {module: FP8}
    assert ct.specs_from_config(float_elsewhere(weights=block), modules) == {module: FP8_BLOCK}
    tensor = float_elsewhere(weights={"strategy": "tensor"}, input_activations=TOKENS | {"type": "float"})
    expected = Spec(8, 0, kind="float", activations="fp8")
    assert ct.specs_from_config(tensor, modules) == {module: expected}
    tokens = TOKENS | {"group_size": None, "observer": None, "actorder": None}
    group = {"format": "int-quantized", "input_activations": tokens}
    section = written_elsewhere(weights={"num_bits": 8, "strategy": "channel", "group_size": None}, group=group)
    assert ct.specs_from_config(section, modules) == {module: W8A8}


def test_one_layout_is_named_once_and_several_by_every_group():
    up, down, query = (
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
    )
    one = ct.quantization_config({up: FP8, down: FP8_BLOCK}, tied=False)
    assert one["format"] == "float-quantized"
    assert all("format" not in group for group in one["config_groups"].values())
    assert one["config_groups"]["group_1"]["weights"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128],
        "dynamic": False, "observer": "minmax",
    }  # fmt: skip
    specs = {up: W8A8, down: FP8, query: INT4}
    several = ct.quantization_config(specs, tied=False)
    assert several["format"] == "mixed-precision"
    layouts = [group["format"] for group in several["config_groups"].values()]
    assert layouts == ["int-quantized", "float-quantized", "pack-quantized"]
    assert several["config_groups"]["group_0"]["input_activations"] == TOKENS
    assert "input_activations" not in several["config_groups"]["group_1"]
    assert ct.specs_from_config(several, specs) == specs


def test_warnings_about_fp8_and_activations():
    def lines(spec, shape=(256, 256)):
        linears = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return ct.engine_warnings([planned(f"model.layers.0.{n}.weight", spec, shape) for n in linears], FAMILY)

    assert lines(FP8) == lines(FP8_BLOCK) == lines(W8A8) == lines(Spec(8, 0, activations="int8")) == []
    assert lines(Spec(8, 0, kind="float")) == []
    (line,) = lines(Spec(8, 0, kind="float", activations="fp8"))
    assert "channel scales are kept" in line
    (line,) = lines(FP8_BLOCK, (256, 192))
    assert line.startswith("3 tensors are no whole number of fp8 blocks")
    (line,) = lines(Spec(4, 32, activations="int8"))
    assert "with 8-bit weights" in line


def test_sections_of_other_tools_are_read():
    modules = ["model.layers.0.mlp.up_proj", "lm_head"]
    assert ct.specs_from_config(written_elsewhere(), modules) == {modules[0]: Spec(4, 128), "lm_head": None}
    channel = written_elsewhere(weights={"strategy": "channel", "group_size": -1, "num_bits": 8})
    assert ct.specs_from_config(channel, modules)[modules[0]] == Spec(8, -1)
    silent = written_elsewhere(weights={"strategy": None, "group_size": None})
    assert ct.specs_from_config(silent, modules)[modules[0]] == Spec(4, 0)


def test_matching_order_is_name_then_regex_in_alphabetical_order_then_class():
    section = written_elsewhere(ignore=[r"re:.*\.layers\.0\..*"])
    base = section["config_groups"].pop("group_0")
    for bits, target in ((8, "Linear"), (7, "re:.*up_proj"), (6, r"re:.*\.3\..*"), (5, "a.3.up_proj")):
        weights = {**base["weights"], "num_bits": bits}
        section["config_groups"][f"g{bits}"] = {**base, "targets": [target], "weights": weights}
    found = ct.specs_from_config(
        section,
        ["a.3.up_proj", "b.3.up_proj", "a.4.up_proj", "a.4.down", "a.layers.0.up_proj", "x.up_projector"],
    )
    assert [spec and spec.bits for spec in found.values()] == [5, 6, 7, 8, None, 7]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (written_elsewhere(quant_method="gptq"), "quant_method"),
        (written_elsewhere(format="marlin-24", group={"format": None}), "layout is not read"),
        (written_elsewhere(format="mixed-precision", group={"format": None}), "layout is not read"),
        (written_elsewhere(format="int-quantized", group={"format": None}), "int4 g128 in this layout is not read"),
        (float_elsewhere("int-quantized"), "fp8 channel in this layout is not read"),
        (written_elsewhere(group={"input_activations": {"num_bits": 8}}), "quantizes activations"),
        (written_elsewhere(group={"input_activations": TOKENS | {"dynamic": False}}), "quantizes activations"),
        (written_elsewhere(group={"input_activations": TOKENS | {"strategy": "tensor"}}), "quantizes activations"),
        (written_elsewhere(group={"input_activations": TOKENS | {"type": "float"}}), "activations must be int8"),
        (written_elsewhere(group={"output_activations": TOKENS}), "quantizes outputs"),
        (written_elsewhere(weights={"type": "float"}), "8 bits and is symmetric"),
        (written_elsewhere(weights={"type": "posit"}), "weights.type"),
        (float_elsewhere(weights={"strategy": "group", "group_size": 32}), "fp8 takes group_size -1"),
        (float_elsewhere(weights={"strategy": "block"}), "without a block_structure of two sizes"),
        (float_elsewhere(weights={"strategy": "block", "block_structure": [128]}), "of two sizes"),
        (written_elsewhere(weights={"actorder": "group"}), "g_idx"),
        (written_elsewhere(weights={"num_bits": 16}), "bits must be 2..8"),
        (
            written_elsewhere(weights={"strategy": "block", "block_structure": [128, 128]}),
            "blocks are for float formats",
        ),
        (written_elsewhere(weights={"strategy": "tensor_group"}), "weights"),
        (written_elsewhere(weights={"group_size": None}), "without a positive group_size"),
        (written_elsewhere(group={"targets": ["re:("]}), r"re:\("),
        (written_elsewhere(ignore="lm_head"), "ignore"),
        (written_elsewhere(config_groups={"W4A16": ["Linear"]}), "W4A16"),
        (written_elsewhere(config_groups=[1]), "config_groups"),
        (written_elsewhere(transform_config={"config_groups": {"u": 1}}), "transform_config"),
        (written_elsewhere(sparsity_config={"format": "sparse-bitmask"}), "sparsity_config"),
    ],
)
def test_what_is_not_a_plain_integer_format_is_refused_with_the_reason(section, message):
    with pytest.raises(Problems) as caught:
        ct.specs_from_config(section, ["model.layers.0.mlp.up_proj"])
    assert message.replace("\\", "") in str(caught.value)


# --- the plan -----------------------------------------------------------------------------------


def planned(name, spec, shape=(64, 64), role="attention", layer=0, dtype="BF16"):
    module = name.removesuffix(".weight")
    return PlannedTensor(name, module, role, layer, shape, dtype, 0, spec, (), "rule 2 (x.yaml:14)", 0)


def test_check_plan_tells_everything_at_once():
    tensors = [
        planned("model.embed_tokens.weight", INT4, role="embedding", layer=None),
        planned("model.layers.0.self_attn.q_proj.weight", Spec(4, 48)),
        planned("model.layers.0.self_attn.k_proj.weight", INT4),
        planned("model.layers.0.mlp.experts.weight", INT4, shape=(4, 64, 64), role="ffn"),
        planned("model.norm.weight", None, shape=(64,), role="norm"),
        planned("lm_head.weight", INT8, role="lm_head", layer=None),
    ]
    found = ct.check_plan(tensors, tied=True)
    assert [problem.what.split(" ")[0] for problem in found] == [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.weight",
        "lm_head.weight",
    ]
    assert all(problem.hint and "rule 2 (x.yaml:14)" in problem.what for problem in found)
    assert "16, 32, 64" in str(found[1])
    assert len(ct.check_plan(tensors, tied=False)) == 3


def test_engine_warnings():
    def block(layer, **formats):
        names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
        return [planned(f"model.layers.{layer}.{names[n]}.weight", s) for n, s in formats.items()]

    assert ct.engine_warnings(block(0, q=INT4, k=INT4, v=INT4), FAMILY) == []
    fused = ct.engine_warnings([*block(0, q=INT4, k=INT4, v=INT4), *block(3, q=INT4, k=INT4, v=INT8)], FAMILY)
    assert len(fused) == 1
    assert fused[0].endswith("but differ in block 3")
    left_float = ct.engine_warnings(block(2, q=INT4, k=INT4, v=None), FAMILY)
    assert len(left_float) == 1
    assert left_float[0].endswith("differ in block 2")
    odd, asym = Spec(3, 0, False, "F16"), Spec(4, 32, symmetric=False)
    lines = ct.engine_warnings(block(0, q=odd, k=odd, v=odd), FAMILY)
    for word in ("int3 (3 tensors)", "one scale per tensor", "stored in F16"):
        assert sum(word in line for line in lines) == 1
    assert len(lines) == 3
    (line,) = ct.engine_warnings(block(0, q=asym, k=asym, v=asym), FAMILY)
    assert "dequantize=True" in line
    both = [*block(0, q=asym, k=asym, v=asym), *block(1, q=INT4, k=INT4, v=INT4)]
    (line,) = ct.engine_warnings(both, FAMILY)
    assert "does not load in transformers" in line
