"""The bit model against the golden cases of the instruction, and its chain along K against float64."""

from pathlib import Path

import numpy as np
import pytest
from requant.kernels import mma_model, reference
from requant.kernels.formats import NumberFormat
from safetensors.numpy import load_file

GOLDENS = Path(__file__).parents[1] / "goldens" / "fp4_mma"
CASES = [(NumberFormat.NVFP4, "nvfp4_ue4m3_4x"), (NumberFormat.MXFP4, "mxfp4_ue8m0_2x")]
NAN = 0x7FFFFFFF


def one(fmt: NumberFormat, code: tuple[int, int], scale_a: list[int], scale_b: list[int], c: float) -> np.uint32:
    """One output, all codes of a equal and all of b; its bits."""
    codes = [np.full((1, 32), each * 17, np.uint8) for each in code]
    scales = [np.array([s], np.uint8) for s in (scale_a, scale_b)]
    return mma_model.fp4_mma(*codes, *scales, np.array([c], np.float32), fmt=fmt).view(np.uint32)[0]


def random_operand(rng: np.random.Generator, fmt: NumberFormat, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    codes = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
    low, high = (0x20, 0x60) if fmt is NumberFormat.NVFP4 else (117, 137)
    return codes, rng.integers(low, high, (rows, k // fmt.group), dtype=np.uint8)


@pytest.mark.parametrize(("fmt", "name"), CASES)
def test_every_golden_bit(fmt: NumberFormat, name: str) -> None:
    case = load_file(GOLDENS / f"{name}.safetensors")
    d = mma_model.fp4_mma(case["a"], case["b"], case["scale_a"], case["scale_b"], case["c"], fmt=fmt)
    assert len(d) == 4096
    np.testing.assert_array_equal(d.view(np.uint32), case["d"].view(np.uint32))


def test_one_times_one_is_sixty_four() -> None:
    assert one(NumberFormat.NVFP4, (2, 2), [0x38] * 4, [0x38] * 4, 0.0) == np.float32(64).view(np.uint32)
    assert one(NumberFormat.MXFP4, (2, 2), [127] * 2, [128] * 2, 1.0) == np.float32(129).view(np.uint32)


def test_rounds_toward_zero_and_not_to_nearest() -> None:
    # 64 * 2^-9 * 2^-9 * .25 = 2^-14 beside -1024: nearest is -1024 + 2^-14 exactly (ulp 2^-14), then halve the step.
    step = one(NumberFormat.NVFP4, (1, 1), [1] * 4, [1] * 4, -1024.0).view(np.float32)
    assert step == np.float32(-1024 + 2.0**-14)
    coarser = one(NumberFormat.NVFP4, (1, 1), [1] * 4, [1] * 4, -4096.0).view(np.float32)
    assert coarser == np.nextafter(np.float32(-4096), np.float32(0)), "a cut sum falls toward zero"
    assert one(NumberFormat.NVFP4, (1, 1), [1] * 4, [1] * 4, 4096.0).view(np.float32) == np.float32(4096)


def test_nan_scales_and_the_ignored_sign_of_ue4m3() -> None:
    assert one(NumberFormat.NVFP4, (0, 0), [0x7F, 0, 0, 0], [0x38] * 4, 1.0) == NAN
    assert one(NumberFormat.NVFP4, (0, 0), [0x38] * 4, [0, 0, 0, 0xFF], 1.0) == NAN
    assert one(NumberFormat.MXFP4, (2, 2), [127, 255], [127, 127], 1.0) == NAN
    assert one(NumberFormat.NVFP4, (2, 2), [0x38] * 4, [0x38] * 4, float("nan")) == NAN
    assert one(NumberFormat.NVFP4, (2, 2), [0xB8] * 4, [0x38] * 4, 0.0) == np.float32(64).view(np.uint32)


def test_an_infinite_accumulator_stays_and_overflow_is_infinite() -> None:
    assert one(NumberFormat.NVFP4, (2, 2), [0x38] * 4, [0x38] * 4, -np.inf) == 0xFF800000
    assert one(NumberFormat.MXFP4, (7, 15), [254] * 2, [254] * 2, 0.0) == 0xFF800000


def test_subnormal_results_survive() -> None:
    # 64 * 0.25 * 2^-127 * 2^(byte - 127), and FP32's smallest subnormal is 2^-149
    assert one(NumberFormat.MXFP4, (1, 1), [0, 0], [107, 107], 0.0) == 1 << 6
    assert one(NumberFormat.MXFP4, (1, 1), [0, 0], [101, 101], 0.0) == 1
    assert one(NumberFormat.MXFP4, (1, 1), [0, 0], [100, 100], 0.0) == 0


@pytest.mark.parametrize("fmt", [NumberFormat.NVFP4, NumberFormat.MXFP4])
@pytest.mark.parametrize("k", [64, 96, 480])
def test_matmul_is_within_its_truncation_of_float64(fmt: NumberFormat, k: int) -> None:
    rng = np.random.default_rng(k)
    a, scale_a = random_operand(rng, fmt, 5, k)
    b, scale_b = random_operand(rng, fmt, 7, k)

    def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        if fmt is NumberFormat.NVFP4:
            return reference.dequantize_nvfp4(codes, scales, 1.0)
        return reference.dequantize_mxfp4(codes, scales)

    x, w = decode(a, scale_a), decode(b, scale_b)
    exact, magnitude = x @ w.T, np.abs(x) @ np.abs(w).T
    y = mma_model.matmul(a, scale_a, b, scale_b, fmt=fmt)
    assert (np.abs(y - exact) <= 2.0**-23 * -(-k // 64) * magnitude).all()


def test_matmul_over_k_ranges_splits_the_sum() -> None:
    rng = np.random.default_rng(3)
    a, scale_a = random_operand(rng, NumberFormat.NVFP4, 3, 256)
    b, scale_b = random_operand(rng, NumberFormat.NVFP4, 4, 256)
    head = mma_model.matmul(a, scale_a, b, scale_b, fmt=NumberFormat.NVFP4, k_range=(0, 128))
    alone = mma_model.matmul(a[:, :64], scale_a[:, :8], b[:, :64], scale_b[:, :8], fmt=NumberFormat.NVFP4)
    np.testing.assert_array_equal(head, alone)
