"""The activation scale beside a converted weight stands for the source's amax in every dialect, or is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from requant.validate.numerics import check_numerics
from requant.validate.numerics_pieces import PiecewiseNumerics
from safetensors.torch import save_file

BASE = "model.layers.0.mlp"
LEAVES = ("gate_proj", "up_proj", "down_proj")
N, K = 32, 64
OWN = {"gate_proj": 0.25, "up_proj": 0.375, "down_proj": 0.5}
"""input_scale of the FP8 source; its amax is 448 times that."""


def fp8(scales: dict[str, float], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for leaf, scale in scales.items():
        made[f"{BASE}.{leaf}.weight"] = torch.zeros((N, K), dtype=torch.float8_e4m3fn)
        made[f"{BASE}.{leaf}.weight_scale"] = torch.tensor(1.0)
        made[f"{BASE}.{leaf}.input_scale"] = torch.tensor(scale, dtype=dtype)
    return made


def nvfp4(scales: dict[str, float], *, reciprocal: bool = False) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    weight, second, given = (
        ("weight_packed", "weight_global_scale", "input_global_scale")
        if reciprocal
        else ("weight", "weight_scale_2", "input_scale")
    )
    for leaf, scale in scales.items():
        shape = (1,) if reciprocal else ()
        made[f"{BASE}.{leaf}.{weight}"] = torch.zeros((N, K // 2), dtype=torch.uint8)
        made[f"{BASE}.{leaf}.weight_scale"] = torch.ones((N, K // 16)).to(torch.float8_e4m3fn)
        made[f"{BASE}.{leaf}.{second}"] = torch.ones(shape)
        made[f"{BASE}.{leaf}.{given}"] = torch.full(shape, scale, dtype=torch.float32)
    return made


def write(folder: Path, tensors: dict[str, torch.Tensor], *, given: str = "input_scale: 1.0", note: str = "", **config):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if given:
        (folder / "requant.manifest.yaml").write_text(f"layers: []\nactivations: {{{given}}}\n")
    if note:
        (folder / "requant.lock.json").write_text(json.dumps({"input_scale": note}))
    return folder


def wrong(source: Path, output: Path) -> dict[str, str]:
    found = check_numerics(source, output, None).findings
    return {f.where.rpartition(".")[2]: f.message for f in found if f.rule == "activation-scale-differs"}


RIGHT = {"gate_proj": 0.375 / 6, "up_proj": 0.375 / 6, "down_proj": 0.5 / 6}
"""Under NVFP4: the same amax over 6 * 448; gate and up share theirs."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scales_restated_for_nvfp4_pass_and_each_corruption_is_found(tmp_path: Path, dtype: torch.dtype) -> None:
    source = write(tmp_path / "s", fp8(OWN, dtype))
    assert wrong(source, write(tmp_path / "right", nvfp4(RIGHT))) == {}
    assert wrong(source, write(tmp_path / "own", nvfp4({leaf: OWN[leaf] / 6 for leaf in LEAVES}))) == {}
    turned = {leaf: 1 / RIGHT[leaf] for leaf in LEAVES}
    assert wrong(source, write(tmp_path / "ct", nvfp4(turned, reciprocal=True))) == {}
    for name, scale in (
        ("double", 1 / 6),
        ("as it was", 0.5),
        ("one bit of ten", 0.5 / 6 * 1.001),
        ("nan", float("nan")),
    ):
        found = wrong(source, write(tmp_path / name, nvfp4({**RIGHT, "down_proj": scale})))
        assert set(found) == {"down_proj"}, name
    assert found["down_proj"] == "the activation scale stands for a largest input of nan, the source's for 224"
    less = wrong(source, write(tmp_path / "less", nvfp4({**RIGHT, "gate_proj": 0.3 / 6})))
    assert less == {
        "gate_proj": "the activation scale stands for a largest input of 134.4, the source's for 112, 168 with what is "
        "fused with it"
    }
    upright = wrong(source, write(tmp_path / "upright", nvfp4(RIGHT, reciprocal=True)))
    assert set(upright) == set(LEAVES)  # not turned over for compressed-tensors


@pytest.mark.parametrize(
    ("given", "note", "found"),
    [
        ("input_scale: 1.0", "", set()),  # no lock yet: the manifest's constant may stand
        ("input_scale: 1.0", "constant 1.0", set()),
        ("input_scale: 1.0", "the source's own", set(LEAVES)),
        ("input_scale: 1.0", "the source's own, else constant 1.0", set(LEAVES)),
        ("input_scale: 2.0", "constant 2.0", set(LEAVES)),
        ("input_scale: {from: /x}", "from another checkpoint: 3 scales", set()),
        ("calibrate: {text: t.txt}", "measured on t.txt", set()),
        ("", "", set()),
    ],
)
def test_what_the_manifest_gives_may_stand_and_nothing_else(tmp_path: Path, given: str, note: str, found: set) -> None:
    source = write(tmp_path / "s", fp8(OWN))
    output = write(tmp_path / "o", nvfp4(dict.fromkeys(LEAVES, 1.0)), given=given, note=note)
    assert set(wrong(source, output)) == found


def test_nvfp4_weights_under_fp8_activations_have_the_room_of_fp8(tmp_path: Path) -> None:
    """W4A8: modelopt divides by 448 there, so an NVFP4 output divides the same amax by six times as much."""
    own = {leaf: torch.tensor(0.5) for leaf in LEAVES}
    source = write(
        tmp_path / "s", nvfp4(own), quantization_config={"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"}
    )
    turned = dict.fromkeys(LEAVES, 2 * 6.0)
    assert wrong(source, write(tmp_path / "o", nvfp4(turned, reciprocal=True))) == {}
    turned["up_proj"] = 2.0
    assert set(wrong(source, write(tmp_path / "w", nvfp4(turned, reciprocal=True)))) == {"up_proj"}


