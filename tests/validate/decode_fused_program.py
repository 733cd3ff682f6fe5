"""The fused kernels against the plain glue: `cpu` in FP32 under Triton's interpreter, `cuda` in BF16.

Run by test_decode.py in a Python of its own (the interpreter is chosen by the environment before Triton is imported).
Further arguments choose among norms, gates, attention and products: Triton compiles those of several runs at a time.
Prints name and largest error of each, as a part of the largest number. NO_CLUSTER leaves out what a cluster runs.
"""

import os
import sys

import torch
from requant.kernels import decode_cuda, w4a16
from requant.kernels.formats import NumberFormat
from requant.kernels.triton import bf16
from requant.kernels.triton.dequantize import to_bf16
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.kernels.w4a16_library import tile_tokens
from requant.validate.decode_fused import FusedGlue
from requant.validate.decode_glue import Added, PlainGlue
from requant.validate.decode_load import as_bf16
from requant.validate.decode_model import Attention, Gate, Matrix, Router

DEVICE = sys.argv[1]
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
torch.set_default_device(DEVICE)
PDL = DEVICE != "cpu"
LAUNCH = {"PDL": True, "launch_pdl": True} if PDL else {"PDL": False}
if os.environ.get("NO_CLUSTER"):  # tests/gpu/cluster_race.cu says why
    decode_cuda.chooses = lambda *_: False
FUSED, PLAIN = FusedGlue(pdl=PDL, device=DEVICE), PlainGlue()
TOKENS, WIDTH, EXPERTS, SLOTS = 3, 96, 5, 2


def say(name, ours, exact):
    worst = max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max()) for a, b in zip(ours, exact, strict=True)
    )
    print(name, worst)


def randn(*shape):
    """What the model holds in BF16 on a GPU."""
    return torch.randn(shape).to(DTYPE)


def norms():
    h, norm = torch.randn(TOKENS, WIDTH), randn(WIDTH)
    y, weights = randn(TOKENS, SLOTS, WIDTH), torch.rand(TOKENS, SLOTS)
    ids, bias = torch.randint(0, EXPERTS, (TOKENS, SLOTS)).int(), randn(EXPERTS, WIDTH)
    one = y[:, :1].contiguous()
    for added in (None, Added(y, weights, ids, bias), Added(y, weights, ids), Added(one, bias=bias[0]), Added(one)):
        say("add_norm", FUSED.add_norm(h, added, norm, 1e-5), PLAIN.add_norm(h, added, norm, 1e-5))
    tokens = torch.tensor([4, 0, 2])
    say("embed", FUSED.embed(bias, tokens, norm, 1e-5), PLAIN.embed(bias, tokens, norm, 1e-5))
    for tokens, top_k, normalize, experts in (
        (3, 3, True, 5), (3, 2, False, 5), (7, 4, True, 5), (16, 4, True, 5), (1, 4, True, 32), (2, 8, False, 100)
    ):  # fmt: skip
        h, y = torch.randn(tokens, WIDTH), randn(tokens, 1, WIDTH)
        biased = tokens != 7
        added = Added(y, bias=bias[0] if biased else None)
        router = Router(randn(experts, WIDTH) / WIDTH**0.5, top_k, randn(experts) if biased else None, normalize)
        exact = PLAIN.choose(h, added, norm, 1e-5, router, None, route=False)
        ours = FUSED.choose(h, added, norm, 1e-5, router, None, route=True)
        say("choose", [ours.h, ours.x, ours.ids, ours.weights], [exact.h, exact.x, exact.ids, exact.weights])
        expected = routed(exact.ids, experts)
        filled = [at for at, value in enumerate(expected) if value is not None]
        assert [ours.routing.data.tolist()[at] for at in filled] == [expected[at] for at in filled]
        kept, w4a16.route_experts = w4a16.route_experts, lambda ids, experts: (ids.tolist(), experts)
        left = FusedGlue(pdl=PDL, device=DEVICE, routes=False).choose(h, added, norm, 1e-5, router, None, route=True)
        w4a16.route_experts = kept
        assert left.routing == (exact.ids.tolist(), experts), "Triton's product reads a list of its own"
        again = FUSED.choose(h, added, norm, 1e-5, router, torch.zeros_like(ours.ids), route=False)
        say("choose", [again.ids], [exact.ids])
        h[0] = torch.nan  # its experts are some, each once; the others' are as before
        lost = FUSED.choose(h, added, norm, 1e-5, router, None, route=False).ids.tolist()
        assert sorted(lost[0]) == list(range(top_k))
        assert lost[1:] == exact.ids.tolist()[1:]


