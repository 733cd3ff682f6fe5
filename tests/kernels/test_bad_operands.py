"""Operands that cannot be, on every path: a clear error before anything runs, or what the format says; no wrong number.

All paths of kernels/dispatch.py: those of the CPU here, those of a GPU on whatever GPU there is. The checks that each
kernel makes for itself are tested beside it.
"""

import re

import numpy as np
import pytest
import torch
from requant.kernels.availability import KernelUnavailableError
from requant.kernels.dispatch import Path, paths
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.kernels.matmul import decode, grouped_matmul, matmul, stack
from requant.kernels.reference_torch import dequantize, excess, products
from requant.kernels.reference_w4a4 import round_activations
from requant.kernels.w4a4_operands import Fp4Tensor

NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4
M, N, K = 3, 16, 64
ON_CPU = [Path.CPU, Path.REFERENCE]


def codes(n=N, k=K, dtype=np.uint8):
    return np.random.default_rng(n + k).integers(0, 256, (n, k // 2)).astype(dtype) | dtype(0x11)  # no zero codes


def scales(n=N, columns=K // 16, byte=0x38, dtype=np.uint8):
    return np.full((n, columns), byte, dtype)


def weight(fmt=NVFP4, made=None, steps=None, scale=0.5):
    made = codes() if made is None else made
    byte = 0x38 if fmt is NVFP4 else 127
    steps = scales(made.shape[0], made.shape[-1] * 2 // fmt.group, byte) if steps is None else steps
    return PackedTensor(fmt, made, steps, np.float32(scale) if fmt is NVFP4 else None)


def activations(m=M, k=K):
    return np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)


# --- on the CPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ON_CPU)
@pytest.mark.parametrize(
    ("x", "given", "message"),
    [
        (activations(k=24), {"made": codes(k=24)}, "K = 24 is not a multiple of nvfp4's group of 16"),
        (activations(k=48), {"fmt": MXFP4, "made": codes(k=48)}, "K = 48 is not a multiple of mxfp4's group of 32"),
        (activations(k=48), {}, "x (3, 48) and weight [16, 64] do not share K"),
        (activations().astype(np.int32), {}, "x is int32 (3, 64): expected float32 [M, 64]"),
        (activations()[0], {}, "x is float32 (64,): expected float32 [M, 64]"),
        (activations(), {"made": codes(dtype=np.int16)}, "codes are int16, block scales uint8: expected uint8 bytes"),
        (activations(), {"steps": scales(dtype=np.float32)}, "codes are uint8, block scales float32: expected uint8"),
        (activations(), {"steps": scales(dtype=np.int8)}, "codes are uint8, block scales int8: expected uint8 bytes"),
        (activations(), {"scale": 0.0}, "global scale 0.0 is not a positive finite number"),
        (activations(), {"scale": -2.0}, "global scale -2.0 is not a positive finite number"),
        (activations(), {"scale": np.nan}, "global scale nan is not a positive finite number"),
        (activations(), {"scale": np.inf}, "global scale inf is not a positive finite number"),
    ],
)
def test_the_cpu_paths_refuse(path, x, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        matmul(x, weight(**given), path)
    if x.ndim == 2:
        with pytest.raises(ValueError, match=re.escape(message)):
            grouped_matmul(x, [weight(**given)] * 2, np.zeros((M, 1), np.int64), path)


@pytest.mark.parametrize(
    ("made", "steps", "message"),
    [
        (codes(), scales(columns=3), "block scales (16, 3) do not fit codes (16, 32) in groups of 16"),
        (codes(), scales(n=1), "block scales (1, 4) do not fit"),
        (codes()[0], scales(), "codes (32,) are not [N, K/2]"),
    ],
)
def test_a_packed_tensor_that_does_not_fit_itself_is_never_made(made, steps, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PackedTensor(NVFP4, made, steps, np.float32(1))


@pytest.mark.parametrize("path", ON_CPU)
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_strides_and_alignment_do_not_matter_on_a_cpu(path, fmt):
    x, w = activations(), weight(fmt)
    expected = matmul(x, w, path).y
    room = np.zeros(w.codes.size + 1, np.uint8)
    room[1:] = w.codes.ravel()
    odd = PackedTensor(fmt, room[1:].reshape(w.codes.shape), np.asfortranarray(w.block_scales), w.global_scale)
    every_other = np.zeros((M, 2 * K), np.float32)
    every_other[:, ::2] = x
    assert odd.codes.ctypes.data % 2 != w.codes.ctypes.data % 2
    for other in (np.asfortranarray(x), every_other[:, ::2]):
        np.testing.assert_allclose(matmul(other, odd, path).y, expected, rtol=1e-5, atol=1e-4)  # BLAS adds otherwise


@pytest.mark.parametrize("path", ON_CPU)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_reach_what_depends_on_them_on_a_cpu(path, bad):
    x, w = activations(), weight()
    clean = matmul(x, w, path).y
    spoilt = x.copy()
    spoilt[1, 40] = bad
    y = matmul(spoilt, w, path).y
    assert not np.isfinite(y[1]).any()
    np.testing.assert_array_equal(y[[0, 2]], clean[[0, 2]])
    steps = scales()
    steps[5, 2] = 0x7F
    y = matmul(x, weight(steps=steps), path).y
    assert np.isnan(y[:, 5]).all()
    np.testing.assert_array_equal(np.delete(y, 5, 1), np.delete(clean, 5, 1))


@pytest.mark.parametrize("path", ON_CPU)
def test_nothing_is_an_answer_on_a_cpu(path):
    assert matmul(activations(0), weight(), path).y.shape == (0, N)
    empty = PackedTensor(NVFP4, codes(0), scales(0), np.float32(1))
    assert matmul(activations(), empty, path).y.shape == (M, 0)
    assert grouped_matmul(activations(0), [weight()], np.zeros((0, 2), np.int64), path).y.shape == (0, 2, N)


@pytest.mark.parametrize("path", [path for path in Path if path.on_gpu])
def test_a_gpu_path_without_a_gpu_is_an_error_with_its_reason(path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        KernelUnavailableError, match=f"path {path} (is unavailable because|compiles here, but does not)"
    ):
        matmul(activations(), weight(), path)
    on_cpu = Fp4Tensor.weight(torch.from_numpy(codes()), torch.from_numpy(scales()), 0.5)
    with pytest.raises(ValueError, match="torch tensors are multiplied on a GPU, these are on cpu: give numpy arrays"):
        matmul(torch.from_numpy(activations()).bfloat16(), on_cpu, path)


def test_a_negative_block_scale_is_refused_where_tensor_cores_would_drop_its_sign():
    steps = scales()
    steps[3, 1] = 0xB8
    with pytest.raises(ValueError, match="a block scale is negative: FP4 tensor cores ignore the sign"):
        Fp4Tensor.weight(torch.from_numpy(codes()), torch.from_numpy(steps), 1.0)
    steps[3, 1] = 0x80  # -0: as good as 0
    Fp4Tensor.weight(torch.from_numpy(codes()), torch.from_numpy(steps), 1.0)
    steps[3, 1] = 0xFF  # NaN, which spoils its column on every path
    Fp4Tensor.weight(torch.from_numpy(codes()), torch.from_numpy(steps), 1.0)
    assert decode(weight(steps=np.where(scales() > 0, np.uint8(0xB8), 0))).min() < 0, "the oracle has the sign"


# --- on the GPU at hand: every path that runs there -----------------------------------------------------------------


def on_gpu(fmt=NVFP4, steps=None, experts=0):
    """(a weight as Fp4Tensor, its numbers in float64)."""
    one = stack([weight(fmt, steps=steps)] * max(experts, 1))
    made = one if experts else Fp4Tensor(fmt, one.codes[0], one.scales[0], one.global_scale)
    return made, dequantize(fmt, made.codes, made.scales, made.global_scale)


def gpu_paths(fmt):
    """Those that run on this GPU and take the format."""
    made, _ = on_gpu(fmt)
    x = torch.zeros((1, K), dtype=torch.bfloat16, device="cuda")
    for path in [state.path for state in paths() if state.runs and state.path.on_gpu]:
        try:
            matmul(x, made, path)
        except KernelUnavailableError:
            continue
        yield path


def tensor(m=M, k=K):
    return torch.from_numpy(activations(m, k)).bfloat16().cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_the_gpu_paths_refuse(fmt):
    made, _ = on_gpu(fmt)
    strided = torch.zeros((M, 2 * K), dtype=torch.bfloat16, device="cuda")[:, ::2]
    shifted = torch.zeros(M * K + 1, dtype=torch.bfloat16, device="cuda")[1:].view(M, K)
    refused = {
        r"x must be bfloat16 \[M, 64\], not torch.float32": tensor().float(),
        r"x must be bfloat16 \[M, 64\], not torch.bfloat16 \[3, 48\]": tensor(k=48),
        "contiguous|strides": strided,
        "multiple of 16|past a multiple": shifted,
        "x is on cpu, the weight on cuda:0": tensor().cpu(),
    }
    seen = 0
    for path in gpu_paths(fmt):
        for message, x in refused.items():
            with pytest.raises(ValueError, match=message):
                matmul(x, made, path)
        seen += 1
    assert seen >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_nothing_is_an_answer_on_a_gpu(fmt):
    made, _ = on_gpu(fmt)
    stacked, _ = on_gpu(fmt, experts=3)
    for path in gpu_paths(fmt):
        assert matmul(tensor(0), made, path).y.shape == (0, N)
        try:
            y = grouped_matmul(tensor(0), stacked, torch.zeros((0, 2), dtype=torch.int32, device="cuda"), path).y
        except KernelUnavailableError as error:
            assert "grouped form" in str(error)
            continue
        assert y.shape == (0, 2, N)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_reach_what_depends_on_them_on_a_gpu(fmt, bad):
    made, _ = on_gpu(fmt)
    steps = scales(N, K // fmt.group, 0x38 if fmt is NVFP4 else 127)
    steps[5, 1] = 0x7F if fmt is NVFP4 else 0xFF
    broken, _ = on_gpu(fmt, steps=steps)
    x, spoilt = tensor(), tensor()
    spoilt[1, 40] = bad
    for path in gpu_paths(fmt):
        clean = matmul(x, made, path).y
        y = matmul(spoilt, made, path).y
        assert not y[1].isfinite().any(), path
        if path.granularity == "token":
            assert torch.equal(y[[0, 2]], clean[[0, 2]]), path
        y = matmul(x, broken, path).y
        assert y[:, 5].isnan().all(), path
        keep = [n for n in range(N) if n != 5]
        assert torch.equal(y[:, keep], clean[:, keep]), path


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("bad", [-1, 3, 1 << 20])
def test_an_expert_that_does_not_exist_is_refused_by_every_path(fmt, bad):
    stacked, numbers = on_gpu(fmt, experts=3)
    ids = torch.tensor([[0, 1], [2, bad], [1, 0]], dtype=torch.int32, device="cuda")
    good = ids.clamp(0, 2)
    for path in gpu_paths(fmt):
        try:
            with pytest.raises(ValueError, match=f"expert id {bad} is out of range: there are 3 experts"):
                grouped_matmul(tensor(), stacked, ids, path)
            y = grouped_matmul(tensor(), stacked, good, path).y
        except KernelUnavailableError as error:
            assert "grouped form" in str(error)
            continue
        x = tensor().double()
        if path.rounds_activations:
            rounded = round_activations(tensor().float().cpu().numpy(), fmt, granularity=path.granularity)
            x = torch.from_numpy(rounded).cuda()
        for token, slot in np.ndindex(M, 2):
            exact = products(x[token][None], numbers[good[token, slot]])
            assert excess(y[token, slot][None], *exact) <= 1, path
