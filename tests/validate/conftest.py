"""A golden export that a test may break: tensors and metadata in memory, written anew and checked in a tmp folder."""

import copy
import json
from pathlib import Path

import pytest

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"


class Export:
    """One checkpoint in memory. tensors, config and hf_quant may be changed at will before `check`."""

    def __init__(self, golden, folder):
        from safetensors.torch import load_file

        self.source = GOLDENS / "modelopt" / golden
        self.folder = folder
        self.tensors = load_file(self.source / "model.safetensors")
        self.config = json.loads((self.source / "config.json").read_text())
        hf_quant = self.source / "hf_quant_config.json"
        self.hf_quant = json.loads(hf_quant.read_text()) if hf_quant.exists() else None

    @property
    def quant(self):
        return self.config["quantization_config"]

    def exclude(self, names):
        """Set the exclude list in both files."""
        self.quant["ignore"] = list(names)
        self.hf_quant["quantization"]["exclude_modules"] = list(names)

    def declare(self, algo):
        """Set the algorithm in both files."""
        self.quant["quant_algo"] = algo
        self.hf_quant["quantization"]["quant_algo"] = algo

    def drop(self, *suffixes):
        """Remove every tensor whose name ends so; the number removed."""
        gone = [name for name in self.tensors if name.endswith(suffixes)]
        for name in gone:
            del self.tensors[name]
        assert gone, f"no tensor ends in {suffixes}"
        return len(gone)

    def rename(self, old, new):
        """Replace a part of every tensor name."""
        self.tensors = {name.replace(old, new): tensor for name, tensor in self.tensors.items()}

    def byte(self, name, value, index=0):
        """Overwrite one byte of a one-byte tensor."""
        import torch

        flat = self.tensors[name].view(torch.uint8).reshape(-1).clone()
        flat[index] = value
        self.tensors[name] = flat.reshape(self.tensors[name].shape).view(self.tensors[name].dtype)

    def fill(self, name, value):
        """Overwrite all bytes of a one-byte tensor."""
        import torch

        tensor = self.tensors[name]
        self.tensors[name] = torch.full(tensor.shape, value, dtype=torch.uint8).view(tensor.dtype)

    def scalar(self, name, value):
        """Overwrite an F32 scalar, keeping its shape."""
        import torch

        self.tensors[name] = torch.full_like(self.tensors[name], value)

    def write(self, shards=1, index=True, metadata=None):
        """Write the folder; with several shards, tensors go round robin in sorted order."""
        from safetensors.torch import save_file

        self.folder.mkdir(exist_ok=True)
        names = sorted(self.tensors)
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        if shards == 1:
            files = ["model.safetensors"]
        where = {name: files[i % shards] for i, name in enumerate(names)}
        for file in files:
            part = {name: self.tensors[name].contiguous().clone() for name in names if where[name] == file}
            save_file(part, self.folder / file, metadata={"format": "pt"} if metadata is None else metadata)
        if shards > 1 and index:
            total = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())
            self.index({"metadata": {"total_size": total}, "weight_map": where})
        (self.folder / "config.json").write_text(json.dumps(self.config))
        if self.hf_quant is not None:
            (self.folder / "hf_quant_config.json").write_text(json.dumps(self.hf_quant))
        return self

    def index(self, content):
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(content))

    def read_index(self):
        return json.loads((self.folder / "model.safetensors.index.json").read_text())

    def check(self, *runtimes, **options):
        """Write (unless the folder stands already) and check."""
        from requant.validate.contract import check_contract

        if not self.folder.exists():
            self.write()
        return check_contract(self.folder, runtimes, **options)


@pytest.fixture
def export(tmp_path):
    """export(golden_name) -> Export to be written under tmp_path."""
    return lambda golden: Export(golden, tmp_path / "output")


