"""The oracle on torch tensors is the oracle: equal bits, for every code, every scale and stacks of weights."""

import numpy as np
import pytest
import torch
from requant.kernels import bounds, reference, reference_torch
from requant.kernels.formats import NumberFormat

NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
def test_every_code_under_every_scale_is_the_references(fmt):
    scales = np.repeat(np.arange(256, dtype=np.uint8), 4)[:, None]
    codes = np.random.default_rng(0).integers(0, 256, (1024, fmt.group // 2), dtype=np.uint8)
    assert len(np.unique(codes)) == 256
    scale = 0.37 if fmt is NVFP4 else None
    exact = (
        reference.dequantize_nvfp4(codes, scales, 0.37) if fmt is NVFP4 else reference.dequantize_mxfp4(codes, scales)
    )
    found = reference_torch.dequantize(fmt, torch.from_numpy(codes), torch.from_numpy(scales), scale).numpy()
    np.testing.assert_allclose(found, exact, rtol=2**-50, atol=0)  # code * scale * global in another order
    finite = np.isfinite(exact)
    assert (np.isnan(found) == ~finite).all()
    assert (~finite).any()


def test_each_weight_of_a_stack_has_its_own_global_scale():
    codes = torch.full((3, 2, 16), 0x22, dtype=torch.uint8)
    scales = torch.full((3, 2, 2), 0x38, dtype=torch.uint8)
    found = reference_torch.dequantize(NVFP4, codes, scales, torch.tensor([1.0, 2.0, 0.5]))
    assert [found[e].unique().tolist() for e in range(3)] == [[1.0], [2.0], [0.5]]
    rows = reference_torch.dequantize(NVFP4, codes[0], scales[0], torch.tensor([1.0, 4.0]))
    assert [row.unique().tolist() for row in rows] == [[1.0], [4.0]], "activations: each row"
    assert reference_torch.dequantize(MXFP4, codes, scales[..., :1] + 72).unique().tolist() == [2.0]  # byte 128


def test_products_and_their_bound_are_those_of_bounds():
    x, w = torch.tensor([[1.0, -2.0], [0.5, 4.0]]).bfloat16(), torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    exact, terms = reference_torch.products(x, w)
    assert (exact.tolist(), terms.tolist()) == ([[1.0], [5.5]], [[5.0], [5.5]])
    y = exact + torch.tensor([[0.0], [0.03]], dtype=torch.float64)
    expected = 0.03 / (bounds.OF_RESULT * 5.5 + bounds.OF_TERMS * 5.5)
    assert reference_torch.excess(y, exact, terms) == pytest.approx(expected, rel=1e-6)
    assert reference_torch.excess(torch.full_like(y, torch.nan).bfloat16(), exact, terms) == float("inf")
