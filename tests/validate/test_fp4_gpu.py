"""FP4 weights on a GPU, as far as a machine without one can tell: which kernel gets what, and W4A4 emulated exactly."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from requant.kernels import reference
from requant.kernels.availability import KernelUnavailableError
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.validate import fp4_gpu
from requant.validate.fp4_gpu import Fp32Head, GpuWeight, rounded_in_units
from requant.validate.fp4_modules import (
    Expert,
    Nvfp4Experts,
    Nvfp4Linear,
    Packed,
    _stacked,
    kernels_used,
    round_activations,
)


def nvfp4(n, k, seed=0, scale=2.0**-12):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return PackedTensor(
        NumberFormat.NVFP4, codes, rng.integers(40, 80, (n, k // 16), dtype=np.uint8), np.float32(scale)
    )


def mxfp4(n, k, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return PackedTensor(NumberFormat.MXFP4, codes, rng.integers(118, 124, (n, k // 32), dtype=np.uint8))


def values(codes, scales, global_scale, fmt):
    if fmt is NumberFormat.MXFP4:
        return np.asarray(reference.dequantize_mxfp4(codes, scales))
    return np.asarray(reference.dequantize_nvfp4(codes, scales, float(global_scale)))


@pytest.fixture
def kernels(monkeypatch):
    """matmul and grouped_matmul of the chip, in float64 on the CPU; each call is noted."""
    calls = []

    def choice(kind):
        return SimpleNamespace(kernel=f"the {kind} kernel")

    def matmul(x, weight, *, fp32, **options):
        assert not fp32
        calls.append(("dense", x, weight.format, options))
        scale = None if weight.global_scale is None else weight.global_scale[0]
        w = values(weight.codes.numpy(), weight.scales.numpy(), scale, weight.format)
        return SimpleNamespace(y=torch.tensor(x.double().numpy() @ w.T).bfloat16(), choice=choice("dense"))

    def grouped(x, weight, ids, **options):
        calls.append(("grouped", x, weight.format, options))
        y = torch.zeros(*ids.shape, weight.codes.shape[1], dtype=torch.float64)
        for t, slot in np.ndindex(*ids.shape):
            e = int(ids[t, slot])
            scale = None if weight.global_scale is None else weight.global_scale[e]
            w = values(weight.codes[e].numpy(), weight.scales[e].numpy(), scale, weight.format)
            y[t, slot] = torch.tensor(w @ x[t].double().numpy())
        return SimpleNamespace(y=y.bfloat16(), choice=choice("grouped"))

    monkeypatch.setattr(fp4_gpu, "matmul", matmul)
    monkeypatch.setattr(fp4_gpu, "grouped_matmul", grouped)
    monkeypatch.setattr(GpuWeight, "_native", lambda self, *, grouped: False)
    return calls


@pytest.mark.parametrize("scale", [1.0, 0.004, 2.0**-20, 37.0])
def test_rounded_activations_are_those_of_the_cpu_path_bit_by_bit(scale):
    rng = np.random.default_rng(7)
    x = (rng.normal(size=(64, 256)) * 2.0 ** rng.integers(-30, 9, (64, 256))).astype(np.float32)
    x[0], x[1, ::3], x[2, 16:32] = 0.0, -0.0, 1e-30
    x[3] = np.resize(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], dtype=np.float32) * np.float32(scale), 256)
    x = torch.tensor(x).bfloat16().float().numpy()
    units = rounded_in_units(torch.tensor(x), torch.full((64, 1), scale))
    assert units.dtype == torch.bfloat16
    expected = round_activations(np.ascontiguousarray(x), np.float32(scale))
    found = (units.float() * np.float32(scale)).numpy()
    np.testing.assert_array_equal(found, expected)


def test_a_linear_gives_the_chips_kernel_the_weight_as_stored_and_bf16(kernels):
    x = torch.tensor(np.random.default_rng(1).normal(size=(2, 3, 64)).astype(np.float32))
    for tensor in (mxfp4(48, 64), nvfp4(48, 64)):
        weight = Packed(tensor)
        y = weight.multiply(x, None)  # where no GPU is, torch takes the CPU for the device
        assert (y.shape, y.dtype) == ((2, 3, 48), torch.float32)
        w = values(tensor.codes, tensor.block_scales, tensor.global_scale, tensor.format)
        np.testing.assert_allclose(y.reshape(6, 48), x.reshape(6, 64).numpy() @ w.T, rtol=0.05, atol=0.02 * w.std())
        assert weight.kernels == {"the dense kernel"}
    assert [call[2] for call in kernels] == [NumberFormat.MXFP4, NumberFormat.NVFP4]
    assert all(
        call[1].dtype == torch.bfloat16 and call[3] == {"activations": "bf16", "input_scale": None} for call in kernels
    )


def test_w4a4_is_emulated_where_the_chip_lacks_it_and_left_to_the_chip_where_it_does_not(kernels, monkeypatch):
    tensor, x = nvfp4(48, 64), torch.tensor(np.random.default_rng(2).normal(size=(6, 64)).astype(np.float32))
    scale = np.float32(0.004)
    w = values(tensor.codes, tensor.block_scales, tensor.global_scale, tensor.format)
    expected = round_activations(x.bfloat16().float().numpy(), scale) @ w.T
    weight = Packed(tensor)
    found = weight.multiply(x, scale).numpy()
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=1e-4 * np.abs(expected).max())
    assert weight.kernels == {"the dense kernel, activations rounded before"}
    assert kernels[-1][3] == {"activations": "bf16"}
    monkeypatch.setattr(GpuWeight, "_native", lambda self, *, grouped: True)
    weight.multiply(x, scale)
    assert kernels[-1][3] == {"activations": "fp4", "input_scale": float(scale)}


class Original(torch.nn.Module):
    """What a transformers experts module brings: parameters to be dropped, and its gating."""

    def __init__(self, interleaved):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(3, 1, 1, device="meta"))
        self.down_proj = torch.nn.Parameter(torch.empty(3, 1, 1, device="meta"))
        self.is_concatenated = not interleaved

    def _apply_gate(self, both):
        gate, up = (both[..., ::2], both[..., 1::2]) if not self.is_concatenated else both.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def experts(split, biased, scales, make=nvfp4):
    rng = np.random.default_rng(11)
    made = []
    for e in range(3):
        bias = torch.tensor(rng.normal(size=(2, 32)).astype(np.float32)) * 1e-3 if biased else None
        down_bias = torch.tensor(rng.normal(size=64).astype(np.float32)) * 1e-3 if biased else None
        own = (np.float32(0.01 * (e + 1)), np.float32(1e-5 * (e + 1))) if scales else None
        down = Packed(make(64, 32, 30 + e))
        if split:
            pair = Packed(make(32, 64, 10 + e)), Packed(make(32, 64, 20 + e))
            made.append(Expert(pair, down, None if bias is None else (bias[0], bias[1]), down_bias, own))
        else:
            both = Packed(make(64, 64, 40 + e))
            made.append(Expert(both, down, None if bias is None else bias.flatten(), down_bias, own))
    return made


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("make", [nvfp4, mxfp4])
def test_grouped_experts_are_those_of_the_cpu_path(kernels, interleaved, split, biased, scales, make):
    module = Nvfp4Experts(Original(interleaved), experts(split, biased, scales, make))
    x = torch.tensor(np.random.default_rng(4).normal(size=(5, 64)).astype(np.float32)).bfloat16().float()
    ids = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0], [2, 3]])  # 3: a masked slot
    weights = torch.tensor(np.random.default_rng(5).random((5, 2)).astype(np.float32))
    expected = module(x, ids, weights)
    found = module._together(x, ids, weights)
    assert module.one_by_one == ""
    scale = float(expected.abs().max())
    # W4A4 rounds the inner activations, which differ a little in BF16, to other codes now and then
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=0.02, atol=(0.1 if scales else 0.01) * scale)
    assert {call[0] for call in kernels} == {"grouped"}
    assert len(kernels) == (3 if split else 2)
    said = "the grouped kernel" + (", activations rounded before" if scales else "")
    assert kernels_used(module) == (f"{said} (experts grouped)",)


def test_experts_that_are_not_alike_or_a_chip_without_a_grouped_kernel_leave_them_one_by_one(kernels, monkeypatch):
    x, ids, weights = torch.ones(1, 64), torch.tensor([[0, 1]]), torch.ones(1, 2)
    mixed = [*experts(False, False, False), Expert(torch.ones(64, 64), torch.ones(64, 32))]
    module = Nvfp4Experts(Original(False), mixed)
    assert module._together(x, ids, weights) is None
    assert module.one_by_one == "some experts are not packed"

    def unavailable(*_arguments, **_options):
        raise KernelUnavailableError("no FP4 kernel runs on X")

    monkeypatch.setattr(fp4_gpu, "grouped_matmul", unavailable)
    module = Nvfp4Experts(Original(False), experts(False, False, False))
    assert module._together(x, ids, weights) is None
    assert module.one_by_one == "no FP4 kernel runs on X"
    for expert in module.experts:
        expert.down.multiply(torch.ones(1, 32), None)
    assert kernels_used(module) == ("the dense kernel (experts one by one: no FP4 kernel runs on X)",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e: Expert(e.gate_up, e.down, None, e.down_bias, e.scales), "bias"),
        (lambda e: Expert(e.gate_up, e.down, e.gate_up_bias, e.down_bias, None), "activation scales"),
        (lambda e: Expert((e.gate_up, e.gate_up), e.down, None, e.down_bias, e.scales), "apart"),
        (lambda e: Expert(Packed(mxfp4(64, 64)), e.down, e.gate_up_bias, e.down_bias, e.scales), "one format"),
    ],
)
def test_what_cannot_be_stacked_is_told(change, reason):
    made = experts(False, True, True)
    with pytest.raises(ValueError, match=reason):
        _stacked([*made[:2], change(made[2])], torch.device("cpu"))


def test_a_head_makes_its_logits_in_fp32():
    linear = torch.nn.Linear(8, 5, bias=True).bfloat16()
    x = torch.randn(3, 8).bfloat16()
    y = Fp32Head(linear)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x.float() @ linear.weight.float().T + linear.bias.float())


def test_an_fp4_head_makes_its_logits_in_fp32(monkeypatch):
    """What the kernel sums in FP32 is not rounded to BF16 on the way, whether activations were rounded or not."""
    from requant.kernels.matmul import Product

    def kernel(x, weight, *, activations, input_scale=None, fp32=False):
        y = x.float() @ weight.T
        return Product(y if fp32 else y.bfloat16(), SimpleNamespace(kernel="a kernel"))

    weight = torch.randn(16, 32)
    on_gpu = object.__new__(GpuWeight)
    on_gpu.kernels, on_gpu._weight = set(), weight
    monkeypatch.setattr(fp4_gpu, "matmul", kernel)
    monkeypatch.setattr(GpuWeight, "_native", lambda self, *, grouped: False)
    packed = Packed(nvfp4(16, 32))
    packed._on_gpu = on_gpu
    x = torch.randn(2, 3, 32).bfloat16()
    exact = x.float() @ weight.T
    y = packed.multiply(x, None, fp32=True)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, exact)
    assert torch.equal(packed.multiply(x, None), exact.bfloat16())
    rounded = packed.multiply(x, np.float32(0.25), fp32=True)
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, rounded.bfloat16().float())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_logits_of_an_fp4_head_on_a_gpu_are_float64_but_for_fp32(tokens):
    weight = nvfp4(48, 160)
    exact = values(weight.codes, weight.block_scales, weight.global_scale, weight.format)
    x = torch.randn(tokens, 160).bfloat16()
    y = Packed(weight).multiply(x.cuda(), None, fp32=True)
    expected = x.double() @ torch.as_tensor(exact).T
    assert y.dtype == torch.float32
    assert float((y.cpu() - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_modules_name_no_kernel_before_they_have_run():
    assert kernels_used(torch.nn.Sequential(Nvfp4Linear(Packed(nvfp4(16, 32))))) == ()
