"""One call for every path: right numbers, the choice beside them, clear refusals."""

import numpy as np
import pytest
import torch
from requant.kernels import bounds, reference
from requant.kernels.availability import KernelUnavailableError
from requant.kernels.dispatch import Path, paths
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.kernels.matmul import decode, grouped_matmul, matmul, stack
from requant.kernels.reference_w4a4 import round_activations
from requant.kernels.w4a4_operands import Fp4Tensor

NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4


def packed(rng, fmt, n, k):
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    low, high = (0x08, 0x7F) if fmt is NVFP4 else (115, 135)
    scales = rng.integers(low, high, (n, k // fmt.group), dtype=np.uint8)
    return PackedTensor(fmt, codes, scales, np.float32(0.0123) if fmt is NVFP4 else None)


# --- the tolerance --------------------------------------------------------------------------------------------------


def test_the_bound_by_hand():
    exact, terms = np.array([[256.0, 0.0]]), np.array([[512.0, 1024.0]])
    just = exact + np.array([[1.0 + 2.0**-5, 2.0**-4]])  # 2^-8 * 256 + 2^-14 * 512, 2^-14 * 1024
    assert bounds.excess(just, exact, terms) == 1.0
    assert bounds.excess(exact + np.array([[0.0, 2.0**-3]]), exact, terms) == 2.0
    assert bounds.excess(exact, exact, np.zeros((1, 2))) == 0.0


def test_the_bound_and_outputs_that_are_not_finite():
    exact, terms = np.array([1.0, np.nan, np.inf]), np.ones(3)
    assert bounds.excess(np.array([1.0, 5.0, -7.0]), exact, terms) == 0.0, "only what should be finite is judged"
    assert bounds.excess(np.array([np.nan, 5.0, 0.0]), exact, terms) == np.inf
    assert bounds.excess(exact[1:], exact[1:], terms[1:]) == 0.0


def test_half_precision_partial_sums_fail_the_bound_and_fp32_passes():
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((8, 4096)), rng.standard_normal((1, 4096))
    x[0, ::200] *= 64
    exact, terms = x @ w.T, np.abs(x) @ np.abs(w).T
    total16, total32 = np.zeros((1, 8), np.float16), np.zeros((1, 8), np.float32)
    for k in range(4096):
        product = (x[:, k : k + 1] * w[:, k]).astype(np.float32)
        total16, total32 = (total16 + product.astype(np.float16)).astype(np.float16), total32 + product
    assert bounds.excess(total32.astype(float), exact, terms) < 0.1
    assert bounds.excess(total16.astype(float), exact, terms) > 1


@pytest.mark.parametrize(
    ("y", "exact", "expected"),
    [([3.0, 4.0], [3.0, 4.0], 0.0), ([3.0, 4.5], [3.0, 4.0], 0.1), ([0.0], [0.0], 0.0), ([1.0], [0.0], np.inf)],
)
def test_relative_error(y, exact, expected):
    assert bounds.relative_error(np.array(y), np.array(exact)) == pytest.approx(expected)
    assert bounds.relative_error(np.array([np.nan]), np.array([1.0])) == np.inf


# --- on the CPU -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("m", [0, 1, 17])
def test_cpu_and_oracle_agree_and_say_who_they_are(fmt, m):
    rng = np.random.default_rng(m)
    w, x = packed(rng, fmt, 24, 96), rng.standard_normal((m, 96)).astype(np.float32)
    ours, exact = matmul(x, w), matmul(x, w, "reference")
    assert (ours.choice.path, exact.choice.path) == (Path.CPU, Path.REFERENCE)
    assert exact.y.dtype == np.float64
    np.testing.assert_array_equal(exact.y, reference.matmul(x, decode(w)))
    assert ours.y.shape == (m, 24)
    terms = np.abs(x.astype(np.float64)) @ np.abs(decode(w)).T
    assert bounds.excess(ours.y.astype(np.float64), exact.y, terms) < 0.01


def test_the_oracle_decodes_both_formats():
    codes = np.array([[0x21] * 16], np.uint8)  # 0.5 1 0.5 1 ...
    assert decode(PackedTensor(MXFP4, codes, np.array([[130]], np.uint8)))[0, :3].tolist() == [4.0, 8.0, 4.0]
    nvfp4 = PackedTensor(NVFP4, codes, np.array([[0x38, 0x40]], np.uint8), np.float32(0.5))
    assert decode(nvfp4)[0, [0, 1, 16, 17]].tolist() == [0.25, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("path", ["auto", "cpu", "reference"])
def test_cpu_operands_that_do_not_fit_are_refused(path):
    rng = np.random.default_rng(1)
    w = packed(rng, NVFP4, 8, 32)
    with pytest.raises(ValueError, match="do not share K"):
        matmul(np.zeros((2, 48), np.float32), w, path)
    bad = PackedTensor(NVFP4, w.codes, w.block_scales, np.float32(0))
    with pytest.raises(ValueError, match="not a positive finite number"):
        matmul(np.zeros((2, 32), np.float32), bad, path)


def test_numpy_and_torch_are_not_mixed():
    w = packed(np.random.default_rng(1), NVFP4, 8, 32)
    on_cpu = Fp4Tensor.weight(torch.as_tensor(w.codes), torch.as_tensor(w.block_scales), 1.0)
    with pytest.raises(ValueError, match="x must be a numpy array too"):
        matmul(torch.zeros(2, 32), w)
    with pytest.raises(ValueError, match="as a torch tensor on that GPU"):
        matmul(np.zeros((2, 32), np.float32), on_cpu)
    with pytest.raises(ValueError, match="give numpy arrays instead"):
        matmul(torch.zeros((2, 32), dtype=torch.bfloat16), on_cpu)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("path", ["auto", "cpu", "reference"])
def test_experts_on_the_cpu_are_each_tokens_own(fmt, path):
    rng = np.random.default_rng(3)
    experts, x = [packed(rng, fmt, 12, 64) for _ in range(5)], rng.standard_normal((7, 64)).astype(np.float32)
    ids = np.stack([rng.permutation(4)[:3] for _ in range(7)])  # the fifth is nobody's
    y, choice = grouped_matmul(x, experts, ids, path)
    assert (y.shape, choice.path) == ((7, 3, 12), Path.CPU if path == "auto" else path)
    for token, slot in np.ndindex(7, 3):
        exact = x[token].astype(np.float64) @ decode(experts[ids[token, slot]]).T
        terms = np.abs(x[token].astype(np.float64)) @ np.abs(decode(experts[ids[token, slot]])).T
        assert bounds.excess(y[token, slot].astype(np.float64), exact, terms) < 0.01
    assert grouped_matmul(x[:0], experts, ids[:0], path).y.shape == (0, 3, 12)


def test_experts_on_the_cpu_that_do_not_fit_are_refused():
    rng = np.random.default_rng(4)
    experts, x = [packed(rng, NVFP4, 8, 32) for _ in range(3)], np.zeros((2, 32), np.float32)
    ids = np.zeros((2, 1), np.int32)
    bad = PackedTensor(NVFP4, experts[0].codes, experts[0].block_scales, np.float32(-1))
    refused = {
        "expert id 3 is out of range: there are 3 experts": (x, experts, ids + 3),
        "expert id -1 is out of range": (x, experts, ids - 1),
        r"must be integers \[2, top_k\], not float64 \[2, 1\]": (x, experts, ids.astype(float)),
        r"must be integers \[2, top_k\], not int32 \[1, 1\]": (x, experts, ids[:1]),
        "one format and shape": (x, [*experts, packed(rng, NVFP4, 9, 32)], ids),
        "at least one": (x, [], ids),
        "do not share K": (x[:, :16], experts, ids),
        "not a positive finite number": (x, [*experts, bad], ids),
        "the weight a PackedTensor for each": (x, stack(experts, "cpu"), ids),
    }
    for message, operands in refused.items():
        with pytest.raises(ValueError, match=message):
            grouped_matmul(*operands)


def test_stacked_weights():
    rng = np.random.default_rng(2)
    weights = [packed(rng, NVFP4, 8, 32) for _ in range(3)]
    made = stack(weights, "cpu")
    assert made.codes.shape == (3, 8, 16)
    np.testing.assert_array_equal(made.codes[1].numpy(), weights[1].codes)
    assert made.global_scale.tolist() == [float(np.float32(0.0123))] * 3
    assert stack([packed(rng, MXFP4, 8, 32)], "cpu").global_scale is None
    with pytest.raises(ValueError, match="one format"):
        stack([weights[0], packed(rng, MXFP4, 8, 32)], "cpu")
    with pytest.raises(ValueError, match="need grouped_matmul"):
        matmul(torch.zeros((2, 32), dtype=torch.bfloat16), made)
    with pytest.raises(ValueError, match="not a stack of experts"):
        grouped_matmul(torch.zeros(2, 32), Fp4Tensor(NVFP4, made.codes[0], made.scales[0], None), torch.zeros(2, 1))


# --- on the GPU -----------------------------------------------------------------------------------------------------


def gpu_paths():
    return [state.path for state in paths() if state.runs and state.path.on_gpu]


def wide(rng, m, k):
    x = rng.standard_normal((m, k)) * np.exp2(rng.integers(-20, 1, (m, k)))
    x[:, k // 3] *= 64
    return torch.from_numpy(x).to(torch.bfloat16)


def check(path, y, x, w):
    operand = round_activations(x.float().numpy(), w.format) if path.rounds_activations else x.double().numpy()
    exact, terms = operand @ decode(w).T, np.abs(operand) @ np.abs(decode(w)).T
    assert bounds.excess(y.double().cpu().numpy(), exact, terms) <= 1, path


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("m", [1, 7, 64, 100])
def test_every_path_of_this_gpu_keeps_the_bound(fmt, m):
    rng = np.random.default_rng(m)
    w, x = packed(rng, fmt, 200, 544), wide(rng, m, 544)
    one = stack([w])
    on_gpu = Fp4Tensor(fmt, one.codes[0], one.scales[0], one.global_scale)
    for path in ["auto", *gpu_paths()]:
        if path in ("scaled_mm", "dot_scaled") and m > 0:
            continue  # one global scale for all of x: their own tests
        y, choice = matmul(x.cuda(), on_gpu, path)
        assert path in ("auto", choice.path)
        check(choice.path, y, x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_every_grouped_path_of_this_gpu_keeps_the_bound(fmt):
    rng = np.random.default_rng(9)
    experts, x = [packed(rng, fmt, 96, 320) for _ in range(5)], wide(rng, 11, 320)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(11)]).int()
    for path in ["auto", *gpu_paths()]:
        try:
            y, choice = grouped_matmul(x.cuda(), stack(experts), ids.cuda(), path)
        except KernelUnavailableError as error:
            assert "grouped form" in str(error)
            continue
        for token in range(11):
            for slot in range(2):
                check(choice.path, y[token, slot][None], x[token][None], experts[ids[token, slot]])


@pytest.mark.gpu
def test_gpu_operands_that_do_not_fit_are_refused():
    w = stack([packed(np.random.default_rng(1), NVFP4, 8, 32)])
    flat = Fp4Tensor(NVFP4, w.codes[0], w.scales[0], w.global_scale)
    with pytest.raises(ValueError, match=r"x must be bfloat16 \[M, 32\]"):
        matmul(torch.zeros((2, 48), dtype=torch.bfloat16, device="cuda"), flat)
    with pytest.raises(ValueError, match="expert id 3 is out of range"):
        grouped_matmul(
            torch.zeros((1, 32), dtype=torch.bfloat16, device="cuda"), w, torch.tensor([[3]], device="cuda").int()
        )
    assert matmul(torch.zeros((0, 32), dtype=torch.bfloat16, device="cuda"), flat).y.shape == (0, 8)
