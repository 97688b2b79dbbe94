"""Peak memory follows the embedding and one block, not the model: printed with the explanation."""

import json
import subprocess
import sys

import numpy as np
import pytest

SAMPLES = 8
LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1280,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def write_random_model(folder, config, seed=0):
    """Shards of random bfloat16 weights, one block at a time, and the embedded model's tokenizer."""
    from compressor.arch import find_family
    from compressor.checkpoint.shard import write_safetensors
    from compressor.core.tensors import RawTensor
    from compressor.kernels.floats import encode_float
    from compressor.models import open_model

    folder.mkdir()
    rng, family = np.random.default_rng(seed), find_family(config, "random")
    shards: dict[str, dict] = {}
    for name, expected in family.tensors(config).items():
        shards.setdefault(f"layer-{expected.layer}", {})[name] = expected.shape
    weight_map = {}
    for shard, shapes in shards.items():
        tensors = {}
        for name, shape in shapes.items():
            values = rng.normal(0, 0.02, shape).astype(np.float32) if len(shape) > 1 else np.ones(shape, np.float32)
            tensors[name] = RawTensor("BF16", shape, encode_float(values, "BF16"))
            weight_map[name] = f"{shard}.safetensors"
        write_safetensors(folder / f"{shard}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    for name, source in open_model("demo").side_files().items():
        (folder / name).write_bytes(source if isinstance(source, bytes) else source.read_bytes())


def run(model, out):
    command = [sys.executable, "-m", "compressor", "quantize", str(model), "--recipe", "demo", "--out", str(out)]
    result = subprocess.run(
        [*command, "--samples", str(SAMPLES), "--json"], capture_output=True, text=True, check=True
    )
    plan = [sys.executable, "-m", "compressor", "plan", str(model), "--recipe", "demo", "--samples", str(SAMPLES)]
    planned = subprocess.run([*plan, "--json"], capture_output=True, text=True, check=True)
    return json.loads(result.stdout), json.loads(planned.stdout)


@pytest.mark.slow
def test_peak_memory_does_not_follow_model_size(demo_available, tmp_path):
    write_random_model(tmp_path / "large", LARGE)
    small, small_plan = run("demo", tmp_path / "out-small")
    large, large_plan = run(tmp_path / "large", tmp_path / "out-large")
    print("\n                                   embedded model   four times its size   difference (MB)")
    rows = [("weights (bf16)", small["source_bytes"], large["source_bytes"])]
    rows += [(name, small_plan["peak_parts"][name], size) for name, size in large_plan["peak_parts"].items()]
    rows += [("predicted peak", small["predicted_peak_bytes"], large["predicted_peak_bytes"])]
    rows += [("measured peak", small["peak_rss_bytes"], large["peak_rss_bytes"])]
    for name, a, b in rows:
        print(f"{name:36s} {a / 1e6:12.1f} {b / 1e6:17.1f} {(b - a) / 1e6:17.1f}")
    grown = large["peak_rss_bytes"] - small["peak_rss_bytes"]
    explained = large["predicted_peak_bytes"] - small["predicted_peak_bytes"]
    assert large["source_bytes"] > 3.9 * small["source_bytes"]
    assert large["peak_rss_bytes"] < small["peak_rss_bytes"] + explained + 150e6
    assert grown < 0.6 * (large["source_bytes"] - small["source_bytes"])
    for result in (small, large):
        assert abs(result["peak_rss_bytes"] / result["predicted_peak_bytes"] - 1) < 0.4
