"""The W4A4 oracle by hand: which global scale, which rounding, and what becomes of NaN."""

import numpy as np
import pytest
from requant.kernels import mma_model, reference, reference_w4a4
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.kernels.reference_w4a4 import round_activations

NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4
ROW = np.array([6, 3, 1, 0.5] * 8, np.float32)


def test_values_on_the_grid_stay_and_others_take_the_nearest_that_their_format_names():
    x = np.stack([ROW, np.where(ROW == 1, np.float32(1.2), ROW)])
    assert round_activations(x, MXFP4)[:, :4].tolist() == [[6, 3, 1, 0.5], [6, 3, 1, 0.5]]
    assert round_activations(x, NVFP4, input_scale=1.0)[1, :4].tolist() == [6, 3, 1, 0.5]  # block scale 1
    halfway = np.where(ROW == 1, np.float32(1.25), ROW)[None]  # between 1 and 1.5
    assert round_activations(halfway, MXFP4)[0, 2] == 1.0  # down
    assert round_activations(halfway, NVFP4, input_scale=1.0)[0, 2] == 1.0  # to the even code
    assert round_activations(np.where(ROW == 1, np.float32(1.75), ROW)[None], NVFP4, input_scale=1.0)[0, 2] == 2.0


def test_the_global_scale_is_each_tokens_the_tensors_or_the_checkpoints():
    x = np.stack([ROW, ROW * np.float32(2.0**-24)])
    by_token = round_activations(x, NVFP4)
    np.testing.assert_allclose(by_token, x, rtol=1e-6)
    by_tensor = round_activations(x, NVFP4, granularity="tensor")
    np.testing.assert_allclose(by_tensor[0], x[0], rtol=1e-6)
    assert not by_tensor[1].any(), "below what the smallest block scale can say"
    scale = float(np.float32(6 / 2688))
    np.testing.assert_array_equal(round_activations(x, NVFP4, input_scale=scale), by_tensor)
    clipped = round_activations(x, NVFP4, input_scale=1e-4)[0]
    assert clipped.max() == 448 * 6 * float(np.float32(1e-4)), "the largest that this static scale can say"


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_spoils_its_block_and_moves_no_scale(fmt, bad):
    x = np.random.default_rng(0).standard_normal((3, 96)).astype(np.float32)
    clean = round_activations(np.where(np.arange(96) == 40, np.float32(0), x), fmt)
    x[1, 40] = bad
    found = round_activations(x, fmt)
    block = slice(32, 48) if fmt is NVFP4 else slice(32, 64)
    assert np.isnan(found[1, block]).all()
    keep = np.ones(96, bool)
    keep[block] = False
    np.testing.assert_array_equal(found[1, keep], clean[1, keep])
    assert np.isfinite(found[[0, 2]]).all()


def test_the_product_is_that_of_the_rounded_operands_and_of_the_bit_model():
    rng = np.random.default_rng(1)
    for fmt, low, high in ((NVFP4, 0x30, 0x50), (MXFP4, 120, 134)):
        codes = rng.integers(0, 256, (24, 48), dtype=np.uint8)
        scales = rng.integers(low, high, (24, 96 // fmt.group), dtype=np.uint8)
        weight = PackedTensor(fmt, codes, scales, np.float32(0.5) if fmt is NVFP4 else None)
        x = rng.standard_normal((5, 96)).astype(np.float32)
        scale = 0.01 if fmt is NVFP4 else None
        y = reference_w4a4.matmul(x, weight, input_scale=scale)
        rounded = round_activations(x, fmt, input_scale=scale)
        np.testing.assert_array_equal(y, rounded @ reference_w4a4.decode(weight).T)
        encoded = reference.encode_mxfp4(x) if fmt is MXFP4 else reference.encode_nvfp4(x, np.float32(0.01))
        bits = mma_model.matmul(*encoded, codes, scales, fmt=fmt).astype(np.float64)
        bits *= 1.0 if fmt is MXFP4 else float(np.float32(0.01)) * 0.5
        terms = np.abs(rounded) @ np.abs(reference_w4a4.decode(weight)).T
        assert (np.abs(bits - y) <= 2.0**-20 * terms).all()


def test_no_tokens_and_what_cannot_be():
    assert round_activations(np.zeros((0, 32), np.float32), NVFP4).shape == (0, 32)
    assert round_activations(np.zeros((0, 32), np.float32), MXFP4).shape == (0, 32)
    refused = {
        "K = 24 is not a multiple of 16": ((1, 24), NVFP4, None),
        "K = 48 is not a multiple of 32": ((1, 48), MXFP4, None),
        "input_scale 0.0 for nvfp4": ((1, 32), NVFP4, 0.0),
        "input_scale 1.0 for mxfp4": ((1, 32), MXFP4, 1.0),
        "is no FP4 format": ((1, 32), NumberFormat.FP8, None),
    }
    for message, (shape, fmt, scale) in refused.items():
        with pytest.raises(ValueError, match=message):
            round_activations(np.zeros(shape, np.float32), fmt, input_scale=scale)
