"""INT4 decoders against the oracle, and the oracle against the packing written out by hand."""

import numpy as np
import pytest
from requant.kernels.int4 import decode_awq, decode_gptq, decode_packed, unpack_columns, unpack_zero_rows
from requant.kernels.reference import dequantize_awq, dequantize_gptq, dequantize_packed_int4


def pack_k(nibbles):
    """[.., 8n] nibbles to [.., n] words, the first in the lowest bits."""
    words = np.zeros((*nibbles.shape[:-1], nibbles.shape[-1] // 8), np.uint32)
    for i in range(8):
        words |= nibbles[..., i::8].astype(np.uint32) << np.uint32(4 * i)
    return words


def pack_awq(nibbles):
    """As AutoAWQ packs: bits 4i of a word take column ORDER[i] of its eight."""
    words = np.zeros((nibbles.shape[0], nibbles.shape[1] // 8), np.uint32)
    for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        words |= nibbles[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return words


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_compressed_tensors(rng, asymmetric):
    n, k, group = 16, 96, 32
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // group))
    scales = rng.standard_normal((n, k // group)).astype(np.float32)
    if not asymmetric:
        zeros[:] = 8
    want = (codes - np.repeat(zeros, group, axis=1)) * np.repeat(scales.astype(np.float64), group, axis=1)
    packed = pack_k(zeros.T).T.copy() if asymmetric else None
    assert (dequantize_packed_int4(pack_k(codes), scales, packed, k) == want).all()
    out = np.empty((n, k), np.float32)
    zero = unpack_zero_rows(packed) if asymmetric else np.full(scales.shape, 8, np.float32)
    decode_packed(pack_k(codes), scales, zero, group, out)
    assert (out == want.astype(np.float32)).all()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq(rng, offset, shuffled):
    n, k, group = 24, 64, 16
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 15, (k // group, n))
    scales = rng.standard_normal((k // group, n)).astype(np.float16).astype(np.float32)
    order = np.arange(k) // group
    if shuffled:
        rng.shuffle(order)
    want = (codes - (zeros + offset)[order].T) * scales.astype(np.float64)[order].T
    words, packed = pack_k(codes).T.copy(), pack_k(zeros)
    assert (dequantize_gptq(words, scales, packed, order, offset) == want).all()
    out = np.empty((n, k), np.float32)
    decode_gptq(words, scales, unpack_columns(packed, False) + np.float32(offset), order, out)
    assert (out == want).all()


def test_awq(rng):
    n, k, group = 24, 64, 16
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // group, n))
    scales = rng.standard_normal((k // group, n)).astype(np.float16).astype(np.float32)
    order = np.arange(k) // group
    want = ((codes - zeros[order]) * scales.astype(np.float64)[order]).T
    assert (dequantize_awq(pack_awq(codes), scales, pack_awq(zeros)) == want).all()
    out = np.empty((n, k), np.float32)
    decode_awq(pack_awq(codes), scales, unpack_columns(pack_awq(zeros), True), order, out)
    assert (out == want).all()


def test_shapes_and_groups_that_do_not_fit_are_refused():
    words, plane = np.zeros((8, 8), np.uint32), np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        decode_packed(words, plane, plane, 32, np.empty((8, 60), np.float32))
    with pytest.raises(ValueError, match="group 2"):
        decode_gptq(words, plane, plane, np.full(64, 2), np.empty((8, 64), np.float32))
