"""A layer's experts on a GPU, from the router's choice to their product: the list of slots is the one its kernel reads.

With nvcc the CUDA kernel multiplies, and few slots are sorted by the router's own kernel; without it Triton does, whose
list is another. Both against float64, at every size that takes another way.
"""

from types import SimpleNamespace

import pytest
import torch
from requant.kernels import w4a16_library
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.validate.decode_engine import make_glue
from requant.validate.decode_glue import Added
from requant.validate.decode_model import Matrix, Router
from requant.validate.decode_products import Products

pytestmark = pytest.mark.gpu

WIDTH, EXPERTS, ROWS, TOP_K = 160, 9, 56, 4


class Weights:
    """NVFP4 experts [EXPERTS, ROWS, WIDTH], and their values in float64."""

    def __init__(self):
        codes = torch.randint(0, 256, (EXPERTS, ROWS, WIDTH // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(0x28, 0x48, (EXPERTS, ROWS, WIDTH // 16), dtype=torch.uint8, device="cuda")
        scale = torch.rand(EXPERTS, device="cuda") + 0.5
        self.matrix = Matrix(NumberFormat.NVFP4, 0, packed=Fp4Tensor.weight(codes, scales, scale))
        self.exact = dequantize(NumberFormat.NVFP4, codes, scales, scale)


@pytest.mark.parametrize("nvcc", [True, False])
@pytest.mark.parametrize(
    "tokens", [1, 3, 32, 40, 600]
)  # 128 slots: the last that the router's kernel sorts; 2400 are multiplied in BF16
def test_every_token_meets_the_experts_that_its_router_chose(monkeypatch, nvcc, tokens):
    if not nvcc:
        monkeypatch.setattr(w4a16_library, "find_nvcc", lambda: None)
        monkeypatch.setattr(w4a16_library, "given_library", lambda: None)
    torch.manual_seed(tokens)
    weights = Weights()
    decoder = SimpleNamespace(embedding=SimpleNamespace(is_cuda=True), matrices=lambda: ())
    glue, products = make_glue(decoder), Products(decoder)
    h, y = (torch.randn(tokens, *shape, device="cuda") for shape in ((WIDTH,), (1, WIDTH)))
    router = Router(torch.randn(EXPERTS, WIDTH, device="cuda").bfloat16(), TOP_K)
    norm = torch.ones(WIDTH, device="cuda").bfloat16()
    chosen = glue.choose(h, Added(y.bfloat16()), norm, 1e-5, router, None, route=True)
    assert chosen.routing.triton is not nvcc
    logits = chosen.x.double() @ router.weight.double().T
    best = logits.topk(TOP_K).values
    assert torch.allclose(logits.gather(1, chosen.ids.long()), best, atol=1e-3 * float(best.abs().max()))
    out = products.grouped(chosen.x, weights.matrix, chosen.ids, chosen.routing)
    x, mine = chosen.x.double(), weights.exact[chosen.ids.long()]
    if not products.routes(weights.matrix, tokens * TOP_K):
        mine = mine.bfloat16().double()
    exact, terms = (torch.einsum("tk,tjnk->tjn", *pair) for pair in ((x, mine), (x.abs(), mine.abs())))
    assert excess(out, exact, terms) <= 1.0
    assert (exact.abs() > 0).all(), "an output that is nothing would show nothing"
