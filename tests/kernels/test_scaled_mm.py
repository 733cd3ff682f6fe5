"""torch's NVFP4 scaled_mm: what is handed to it, on a machine that cannot run it."""

import numpy as np
import pytest
import torch
from requant.kernels import availability, reference, scaled_mm
from requant.kernels.availability import Availability, KernelUnavailableError, State
from requant.kernels.w4a4_operands import Fp4Tensor


def operand(rng: np.random.Generator, rows: int, k: int, scale: float) -> Fp4Tensor:
    return Fp4Tensor.weight(
        torch.from_numpy(rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)),
        torch.from_numpy(rng.integers(0x20, 0x60, (rows, k // 16), dtype=np.uint8)),
        scale,
    )


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (300, 10)])
def test_every_scale_lies_where_cublaslt_reads_it(rows: int, columns: int) -> None:
    linear = torch.from_numpy(np.random.default_rng(rows).integers(1, 127, (rows, columns), dtype=np.uint8))
    flat = scaled_mm.swizzle_32_4_4(linear)
    tiles_k = -(-columns // 4)
    assert flat.numel() == -(-rows // 128) * 128 * tiles_k * 4
    expected = np.zeros(flat.numel(), np.uint8)
    for row in range(rows):
        for column in range(columns):
            tile, r, c = (row // 128) * tiles_k + column // 4, row % 128, column % 4
            expected[512 * tile + 16 * (r % 32) + 4 * (r // 32) + c] = linear[row, column]
    np.testing.assert_array_equal(flat.numpy(), expected)


def test_the_operands_mean_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch's function decodes what it is given by the documented layout."""
    functional = torch.nn.functional

    def unswizzle(flat: torch.Tensor, rows: int, columns: int) -> np.ndarray:
        tiles_k = -(-columns // 4)
        row, column = np.mgrid[:rows, :columns]
        tile = (row // 128) * tiles_k + column // 4
        return flat.view(torch.uint8).numpy()[512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4]

    def fake(a, b, scale_a, recipe_a, scale_b, recipe_b, *, swizzle_a, swizzle_b, output_dtype):
        wanted = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
        order = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
        assert (recipe_a, recipe_b, swizzle_a, swizzle_b) == (wanted, wanted, order, order)
        assert a.dtype == b.dtype == torch.float4_e2m1fn_x2
        assert scale_a[0].dtype == scale_b[0].dtype == torch.float8_e4m3fn
        values = []
        for codes, scales in ((a, scale_a), (b.t(), scale_b)):
            rows, half = codes.shape
            blocks = unswizzle(scales[0], rows, half // 8)
            values.append(reference.dequantize_nvfp4(codes.view(torch.uint8).numpy(), blocks, scales[1].item()))
        return torch.from_numpy(values[0] @ values[1].T).to(output_dtype)

    monkeypatch.setattr(functional, "scaled_mm", fake)
    monkeypatch.setattr(scaled_mm, "availability", lambda: Availability(State.RUNS, "pretended"))
    rng = np.random.default_rng(1)
    x, w = operand(rng, 5, 352, 0.25), operand(rng, 144, 352, 3.0)
    xs, ws = (reference.dequantize_nvfp4(t.codes.numpy(), t.scales.numpy(), t.global_scale.item()) for t in (x, w))
    np.testing.assert_array_equal(
        scaled_mm.matmul(x, w).float().numpy(), torch.from_numpy(xs @ ws.T).bfloat16().float()
    )
    assert scaled_mm.matmul(Fp4Tensor(x.format, x.codes[:0], x.scales[:0], x.global_scale), w).shape == (0, 144)


def test_what_cublaslt_does_not_take_is_refused() -> None:
    rng = np.random.default_rng(2)
    x, w = operand(rng, 3, 64, 1.0), operand(rng, 16, 64, 1.0)
    mxfp4 = Fp4Tensor.weight(torch.zeros((16, 32), dtype=torch.uint8), torch.zeros((16, 2), dtype=torch.uint8))
    refused = {
        "NVFP4 x NVFP4, not nvfp4 x mxfp4": (x, mxfp4),
        "do not go together": (x, operand(rng, 16, 128, 1.0)),
        "K = 48 is not a multiple of 32": (operand(rng, 3, 48, 1.0), operand(rng, 16, 48, 1.0)),
        "N = 24 is not a multiple of 16": (x, operand(rng, 24, 64, 1.0)),
        "one global scale for all of x": (Fp4Tensor(x.format, x.codes, x.scales, torch.ones(3)), w),
    }
    for message, operands in refused.items():
        with pytest.raises(ValueError, match=message):
            scaled_mm.matmul(*operands)


def test_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    monkeypatch.setattr(scaled_mm, "gpu", lambda: ("there is no GPU", None))
    with pytest.raises(KernelUnavailableError, match="scaled_mm is unavailable because there is no GPU"):
        scaled_mm.matmul(operand(rng, 3, 64, 1.0), operand(rng, 16, 64, 1.0))
    monkeypatch.setattr(scaled_mm, "gpu", lambda: ("Card (SM90)", (9, 0)))
    assert str(scaled_mm.availability()) == "unavailable because Card (SM90) has no FP4 tensor cores"
    monkeypatch.setattr(scaled_mm, "gpu", lambda: ("Card (SM100)", (10, 0)))
    assert scaled_mm.availability().state is State.RUNS
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    assert "has no nn.functional.scaled_mm" in scaled_mm.availability().reason


def test_dot_scaled_says_which_triton_and_chip_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert str(availability.dot_scaled()) == "unavailable because there is no Triton"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.7.1")
    assert "Triton 3.7.1 crashes on E4M3 scales" in availability.dot_scaled().reason
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.10.0")
    monkeypatch.setattr(availability, "gpu", lambda: ("there is no GPU", None))
    assert str(availability.dot_scaled()) == "compiles: for SM100 by Triton 3.10.0; there is no GPU"
    monkeypatch.setattr(availability, "gpu", lambda: ("Card (SM120)", (12, 0)))
    assert availability.dot_scaled().reason.endswith("Card (SM120) has no tcgen05")
    monkeypatch.setattr(availability, "gpu", lambda: ("Card (SM100)", (10, 0)))
    assert availability.dot_scaled().state is State.RUNS
