"""A rotated model is the same function, in other weights, seen tensor by tensor."""

import numpy as np
import pytest
import torch

from compressor.arch import families, find_family
from compressor.arch.base import Norm
from compressor.calibration.walk import Walk
from compressor.checkpoint.reader import check_against_family, open_checkpoint
from compressor.core.plan import PassCall
from compressor.errors import CompressorError, GateFailed
from compressor.kernels.floats import bf16_to_f32, f32_to_bf16
from compressor.transforms import base, rotate

VARIANTS = {
    **{name: (name, {}) for name in families()},
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "no groups": ("llama", {"num_key_value_heads": 4}),
    "wide heads": ("llama", {"head_dim": 32}),
    "width 36": ("llama", {"hidden_size": 36, "head_dim": 12}),
}
TOKENS = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def wide_model(tiny_model, tmp_path_factory):
    """``wide_model("llama", ...)``: the tiny model saved in float32, so that storing rounds next to nothing."""
    from transformers import AutoModelForCausalLM

    def make(family, **overrides):
        model = AutoModelForCausalLM.from_pretrained(tiny_model(family, **overrides), dtype=torch.float32)
        folder = tmp_path_factory.mktemp("wide")
        model.save_pretrained(folder)
        return open_checkpoint(str(folder))

    return make


def rotated(checkpoint, **options):
    family = find_family(checkpoint.config, checkpoint.label)
    return base.apply([PassCall("rotate", rotate.Options(**options).model_dump())], checkpoint, family)


