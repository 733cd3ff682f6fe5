"""The stage numerics on blocks: counts and errors against the oracle in exact rationals, and modelopt's own exports."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from numerics_folders import GOLDENS, LOSSLESS, random_mx, rows_of, rules
from requant.kernels import reference as ref
from requant.kernels.formats import E4M3_VALUES, NumberFormat
from requant.kernels.reference_repack import repack_oracle
from requant.manifests.schema import NumericsGate
from requant.validate.collector import Collector
from requant.validate.numerics import check_numerics
from requant.validate.numerics_blocks import Planes, Tally, compare_codes, compare_values, steps_of
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import open_folder
from requant.validate.results import Status


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
    m, [member], counts = repack_oracle([(codes, scales)])
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
    right = repack_oracle([(codes, scales)])
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
