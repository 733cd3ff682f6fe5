"""The stage numerics on stacked experts: followed into both layouts, along their true axis, none missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numerics_folders import LOSSLESS, Entry, bf16, f32, modelopt, rows_of, rules, u8, write
from requant.kernels import reference as ref
from requant.kernels.reference_repack import repack_oracle
from requant.manifests.schema import NumericsGate
from requant.validate.numerics import check_numerics
from requant.validate.results import StageResult, Status


class GptOss:
    """A stack of E = 3 experts, hidden 96, inter 32: gate and up rows interleaved, biases."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(9)
        self.path, self.base = path, "model.layers.0.mlp.experts"
        self.codes = rng.integers(0, 256, (3, 64, 48), dtype=np.uint8)
        self.scales = rng.integers(112, 124, (3, 64, 3), dtype=np.uint8)
        self.bias = rng.standard_normal((3, 64)).astype(np.float32)
        self.source = {
            f"{self.base}.gate_up_proj_blocks": ("U8", (3, 64, 3, 16), self.codes.tobytes()),
            f"{self.base}.gate_up_proj_scales": u8(self.scales),
            f"{self.base}.gate_up_proj_bias": bf16(self.bias),
        }
        self.m, members, _ = repack_oracle(list(zip(self.codes, self.scales, strict=True)))
        self.members = members

    def experts(self) -> dict[str, Entry]:
        out: dict[str, Entry] = {}
        for expert, (codes, scales) in enumerate(self.members):
            for first, leaf in enumerate(("gate_proj", "up_proj")):
                module = f"{self.base}.{expert}.{leaf}"
                planes = (np.ascontiguousarray(a[first::2]) for a in (codes, scales))
                out |= modelopt(module, *planes, self.m)
                out[f"{module}.bias"] = bf16(self.bias[expert, first::2])
        return out

    def stacked(self) -> dict[str, Entry]:
        codes, scales = (np.stack([member[i].T for member in self.members]) for i in range(2))
        return {
            f"{self.base}.gate_up_proj": u8(np.ascontiguousarray(codes)),
            f"{self.base}.gate_up_proj_weight_scale": u8(np.ascontiguousarray(scales), "F8_E4M3"),
            f"{self.base}.gate_up_proj_weight_scale_2": f32(2.0**self.m),
            f"{self.base}.gate_up_proj_input_scale": f32(1.0),
            f"{self.base}.gate_up_proj_bias": self.source[f"{self.base}.gate_up_proj_bias"],
        }

    def check(self, output: dict[str, Entry], name: str) -> StageResult:
        return check_numerics(write(self.path / "src", self.source), write(self.path / name, output), LOSSLESS)


def test_stacked_experts_are_followed_into_both_target_layouts(tmp_path: Path) -> None:
    case = GptOss(tmp_path)
    stacked, experts = case.check(case.stacked(), "stacked"), case.check(case.experts(), "experts")
    assert (stacked.status, experts.status) == (Status.PASSED, Status.PASSED)
    blocks = 3 * 64 * 96 // 16
    assert stacked.data["totals"]["exact"] == experts.data["totals"]["exact"] == blocks
    assert len(rows_of(stacked)) == 1
    assert len(rows_of(experts)) == 6
    assert experts.data["census"]["copied"] == 6  # the biases, cut up


def test_swapped_gate_and_up_rows_and_biases_are_found(tmp_path: Path) -> None:
    case = GptOss(tmp_path)
    good = case.experts()
    a, b = f"{case.base}.1.gate_proj", f"{case.base}.1.up_proj"
    swapped = {**good, f"{a}.bias": good[f"{b}.bias"], f"{b}.bias": good[f"{a}.bias"]}
    result = case.check(swapped, "bias")
    assert {f.where for f in result.errors if f.rule == "copy-differs"} == {f"{a}.bias", f"{b}.bias"}
    swapped = {**good, f"{a}.weight": good[f"{b}.weight"], f"{b}.weight": good[f"{a}.weight"]}
    result = case.check(swapped, "weight")
    assert {f.where for f in result.errors if f.rule == "lossy-blocks"} == {a, b}


def test_a_missing_expert_is_an_incomplete_tensor(tmp_path: Path) -> None:
    case = GptOss(tmp_path)
    part = {name: entry for name, entry in case.experts().items() if ".2." not in name}
    result = case.check(part, "part")
    messages = {f.where: f.message for f in result.errors if f.rule == "tensor-incomplete"}
    assert messages == {
        f"{case.base}.gate_up_proj": "128 of its 192 rows are in the output",
        f"{case.base}.gate_up_proj_bias": "128 of its 192 elements are in the output",
    }


def test_a_plain_stack_is_read_along_its_true_input_axis(tmp_path: Path) -> None:
    """BF16 gpt-oss stores [E, H, 2I]; hidden = inter so that no shape can tell the axes apart."""
    rng = np.random.default_rng(2)
    plain = (rng.integers(-60, 60, (2, 64, 64)) / 16).astype(np.float32)
    base, output = "model.layers.0.mlp.experts", {}
    for expert in range(2):
        codes, scales = ref.encode_mxfp4(np.ascontiguousarray(plain[expert].T))
        output[f"{base}.{expert}.down_proj.weight"] = u8(codes)
        output[f"{base}.{expert}.down_proj.weight_scale"] = u8(scales)
    source = write(tmp_path / "s", {f"{base}.down_proj": bf16(plain)})
    result = check_numerics(source, write(tmp_path / "o", output), NumericsGate(min_sqnr_db=15.0))
    assert result.status is Status.PASSED
    untransposed = dict(output)
    for expert in range(2):
        codes, scales = ref.encode_mxfp4(plain[expert])
        untransposed[f"{base}.{expert}.down_proj.weight"] = u8(codes)
        untransposed[f"{base}.{expert}.down_proj.weight_scale"] = u8(scales)
    result = check_numerics(source, write(tmp_path / "t", untransposed), NumericsGate(min_sqnr_db=15.0))
    assert rules(result) == {"misrounded", "sqnr-low"}
