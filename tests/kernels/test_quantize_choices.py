"""Scale choices must never lose to amax/6, and bad weights must be named rather than quantized."""

from __future__ import annotations

import numpy as np
import pytest
from requant.kernels import reference
from requant.kernels.formats import E4M3_VALUES
from requant.kernels.quantize import (
    NonFiniteError,
    amax,
    bf16_to_mxfp4,
    bf16_to_nvfp4,
    nvfp4_global_scale,
    sweep_global_scale,
)

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nvfp4(w, global_scale, *args):
    codes, scales = (
        np.empty((w.shape[0], w.shape[1] // 2), np.uint8),
        np.empty((w.shape[0], w.shape[1] // 16), np.uint8),
    )
    bf16_to_nvfp4(w, global_scale, codes, scales, *args)
    return codes, scales


def block_errors(w, codes, scales, global_scale, weights=1.0):
    miss = reference.dequantize_nvfp4(codes, scales, float(global_scale)) - w.astype(np.float64)
    return (miss * miss * weights).reshape(w.shape[0], -1, 16).sum(-1)


def sqnr(w, errors):
    return 10 * np.log10((w.astype(np.float64) ** 2).sum() / errors.sum())


@pytest.fixture(scope="module")
def gaussian():
    return np.random.default_rng(3).standard_normal((96, 256)).astype(np.float32)


def sweep_error(w, global_scale, bytes_):
    """Least squared error per block over the given E4M3 bytes, in float64."""
    blocks = np.abs(w.reshape(w.shape[0], -1, 16).astype(np.float64))
    best = np.full(blocks.shape[:2], np.inf)
    for byte in bytes_:
        step = float(E4M3_VALUES[byte]) * float(global_scale)
        miss = np.abs(blocks[..., None] / step - GRID).min(-1) * step
        best = np.minimum(best, (miss**2).sum(-1))
    return best


def test_mse_finds_the_best_of_all_126_scales(gaussian):
    scale_2 = nvfp4_global_scale(amax(gaussian), "mse")
    errors = block_errors(gaussian, *nvfp4(gaussian, scale_2, "mse"), scale_2)
    best = sweep_error(gaussian, scale_2, range(1, 0x7F))
    np.testing.assert_allclose(errors, best, rtol=1e-4)
    nearest = block_errors(gaussian, *nvfp4(gaussian, scale_2), scale_2)
    assert (errors <= nearest * (1 + 1e-5)).all()
    assert sqnr(gaussian, errors) > sqnr(gaussian, nearest) + 1.2


def test_the_error_that_mse_reports_is_the_one_it_makes(gaussian):
    importance = np.linspace(0.5, 2, 256, dtype=np.float32)
    scale_2 = nvfp4_global_scale(amax(gaussian), "mse")
    codes, scales = np.empty((96, 128), np.uint8), np.empty((96, 16), np.uint8)
    for weights in (None, importance):
        told = bf16_to_nvfp4(gaussian, scale_2, codes, scales, "mse", weights)
        miss = reference.dequantize_nvfp4(codes, scales, float(scale_2)) - gaussian.astype(np.float64)
        assert told == pytest.approx((miss * miss * (1.0 if weights is None else weights)).sum(), rel=1e-5)
    assert bf16_to_nvfp4(gaussian, scale_2, codes, scales) == 0.0


@pytest.mark.parametrize("top", [6, 4, 3, 2])
def test_a_swept_global_scale_finds_the_grid_of_weights_that_were_mxfp4(top):
    """Upcast checkpoints (gpt-oss in BF16): s2 from the amax misses the grid, a power of two hits every value."""
    rng = np.random.default_rng(top)
    grid = np.array([x for x in GRID if x <= top])
    w = (rng.choice(grid, (64, 256)) * rng.choice([-1, 1], (64, 256))).astype(np.float32)
    w[:, ::16] = top
    w = (w.reshape(64, 8, 32) * np.exp2(rng.integers(-9, -3, (64, 8, 1))).astype(np.float32)).reshape(64, 256)
    swept = sweep_global_scale(amax(w), [(w[:16], None), (w[40:44], None)])
    assert np.frexp(swept)[0] == 0.5
    decoded = reference.dequantize_nvfp4(*nvfp4(w, swept, "mse"), float(swept)).astype(np.float32)
    np.testing.assert_array_equal(decoded, w)
    plain = nvfp4_global_scale(amax(w), "mse")
    lost = sqnr(w, block_errors(w, *nvfp4(w, plain, "mse"), plain))
    assert (lost < 40) == (top in (4, 2))


def test_a_sweep_keeps_the_scale_of_the_amax_where_nothing_saves_a_hundredth(gaussian):
    scale_2 = nvfp4_global_scale(amax(gaussian), "mse")
    assert sweep_global_scale(amax(gaussian), [(gaussian, None)]) == scale_2


def test_a_sweep_obeys_the_importance_of_channels():
    """Half the channels are on MXFP4's grid, half are noise: what matters decides."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 256)).astype(np.float32) * np.float32(0.3)
    w[:, :128] = rng.choice(np.float32([-4, -1.5, 0.5, 2, 3]), (64, 128))
    importance = np.repeat(np.float32([1, 0]), 128)
    for weights, exact in ((importance, True), (1 - importance, False)):
        swept = sweep_global_scale(4.0, [(w, weights)])
        errors = block_errors(w, *nvfp4(w, swept, "mse", weights), swept)
        assert (errors[:, :8].sum() < 1e-9) == exact


def test_a_sweep_never_leaves_fp32(gaussian):
    for top in (np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal):
        w = np.full((1, 16), top, np.float32)
        scale_2 = sweep_global_scale(float(top), [(w, None)])
        assert np.isfinite(scale_2)
        assert scale_2 > 0
    assert sweep_global_scale(0.0, [(np.zeros((1, 16), np.float32), None)]) == 1


def test_four_over_six_takes_the_better_of_its_two_scales(gaussian):
    scale_2 = nvfp4_global_scale(amax(gaussian), "four-over-six")
    assert scale_2 == np.float32(amax(gaussian)) / np.float32(6 * 256)
    codes, scales = nvfp4(gaussian, scale_2, "four-over-six")
    top = np.abs(gaussian.reshape(96, -1, 16)).max(-1)
    six = reference.encode_e4m3(top / (np.float32(6) * scale_2))
    four = reference.encode_e4m3(top / (np.float32(4) * scale_2))
    e6 = block_errors(gaussian, *nvfp4(gaussian, scale_2), scale_2)
    blocks = gaussian.reshape(-1, 16)
    e4 = np.array(
        [sweep_error(b[None], scale_2, [byte])[0, 0] for b, byte in zip(blocks, four.ravel(), strict=True)]
    ).reshape(e6.shape)
    clear = np.abs(e4 - e6) > 1e-5 * e6
    assert (scales == np.where(e4 < e6, four, six))[clear].all()
    assert 0.2 < (scales != six).mean() < 0.8
    errors = block_errors(gaussian, codes, scales, scale_2)
    assert (errors <= np.minimum(e4, e6) * (1 + 1e-4)).all()
    plain_2 = nvfp4_global_scale(amax(gaussian))
    plain = block_errors(gaussian, *nvfp4(gaussian, plain_2), plain_2)
    assert sqnr(gaussian, errors) > sqnr(gaussian, plain) + 0.5


def test_the_largest_block_has_room_under_four_over_six():
    w = np.zeros((1, 16), np.float32)
    w[0] = [4.0, 3.0, 2.0, 1.0] * 4  # exact under amax/4, not under amax/6
    scale_2 = nvfp4_global_scale(amax(w), "four-over-six")
    codes, scales = nvfp4(w, scale_2, "four-over-six")
    assert scales[0, 0] == 0x7C  # 384 = 256 * 6 / 4
    np.testing.assert_allclose(reference.dequantize_nvfp4(codes, scales, float(scale_2)), w, rtol=1e-6)


@pytest.mark.parametrize("choice", ["four-over-six", "mse"])
def test_importance_lowers_the_weighted_error(gaussian, choice):
    importance = np.exp(np.random.default_rng(4).standard_normal(256) * 2).astype(np.float32)
    scale_2 = nvfp4_global_scale(amax(gaussian), choice)
    plain = block_errors(gaussian, *nvfp4(gaussian, scale_2, choice), scale_2, importance).sum()
    weighted = block_errors(gaussian, *nvfp4(gaussian, scale_2, choice, importance), scale_2, importance)
    assert weighted.sum() < 0.97 * plain
    ones = nvfp4(gaussian, scale_2, choice, np.ones(256, np.float32))
    assert all((a == b).all() for a, b in zip(ones, nvfp4(gaussian, scale_2, choice), strict=True))


def test_importance_follows_the_columns_over_chunk_borders():
    rng = np.random.default_rng(5)
    w = rng.standard_normal((64, 48)).astype(np.float32)  # 48 does not divide a chunk of 2048
    importance = np.exp(rng.standard_normal(48) * 2).astype(np.float32)
    scale_2 = nvfp4_global_scale(amax(w))
    whole = nvfp4(w, scale_2, "mse", importance)
    rows = [nvfp4(w[i : i + 1], scale_2, "mse", importance) for i in range(64)]
    assert (whole[0] == np.concatenate([c for c, _ in rows])).all()
    assert (whole[1] == np.concatenate([s for _, s in rows])).all()


@pytest.mark.parametrize("choice", ["nearest", "four-over-six", "mse"])
@pytest.mark.parametrize("exponent", [-100, -60, 0, 60, 120])
def test_scaling_a_weight_by_a_power_of_two_changes_only_the_global_scale(gaussian, choice, exponent):
    scaled = np.ldexp(gaussian, exponent)
    one, other = nvfp4_global_scale(amax(gaussian), choice), nvfp4_global_scale(amax(scaled), choice)
    assert float(other) == np.ldexp(float(one), exponent)
    want, got = nvfp4(gaussian, one, choice), nvfp4(scaled, other, choice)
    assert (want[1] == got[1]).all()
    assert (want[0] == got[0]).all()


@pytest.mark.parametrize("choice", ["nearest", "four-over-six", "mse"])
def test_a_block_of_zeros_keeps_a_harmless_scale(choice):
    w = np.zeros((2, 32), np.float32)
    w[0] = np.linspace(-1, 1, 32)
    w[1, 3] = -0.0
    scale_2 = nvfp4_global_scale(amax(w), choice)
    codes, scales = nvfp4(w, scale_2, choice)
    assert not codes[1].any()
    assert ((scales > 0) & (scales < 0x7F)).all()


def test_an_all_zero_tensor_gets_the_global_scale_one():
    w = np.zeros((16, 32), np.uint16)
    assert amax(w) == 0.0
    assert nvfp4_global_scale(0.0) == 1.0
    codes, scales = nvfp4(w, np.float32(1.0))
    assert not codes.any()
    assert (scales == 0x38).all()


def test_the_global_scale_never_underflows_to_zero():
    assert nvfp4_global_scale(2.0**-149) == np.float32(2.0**-149)


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize(("row", "column"), [(0, 0), (70, 63), (99, 95)])
def test_infinity_and_nan_are_named_by_row_and_column(value, row, column):
    w = np.full((100, 96), 0x3F80, np.uint16)
    w[row, column] = value
    floats = (w.astype(np.uint32) << 16).view(np.float32)
    out = np.empty((100, 48), np.uint8)
    for weight in (w, floats, floats.astype(np.float16), np.asfortranarray(w)):
        for call in (
            amax,
            lambda x: bf16_to_mxfp4(x, out, np.empty((100, 3), np.uint8)),
            lambda x: bf16_to_nvfp4(x, np.float32(1), out, np.empty((100, 6), np.uint8)),
        ):
            with pytest.raises(NonFiniteError) as caught:
                call(weight)
            assert (caught.value.row, caught.value.column) == (row, column)
            assert f"row {row}, column {column}" in str(caught.value)


def test_shapes_that_do_not_fit_are_refused_before_any_memory_is_touched():
    w = np.zeros((4, 64), np.float32)
    codes, s16, s32 = np.zeros((4, 32), np.uint8), np.zeros((4, 4), np.uint8), np.zeros((4, 2), np.uint8)
    for call, message in (
        (lambda: bf16_to_mxfp4(w[:, :48], codes[:, :24], s32), "multiple of 32"),
        (lambda: bf16_to_nvfp4(w[:, :40], np.float32(1), codes, s16), "multiple of 16"),
        (lambda: bf16_to_mxfp4(w, codes[:3], s32), "codes"),
        (lambda: bf16_to_nvfp4(w, np.float32(1), codes, s32), "scales"),
        (lambda: bf16_to_nvfp4(w, np.float32(1), codes, np.zeros((4, 8), np.uint8)[:, ::2]), "contiguous"),
        (lambda: bf16_to_nvfp4(w, np.float32(0), codes, s16), "global scale"),
        (lambda: bf16_to_nvfp4(w, np.float32("nan"), codes, s16), "global scale"),
        (lambda: bf16_to_nvfp4(w, np.float32(1), codes, s16, "mse", np.ones(32, np.float32)), "importance"),
        (lambda: bf16_to_nvfp4(w, np.float32(1), codes, s16, "mse", np.full(64, -1, np.float32)), "importance"),
        (lambda: amax(w.astype(np.float64)), "float64"),
        (lambda: amax(w[0]), r"\(64,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_an_empty_weight_is_no_error():
    w = np.zeros((0, 64), np.uint16)
    assert amax(w) == 0.0
    codes, scales = nvfp4(w, np.float32(1))
    assert codes.shape == (0, 32)
    assert scales.shape == (0, 4)
