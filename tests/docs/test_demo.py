"""`make demo`, the README's first command, run as it stands and its claim counted again by other means.

Uses the cached model file, or downloads it as the demo does.
"""

import json
import re

import numpy as np
import pytest
import torch
from requant.convert.smollm2 import sha256_of
from safetensors import safe_open

pytestmark = pytest.mark.xdist_group("demo")

WEIGHTS = 106_168_320  # in the 210 linears of SmolLM2-135M's 30 layers
BF16_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
CODE_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decode(codes, scales):
    """float64 [N, K] of packed E2M1 codes uint8 [N, K/2] under block scales [N, K/group]."""
    low_high = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    return CODE_VALUES[low_high] * np.repeat(scales, low_high.shape[1] // scales.shape[1], axis=1)


def test_the_bf16_folder_is_the_pinned_one(demo):
    assert sha256_of(demo[0] / "SmolLM2-135M-Instruct" / "model.safetensors") == BF16_SHA256


def test_it_says_that_every_weight_is_equal(demo):
    assert f"{WEIGHTS:,} of {WEIGHTS:,}" in demo[1]
    assert len(re.findall(r"(?i)^.*\bsigned off\b", demo[1], re.MULTILINE)) >= 2, demo[1]


def test_every_weight_is_equal_counted_independently(demo):
    equal = total = 0
    with (
        safe_open(demo[0] / "SmolLM2-135M-Instruct-MXFP4" / "model.safetensors", "pt") as mx,
        safe_open(demo[0] / "SmolLM2-135M-Instruct-NVFP4" / "model.safetensors", "pt") as nv,
    ):
        modules = [key.removesuffix(".weight_packed") for key in mx.keys() if key.endswith(".weight_packed")]  # noqa: SIM118
        assert len(modules) == 210
        for module in modules:
            exponents = mx.get_tensor(f"{module}.weight_scale").numpy().astype(np.int64) - 127
            before = decode(mx.get_tensor(f"{module}.weight_packed").numpy(), np.ldexp(1.0, exponents))
            scales = nv.get_tensor(f"{module}.weight_scale").to(torch.float64).numpy()
            second = nv.get_tensor(f"{module}.weight_scale_2").to(torch.float64).item()
            after = decode(nv.get_tensor(f"{module}.weight").numpy(), scales * second)
            equal += int(np.count_nonzero((before == after) & (np.signbit(before) == np.signbit(after))))
            total += before.size
    assert (equal, total) == (WEIGHTS, WEIGHTS)


def test_each_step_leaves_its_sign_off_beside_the_weights(demo):
    for step in ("MXFP4", "NVFP4"):
        folder = demo[0] / f"SmolLM2-135M-Instruct-{step}"
        signoff = json.loads((folder / "requant.signoff.json").read_text())
        assert signoff["signed_off"] is True
        assert (folder / "requant.signoff.md").read_text().startswith("#")
    assert not list(demo[0].glob("*.partial"))