def model_of(checkpoint):
    """transformers' model in float32 with the checkpoint's stored tensors, each in its place."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**checkpoint.config), dtype=torch.float32).eval()
    state = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if checkpoint.config["tie_word_embeddings"] else set())
    model.tie_weights()
    return model


@torch.inference_mode()
def logits_of(model):
    return model(input_ids=TOKENS, use_cache=False).logits.numpy()


def walked(checkpoint):
    walk = Walk(checkpoint, find_family(checkpoint.config, checkpoint.label))
    streams = walk.embed([TOKENS])
    for layer in range(walk.layers):
        block = walk.block(layer)
        walk.forward(block, layer, streams)
    return streams[0].numpy(), walk.logits(streams[0]).numpy()


@pytest.mark.parametrize("kind", ["hadamard", "orthogonal"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_stay(wide_model, variant, kind):
    family, overrides = VARIANTS[variant]
    checkpoint = wide_model(family, **overrides)
    found = rotated(checkpoint, kind=kind, seed=3)
    before = logits_of(model_of(checkpoint))
    assert before.std() > 0.3
    limit = 1e-4 * np.abs(before).max()
    np.testing.assert_allclose(logits_of(model_of(found)), before, rtol=0, atol=limit)
    np.testing.assert_allclose(walked(found)[1], before, rtol=0, atol=limit)
    assert check_against_family(found, find_family(found.config, "m")) == []


@pytest.mark.parametrize("values", [True, False])
def test_the_stream_is_the_old_one_times_q(wide_model, values):
    checkpoint = wide_model("qwen2")
    found = rotated(checkpoint, values=values)
    q = found._rotations["stream"].matrix()
    np.testing.assert_allclose(walked(found)[0], walked(checkpoint)[0] @ q, rtol=0, atol=2e-4)


def test_every_tensor_by_its_formula(wide_model):
    checkpoint = wide_model("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    found, old = rotated(checkpoint, seed=1), checkpoint.read
    q, v = (found._rotations[name].matrix() for name in ("stream", "heads"))
    attn, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    before = np.diag(old("model.layers.1.input_layernorm.weight"))
    after = np.diag(old("model.layers.1.post_attention_layernorm.weight"))
    by_head = np.kron(np.eye(4), v)
    expected = {
        "model.embed_tokens.weight": old("model.embed_tokens.weight") @ q,
        "lm_head.weight": old("model.embed_tokens.weight") @ np.diag(old("model.norm.weight")) @ q,
        f"{attn}.q_proj.weight": old(f"{attn}.q_proj.weight") @ before @ q,
        f"{attn}.v_proj.weight": np.kron(np.eye(2), v).T @ old(f"{attn}.v_proj.weight") @ before @ q,
        f"{attn}.v_proj.bias": old(f"{attn}.v_proj.bias") @ np.kron(np.eye(2), v),
        f"{attn}.q_proj.bias": old(f"{attn}.q_proj.bias"),
        f"{attn}.o_proj.weight": q.T @ old(f"{attn}.o_proj.weight") @ by_head,
        f"{attn}.o_proj.bias": old(f"{attn}.o_proj.bias") @ q,
        f"{mlp}.up_proj.weight": old(f"{mlp}.up_proj.weight") @ after @ q,
        f"{mlp}.up_proj.bias": old(f"{mlp}.up_proj.bias"),
        f"{mlp}.down_proj.weight": q.T @ old(f"{mlp}.down_proj.weight"),
        f"{mlp}.down_proj.bias": old(f"{mlp}.down_proj.bias") @ q,
        "model.layers.1.input_layernorm.weight": np.ones(64),
        "model.norm.weight": np.ones(64),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found.read(name), value, rtol=0, atol=3e-6, err_msg=name)
    assert found.tensors.keys() == checkpoint.tensors.keys() | {"lm_head.weight"}


def test_head_norms_of_qwen3_are_untouched(wide_model):
    checkpoint = wide_model("qwen3")
    found, name = rotated(checkpoint), "model.layers.0.self_attn.q_norm.weight"
    assert np.array_equal(found.raw(name).data, checkpoint.raw(name).data)


def test_a_wide_matrix_in_pieces_is_the_same(wide_model, monkeypatch):
    checkpoint = wide_model("llama", attention_bias=True)
    whole = rotated(checkpoint)
    expected = {name: (whole.raw(name).data, whole.read(name)) for name in whole.tensors}
    monkeypatch.setattr(rotate, "PIECE", 3 * 64 + 1)
    for name, (data, values) in expected.items():
        found = rotated(checkpoint)
        np.testing.assert_allclose(found.read(name), values, rtol=0, atol=1e-6)
        assert found.raw(name).data.nbytes == data.nbytes == found.tensors[name].nbytes


def test_matrices_are_read_unrounded_and_vectors_as_stored(tiny_model):
    checkpoint = open_checkpoint(str(tiny_model("llama", attention_bias=True)))
    found = rotated(checkpoint)
    assert {info.dtype for info in found.tensors.values()} == {"BF16"}
    weight, bias = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.bias"
    for name in (weight, bias):
        stored = bf16_to_f32(found.raw(name).data.view(np.uint16)).reshape(found.tensors[name].shape)
        assert np.array_equal(stored, bf16_to_f32(f32_to_bf16(found.read(name))))
        assert np.array_equal(stored, found.read(name)) == (name == bias)


def test_seed_and_options_decide_bytes_and_fingerprint(tiny_model):
    checkpoint = open_checkpoint(str(tiny_model("llama")))
    variants = [{}, {"seed": 1}, {"kind": "orthogonal"}, {"values": False}]
    name = "model.layers.0.self_attn.v_proj.weight"
    views = [rotated(checkpoint, **options) for options in variants]
    assert len({view.fingerprint() for view in [checkpoint, *views]}) == 5
    assert len({view.raw(name).data.tobytes() for view in views}) == 4
    for view, options in zip(views, variants, strict=True):
        again = rotated(checkpoint, **options)
        assert again.fingerprint() == view.fingerprint()
        assert again.raw(name).data.tobytes() == view.raw(name).data.tobytes()


def test_untying_is_told_with_its_size(tiny_model):
    tied = rotated(open_checkpoint(str(tiny_model("llama", tie_word_embeddings=True))))
    assert tied.config["tie_word_embeddings"] is False
    assert [n for n in tied.notes if "lm_head.weight is a tensor of its own, 16,384 more weights (0.0 MB" in n]
    assert tied.source.config["tie_word_embeddings"] is True
    untied = rotated(open_checkpoint(str(tiny_model("llama"))))
    assert not [n for n in untied.notes if "unties" in n]
    assert [n for n in untied.notes if "stream of width 64, value heads of width 16 (hadamard, seed 0)" in n]


def test_unknown_tensors_are_carried_and_told(tiny_model):
    checkpoint = open_checkpoint(str(tiny_model("llama", num_hidden_layers=3)))
    checkpoint.config["num_hidden_layers"] = 2
    found = rotated(checkpoint)
    assert [note for note in found.notes if note.startswith("9 tensors unknown to family llama")]
    name = "model.layers.2.mlp.up_proj.weight"
    assert np.array_equal(found.raw(name).data, checkpoint.raw(name).data)


def test_the_run_s_own_check_passes_and_can_fail(tiny_model):
    checkpoint = open_checkpoint(str(tiny_model("qwen2", tie_word_embeddings=True)))
    family = find_family(checkpoint.config, "m")
    base.verify(checkpoint, family, [TOKENS], "cpu")
    found = rotated(checkpoint)
    base.verify(found, family, [TOKENS], "cpu")
    name = "model.layers.1.mlp.down_proj.weight"
    found._changes[name] = rotate.Change(name)  # a writer that was forgotten
    with pytest.raises(GateFailed, match="something else in block 1"):
        base.verify(found, family, [TOKENS], "cpu")


def test_widths_without_a_hadamard_matrix_are_refused(tiny_model):
    checkpoint = open_checkpoint(str(tiny_model("llama", hidden_size=56, head_dim=14)))
    with pytest.raises(CompressorError) as caught:
        rotated(checkpoint)
    assert "no Hadamard matrix for head_dim 14" in str(caught.value)
    assert "kind: orthogonal takes every width" in str(caught.value)
    rotated(checkpoint, values=False)
    rotated(checkpoint, kind="orthogonal")


def test_families_that_do_not_turn_are_refused():
    from dataclasses import replace

    llama = families()["llama"]
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "vocab_size": 99,
    }

    def said(family):
        return [str(problem) for problem in rotate.problems(config, family, rotate.Options())]

    assert said(llama) == []
    (other,) = said(replace(llama, norm_kind="other"))
    assert "its norms cannot be folded" in other
    (post,) = said(replace(llama, norms=(*llama.norms, Norm("post_ffn_norm", "hidden", "x"))))
    assert "post_ffn_norm touches the residual stream" in post
    (writer,) = said(replace(llama, writers=("mlp.down_proj",)))
    assert "self_attn.o_proj touches" in writer
    readers = said(replace(llama, pairs=llama.pairs[1:]))
    assert len(readers) == 4  # a norm and its three linears


def test_nan_is_named(tiny_model, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.down_proj.weight"][5, 6] = float("nan")
    save_file(state, folder / "model.safetensors")
    found = rotated(open_checkpoint(str(folder)))
    for get in (found.raw, found.read):
        with pytest.raises(CompressorError, match=r"down_proj.*NaN"):
            get("model.layers.0.mlp.down_proj.weight")


def test_a_value_too_large_for_its_dtype_is_named(wide_model, tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint = wide_model("llama")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float16)
    model.model.embed_tokens.weight.data[7] = 60000.0
    model.save_pretrained(tmp_path)
    found = rotated(open_checkpoint(str(tmp_path)), kind="hadamard", seed=0)
    found._rotations["stream"].signs[:] = 1.0  # the first column of Q is then all 1/8: 8 * 60000
    with pytest.raises(CompressorError, match=r"embed_tokens.*too large for F16"):
        found.raw("model.embed_tokens.weight")


def test_memory_counts_the_matrix_only_where_there_is_one():
    config = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 1, "num_hidden_layers": 1}
    config["vocab_size"] = 1000
    llama = families()["llama"]
    fast = rotate.memory(config, llama, rotate.Options())
    dense = rotate.memory(config, llama, rotate.Options(kind="orthogonal"))
    assert fast == rotate.WORKING_BYTES + 2 * 4096 * 1000
    assert dense == 8 * (4096**2 + 128**2) + 2 * 8 * 4096**2
