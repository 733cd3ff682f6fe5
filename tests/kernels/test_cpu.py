"""Decoding is exact against the float64 oracle, and x @ w^T obeys the bound that every timed kernel must obey."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requant.kernels import bounds, cpu, reference
from requant.kernels.cpu import cpu_matmul
from requant.kernels.cpu_dequant import dequantize, dequantize_fp8_block, dequantize_mxfp4, dequantize_nvfp4
from requant.kernels.formats import NumberFormat, PackedTensor


def packed(rng, number, n, k, scale_bytes=None):
    """Random codes; scales over all but NaN of the format, or over scale_bytes."""
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    low, high = scale_bytes or ((0, 0x7F) if number is NumberFormat.NVFP4 else (100, 140))
    scales = rng.integers(low, high, (n, k // number.group), dtype=np.uint8)
    return PackedTensor(number, codes, scales, np.float32(0.0123) if number is NumberFormat.NVFP4 else None)


def exact(weight):
    if weight.global_scale is None:
        return reference.dequantize_mxfp4(weight.codes, weight.block_scales)
    return reference.dequantize_nvfp4(weight.codes, weight.block_scales, float(weight.global_scale))


def as_bf16(values):
    """Bits of ml_dtypes' rounding, an independent one."""
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


@pytest.mark.parametrize("number", [NumberFormat.NVFP4, NumberFormat.MXFP4])
def test_every_code_pair_under_every_finite_scale_decodes_exactly(number):
    last = 0x7F if number is NumberFormat.NVFP4 else 254
    scales = np.arange(last, dtype=np.uint8)[:, None].repeat(512 // number.group, 1)
    codes = np.arange(256, dtype=np.uint8)[None].repeat(last, 0)
    weight = PackedTensor(number, codes, scales, np.float32(0.37) if number is NumberFormat.NVFP4 else None)
    with np.errstate(over="ignore"):  # 4 and 6 under 2^126
        want = exact(weight).astype(np.float32)  # one rounding
    out, narrow = np.full((last, 512), np.nan, np.float32), np.empty((last, 512), np.uint16)
    dequantize(weight, out)
    assert (out.view(np.uint32) == want.view(np.uint32)).all(), "bit for bit, -0 too"
    dequantize(weight, narrow)
    assert (narrow == as_bf16(want)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_any_row_range_of_any_shape_decodes_alike(seed, rows, groups, nvfp4):
    number = NumberFormat.NVFP4 if nvfp4 else NumberFormat.MXFP4
    weight = packed(np.random.default_rng(seed), number, rows, groups * 288)
    out = np.empty((rows, groups * 288), np.float32)
    dequantize(weight, out)
    assert (out == exact(weight).astype(np.float32)).all()
    for row in range(rows):
        one = np.empty((1, out.shape[1]), np.float32)
        part = weight.codes[row : row + 1], weight.block_scales[row : row + 1]
        if nvfp4:
            dequantize_nvfp4(*part, weight.global_scale, one)
        else:
            dequantize_mxfp4(*part, one)
        assert (one == out[row]).all()


@pytest.mark.parametrize(("number", "nan"), [(NumberFormat.NVFP4, 0x7F), (NumberFormat.MXFP4, 0xFF)])
def test_a_nan_scale_makes_nan_of_its_block_and_of_nothing_else(number, nan):
    codes, scales = np.zeros((2, 48), np.uint8), np.full((2, 96 // number.group), 0x38, np.uint8)
    scales[1, 1] = nan
    weight = PackedTensor(number, codes, scales, np.float32(1) if number is NumberFormat.NVFP4 else None)
    out, narrow = np.empty((2, 96), np.float32), np.empty((2, 96), np.uint16)
    dequantize(weight, out)
    dequantize(weight, narrow)
    block = np.zeros((2, 96), bool)
    block[1, number.group : 2 * number.group] = True
    assert (np.isnan(out) == block).all()
    assert (np.isnan(narrow.view(ml_dtypes.bfloat16).astype(np.float32)) == block).all()


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 200), (300, 200), (7, 13)])
@pytest.mark.parametrize("e8m0", [False, True])
def test_fp8_blocks_with_ragged_edges_decode_exactly_from_any_row(block, e8m0):
    rng = np.random.default_rng(7)
    values = rng.integers(0, 256, (300, 200), dtype=np.uint8)
    values[values & 0x7F == 0x7F] = 0x80  # keep NaN out, put -0 in
    values[0, :128], values[1, :127] = np.arange(128) ^ 0x80, np.arange(127)
    values[0, 127] = 0
    grid = -(-300 // block[0]), -(-200 // block[1])
    scales = rng.integers(110, 140, grid, dtype=np.uint8) if e8m0 else rng.random(grid).astype(np.float32) * 1e-3
    want = reference.dequantize_fp8_block(values, scales, block).astype(np.float32)
    for first, end in ((0, 300), (5, 6), (127, 290)):
        out, narrow = np.empty((end - first, 200), np.float32), np.empty((end - first, 200), np.uint16)
        dequantize_fp8_block(values[first:end], scales, block, out, first)
        assert (out.view(np.uint32) == want[first:end].view(np.uint32)).all()
        dequantize_fp8_block(values[first:end], scales, block, narrow, first)
        assert (narrow == as_bf16(want[first:end])).all()


def test_fp8_nan_stays_nan():
    values = np.array([[0x7F, 0xFF, 0x00, 0x7E]], np.uint8)
    out = np.empty((1, 4), np.float32)
    dequantize_fp8_block(values, np.full((1, 1), 0.5, np.float32), (128, 128), out)
    assert np.isnan(out[0, :2]).all()
    assert out[0, 2:].tolist() == [0.0, 224.0]


def test_decoders_refuse_shapes_that_do_not_fit():
    codes, scales = np.zeros((2, 24), np.uint8), np.zeros((2, 3), np.uint8)
    fp8, grid = np.zeros((4, 256), np.uint8), np.ones((1, 2), np.float32)
    wide = np.empty((4, 256), np.float32)
    for call, message in (
        (lambda: dequantize_mxfp4(codes, scales[:, :1], np.empty((2, 48), np.float32)), "do not fit"),
        (lambda: dequantize_nvfp4(codes, scales, 1, np.empty((2, 47), np.float32)), "out"),
        (lambda: dequantize_nvfp4(codes, scales, 1, np.empty((2, 48), np.float64)), "float64"),
        (lambda: dequantize_nvfp4(codes, scales, 1, np.empty((2, 96), np.float32)[:, ::2]), "contiguous"),
        (lambda: dequantize_nvfp4(codes.astype(np.int8), scales, 1, np.empty((2, 48), np.float32)), "uint8"),
        (lambda: dequantize_fp8_block(fp8, grid[:, :1], (128, 128), wide), "cover"),
        (lambda: dequantize_fp8_block(fp8, grid, (128, 128), wide, 125), "cover"),
        (lambda: dequantize_fp8_block(fp8, grid, (0, 128), wide), "no such blocks"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def of_bound(x, weight, y):
    """The largest error as a multiple of its bound."""
    w, x = exact(weight), x.astype(np.float64)
    return bounds.excess(y.astype(np.float64), x @ w.T, np.abs(x) @ np.abs(w).T)


@pytest.mark.parametrize("number", [NumberFormat.NVFP4, NumberFormat.MXFP4])
@pytest.mark.parametrize("m", [1, 2, 7, 64])
def test_matmul_stays_within_the_bound_with_outliers_and_a_range_of_2_to_the_20(number, m):
    rng = np.random.default_rng(m)
    weight = packed(rng, number, 96, 2880)
    x = rng.standard_normal((m, 2880)) * 2.0 ** rng.uniform(-10, 10, (m, 2880))
    x[:, ::301] *= 1000
    x = x.astype(np.float32)
    y = cpu_matmul(x, weight)
    assert y.dtype == np.float32
    assert of_bound(x, weight, y) <= 1
    assert of_bound(x, weight, y * np.float32(1.02)) > 1, "the bound would notice 2%"


def test_matmul_of_several_tiles_equals_one_tile(monkeypatch):
    rng = np.random.default_rng(0)
    weight, x = packed(rng, NumberFormat.NVFP4, 50, 64), rng.integers(-8, 9, (3, 64)).astype(np.float32)
    weight = PackedTensor(NumberFormat.NVFP4, weight.codes, weight.block_scales & 0x78, np.float32(1))
    want = x.astype(np.float64) @ exact(weight).T
    assert (cpu_matmul(x, weight) == want).all(), "small integers and powers of two: FP32 is exact"
    monkeypatch.setattr(cpu, "_TILE", 64 * 7)
    monkeypatch.setattr(cpu, "_STRIP", 64)
    for threads in (1, 2, 5):
        assert (cpu_matmul(x, weight, threads) == want).all()


def test_non_finite_activations_and_scales_propagate():
    rng = np.random.default_rng(1)
    weight = packed(rng, NumberFormat.NVFP4, 40, 64, (1, 0x7F))
    weight.codes[3] = 0
    weight.block_scales[5, 2] = 0x7F
    for m in (1, 4):
        x = np.ones((m, 64), np.float32)
        y = cpu_matmul(x, weight)
        assert np.isnan(y[:, 5]).all()
        assert np.isfinite(np.delete(y, 5, axis=1)).all()
        x[m - 1, 9] = np.nan
        assert np.isnan(cpu_matmul(x, weight)[m - 1]).all()
        x[m - 1, 9] = np.inf
        y = cpu_matmul(x, weight)[m - 1]
        assert not np.isfinite(y).any()
        assert np.isnan(y[3]), "infinity times zero"


def test_matmul_of_no_rows_is_empty():
    weight = packed(np.random.default_rng(2), NumberFormat.MXFP4, 40, 64)
    assert cpu_matmul(np.empty((0, 64), np.float32), weight).shape == (0, 40)


def test_matmul_refuses_bad_input():
    rng = np.random.default_rng(3)
    weight = packed(rng, NumberFormat.NVFP4, 8, 64)
    ragged = PackedTensor(NumberFormat.NVFP4, np.zeros((8, 12), np.uint8), np.zeros((8, 1), np.uint8), np.float32(1))
    x = np.ones((2, 64), np.float32)
    for call, message in (
        (lambda: cpu_matmul(x.astype(np.float64), weight), "float64"),
        (lambda: cpu_matmul(x[0], weight), r"\(64,\)"),
        (lambda: cpu_matmul(x[:, :32], weight), "share K"),
        (lambda: cpu_matmul(x[:, :24], ragged), "multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for scale in (0, -1, np.nan, np.inf):
        bad = PackedTensor(weight.format, weight.codes, weight.block_scales, np.float32(scale))
        with pytest.raises(ValueError, match="global scale"):
            cpu_matmul(x, bad)
