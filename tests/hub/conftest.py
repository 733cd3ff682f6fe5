"""A Hub on loopback for every test of this folder, the real client pointed at it, and tiny checkpoints to send."""

import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import hub_server
import numpy as np
import pytest
import yaml
from hub_server import HubServer


def pytest_collection_modifyitems(items):
    """huggingface_hub 2.4 sends LFS bodies in a way that its HTTP library deprecates; other warnings stay errors."""
    here = Path(__file__).parent
    mark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(mark)


@pytest.fixture
def hub_module():
    """The module itself, for Fault and the like."""
    return hub_server


@pytest.fixture
def client(tmp_path, monkeypatch):
    """huggingface_hub with a cache of its own, no Xet, and waits between retries cut short."""
    import huggingface_hub
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http, disable_progress_bars
    from requant.convert import repository

    disable_progress_bars()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    huggingface_hub.slept = []
    impatient = SimpleNamespace(**{**vars(time), "sleep": huggingface_hub.slept.append})
    for module in (_http, file_download, repository):
        monkeypatch.setattr(module, "time", impatient)
    yield huggingface_hub
    _http.close_session()


@pytest.fixture
def hub(tmp_path, monkeypatch, client):
    """The server, with HF_ENDPOINT and HF_TOKEN set to it."""
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


@pytest.fixture
def xet_hub(tmp_path, monkeypatch, client):
    """The server with Xet storage instead of LFS."""
    monkeypatch.setattr(client.constants, "HF_HUB_DISABLE_XET", False)
    with HubServer(tmp_path / "hub", xet=True) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


# --- checkpoints ------------------------------------------------------------------------------------------------------


def write_safetensors(path, tensors):
    """A shard by hand (safetensors' numpy side has no BF16): name -> uint16 array of BF16 bits."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + b"".join(a.tobytes() for a in tensors.values()))


def llama(rng, layers=2, hidden=64, inter=128):
    """BF16 weights under Llama's names, normal values."""

    def bf16(*shape):
        return (rng.normal(0, 0.02, shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    tensors = {"model.embed_tokens.weight": bf16(96, hidden), "model.norm.weight": bf16(hidden)}
    for layer in range(layers):
        base = f"model.layers.{layer}"
        for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"{base}.self_attn.{leaf}.weight"] = bf16(hidden, hidden)
        for leaf, shape in {
            "gate_proj": (inter, hidden),
            "up_proj": (inter, hidden),
            "down_proj": (hidden, inter),
        }.items():
            tensors[f"{base}.mlp.{leaf}.weight"] = bf16(*shape)
        for leaf in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{base}.{leaf}.weight"] = bf16(hidden)
    return tensors


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
CARD = "---\nlicense: apache-2.0\nlanguage:\n- en\npipeline_tag: text-generation\n---\n# The source's own card\n"


class Kit:
    """Makers of checkpoints and manifests in one folder."""

    def __init__(self, tmp):
        self.tmp = tmp
        self.rng = np.random.default_rng(0)

    def source(self, name="src", shards=3, **size):
        """A sharded BF16 checkpoint with the files that stand beside one."""
        folder = self.tmp / name
        folder.mkdir()
        tensors = list(llama(self.rng, **size).items())
        step = -(-len(tensors) // shards)
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(tensors[number * step : (number + 1) * step])
            write_safetensors(folder / file, part)
            weight_map.update(dict.fromkeys(part, file))
        total = sum(a.nbytes for _, a in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        config = {**CONFIG, "num_hidden_layers": size.get("layers", 2)}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
        (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "README.md").write_text(CARD)
        (folder / "LICENSE").write_text("Apache-2.0\n")
        return folder

    def manifest(self, source, output="out", shard_size="40kB", publish=None, name="tiny-mxfp4", **execute):
        """A manifest file; source: a folder, or owner/name on the Hub."""
        where = {"path": str(source)} if isinstance(source, Path) else {"repo": source}
        body = {
            "version": 1,
            "name": name,
            "source": where,
            "target": {
                "format": "mxfp4",
                "layout": "compressed-tensors",
                "output": str(self.tmp / output),
                "shard_size": shard_size,
                "runtimes": ["vllm"],
            },
            "layers": [{"match": "model.layers.*_proj", "to": "mxfp4"}, {"match": "*", "to": "keep"}],
        }
        if publish:
            body["publish"] = publish
        if execute:
            body["execute"] = execute
        path = self.tmp / f"{output}.yaml"
        path.write_text(yaml.safe_dump(body))
        return path

    def requant(self, *arguments):
        """Run the command line in this process; the exit code."""
        from requant.convert.cli import main

        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in arguments])
        return stop.value.code or 0

    def signed(self, output="out", source=None, **manifest):
        """A converted and signed-off folder."""
        source = source or self.source()
        assert self.requant("convert", self.manifest(source, output, **manifest), "--quiet") == 0
        return self.tmp / output


@pytest.fixture
def kit(tmp_path):
    """Makers of checkpoints and manifests."""
    return Kit(tmp_path)


class DiskWatch:
    """The most that the folders of one output occupied, in bytes really allocated."""

    def __init__(self, output):
        self.output = output
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self._stop.wait(0.002):
            self.most = max(self.most, self.used())

    def used(self):
        total = 0
        for suffix in ("", ".partial", ".stream"):
            for folder, _, names in os.walk(f"{self.output}{suffix}"):
                for name in names:
                    try:
                        total += (Path(folder) / name).lstat().st_blocks * 512
                    except FileNotFoundError:
                        continue
        return total

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


@pytest.fixture
def disk_watch():
    """The watcher of an output's folders."""
    return DiskWatch
