"""The decode engine against transformers, family by family, on a CPU in FP32; and the stage `speed` with it."""

import json
import shutil

import pytest

pytest.importorskip("transformers", reason="needs the extra eval")

import torch
from requant.convert.synthetic import config_of, specs_of
from requant.kernels.empty_model import ModelUnavailableError, empty_model
from requant.manifests.gates import SpeedGate
from requant.validate.decode_engine import Engine
from requant.validate.decode_glue import PlainGlue
from requant.validate.decode_load import load_decoder
from requant.validate.decode_products import Products
from requant.validate.decode_step import Cache, State, prefill
from requant.validate.load_model import load_model
from requant.validate.results import Status
from requant.validate.speed import check_speed
from safetensors.torch import load_file, save_file

GATE = {"device": "cpu", "concurrency": (1, 2), "requests": (2, 3), "prompt_tokens": 12, "output_tokens": 6}


@pytest.mark.parametrize(
    "name",
    [
        "_src_llama_bf16",
        "llama_mxfp4",
        "llama_w4a16_nvfp4",
        "_src_qwen3moe_bf16",
        "qwen3moe_nvfp4_experts",
        "_src_gptoss_mxfp4",
        "gptoss_nvfp4_cast",
    ],
)
def test_the_engine_computes_what_the_class_computes(golden, name):
    """Logits after a prompt longer than the sliding window, and twelve greedy steps, two streams at a time."""
    folder = golden(name)
    decoder = load_decoder(folder, device="cpu", positions=80)
    theirs = load_model(folder).model
    ids = torch.randint(1, 120, (2, 40), generator=torch.Generator().manual_seed(1))
    products = Products(decoder)
    cache, state = Cache.empty(decoder, 2, 80), State.new(decoder, 2)
    with torch.inference_mode():
        expected = theirs(input_ids=ids, use_cache=False).logits[:, -1]
        at = [torch.tensor([stream]) for stream in range(2)]
        ours = torch.stack([prefill(decoder, cache, at[s], ids[s], PlainGlue(), products) for s in range(2)])
        assert float((ours - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        sequence = ids
        for _ in range(12):
            token = theirs(input_ids=sequence, use_cache=False).logits[:, -1].argmax(-1)
            sequence = torch.cat([sequence, token[:, None]], 1)
    engine = Engine(decoder, 2, 80, products)
    assert engine.tokens(list(ids), 12, eager=True) == sequence[:, 40:].tolist()
    assert len(state.routed) == sum(hasattr(layer.mlp, "router") for layer in decoder.layers)


def test_a_tied_head_is_the_embedding(golden):
    folder = golden("_src_llama_bf16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    decoder = load_decoder(folder, device="cpu", positions=16)
    assert decoder.head.plain is decoder.embedding


def test_biases_of_a_dense_mlp_are_added(golden):
    folder = golden("_src_llama_bf16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mlp_bias": True}))
    tensors = load_file(folder / "model.safetensors")
    made = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if ".mlp." in name]:
        rows = tensors[name].shape[0]
        tensors[name.replace(".weight", ".bias")] = torch.randn(rows, generator=made).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    decoder = load_decoder(folder, device="cpu", positions=16)
    ids = torch.arange(3, 12)
    with torch.inference_mode():
        expected = load_model(folder).model(input_ids=ids[None], use_cache=False).logits[0, -1]
        ours = prefill(decoder, Cache.empty(decoder, 1, 16), torch.tensor([0]), ids, PlainGlue(), Products(decoder))
    assert float((ours - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    biases = sum(layer.mlp.gate_up_bias.numel() + layer.mlp.down_bias.numel() for layer in decoder.layers)
    assert biases == sum(tensor.numel() for name, tensor in tensors.items() if name.endswith(".bias"))
    del tensors["model.layers.0.mlp.up_proj.bias"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailableError, match="some have a bias and some none"):
        load_decoder(folder, device="cpu", positions=16)


def test_lossless_checkpoints_decode_the_same_tokens_and_pass(golden):
    seen = []
    result = check_speed(
        golden("gptoss_nvfp4_cast"),
        SpeedGate(**GATE),
        source=golden("_src_gptoss_mxfp4"),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert result.status is Status.PASSED, result.reason
    runs = result.data["runs"]
    assert [run["label"] for run in runs] == ["converted (NVFP4 and BF16)", "source (MXFP4 and BF16)"]
    firsts = [[point["first_tokens"] for point in run["points"]] for run in runs]
    assert firsts[0] == firsts[1]
    assert set(result.data["speedups"]["source"]) == {"1", "2"}
    assert result.reason.startswith("decodes ")
    assert " tokens/s at 2 (" in result.reason
    json.dumps(result.to_json(), allow_nan=False)
    assert seen[-1][0] >= 2


def test_bounds_of_the_gate_decide(golden):
    output, source = golden("llama_mxfp4"), golden("_src_llama_bf16")
    slow = check_speed(output, SpeedGate(**GATE, min_tokens_per_s=1e9), source=source)
    assert slow.status is Status.FAILED
    assert [f.rule for f in slow.findings] == ["too-slow"]
    fast = check_speed(output, SpeedGate(**GATE, min_tokens_per_s=1e-3, min_speedup=1e-6), source=source)
    assert fast.status is Status.PASSED
    needs = check_speed(output, SpeedGate(**GATE, min_roofline=0.5), source=source)
    assert (needs.status, needs.reason.endswith("min_roofline needs a GPU")) == (Status.NOT_RUN, True)


def test_what_cannot_be_decoded_is_not_run_with_the_reason(golden, tmp_path):
    base = golden("llama_mxfp4")
    for kind, said in (("deepseek_v4", "tensors that grow"), ("mamba", "config.json says mamba")):
        folder = tmp_path / kind
        shutil.copytree(base, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind}))
        result = check_speed(folder, SpeedGate(**GATE))
        assert result.status is Status.NOT_RUN
        assert said in result.reason
        assert result.data["kernels"]["points"]
    short = golden("_src_llama_bf16")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    assert load_decoder(short, device="cpu", positions=24).positions == 24
    with pytest.raises(ModelUnavailableError, match=r"asks for 25 tokens in a row .*, the model takes 24"):
        load_decoder(short, device="cpu", positions=25)
    broken = golden("_src_qwen3moe_bf16")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelUnavailableError, match=r"experts\.2\.up_proj, and the checkpoint lacks it"):
        load_decoder(broken, device="cpu", positions=64)