def routed(ids, experts):
    """The list that csrc/w4a16_routing.cuh describes; None where it says nothing."""
    slots, per_token = ids.numel(), ids.shape[1]
    most = tile_tokens(slots, experts)
    tiles = min(slots, experts + slots // most)
    order = sorted(range(slots), key=lambda slot: int(ids.flatten()[slot]))
    found = []
    for expert in range(experts):
        mine = [at for at, slot in enumerate(order) if int(ids.flatten()[slot]) == expert]
        found += [[expert, mine[i], min(most, len(mine) - i), order[mine[i]]] for i in range(0, len(mine), most)]
    listed = [number for tile in found for number in tile] + [None] * (4 * (tiles - len(found)))
    return [len(found), slots, None, None, *listed, *order, *(slot // per_token for slot in order)]


def picks():
    """The largest of each row, the first of equal ones; NaN nowhere, or everywhere."""
    for vocabulary in (5, 1000):
        logits = torch.randn(4, vocabulary)
        logits[0] = torch.tensor(1.0)
        logits[1, vocabulary // 2 :] = 7.0
        for dtype in (torch.float32, torch.bfloat16):
            found = []
            for glue in (FUSED, PLAIN):
                tokens, positions = torch.full((4,), 99), torch.arange(4, dtype=torch.int32)
                glue.pick(logits.to(dtype), tokens, positions)
                found.append([tokens, positions + 1])
            assert found[0][0].tolist()[:2] == [0, vocabulary // 2]
            say("pick", *found)
    tokens = torch.zeros(1, dtype=torch.int64)
    FUSED.pick(torch.full((1, 70), torch.nan), tokens, torch.zeros(1, dtype=torch.int32))
    assert 0 <= tokens.item() < 70


def gates():
    ids = torch.randint(0, EXPERTS, (TOKENS, SLOTS)).int()
    both = randn(TOKENS, SLOTS, 160) * 4
    for gate, bias in ((Gate(True, 7.0, 1.702), randn(EXPERTS, 160)), (Gate(), None)):
        say("gate", [FUSED.gate(both, gate, ids, bias)], [PLAIN.gate(both, gate, ids, bias)])
    bias = randn(160)
    say("gate", [FUSED.gate(both, Gate(), None, bias)], [PLAIN.gate(both, Gate(), None, bias)])


def attention():
    none = Matrix(NumberFormat.BF16, 0, torch.zeros(1, 1))
    for heads, kv, dim, window, family in ((8, 1, 32, 0, "gpt-oss"), (6, 2, 32, 16, "qwen3"), (9, 3, 64, 0, "llama")):
        some = {"qkv_bias": randn((heads + 2 * kv) * dim), "sinks": randn(heads)} if family == "gpt-oss" else {}
        if family == "qwen3":
            some = {"q_norm": randn(dim), "k_norm": randn(dim)}
        a = Attention(heads, kv, dim, dim**-0.5, none, none, window=window, **some)
        caches = [randn(TOKENS, kv, 200, dim) for _ in range(2)]
        theirs = [cache.clone() for cache in caches]
        positions, angles = torch.tensor([0, 77, 199]).int(), torch.randn(200, dim // 2)
        qkv, tables = randn(TOKENS, (heads + 2 * kv) * dim), (angles.cos(), angles.sin())
        ours = FUSED.attend(qkv, a, tuple(caches), positions, tables, 1e-5)
        exact = PLAIN.attend(qkv, a, tuple(theirs), positions, tables, 1e-5)
        say(f"attend {family}", [ours, *caches], [exact, *theirs])
        assert torch.equal(ours, FUSED.attend(qkv, a, tuple(caches), positions, tables, 1e-5)), "the same bits again"
        if dim == 64:  # one stream, which a GPU may do in CUDA
            one = [cache[1:2].clone() for cache in theirs]
            alone = FUSED.attend(qkv[1:2], a, tuple(one), positions[1:2], tables, 1e-5)
            say(f"attend {family}", [alone, *one], [exact[1:2], *(cache[1:2] for cache in theirs)])


def prompts():
    """Lengths beside the blocks of 64, in the second of three streams."""
    none = Matrix(NumberFormat.BF16, 0, torch.zeros(1, 1))
    for heads, kv, dim, window, family in ((8, 2, 32, 40, "gpt-oss"), (6, 2, 32, 0, "qwen3"), (3, 3, 64, 16, "llama")):
        some = {"qkv_bias": randn((heads + 2 * kv) * dim), "sinks": randn(heads)} if family == "gpt-oss" else {}
        if family == "qwen3":
            some = {"q_norm": randn(dim), "k_norm": randn(dim)}
        a = Attention(heads, kv, dim, dim**-0.5, none, none, window=window, **some)
        for count in (1, 64, 150):
            caches = [randn(3, kv, 200, dim) for _ in range(2)]
            theirs = [cache.clone() for cache in caches]
            angles, stream = torch.randn(200, dim // 2), torch.tensor([1])
            qkv, tables = randn(count, (heads + 2 * kv) * dim), (angles.cos(), angles.sin())
            ours = FUSED.attend_prompt(qkv, a, tuple(caches), stream, tables, 1e-5)
            exact = PLAIN.attend_prompt(qkv, a, tuple(theirs), stream, tables, 1e-5)
            say(f"prompt {family}", [ours, *caches], [exact, *theirs])


def decoded():
    """FP4 to BF16, E4M3's subnormals too: to the bit under a power of two, else within one rounding."""
    for fmt in NumberFormat.NVFP4, NumberFormat.MXFP4:
        for lead in ((), (3,)):
            codes = torch.randint(0, 256, (*lead, 24, 48), dtype=torch.uint8)
            low, high = (1, 120) if fmt is NumberFormat.NVFP4 else (100, 140)
            scales = torch.randint(low, high, (*lead, 24, 96 // fmt.group), dtype=torch.uint8)
            whole = torch.tensor([2.0**-7, 1.0, 0.3][: lead[0] if lead else 1])
            packed = Fp4Tensor(fmt, codes, scales, whole if fmt is NumberFormat.NVFP4 else None)
            ours, exact = to_bf16(packed).float(), as_bf16(Matrix(fmt, 0, packed=packed)).plain.float()
            powers = slice(0, 2 if lead else None) if fmt is NumberFormat.NVFP4 else slice(None)
            say("decoded", [ours[powers]], [exact[powers]])
            assert ((ours - exact).abs() <= 2**-7 * exact.abs()).all()
    largest = torch.tensor([[253, 254]], dtype=torch.uint8)  # 2^126, 2^127: of both groups the codes 0, 1 (0.5), 2 (1)
    codes = torch.tensor([0x10, 0x22] * 16, dtype=torch.uint8).reshape(1, 32)
    got = to_bf16(Fp4Tensor(NumberFormat.MXFP4, codes, largest, None)).float()
    assert got[0, :4].tolist() == [0.0, 2.0**125, 2.0**126, 2.0**126]
    assert got[0, 32:36].tolist() == [0.0, 2.0**126, 2.0**127, 2.0**127]


def products():
    x, w = randn(5, 100), randn(33, 100)
    y = torch.full((5, 33), torch.nan, dtype=DTYPE)
    for splits in (1, 3):  # 3: two blocks of 32, and of the last one four
        y.fill_(torch.nan)
        part, counters = torch.full((splits, 5, 33), torch.nan), torch.zeros(3, dtype=torch.int32)
        bf16.skinny[(3, 1, splits)](
            x, w, y, part, counters, 5, 33, 100, BLOCK_N=16, BLOCK_K=32, BLOCK_M=16, EVEN=False, SPLITS=splits,
            STAGES=2, **LAUNCH,
        )  # fmt: skip
        say("skinny", [y], [x @ w.T])
        assert not counters.any()
    for block, tail in (
        (64, 0),
        (64, 64),
        (32, 32),
        (128, 0),
    ):  # a loop; all at once; some and a loop; all in one block
        y.fill_(torch.nan)
        bf16.vector[(9,)](x, w, y, 33, K=100, BLOCK_N=4, BLOCK_K=block, TAIL=tail, **LAUNCH)
        say("vector", [y[:1]], [x[:1] @ w.T])
    stack, ids = randn(4, 33, 100), torch.randint(0, 4, (20, 2)).int()
    for per_slot in (False, True):
        x = randn(20, 2, 100) if per_slot else randn(20, 100)
        y = torch.full((20, 2, 33), torch.nan, dtype=DTYPE)
        bf16.grouped[(3, 4)](
            x, stack, ids, y, 40, 33, 100, TOP_K=2, PER_SLOT=per_slot, SLOTS=64, BLOCK_N=16, BLOCK_K=32, STAGES=2,
            **LAUNCH,
        )  # fmt: skip
        rows = x if per_slot else x[:, None].expand(20, 2, 100)
        say("grouped", [y], [torch.einsum("tjk,tjnk->tjn", rows, stack[ids.long()])])


PARTS = {
    "norms": norms,
    "picks": picks,
    "gates": gates,
    "attention": attention,
    "prompts": prompts,
    "decoded": decoded,
    "products": products,
}
for part in sys.argv[2:] or PARTS:
    torch.manual_seed(0)
    PARTS[part]()
