"""From the Hub and back: pushed, pulled, converted, signed off, published, pulled again; every byte accounted for."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import yaml


def shas(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(Path(folder).glob("*.safetensors"))}


def push(hub, client, folder, repo):
    """Upload a folder as any user of huggingface_hub would."""
    api = client.HfApi(endpoint=hub.url)
    api.create_repo(repo)
    api.upload_folder(repo_id=repo, folder_path=folder)
    return api


def test_a_checkpoint_goes_round_and_its_sign_off_still_holds(hub, client, kit):
    from requant.convert.checkpoint import open_checkpoint

    api = push(hub, client, kit.source(), "tester/source")
    manifest = kit.manifest("tester/source", publish={"repo": "tester/result"})
    assert kit.requant("convert", manifest, "--push", "--quiet") == 0
    api.merge_pull_request("tester/result", 1)
    pulled = Path(api.snapshot_download("tester/result"))
    assert shas(pulled) == shas(kit.tmp / "out")
    assert kit.requant("report", pulled) == 0
    catalogue = open_checkpoint(pulled)
    assert len(catalogue.tensors) == 34
    assert catalogue.quantization_config["quant_method"] == "compressed-tensors"
    local = Path(api.snapshot_download("tester/result", local_dir=kit.tmp / "local"))
    assert kit.requant("report", local) == 0  # whatever a download leaves beside the files
    assert kit.requant("validate", local, "--quiet") == 0  # the lock names the source's commit


@pytest.mark.bench
def test_smollm2_goes_round_and_transformers_loads_it(hub, client, kit):
    """Needs transformers and compressed-tensors, and fetches 93 MB once."""
    import torch
    from requant.convert.smollm2 import main as smollm2
    from transformers import AutoModelForCausalLM

    source = kit.tmp / "SmolLM2"
    assert smollm2([str(source)]) == 0
    api = push(hub, client, source, "tester/SmolLM2")
    manifest = yaml.safe_load(kit.manifest("tester/SmolLM2", shard_size="50MB").read_text())
    manifest["target"] |= {"format": "nvfp4-w4a16", "runtimes": ["vllm", "transformers"]}
    manifest["activations"] = {"input_scale": None}
    manifest["layers"] = [
        {"match": "model.layers.*_proj", "to": "nvfp4", "scale": "nearest"},
        {"match": "*", "to": "keep"},
    ]
    manifest["publish"] = {"repo": "tester/SmolLM2-NVFP4"}
    path = kit.tmp / "smollm2.yaml"
    path.write_text(yaml.safe_dump(manifest))
    assert kit.requant("convert", path, "--push", "--quiet") == 0
    api.merge_pull_request("tester/SmolLM2-NVFP4", 1)
    pulled = Path(api.snapshot_download("tester/SmolLM2-NVFP4"))
    assert shas(pulled) == shas(kit.tmp / "out")
    assert kit.requant("report", pulled) == 0
    tokens = torch.arange(64)[None] * 37 % 49152
    logits = []
    for folder in (source, pulled):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            logits.append(model(tokens).logits.float().log_softmax(-1))
    kl = (logits[0].exp() * (logits[0] - logits[1])).sum(-1).mean().item()
    sys.stdout.write(json.dumps({"kl": kl, "files": shas(pulled)}) + "\n")
    assert 0 < kl < 0.5
