"""FP4 linears and experts against float64, and bit by bit between formats that hold the same values."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from requant.kernels import reference
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.validate.fp4_modules import Expert, Nvfp4Experts, Nvfp4Linear, Packed, round_activations


def mxfp4(n, k, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = rng.integers(118, 124, (n, k // 32), dtype=np.uint8)
    return PackedTensor(NumberFormat.MXFP4, codes, scales)


def as_nvfp4(tensor):
    """The same values: scale 2^(k - m) twice, m = -12."""
    exponents = tensor.block_scales.astype(int) - 127 + 12
    scales = np.repeat(((exponents + 7) << 3).astype(np.uint8), 2, axis=1)
    return PackedTensor(NumberFormat.NVFP4, tensor.codes, scales, np.float32(2.0**-12))


def values(tensor):
    if tensor.global_scale is None:
        return np.asarray(reference.dequantize_mxfp4(tensor.codes, tensor.block_scales))
    return np.asarray(reference.dequantize_nvfp4(tensor.codes, tensor.block_scales, float(tensor.global_scale)))


@pytest.fixture
def x():
    return torch.tensor(np.random.default_rng(9).normal(size=(2, 3, 64)).astype(np.float32))


def test_a_linear_is_the_product_with_the_decoded_weight(x):
    weight, bias = as_nvfp4(mxfp4(48, 64)), torch.linspace(-1, 1, 48)
    y = Nvfp4Linear(Packed(weight), bias)(x)
    expected = x.double().numpy() @ values(weight).T + bias.double().numpy()
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_the_same_values_in_either_format_give_the_same_bits(x):
    weight = mxfp4(48, 64)
    assert np.array_equal(values(weight), values(as_nvfp4(weight)))
    outputs = [Nvfp4Linear(Packed(w, keep=keep))(x) for w in (weight, as_nvfp4(weight)) for keep in (False, True)]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


def test_a_kept_weight_is_decoded_once():
    kept, fresh = Packed(mxfp4(4, 32), keep=True), Packed(mxfp4(4, 32))
    assert kept.decoded() is kept.decoded()
    assert fresh.decoded() is not fresh.decoded()
    assert torch.equal(kept.decoded(), fresh.decoded())


def test_w4a4_rounds_the_input_as_the_oracle_does(x):
    scale = np.float32(0.004)
    flat = x.reshape(-1, 64).numpy()
    codes, scales = reference.encode_nvfp4(flat, scale)
    expected = np.asarray(reference.dequantize_nvfp4(codes, scales, float(scale)), dtype=np.float32)
    assert np.array_equal(round_activations(flat, scale), expected)
    weight = mxfp4(48, 64)
    y = Nvfp4Linear(Packed(weight), None, scale)(x)
    np.testing.assert_allclose(y.reshape(6, 48).numpy(), expected @ values(weight).T, rtol=1e-4, atol=1e-4)
    assert not torch.equal(y, Nvfp4Linear(Packed(weight))(x))


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


def silu(a):
    return a / (1 + np.exp(-a))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_experts_add_up_what_each_chosen_one_gives(interleaved, split):
    rng = np.random.default_rng(3)
    gates, ups = [mxfp4(32, 64, 10 + e) for e in range(3)], [mxfp4(32, 64, 20 + e) for e in range(3)]
    downs = [mxfp4(64, 32, 30 + e) for e in range(3)]
    biases = torch.tensor(rng.normal(size=(3, 2, 32)).astype(np.float32))

    def fused(a, b):
        rows = np.stack([a, b], axis=1).reshape(64, -1) if interleaved else np.concatenate([a, b])
        return np.ascontiguousarray(rows)

    experts = []
    for g, u, d, b in zip(gates, ups, downs, biases, strict=True):
        if split:
            experts.append(Expert((Packed(g), Packed(u)), Packed(d), (b[0], b[1])))
        else:
            both = PackedTensor(g.format, fused(g.codes, u.codes), fused(g.block_scales, u.block_scales))
            bias = torch.tensor(fused(b[0][:, None].numpy(), b[1][:, None].numpy())[:, 0])
            experts.append(Expert(Packed(both), Packed(d), bias))
    module = Nvfp4Experts(Original(interleaved), experts)
    assert list(module.parameters()) == []
    x = rng.normal(size=(5, 64)).astype(np.float32)
    index = torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0], [2, 3]])  # 3: a masked slot
    weight = torch.tensor(rng.random((5, 2)).astype(np.float32))
    expected = np.zeros((5, 64))
    for token in range(5):
        for slot in range(2):
            e = int(index[token, slot])
            if e < 3:
                gate = values(gates[e]) @ x[token] + biases[e, 0].numpy()
                up = values(ups[e]) @ x[token] + biases[e, 1].numpy()
                expected[token] += float(weight[token, slot]) * (values(downs[e]) @ (silu(gate) * up))
    y = module(torch.tensor(x), index, weight)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(module(torch.tensor(x)[None], index, weight)[0], y)


def test_an_expert_that_nobody_chose_is_not_computed():
    broken = SimpleNamespace(decoded=lambda: pytest.fail("computed"), shape=(1, 1))
    good = Expert(torch.ones(4, 2), torch.ones(2, 2))
    module = Nvfp4Experts(Original(False), [good, Expert(broken, broken)])
    y = module(torch.ones(1, 2), torch.tensor([[0]]), torch.ones(1, 1))
    assert torch.isfinite(y).all()
