"""transformers loads our compressed-tensors NVFP4 on the CPU, and its weights are our BF16 dequantization, bit for bit.

Needs transformers and compressed-tensors, which requant itself never imports; they may live in another environment,
whose Python REQUANT_TRANSFORMERS_PYTHON names.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LLAMA = Path(__file__).resolve().parent.parent / "goldens" / "modelopt" / "_src_llama_bf16"
KEEP = {"match": "*", "to": "keep"}
PYTHON = os.environ.get("REQUANT_TRANSFORMERS_PYTHON", "")
HERE = all(importlib.util.find_spec(name) for name in ("transformers", "compressed_tensors"))

PROGRAM = """
import json, sys, torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

quantized, plain = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    quantized, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(run_compressed=False)
)
other = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
theirs, ours = dict(model.named_parameters()), dict(other.named_parameters())
wrong = {n: int((ours[n].view(torch.int16) != theirs[n].to(torch.bfloat16).view(torch.int16)).sum()) for n in ours}
print(json.dumps({"compared": len(ours), "wrong": {n: c for n, c in wrong.items() if c}}))
"""


NEEDED = pytest.mark.skipif(not (PYTHON or HERE), reason="needs transformers and compressed-tensors")


def compared(kit, source, scale):
    """What PROGRAM says of a source in compressed-tensors NVFP4 and of our own dequantization of that."""
    rules = [{"match": "*_proj", "to": "nvfp4", "scale": scale}, KEEP]
    packed, _ = kit.convert(source, rules, output="packed", format="nvfp4-w4a16", layout="compressed-tensors")
    plain, _ = kit.convert(packed, [{"match": "*", "to": "bf16"}], output="plain", format="bf16")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [PYTHON or sys.executable, "-c", PROGRAM, str(packed), str(plain)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@NEEDED
@pytest.mark.parametrize("scale", ["nearest", "four-over-six", "mse"])
def test_weights_in_transformers_are_our_bf16(kit, scale):
    assert compared(kit, LLAMA, scale) == {"compared": 21, "wrong": {}}


@NEEDED
@pytest.mark.xdist_group("demo")  # the one worker that fetches the model
def test_smollm2_in_transformers_is_our_bf16(kit):
    from requant.convert.smollm2 import main

    assert main([str(kit.tmp / "SmolLM2")]) == 0
    assert compared(kit, kit.tmp / "SmolLM2", "nearest") == {"compared": 272, "wrong": {}}