@pytest.mark.parametrize(
    ("name", "layers"), [("gpt-oss-20b", 2), ("qwen3-30b-a3b", 1), ("llama-3.1-8b", 1), ("smollm2-135m", 1)]
)
def test_random_checkpoints_have_every_weight_of_the_class_at_its_shape(tmp_path, name, layers):
    config, _ = config_of(name, layers, "bf16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = empty_model(tmp_path)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items() if k not in tied}
    made = {spec.name: spec.shape for spec in specs_of(config, "bf16")}
    single = {k: v for k, v in made.items() if ".experts.0." not in k and not k.rpartition(".experts.")[2][0].isdigit()}
    assert {k: v for k, v in wanted.items() if k in single} == single
    left = {k: v for k, v in wanted.items() if k not in single}
    if name == "qwen3-30b-a3b":
        experts = "model.layers.0.mlp.experts"
        assert left == {f"{experts}.gate_up_proj": (128, 1536, 2048), f"{experts}.down_proj": (128, 2048, 768)}
        assert made[f"{experts}.127.gate_proj.weight"] == made[f"{experts}.0.up_proj.weight"] == (768, 2048)
        assert made[f"{experts}.5.down_proj.weight"] == (2048, 768)
    else:
        assert left == {}


def test_a_random_deepseek_v4_has_every_weight_of_the_class(tmp_path):
    """Names as transformers' own conversion renames them; the experts are merged there."""
    import re

    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    config, form = config_of("deepseek-v4-flash", 5, None)
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    wanted = {k: tuple(v.shape) for k, v in empty_model(tmp_path).state_dict().items()}
    renames = [
        (re.compile(source), target.replace("\\.", "."))
        for rule in get_checkpoint_conversion_mapping("deepseek_v4")
        if type(rule).__name__ == "WeightRenaming"
        for source, target in zip(rule.source_patterns, rule.target_patterns, strict=True)
    ]
    made = {}
    for spec in specs_of(config, form):
        if spec.name.startswith("mtp.") or spec.name.endswith(".scale") or ".experts." in spec.name:
            continue
        name = spec.name
        for pattern, target in renames:
            name = pattern.sub(target, name)
        made[name if name.startswith("lm_head") else f"model.{name}"] = spec.shape
    assert {k: v for k, v in wanted.items() if ".experts." not in k} == made