def test_piece_by_piece_it_is_judged_once_and_remembered(tmp_path: Path) -> None:
    source = write(tmp_path / "s", fp8(OWN))
    output = write(tmp_path / "o", nvfp4({**RIGHT, "down_proj": 0.5}))
    for _ in range(2):  # the second reads the record of the first
        judge = PiecewiseNumerics(source, output, tmp_path / "record")
        if judge.unjudged():
            scales = [f"{BASE}.{leaf}.input_scale" for leaf in LEAVES]
            there = [n for n in judge.unjudged() if "down" not in n]
            judge.piece(source, output, [*there, *scales])
            judge.piece(source, output, [*judge.unjudged(), *scales])
        found = [f for f in judge.result(None).findings if f.rule == "activation-scale-differs"]
        assert [f.where for f in found] == [f"{BASE}.down_proj"]


def test_a_scale_that_is_not_there_yet_is_not_judged(tmp_path: Path) -> None:
    source = write(tmp_path / "s", fp8(OWN))
    output = write(tmp_path / "o", nvfp4({**RIGHT, "gate_proj": 9.0}))
    judge = PiecewiseNumerics(source, output, tmp_path / "record")
    judge.piece(source, output, judge.unjudged())  # weights and block scales, and no activation scale
    assert not [f for f in judge.result(None).findings if f.rule == "activation-scale-differs"]


def copied(source: Path, output: Path) -> set[str]:
    found = check_numerics(source, output, None).findings
    return {f.where.removeprefix(f"{BASE}.") for f in found if f.rule == "copy-differs"}


@pytest.mark.parametrize(
    ("given", "note", "scale", "passes"),
    [
        ("input_scale: 2.0", "constant 2.0", 2.0, True),
        ("input_scale: 2.0", "constant 2.0", 3.0, False),
        ("input_scale: 2.0", "the source's own, else constant 2.0", 2.0, False),
        ("input_scale: {from: /x}", "from another checkpoint: 3 scales", 3.0, True),
        ("calibrate: {text: t.txt}", "measured on t.txt", float("nan"), False),
        ("calibrate: {text: t.txt}", "measured on t.txt", 0.0, False),
        ("", "", 2.0, False),
    ],
)
@pytest.mark.parametrize("reciprocal", [False, True])
def test_scales_that_stand_under_the_sources_names_may_be_those_that_the_manifest_gives(
    tmp_path: Path, given: str, note: str, scale: float, passes: bool, reciprocal: bool
) -> None:
    source = write(tmp_path / "s", nvfp4(RIGHT, reciprocal=reciprocal))
    turned = dict.fromkeys(LEAVES, 1 / scale if reciprocal and scale else scale)
    output = write(tmp_path / "o", nvfp4(turned, reciprocal=reciprocal), given=given, note=note)
    suffix = "input_global_scale" if reciprocal else "input_scale"
    assert copied(source, output) == (set() if passes else {f"{leaf}.{suffix}" for leaf in LEAVES})


@pytest.mark.parametrize("scale", [2.0, 3.0])
@pytest.mark.parametrize("make", [fp8, nvfp4])
def test_given_scales_may_be_written_after_their_weights(tmp_path: Path, scale: float, make) -> None:
    """A streamed run writes the manifest's scales by themselves: what stands there at its end counts."""
    source = write(tmp_path / "s", make(OWN))
    output = write(tmp_path / "o", nvfp4(dict.fromkeys(LEAVES, 0.0)), given="input_scale: 2.0")
    judge = PiecewiseNumerics(source, output, tmp_path / "record")
    judge.piece(source, output, {*judge.unjudged(), *(f"{BASE}.{leaf}.input_scale" for leaf in LEAVES)})
    save_file(nvfp4(dict.fromkeys(LEAVES, scale)), output / "model.safetensors")
    for again in (judge, PiecewiseNumerics(source, output, tmp_path / "record")):  # the second reads the first's record
        found = {f.where for f in again.result(None).findings if f.rule in ("activation-scale-differs", "copy-differs")}
        assert len(found) == (0 if scale == 2.0 else 3)


def test_a_scale_in_a_shard_that_is_elsewhere_is_asked_for_at_the_end(tmp_path: Path) -> None:
    source = write(tmp_path / "s", fp8(OWN))
    whole = nvfp4(dict.fromkeys(LEAVES, 2.0))
    output = write(tmp_path / "o", {n: t for n, t in whole.items() if "input" not in n}, given="input_scale: 2.0")
    save_file({n: t for n, t in whole.items() if "input" in n}, output / "scales.safetensors")
    judge = PiecewiseNumerics(source, output, tmp_path / "record")
    here = tmp_path / "here"
    here.mkdir()
    (here / "model.safetensors").symlink_to(output / "model.safetensors")
    judge.piece(source, here, {*judge.unjudged(), *(f"{BASE}.{leaf}.input_scale" for leaf in LEAVES)})
    rules = ("activation-scale-differs", "copy-differs", "not-compared")
    assert not [f for f in judge.result(None).findings if f.rule in rules]
    save_file({n: t + 1 for n, t in whole.items() if "input" in n}, output / "scales.safetensors")
    found = PiecewiseNumerics(source, output, tmp_path / "record").result(None).findings
    assert {f.message for f in found if f.rule in rules} == {"its activation scale was not there to be compared"}
