"""Tiny checkpoints with the real producers' names, written tensor by tensor; and a manifest to convert each with."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

WIDTH = {"BF16": 2, "F16": 2, "F32": 4}


def save(path, tensors, metadata=None):
    """Write {name: (dtype, shape, bytes)} as one safetensors file, by hand: the tests want dtypes numpy lacks."""
    header, position = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(data for _, _, data in tensors.values()))


def load(folder):
    """{name: (dtype, shape, bytes)} of every shard in a folder, by hand."""
    out = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            out[name] = (entry["dtype"], tuple(entry["shape"]), raw[8 + length + begin : 8 + length + end])
    return out


def write_checkpoint(folder, shards, config, index=True):
    """A checkpoint of several shards ({name: tensor} each), an index and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save(folder / name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if index and len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
        )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bytes_of(rng, n):
    return rng.integers(0, 256, n, dtype=np.uint8).tobytes()


def mx(rng, n, k, low=100, high=114, codes="I8", scales="F8_E8M0"):
    """MXFP4 codes [n, k/2] and E8M0 bytes [n, k/32] in [low, high]."""
    return (
        (codes, (n, k // 2), bytes_of(rng, n * k // 2)),
        (scales, (n, k // 32), rng.integers(low, high + 1, n * k // 32, dtype=np.uint8).tobytes()),
    )


def bf16(rng, *shape):
    values = rng.standard_normal(int(np.prod(shape))).astype(np.float32).view(np.uint32) >> 16
    return ("BF16", shape, values.astype("<u2").tobytes())


def f32(*values):
    """The bytes of F32 numbers."""
    return np.array(values, "<f4").tobytes()


def deepseek(rng, experts=2, layers=1, hidden=64, inter=32, low=100, high=114):
    """DeepSeek-V4 names: FP4 experts, FP8 attention, an MTP block, plain norms. One dict in file order."""
    tensors = {"embed.weight": bf16(rng, 96, hidden), "head.weight": bf16(rng, 96, hidden)}
    for prefix in [f"layers.{n}" for n in range(layers)] + ["mtp.0"]:
        for expert in range(experts):
            for leaf, (n, k) in {"w1": (inter, hidden), "w2": (hidden, inter), "w3": (inter, hidden)}.items():
                name = f"{prefix}.ffn.experts.{expert}.{leaf}"
                tensors[f"{name}.weight"], tensors[f"{name}.scale"] = mx(rng, n, k, low, high)
        tensors[f"{prefix}.attn.wo_b.weight"] = ("F8_E4M3", (hidden, hidden), bytes(hidden * hidden))
        tensors[f"{prefix}.attn.wo_b.scale"] = ("F8_E8M0", (1, 1), b"\x7f")
        tensors[f"{prefix}.ffn.gate.weight"] = bf16(rng, experts, hidden)
        tensors[f"{prefix}.ffn.gate.bias"] = ("F32", (experts,), bytes(4 * experts))
        tensors[f"{prefix}.ffn_norm.weight"] = bf16(rng, hidden)
    return tensors


DSV4_CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "expert_dtype": "fp4",
    "swiglu_limit": 10.0,
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 2,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}


def gpt_oss(rng, experts=2, hidden=64, inter=32, low=100, high=114):
    """gpt-oss names: stacked experts, K in chunks of 16 bytes, biases."""
    tensors = {"model.embed_tokens.weight": bf16(rng, 96, hidden), "lm_head.weight": bf16(rng, 96, hidden)}
    base = "model.layers.0.mlp.experts"
    for leaf, (n, k) in {"gate_up_proj": (2 * inter, hidden), "down_proj": (hidden, inter)}.items():
        count = experts * n * k
        scales = rng.integers(low, high + 1, count // 32, dtype=np.uint8).tobytes()
        tensors[f"{base}.{leaf}_blocks"] = ("U8", (experts, n, k // 32, 16), bytes_of(rng, count // 2))
        tensors[f"{base}.{leaf}_scales"] = ("U8", (experts, n, k // 32), scales)
        tensors[f"{base}.{leaf}_bias"] = bf16(rng, experts, n)
    tensors["model.layers.0.mlp.router.weight"] = bf16(rng, experts, hidden)
    tensors["model.layers.0.mlp.router.bias"] = bf16(rng, experts)
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"model.layers.0.self_attn.{leaf}.weight"] = bf16(rng, hidden, hidden)
    tensors["model.norm.weight"] = bf16(rng, hidden)
    return tensors


GPT_OSS_CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 1,
    "num_local_experts": 2,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}


def manifest_text(source, output, layers, **target):
    """A manifest as YAML."""
    activations, kv_cache = target.pop("activations", None), target.pop("kv_cache", None)
    body = {
        "version": 1,
        "name": "t",
        "source": {"path": str(source)},
        "target": {"format": "nvfp4", "layout": "modelopt", "output": str(output), **target},
        "layers": layers,
    }
    if activations is not None:
        body["activations"] = activations
    elif target.get("format") in ("nvfp4-w4a16", "mxfp4", "bf16"):
        body["activations"] = {"input_scale": None}
    if kv_cache is not None:
        body["kv_cache"] = kv_cache
    return yaml.safe_dump(body)


EXPERTS = [{"match": "layers.*.ffn.experts.*", "to": "nvfp4"}, {"match": "*", "to": "keep"}]


class Kit:
    """What the tests of this folder share, as one fixture."""

    save = staticmethod(save)
    load = staticmethod(load)
    write_checkpoint = staticmethod(write_checkpoint)
    mx = staticmethod(mx)
    bf16 = staticmethod(bf16)
    f32 = staticmethod(f32)
    deepseek = staticmethod(deepseek)
    gpt_oss = staticmethod(gpt_oss)
    manifest_text = staticmethod(manifest_text)
    DSV4_CONFIG = DSV4_CONFIG
    GPT_OSS_CONFIG = GPT_OSS_CONFIG
    EXPERTS = EXPERTS

    def __init__(self, tmp_path):
        self.tmp = tmp_path
        self.rng = np.random.default_rng(0)

    def job(self, source, layers=None, output=None, **target):
        """A prepared job converting `source` to tmp/out."""
        from requant.convert.pipeline import prepare

        path = self.tmp / f"{(output or 'out').replace('/', '_')}.yaml"
        path.write_text(manifest_text(source, self.tmp / (output or "out"), layers or EXPERTS, **target))
        return prepare(str(path))

    def convert(self, source, layers=None, output=None, force=False, **target):
        """Convert `source`; the output folder and the run's result."""
        from requant.convert.pipeline import run_job

        job = self.job(source, layers, output, **target)
        return job.plan.output, run_job(job, force=force)

    def dsv4(self, shards=2, name="src", **kwargs):
        """A DeepSeek-V4-like checkpoint cut into shards at fixed places."""
        tensors = list(deepseek(self.rng, **kwargs).items())
        size = -(-len(tensors) // shards)
        parts = [dict(tensors[i : i + size]) for i in range(0, len(tensors), size)]
        return write_checkpoint(self.tmp / name, parts, DSV4_CONFIG)


@pytest.fixture
def kit(tmp_path):
    """Makers of tiny checkpoints, and shortcuts to convert them."""
    return Kit(tmp_path)
