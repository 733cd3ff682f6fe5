"""The second opinion: what it must find, with the right numbers, and that it finds nothing where nothing is wrong."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from requant.kernels import reference as ref
from requant.kernels.formats import E4M3_VALUES, NumberFormat
from requant.manifests.schema import NumericsGate
from requant.validate.collector import Collector
from requant.validate.numerics import check_numerics
from requant.validate.numerics_blocks import Planes, Tally, compare_codes, compare_values, steps_of
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import open_folder
from requant.validate.results import StageResult, Status

GOLDENS = Path(__file__).parents[1] / "goldens" / "modelopt"
LOSSLESS = NumericsGate(lossless="required")
Entry = tuple[str, tuple[int, ...], bytes]


def write(folder: Path, tensors: dict[str, Entry], shards: int = 1) -> Path:
    """A checkpoint folder, written byte by byte so that any dtype and any fault can be expressed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        body = b""
        for name in names[shard::shards]:
            dtype, shape, data = tensors[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
            body += data
            weight_map[name] = file
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + body)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def u8(array: np.ndarray, dtype: str = "U8") -> Entry:
    return dtype, array.shape, array.tobytes()


def f32(value: float, shape: tuple[int, ...] = ()) -> Entry:
    return "F32", shape, np.float32(value).tobytes()