@pytest.fixture
def hits():
    """hits(result, rule) -> the findings of that rule; hits(result) -> the set of rules with errors."""

    def find(result, rule=None, severity=None):
        if rule is None:
            return {finding.rule for finding in result.findings if finding.severity == "error"}
        return [f for f in result.findings if f.rule == rule and severity in (None, f.severity)]

    return find


@pytest.fixture
def to_compressed_tensors():
    """Turn a modelopt NVFP4 or MXFP4 export into compressed-tensors' layout, in memory."""

    def turn(one, activations=True):
        import torch

        tensors = {}
        nvfp4 = any(name.endswith("weight_scale_2") for name in one.tensors)
        for name, tensor in one.tensors.items():
            head, _, leaf = name.rpartition(".")
            if leaf == "weight" and tensor.dtype == torch.uint8:
                tensors[f"{head}.weight_packed"] = tensor
            elif leaf == "weight_scale_2":
                tensors[f"{head}.weight_global_scale"] = (1 / tensor).reshape(1)
            elif leaf == "input_scale" and activations:
                tensors[f"{head}.input_global_scale"] = (1 / tensor).reshape(1)
            elif leaf not in ("input_scale", "k_scale", "v_scale"):
                tensors[name] = tensor
        style = "nvfp4-pack-quantized" if nvfp4 else "mxfp4-pack-quantized"
        weights = {"num_bits": 4, "type": "float", "group_size": 16 if nvfp4 else 32, "symmetric": True}
        group = {"format": style, "targets": ["Linear"], "weights": weights}
        group["input_activations"] = {**weights, "dynamic": "local"} if activations else None
        ignore = [name for name in one.quant["ignore"] if name != "model.embed_tokens"]
        one.config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": style,
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "kv_cache_scheme": None,
        }
        one.tensors, one.hf_quant = tensors, None
        return one

    return turn


@pytest.fixture
def deepseek_v4(tmp_path):
    """A tiny DeepSeek-V4 hybrid with the published config's keys: NVFP4 experts, FP8 rest, MXFP4 MTP experts."""

    def build():
        import torch

        one = Export("qwen3moe_nvfp4_experts", tmp_path / "output")
        tensors = {}
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for name, tensor in one.tensors.items():
            if ".experts." in name:
                _, _, rest = name.partition(".experts.")
                index, projection, part = rest.split(".")
                tensors[f"layers.0.ffn.experts.{index}.{names[projection]}.{part}"] = tensor
                if part == "weight":
                    rows, half = tensor.shape
                    mtp = f"mtp.0.ffn.experts.{index}.{names[projection]}"
                    tensors[f"{mtp}.weight"] = torch.zeros(64, 32, dtype=torch.int8)
                    tensors[f"{mtp}.scale"] = torch.full((64, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
                    assert rows and half
        tensors["embed.weight"] = one.tensors["model.embed_tokens.weight"]
        tensors["head.weight"] = one.tensors["lm_head.weight"]
        tensors["layers.0.ffn.gate.weight"] = one.tensors["model.layers.0.mlp.gate.weight"]
        tensors["layers.0.attn.wq_a.weight"] = torch.zeros(200, 130, dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensors["layers.0.attn.wq_a.scale"] = torch.full((2, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        hub = GOLDENS / "hub_configs"
        one.config = json.loads((hub / "nvidia--DeepSeek-V4-Flash-NVFP4_config.json").read_text())
        one.hf_quant = json.loads((hub / "nvidia--DeepSeek-V4-Flash-NVFP4_hf_quant_config.json").read_text())
        layers = {"layers.0.ffn.experts": {"group_size": 16, "quant_algo": "NVFP4"}}
        one.config.update(num_hidden_layers=1, n_routed_experts=4)
        one.quant["quantized_layers"] = layers
        one.hf_quant["quantization"]["quantized_layers"] = copy.deepcopy(layers)
        one.tensors = tensors
        return one

    return build


@pytest.fixture(scope="session")
def pages():
    """helpers/report_pages.py."""
    import report_pages

    return report_pages
