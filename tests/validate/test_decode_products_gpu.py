"""BF16 products whose K several blocks share: all sums are added up, and the counters are fit for the next launch."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("m", "n", "k"), [(8, 5120, 2880), (16, 2880, 4096), (3, 640, 2880), (33, 1000, 2888), (64, 96, 520)]
)
def test_a_product_that_splits_k_is_float64_but_for_one_rounding_and_repeats_its_bits(m, n, k):
    import torch
    from requant.kernels.reference_torch import excess, products
    from requant.validate.decode_products import _dense_candidates

    torch.manual_seed(m)
    x, w = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(n, k, device="cuda").bfloat16()
    y = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    exact = products(x, w.double())
    splitting = {name: run for name, run in _dense_candidates(m, n, k, device=x.device, pdl=True) if "K in" in name}
    assert {name.endswith("in turn") for name in splitting} == {False, True}
    for name, run in splitting.items():
        seen = []
        for _ in range(4):  # the counters of one launch serve the next
            y.fill_(torch.nan)
            run(x, w, y, x)
            seen.append(y.clone())
        assert excess(seen[0], *exact) <= 1, name
        assert all(torch.equal(seen[0], other) for other in seen[1:]), name
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                run(x, w, y, x)
        for _ in range(3):
            y.fill_(torch.nan)
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, seen[0]), name