def bf16(array: np.ndarray) -> Entry:
    return "BF16", array.shape, (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def random_mx(rng: np.random.Generator, rows: int, k: int, low: int = 112, high: int = 124) -> tuple[np.ndarray, ...]:
    return (
        rng.integers(0, 256, (rows, k // 2), dtype=np.uint8),
        rng.integers(low, high + 1, (rows, k // 32), dtype=np.uint8),
    )


def modelopt(module: str, codes: np.ndarray, scales: np.ndarray, m: int) -> dict[str, Entry]:
    return {
        f"{module}.weight": u8(codes),
        f"{module}.weight_scale": u8(scales, "F8_E4M3"),
        f"{module}.weight_scale_2": f32(2.0**m),
        f"{module}.input_scale": f32(1.0),
    }


def rules(result: StageResult) -> set[str]:
    return {finding.rule for finding in result.errors}


def rows_of(result: StageResult) -> dict[str, dict]:
    tensors = result.data["tensors"]
    return {row[0]: dict(zip(tensors["columns"], row, strict=True)) for row in tensors["rows"]}


class Dsv4:
    """One DeepSeek-V4 expert pair and its output: w1 and w3 in different shards, an MTP expert, an FP8 weight."""

    def __init__(self, path: Path, low: int = 112) -> None:
        rng = np.random.default_rng(3)
        self.path = path
        self.pair = [random_mx(rng, 64, 128, low) for _ in range(2)]
        for codes, _ in self.pair:
            codes[:8] &= 0xAA  # 0 and 1 only: these rows halve exactly
        mtp = random_mx(rng, 16, 64)
        self.source: dict[str, Entry] = {}
        for name, (codes, scales) in zip(("w1", "w3"), self.pair, strict=True):
            self.source[f"layers.0.ffn.experts.0.{name}.weight"] = u8(codes, "I8")
            self.source[f"layers.0.ffn.experts.0.{name}.scale"] = u8(scales, "F8_E8M0")
        kept = {
            "mtp.0.ffn.experts.0.w1.weight": u8(mtp[0], "I8"),
            "mtp.0.ffn.experts.0.w1.scale": u8(mtp[1], "F8_E8M0"),
            "layers.0.attn.wo_b.weight": u8(rng.integers(0, 120, (64, 64), dtype=np.uint8), "F8_E4M3"),
            "layers.0.attn.wo_b.scale": u8(np.array([[120]], np.uint8), "F8_E8M0"),
            "layers.0.norm.weight": bf16(rng.standard_normal(64)),
            "layers.0.step": ("I64", (), struct.pack("<q", 7)),
        }
        self.source |= kept
        self.repacked = ref.repack_oracle(self.pair)
        self.output = dict(kept)
        for name, (codes, scales) in zip(("w1", "w3"), self.repacked.members, strict=True):
            self.output |= modelopt(f"layers.0.ffn.experts.0.{name}", codes, scales, self.repacked.m)

    def check(self, gate: NumericsGate | None = LOSSLESS, layers: str = "") -> StageResult:
        source = write(self.path / "src", self.source, shards=2)
        output = write(self.path / "out", self.output)
        if layers:
            (output / "requant.manifest.yaml").write_text(f"layers:\n{layers}")
        return check_numerics(source, output, gate)


# --- goldens ----------------------------------------------------------------------------------------------------------


def test_modelopts_cast_is_charged_with_its_lost_zero_signs_and_its_out_of_range_blocks() -> None:
    source, output = GOLDENS / "_src_gptoss_mxfp4", GOLDENS / "gptoss_nvfp4_cast"
    result = check_numerics(source, output, LOSSLESS)
    assert result.status is Status.FAILED
    assert rules(result) == {"lossy-blocks", "zero-sign"}
    rows = rows_of(result)
    assert len(rows) == 4
    reader, folder = MappedReader(open_folder(source, Collector())), open_folder(source, Collector())
    for name, row in rows.items():
        blocks = folder.tensors[f"{name}_blocks"]
        codes = ref.unpack_nibbles(reader.rows(blocks, 0, 4).reshape(-1, 16))
        assert row["zero_signs"] == int((codes == 8).sum()), "every 0x8 became 0x0"
        assert row["blocks"] == codes.size // 16
        assert row["lossy"] == (2 if "layers.1" in name else 0), "the one out-of-range 32-block per tensor of layer 1"
        assert row["lossy32"] == row["lossy"] // 2
        assert row["exact"] + row["shifted"] + row["zero_sign"] + row["lossy"] == row["blocks"]
        assert row["shifted"] == 0
        assert 0 < row["changed"] <= 32 if "layers.1" in name else row["changed"] == 0
        assert row["span"] == (32 if "layers.1" in name else 5)
    assert result.data["census"]["copied"] == 33
    assert [f.where for f in result.errors if f.rule == "lossy-blocks"] == [n for n in rows if "layers.1" in n]


def test_llama_encodings_have_the_sqnr_that_float64_gives_and_no_misrounded_weight() -> None:
    for name, gate, status in (("llama_mxfp4", 18.0, Status.PASSED), ("llama_w4a16_nvfp4", 20.1, Status.FAILED)):
        result = check_numerics(GOLDENS / "_src_llama_bf16", GOLDENS / name, NumericsGate(min_sqnr_db=gate))
        assert result.status is status
        assert rules(result) == ({"sqnr-low"} if status is Status.FAILED else set())
        rows = rows_of(result)
        assert len(rows) == 14
        assert all(row["misrounded"] == 0 for row in rows.values())
        folders = [open_folder(GOLDENS / n, Collector()) for n in ("_src_llama_bf16", name)]
        source, output = (MappedReader(f) for f in folders)
        for module, row in rows.items():
            plain = folders[0].tensors[f"{module}.weight"]
            want = (source.rows(plain, 0, plain.shape[0]).view("<u2").astype(np.uint32) << 16).view(np.float32)
            codes, scales = (
                output.rows(folders[1].tensors[f"{module}.{part}"], 0, plain.shape[0]).reshape(plain.shape[0], -1)
                for part in ("weight", "weight_scale")
            )
            if name == "llama_mxfp4":
                got = ref.dequantize_mxfp4(codes, scales)
            else:
                s2 = output.scalar(folders[1].tensors[f"{module}.weight_scale_2"])
                got = ref.dequantize_nvfp4(codes, scales, s2)
            want = want.reshape(got.shape).astype(np.float64)
            error = want - got
            assert row["max_error"] == np.abs(error).max()
            assert row["rms_error"] == pytest.approx(math.sqrt((error**2).mean()), rel=1e-12)
            assert row["sqnr_db"] == pytest.approx(10 * math.log10((want**2).sum() / (error**2).sum()), abs=1e-3)


# --- blocks -----------------------------------------------------------------------------------------------------------


def tally_of(source: tuple[np.ndarray, np.ndarray], output: tuple[np.ndarray, np.ndarray], m: int) -> Tally:
    tally = Tally()
    compare_codes(
        Planes(*source, steps_of(NumberFormat.MXFP4), 32),
        Planes(*output, steps_of(NumberFormat.NVFP4, 2.0**m), 16),
        tally,
    )
    return tally


@pytest.mark.parametrize("span", [3, 14, 15, 17, 18, 20, 22, 24, 26])
@pytest.mark.parametrize("mask", [0xFF, 0x77, 0x22, 0xAA])
def test_counts_and_errors_agree_with_the_oracle_in_exact_rationals(span: int, mask: int) -> None:
    rng = np.random.default_rng(span)
    codes, scales = random_mx(rng, 8, 128, 120 - span, 120)
    codes &= np.uint8(mask)
    scales[0, 0], codes[0, :16] = 120, 0x17
    scales[1, 1] = 120 - span
    m, [member], counts = ref.repack_oracle([(codes, scales)])
    tally = tally_of((codes, scales), member, m)
    assert (tally.exact, tally.shifted, tally.lossy, tally.below_marlin) == counts[:4]
    assert Fraction(tally.max_error) == counts.max_error
    assert tally.squared_error == pytest.approx(float(counts.squared_error), rel=1e-12)
    assert (tally.zero_sign, tally.zero_signs, tally.misrounded, tally.avoidable, tally.nan) == (0, 0, 0, 0, 0)
    assert tally.changed == int((ref.dequantize_mxfp4(codes, scales) != ref.dequantize_nvfp4(*member, 2.0**m)).sum())
    pairs = ~np.equal(ref.dequantize_mxfp4(codes, scales), ref.dequantize_nvfp4(*member, 2.0**m)).reshape(
        8, -1, 32
    ).all(axis=-1)
    assert tally.lossy32 == int(pairs.sum())


def test_a_clamped_scale_under_verbatim_codes_is_misrounded() -> None:
    """2^-18 below the largest, scale clamped to 2^-9, codes kept: 4.5e-8 becomes 9e-8."""
    codes = np.full((1, 32), 0x73, np.uint8)
    scales = np.array([[127, 109]], np.uint8)
    tally = tally_of((codes, scales), (codes, np.array([[0x78, 0x78, 1, 1]], np.uint8)), -8)
    assert (tally.exact, tally.lossy, tally.misrounded) == (2, 2, 32)
    right = ref.repack_oracle([(codes, scales)])
    good = tally_of((codes, scales), right.members[0], right.m)
    assert (good.lossy, good.misrounded) == (2, 0)
    assert good.squared_error < tally.squared_error


def test_swapped_nibbles_are_misrounded() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 64)).astype(np.float32)
    s2 = ref.nvfp4_global_scale([weight])
    codes, scales = ref.encode_nvfp4(weight, s2)
    steps = steps_of(NumberFormat.NVFP4, float(s2))
    good, swapped = Tally(), Tally()
    compare_values(weight.astype(np.float64), Planes(codes, scales, steps, 16), good)
    compare_values(weight.astype(np.float64), Planes(codes >> 4 | codes << 4, scales, steps, 16), swapped)
    assert good.misrounded == 0
    assert swapped.misrounded > 200


def test_a_loss_that_the_same_global_scale_could_have_avoided_is_counted() -> None:
    codes = np.full((1, 32), 0x24, np.uint8)  # 1 and 2: halve once
    scales = np.array([[127, 109]], np.uint8)  # 18 octaves down: one halving away from the window
    zeroed = codes.copy()
    zeroed[:, 16:] = 0
    tally = tally_of((codes, scales), (zeroed, np.array([[0x78, 0x78, 8, 8]], np.uint8)), -8)
    assert (tally.lossy, tally.avoidable) == (2, 2)


def test_the_sign_of_a_zero_is_told_apart_from_a_shift_and_from_equality() -> None:
    codes, scales = np.full((1, 32), 0x82, np.uint8), np.array([[127, 120]], np.uint8)
    block = np.array([[0x78, 0x78, 0x40, 0x40]], np.uint8)
    lost = codes.copy()
    lost[0, :8] = 0x02
    tally = tally_of((codes, scales), (lost, block), -8)
    assert (tally.exact, tally.zero_sign, tally.zero_signs, tally.shifted, tally.lossy) == (3, 1, 8, 0, 0)
    assert not tally.lossless


def test_a_dead_block_may_have_any_scale() -> None:
    codes, scales = np.full((1, 32), 0x88, np.uint8), np.array([[127, 250]], np.uint8)
    codes[0, :16] = 0x17
    tally = tally_of((codes, scales), (codes, np.array([[0x78, 0x78, 8, 0x7E]], np.uint8)), -8)
    assert (tally.exact, tally.lossy, tally.zero_sign) == (4, 0, 0)


def test_nan_scales_on_either_side_are_counted_and_keep_the_errors_finite() -> None:
    codes = np.full((1, 32), 0x17, np.uint8)
    block = np.array([[0x78, 0x78, 0x70, 0x7F]], np.uint8)
    tally = tally_of((codes, np.array([[127, 126]], np.uint8)), (codes, block), -8)
    assert (tally.nan, tally.lossy, tally.max_error) == (1, 1, 0.0)
    tally = tally_of((codes, np.array([[255, 126]], np.uint8)), (codes, block), -8)
    assert (tally.nan, tally.squared_error) == (3, 0.0)
    encoded = Tally()
    values = np.ones((1, 64))
    compare_values(values, Planes(codes, block, steps_of(NumberFormat.NVFP4, 1.0), 16), encoded)
    assert (encoded.nan, math.isfinite(encoded.squared_error)) == (1, True)


@pytest.mark.parametrize(
    "present", [range(256), range(0x7F), range(0x30, 0x50), [0], [1], [7, 8], [0x7E], [0x7F, 0xFE]]
)
def test_every_block_scale_is_counted_in_its_octave(present: list[int]) -> None:
    """Against frexp of the values; zeros, NaNs and negative scales lie in no octave."""
    scales = np.repeat(np.array(present, np.uint8), 4).reshape(2, -1)
    codes = np.zeros((2, scales.shape[1] * 8), np.uint8)
    tally = Tally()
    with np.errstate(invalid="ignore"):
        compare_values(
            np.zeros((2, codes.shape[1] * 2)), Planes(codes, scales, steps_of(NumberFormat.NVFP4), 16), tally
        )
    values = E4M3_VALUES[scales]
    positive = values[np.isfinite(values) & (values > 0)]
    expected = np.bincount(np.frexp(positive)[1] - 1 + 9, minlength=18)
    assert tally.octaves == expected.tolist()
    assert tally.below_marlin == int((positive < 2.0**-6).sum())
    twice = Tally()
    twice.add(tally)
    twice.add(tally)
    assert twice.octaves == (2 * expected).tolist()


# --- whole checkpoints ------------------------------------------------------------------------------------------------


def test_a_lossless_deepseek_v4_conversion_passes_and_every_tensor_is_accounted_for(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    seen: list[tuple[int, int]] = []
    case.check()
    result = check_numerics(tmp_path / "src", tmp_path / "out", LOSSLESS, progress=lambda a, b: seen.append((a, b)))
    assert result.status is Status.PASSED
    assert result.findings == ()
    census = result.data["census"]
    assert (census["source_tensors"], census["output_tensors"]) == (10, 14)
    assert (census["converted"], census["copied"], census["added"], census["dropped"]) == (2, 6, 2, {})
    assert result.data["totals"]["exact"] == 2 * 64 * 128 // 16
    total = sum(len(data) for _, _, data in case.source.values())
    assert seen[-1] == (total, total)
    assert [a for a, _ in seen] == sorted(a for a, _ in seen)
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["status"] == "passed"


def test_lossless_required_fails_naming_tensors_and_counts_and_report_only_counts(tmp_path: Path) -> None:
    case = Dsv4(tmp_path, low=100)
    counts = case.repacked.counts
    assert counts.lossy > 0
    assert counts.shifted > 0
    failed, reported = case.check(), case.check(NumericsGate())
    assert (failed.status, reported.status) == (Status.FAILED, Status.PASSED)
    assert rules(failed) == {"lossy-blocks"}
    assert {f.where for f in failed.errors} <= {"layers.0.ffn.experts.0.w1", "layers.0.ffn.experts.0.w3"}
    assert f"{counts.lossy} of 1,024 blocks lossy in " in failed.reason
    totals = reported.data["totals"]
    assert (totals["exact"], totals["shifted"], totals["lossy"], totals["below_marlin"]) == counts[:4]
    assert totals["max_error"] == float(counts.max_error)
    lossy = totals["lossy_tensors"]
    assert case.check(NumericsGate(max_lossy_tensors=lossy)).status is Status.PASSED
    assert rules(case.check(NumericsGate(max_lossy_tensors=lossy - 1))) == {"lossy-tensors"}


def test_the_window_that_counts_is_that_of_the_fused_pair(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    case.pair[0][1][:] = 124
    case.pair[1][1][:] = 108
    case.pair[1][1][0, 0], case.pair[1][0][0, :16] = 60, 0  # dead, and far below: it does not count
    m, members, _ = ref.repack_oracle(case.pair)
    for name, (codes, scales), source in zip(("w1", "w3"), members, case.pair, strict=True):
        case.output |= modelopt(f"layers.0.ffn.experts.0.{name}", codes, scales, m)
        case.source[f"layers.0.ffn.experts.0.{name}.weight"] = u8(source[0], "I8")
        case.source[f"layers.0.ffn.experts.0.{name}.scale"] = u8(source[1], "F8_E8M0")
    result = case.check()
    assert result.status is Status.PASSED
    rows = rows_of(result)
    assert [(row["span"], row["fused_span"]) for row in rows.values()] == [(0, 16), (0, 16)]
    assert result.data["totals"]["windows"] == {"tensors": 2, "native": 2, "marlin": 0}


@pytest.mark.parametrize(
    ("change", "rule", "where"),
    [
        ("flip a copied byte", "copy-differs", "layers.0.norm.weight"),
        ("flip an MTP scale", "copy-differs", "mtp.0.ffn.experts.0.w1.scale"),
        ("change a copied dtype", "copy-differs", "layers.0.norm.weight"),
        ("lose a tensor", "tensor-missing", "layers.0.attn.wo_b.scale"),
        ("invent a tensor", "tensor-extra", "layers.0.ffn.experts.9.w1.bias"),
        ("leave the source's scale", "tensor-leftover", "layers.0.ffn.experts.0.w1.scale"),
        ("write zeros", "all-zero", "layers.0.ffn.experts.0.w1"),
        ("zero a copied tensor", "copy-differs", "layers.0.norm.weight"),
        ("NaN block scale", "nan-scale", "layers.0.ffn.experts.0.w1"),
        ("global scale off by two", "lossy-blocks", "layers.0.ffn.experts.0.w1"),
        ("lose the global scale", "weight-unpaired", "layers.0.ffn.experts.0.w1"),
        ("swizzled scales", "weight-unpaired", "layers.0.ffn.experts.0.w1"),
        ("cut a row", "weight-unpaired", "layers.0.ffn.experts.0.w1"),
    ],
)
def test_every_fault_is_found_under_its_own_name(tmp_path: Path, change: str, rule: str, where: str) -> None:
    case = Dsv4(tmp_path)
    out = case.output
    w1 = "layers.0.ffn.experts.0.w1"

    def flip(name: str) -> Entry:
        dtype, shape, data = out[name]
        return dtype, shape, data[:-1] + bytes([data[-1] ^ 1])

    codes, scales = case.repacked.members[0]
    edits: dict[str, dict[str, Entry]] = {
        "flip a copied byte": {"layers.0.norm.weight": flip("layers.0.norm.weight")},
        "flip an MTP scale": {"mtp.0.ffn.experts.0.w1.scale": flip("mtp.0.ffn.experts.0.w1.scale")},
        "change a copied dtype": {"layers.0.norm.weight": ("F16", *out["layers.0.norm.weight"][1:])},
        "invent a tensor": {where: f32(1.0)},
        "leave the source's scale": {where: case.source[f"{w1}.scale"]},
        "write zeros": {f"{w1}.weight": u8(np.zeros_like(codes))},
        "zero a copied tensor": {where: ("BF16", (64,), bytes(128))},
        "NaN block scale": {
            f"{w1}.weight_scale": ("F8_E4M3", scales.shape, b"\x7f" + scales.tobytes()[1:]),
        },
        "global scale off by two": {f"{w1}.weight_scale_2": f32(2.0 ** (case.repacked.m + 1))},
        "swizzled scales": {f"{w1}.weight_scale": ("F8_E4M3", (128, 4), scales.tobytes())},
        "cut a row": {
            f"{w1}.weight": u8(codes[:-1]),
            f"{w1}.weight_scale": u8(scales[:-1], "F8_E4M3"),
        },
    }
    out |= edits.get(change, {})
    if change == "lose a tensor":
        del out[where]
    if change == "lose the global scale":
        del out[f"{w1}.weight_scale_2"]
    result = case.check()
    assert result.status is Status.FAILED
    assert where in {finding.where for finding in result.errors if finding.rule == rule}
    if change == "zero a copied tensor":
        assert "all zeros" in next(f.message for f in result.errors if f.where == where)


def test_a_tensor_is_dropped_only_by_a_rule_that_says_so(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    for name in [n for n in case.output if n.startswith("mtp.")]:
        del case.output[name]
    assert rules(case.check()) == {"tensor-missing"}
    drop = "  - {match: 'layers.0.attn.*', to: keep}\n  - {match: 'mtp.*', to: drop}\n"
    result = case.check(layers=drop)
    assert result.status is Status.PASSED
    assert sorted(result.data["census"]["dropped"]) == ["mtp.0.ffn.experts.0.w1.scale", "mtp.0.ffn.experts.0.w1.weight"]
    assert {f.rule for f in result.findings} == {"tensor-dropped"}
    shadowed = "  - {match: '*', to: keep}\n  - {match: 'mtp.*', to: drop}\n"
    assert rules(case.check(layers=shadowed)) == {"tensor-missing"}


def test_compressed_tensors_in_and_out_with_the_global_scale_as_a_divisor(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    codes, scales = random_mx(rng, 32, 64)
    m, [(new, block)], _ = ref.repack_oracle([(codes, scales)])
    x = "language_model.model.layers.0.mlp.down_proj"
    source = write(tmp_path / "src", {f"{x}.weight_packed": u8(codes), f"{x}.weight_scale": u8(scales)})
    outputs = {
        "ct": {
            f"{x}.weight_packed": u8(new),
            f"{x}.weight_scale": u8(block, "F8_E4M3"),
            f"{x}.weight_global_scale": f32(2.0**-m, (1,)),
        },
        "modelopt": modelopt(x, new, block, m),
        "quark": {f"{x}.weight": u8(codes), f"{x}.weight_scale": u8(scales)},
    }
    for name, tensors in outputs.items():
        result = check_numerics(source, write(tmp_path / name, tensors), LOSSLESS)
        assert result.status is Status.PASSED, name
        assert result.data["totals"]["exact"] == 32 * 64 // 16, name
    wrong = {**outputs["ct"], f"{x}.weight_global_scale": f32(2.0**m, (1,))}
    assert "misrounded" in rules(check_numerics(source, write(tmp_path / "wrong", wrong), LOSSLESS))


def test_an_activation_scale_that_was_widened_is_still_the_sources_number(tmp_path: Path) -> None:
    weight = np.random.default_rng(7).integers(0, 120, (32, 64), dtype=np.uint8)
    x = "model.layers.0.mlp.down_proj"
    kept = {f"{x}.weight": u8(weight, "F8_E4M3"), f"{x}.weight_scale": f32(0.5)}
    source = write(tmp_path / "s", {**kept, f"{x}.input_scale": bf16(np.array([0.15625]))})
    for number, wrong in ((0.15625, set()), (0.15626, {f"{x}.input_scale"})):
        output = write(tmp_path / f"o{number}", {**kept, f"{x}.input_scale": f32(number)})
        result = check_numerics(source, output, None)
        assert {f.where for f in result.errors} == wrong
        assert result.status is (Status.FAILED if wrong else Status.PASSED)


def test_a_widened_activation_scale_may_be_that_of_the_weights_it_is_fused_with(tmp_path: Path) -> None:
    weight = np.random.default_rng(7).integers(0, 120, (32, 64), dtype=np.uint8)
    names = [f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up")]
    kept = {f"{x}.weight": u8(weight, "F8_E4M3") for x in names} | {f"{x}.weight_scale": f32(0.5) for x in names}
    theirs = {f"{x}.input_scale": bf16(np.array([s])) for x, s in zip(names, (0.5, 0.75), strict=True)}
    source = write(tmp_path / "s", {**kept, **theirs})
    for shared, wrong in ((0.75, set()), (0.5, {f"{names[1]}.input_scale"})):
        output = write(tmp_path / f"o{shared}", {**kept, **{f"{x}.input_scale": f32(shared) for x in names}})
        assert {f.where for f in check_numerics(source, output, None).errors} == wrong


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_kept_global_scale_that_is_no_f32_is_compared_by_its_bytes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    codes, scales = random_mx(np.random.default_rng(8), 32, 64)
    m, [(new, block)], _ = ref.repack_oracle([(codes, scales)])
    x = "model.layers.0.mlp.down_proj"
    kept = {**modelopt(x, new, block, m), f"{x}.weight_scale_2": bf16(np.full(shape, 0.5))}
    result = check_numerics(write(tmp_path / "s", kept), write(tmp_path / "o", kept), None)
    assert result.status is Status.PASSED


def test_f4_and_e8m0_dtypes_are_read_as_the_bytes_they_are(tmp_path: Path) -> None:
    codes, scales = random_mx(np.random.default_rng(6), 32, 64)
    m, [(new, block)], _ = ref.repack_oracle([(codes, scales)])
    x = "model.layers.0.mlp.down_proj"
    source = {f"{x}.weight": ("F4", (32, 64), codes.tobytes()), f"{x}.weight_scale": u8(scales, "F8_E8M0")}
    result = check_numerics(write(tmp_path / "s", source), write(tmp_path / "o", modelopt(x, new, block, m)), LOSSLESS)
    assert result.status is Status.PASSED
    assert result.data["totals"]["exact"] == 128


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
        self.m, members, _ = ref.repack_oracle(list(zip(self.codes, self.scales, strict=True)))
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


def test_an_unreadable_source_shard_fails_the_stage_instead_of_shrinking_it(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    case.check()
    shard = tmp_path / "src" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    result = check_numerics(tmp_path / "src", tmp_path / "out", None)
    assert "shard-unreadable" in rules(result)


def test_a_small_mapping_budget_changes_nothing_but_the_memory(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    case.check()
    folder = open_folder(tmp_path / "src", Collector())
    thrifty = MappedReader(folder, budget=1)
    for tensor in folder.tensors.values():
        rows = tensor.shape[0] if tensor.shape else 1
        read = b"".join(thrifty.rows(tensor, row, row + 1).tobytes() for row in range(rows))
        assert read == case.source[tensor.name][2]


def test_an_untouched_copy_has_nothing_converted_and_says_so(tmp_path: Path) -> None:
    case = Dsv4(tmp_path)
    case.check()
    shutil.copytree(tmp_path / "src", tmp_path / "same")
    result = check_numerics(tmp_path / "src", tmp_path / "same", LOSSLESS)
    assert result.status is Status.PASSED
    assert "nothing was converted" in result.reason
    assert result.data["census"]["copied"] == 10


def test_the_second_opinion_never_imports_what_wrote_the_output() -> None:
    for file in (Path(__file__).parents[2] / "validate").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) requant\.convert", file.read_text(), re.MULTILINE), file


def test_codes_that_gptq_chose_are_told_and_not_held_against_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "out"
    shutil.copytree(GOLDENS / "llama_w4a16_nvfp4", folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight"][:2] = tensors[f"{name}.weight"][:2] ^ 0x11  # one code up or down
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = GOLDENS / "_src_llama_bf16"
    assert {f.rule for f in check_numerics(source, folder, None).errors} == {"misrounded"}
    rules = "layers: [{match: '*up_proj', to: nvfp4, rounding: gptq}, {match: '*', to: nvfp4}]\n"
    (folder / "requant.manifest.yaml").write_text(rules)
    result = check_numerics(source, folder, None)
    assert result.status is Status.PASSED, result.reason
    assert [f.where for f in result.findings if f.rule == "compensated"] == [name]
    tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] << 4) | (tensors[f"{name}.weight"] >> 4)  # nibbles swapped
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert {f.rule for f in check_numerics(source, folder, None).errors} == {"misrounded"}
