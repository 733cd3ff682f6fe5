"""W4A4 on a GPU. Where there is no SM120, the same kernels run with the FP4 instruction emulated.

Three oracles: the bit model (mma_model) for whole tiles, exactly; float64 of the quantized operands for whole layers,
under the bound of kernels/bounds.py; the CPU encoders for the activation quantizer, byte for byte.
"""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from requant.kernels import mma_model, reference, w4a4
from requant.kernels.availability import KernelUnavailableError
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess, products
from requant.kernels.w4a4 import Fp4Tensor, Routing, grouped_matmul, matmul, quantize, route

pytestmark = pytest.mark.gpu

NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4
FORMATS = [NVFP4, MXFP4]
EMULATE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 12
SLICE = 256


def to_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def random_codes(rng: np.random.Generator, fmt: NumberFormat, shape: tuple[int, ...], k: int) -> list[np.ndarray]:
    codes = rng.integers(0, 256, (*shape, k // 2), dtype=np.uint8)
    low, high = (0x08, 0x7F) if fmt is NVFP4 else (110, 144)
    return [codes, rng.integers(low, high, (*shape, k // fmt.group), dtype=np.uint8)]


def operand(rng: np.random.Generator, fmt: NumberFormat, rows: int, k: int) -> Fp4Tensor:
    """Activations of random bytes with a global scale per token."""
    scale = to_gpu(np.exp2(rng.uniform(-9, 3, rows)).astype(np.float32)) if fmt is NVFP4 else None
    return Fp4Tensor(fmt, *map(to_gpu, random_codes(rng, fmt, (rows,), k)), scale)


def weight(rng: np.random.Generator, fmt: NumberFormat, shape: tuple[int, ...], k: int) -> Fp4Tensor:
    experts = shape[0] if len(shape) == 2 else 1
    scale = to_gpu(np.exp2(rng.uniform(-12, 0, experts)).astype(np.float32)) if fmt is NVFP4 else None
    return Fp4Tensor.weight(*map(to_gpu, random_codes(rng, fmt, shape, k)), scale)


def activations(rng: np.random.Generator, rows: int, k: int) -> torch.Tensor:
    """BF16 with 2^20 of range over the rows and two outlier channels."""
    x = rng.standard_normal((rows, k)) * np.exp2(rng.uniform(-10, 10, (rows, 1)))
    x[:, [k // 3, k - 1]] *= 64
    return torch.from_numpy(x).to(torch.bfloat16).cuda()


def bits(y: torch.Tensor) -> np.ndarray:
    return y.contiguous().view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32).cpu().numpy()


def times_globals(total: np.ndarray, x_global: np.ndarray, w_global: np.ndarray) -> np.ndarray:
    """The epilogue in FP32: sum * (mantissa product, half the exponent) * (the other half)."""
    mantissa_x, exponent_x = np.frexp(x_global)
    mantissa_w, exponent_w = np.frexp(w_global)
    exponent = exponent_x + exponent_w
    half = np.trunc(exponent / 2).astype(int)
    first = np.ldexp((mantissa_x * mantissa_w).astype(np.float32), half)
    return (total * first).astype(np.float32) * np.ldexp(np.float32(1), exponent - half)


def model(x: Fp4Tensor, w: Fp4Tensor, splits: int) -> np.ndarray:
    """float32 [M, N], bit for bit as the kernel: each part of K through the bit model, then added in order."""
    codes_x, scales_x, codes_w, scales_w = (t.cpu().numpy() for t in (x.codes, x.scales, w.codes, w.scales))
    slices = -(-x.k // SLICE)
    out = np.float32(0)
    for part in range(splits):
        span = (slices * part // splits * SLICE, slices * (part + 1) // splits * SLICE)
        y = mma_model.matmul(codes_x, scales_x, codes_w, scales_w, fmt=x.format, k_range=span)
        if x.global_scale is not None and w.global_scale is not None:
            y = times_globals(y, x.global_scale.cpu().numpy().reshape(-1, 1), w.global_scale.cpu().numpy())
        out = y if part == 0 else out + y
    return np.asarray(out)


def decode(t: Fp4Tensor) -> np.ndarray:
    """float64 [.., rows, K]."""
    return dequantize(t.format, t.codes, t.scales, t.global_scale).cpu().numpy()


def assert_within_bound(y: torch.Tensor, x: np.ndarray, w: np.ndarray) -> None:
    """The bound of every kernel here, elementwise; x [M, K], w [N, K] float64."""
    assert y.isfinite().all()
    assert excess(y, *products(torch.from_numpy(x).cuda(), torch.from_numpy(w).cuda())) <= 1.0


# --- the bit model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block_rows", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("m", "n", "k", "splits"),
    [
        (16, 128, 256, 1),
        (128, 128, 1024, 1),
        (37, 200, 1536, 3),  # tails of M and N
        (9, 131, 576, 1),  # K % 256 and an odd N
        (129, 65, 320, 2),
        (3, 128, 1312, 2),  # K % 64 = 32
    ],
)
def test_equals_the_bit_model(fmt: NumberFormat, block_rows: int, m: int, n: int, k: int, splits: int) -> None:
    rng = np.random.default_rng([m, n, k])
    x, w = operand(rng, fmt, m, k), weight(rng, fmt, (n,), k)
    y = matmul(x, w, out_dtype=torch.float32, splits=splits, block_rows=block_rows, emulate=EMULATE)
    np.testing.assert_array_equal(bits(y), model(x, w, splits).view(np.int32))


@pytest.mark.parametrize("k", [16, 48, 80, 272, 1328])
def test_k_that_is_no_multiple_of_32_equals_the_bit_model(k: int) -> None:
    rng = np.random.default_rng(k)
    x, w = operand(rng, NVFP4, 21, k), weight(rng, NVFP4, (77,), k)
    y = matmul(x, w, out_dtype=torch.float32, splits=1, emulate=EMULATE)
    np.testing.assert_array_equal(bits(y), model(x, w, 1).view(np.int32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_bf16_output_is_the_rounded_float32_and_repeats(fmt: NumberFormat) -> None:
    rng = np.random.default_rng(5)
    x, w = operand(rng, fmt, 20, 2048), weight(rng, fmt, (333,), 2048)
    for splits in (1, 4):
        full = matmul(x, w, out_dtype=torch.float32, splits=splits, emulate=EMULATE)
        half = [matmul(x, w, splits=splits, emulate=EMULATE) for _ in range(3)]
        for y in half:
            np.testing.assert_array_equal(bits(y), bits(full.bfloat16()))


# --- whole layers -------------------------------------------------------------------------------------------------

LAYERS = [
    ("SmolLM2-135M q", 576, 576),
    ("SmolLM2-135M gate", 1536, 576),
    ("SmolLM2-135M down", 576, 1536),
    ("DeepSeek-V4 w1", 2048, 4096),
    ("DeepSeek-V4 w2", 4096, 2048),
    ("gpt-oss down", 2880, 2880),
]


@cache
def layer(fmt: NumberFormat, n: int, k: int) -> tuple[Fp4Tensor, np.ndarray]:
    """A converted layer of normal weights, and its values."""
    w = (np.random.default_rng([n, k]).standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
    if fmt is NVFP4:
        scale = reference.nvfp4_global_scale([w])
        packed = Fp4Tensor.weight(*map(to_gpu, reference.encode_nvfp4(w, scale)), float(scale))
    else:
        packed = Fp4Tensor.weight(*map(to_gpu, reference.encode_mxfp4(w)))
    return packed, decode(packed)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("n", "k"), [row[1:] for row in LAYERS], ids=[row[0] for row in LAYERS])
@pytest.mark.parametrize("m", [1, 5, 64, 200])
def test_a_layer_is_within_the_bound_of_float64(fmt: NumberFormat, m: int, n: int, k: int) -> None:
    packed, decoded = layer(fmt, n, k)
    quantized = quantize(activations(np.random.default_rng(m), m, k), fmt, emulate=EMULATE)
    assert_within_bound(matmul(quantized, packed, emulate=EMULATE), decode(quantized), decoded)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize(
    ("experts", "top_k", "n", "k"),
    [(64, 6, 512, 1024), (8, 4, 5760 // 8, 2880), (300, 8, 136, 320)],
    ids=["DeepSeek-V4-like", "gpt-oss-like", "many small experts"],
)
def test_experts_are_within_the_bound_and_equal_the_dense_kernel(
    fmt: NumberFormat, tokens: int, experts: int, top_k: int, n: int, k: int
) -> None:
    rng = np.random.default_rng([tokens, experts])
    w, x = weight(rng, fmt, (experts, n), k), activations(rng, tokens, k)
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
    routing = route(to_gpu(ids), experts)
    options = {"out_dtype": torch.float32, "splits": 2, "block_rows": 16, "emulate": EMULATE}
    y = grouped_matmul(x, w, routing, **options)
    quantized = quantize(x, fmt, emulate=EMULATE)
    decoded_x, decoded_w = decode(quantized), decode(w)
    token, bounds = routing.token.cpu().numpy(), routing.offsets.tolist()
    checked = 0
    for expert, (first, end) in enumerate(pairwise(bounds)):
        if first == end:
            continue
        rows = token[first:end]
        assert_within_bound(y[first:end], decoded_x[rows], decoded_w[expert])
        if checked < 3:  # the same rows through the dense kernel: the same bits
            one = Fp4Tensor.weight(
                w.codes[expert].clone(),
                w.scales[expert].clone(),
                None if w.global_scale is None else w.global_scale[expert],
            )
            dense = matmul(x[to_gpu(rows).long()].contiguous(), one, **options)
            np.testing.assert_array_equal(bits(dense), bits(y[first:end]))
        checked += 1
    assert bounds[-1] == tokens * top_k
    # BF16, tiles and splits left to choose; then the down projection's form, rows already in the order of the routing
    for out in (
        grouped_matmul(x, w, routing, emulate=EMULATE),
        grouped_matmul(x[routing.token.long()].contiguous(), w, routing, routed=True, emulate=EMULATE),
    ):
        assert (out.double() - y.double()).abs().max() <= 2.0**-8 * y.abs().max().double()
        close = (out.double() - y.double()).abs() <= 2.0**-8 * y.double().abs() + 2.0**-14 * y.abs().max().double()
        assert close.all()


def test_an_expert_with_more_rows_than_a_tile() -> None:
    rng = np.random.default_rng(11)
    w, x = weight(rng, NVFP4, (3, 130), 512), activations(rng, 300, 512)
    ids = np.where(np.arange(300) % 10 == 0, 0, 2)[:, None]
    y = grouped_matmul(x, w, route(to_gpu(ids), 3), emulate=EMULATE)
    order = np.argsort(ids[:, 0], kind="stable")
    quantized, decoded = decode(quantize(x, NVFP4, emulate=EMULATE)), decode(w)
    assert_within_bound(y[:30], quantized[order[:30]], decoded[0])
    assert_within_bound(y[30:], quantized[order[30:]], decoded[2])


# --- activations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [16, 576, 2880, 4096, 7168])
def test_quantized_activations_equal_the_oracle_byte_for_byte(k: int) -> None:
    rng = np.random.default_rng(k)
    x = activations(rng, 33, k)
    x[3] = 0
    x[5, :16] = -0.0
    values = x.float().cpu().numpy()
    token = quantize(x, NVFP4, emulate=EMULATE)
    whole = quantize(x, NVFP4, granularity="tensor", emulate=EMULATE)
    static = quantize(x, NVFP4, input_scale=0.037, emulate=EMULATE)
    amax = np.abs(values).max(axis=1)
    scales = np.where(amax > 0, amax / np.float32(2688), np.float32(1))
    assert token.global_scale is not None
    np.testing.assert_array_equal(token.global_scale.cpu().numpy(), scales)
    assert whole.global_scale is not None
    assert whole.global_scale.tolist() == [reference.nvfp4_global_scale([values])]
    for row in range(33):
        expected = reference.encode_nvfp4(values[row : row + 1], scales[row])
        np.testing.assert_array_equal(token.codes[row].cpu().numpy(), expected[0][0])
        np.testing.assert_array_equal(token.scales[row].cpu().numpy(), expected[1][0])
    for got, scale in ((whole, reference.nvfp4_global_scale([values])), (static, np.float32(0.037))):
        expected = reference.encode_nvfp4(values, scale)
        np.testing.assert_array_equal(got.codes.cpu().numpy(), expected[0])
        np.testing.assert_array_equal(got.scales.cpu().numpy(), expected[1])


@pytest.mark.parametrize("k", [32, 2880, 4096])
def test_quantized_mxfp4_activations_equal_the_oracle_byte_for_byte(k: int) -> None:
    x = activations(np.random.default_rng(k), 33, k)
    x[3] = 0
    got, expected = quantize(x, MXFP4, emulate=EMULATE), reference.encode_mxfp4(x.float().cpu().numpy())
    np.testing.assert_array_equal(got.codes.cpu().numpy(), expected[0])
    np.testing.assert_array_equal(got.scales.cpu().numpy(), expected[1])


# --- numbers that are none ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("granularity", ["token", "tensor"])
def test_a_bad_activation_spoils_its_row_alone(fmt: NumberFormat, bad: float, granularity: str) -> None:
    rng = np.random.default_rng(2)
    x, w = activations(rng, 40, 512), weight(rng, fmt, (140,), 512)
    clean = matmul(x, w, granularity=granularity, emulate=EMULATE)
    small = int(x.abs().amax(dim=1).argmin())  # not the row that sets the tensor's scale
    x[small, 100] = bad
    y = matmul(x, w, granularity=granularity, emulate=EMULATE)
    assert y[small].isnan().all()
    others = [row for row in range(40) if row != small]
    np.testing.assert_array_equal(bits(y[others]), bits(clean[others]))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_nan_block_scale_spoils_its_column_alone(fmt: NumberFormat) -> None:
    rng = np.random.default_rng(4)
    x, w = activations(rng, 20, 576), weight(rng, fmt, (140,), 576)
    clean = matmul(x, w, splits=2, emulate=EMULATE)
    w.scales[77, -1] = 0x7F if fmt is NVFP4 else 0xFF
    y = matmul(x, w, splits=2, emulate=EMULATE)
    assert y[:, 77].isnan().all()
    others = [column for column in range(140) if column != 77]
    np.testing.assert_array_equal(bits(y[:, others]), bits(clean[:, others]))


def test_extreme_global_scales_leave_the_range_only_where_the_result_does() -> None:
    rng = np.random.default_rng(6)
    codes, scales = map(to_gpu, random_codes(rng, NVFP4, (130,), 512))
    reference_w = Fp4Tensor.weight(codes, scales, 2.0**-4)
    x = operand(rng, NVFP4, 16, 512)
    assert x.global_scale is not None
    plain = matmul(x, reference_w, out_dtype=torch.float32, emulate=EMULATE)
    for shift in (100, -100):  # sum * 2^100 * 2^-100, whichever comes first
        moved = Fp4Tensor(NVFP4, x.codes, x.scales, x.global_scale * 2.0**shift)
        y = matmul(
            moved, Fp4Tensor.weight(codes, scales, 2.0 ** (-4 - shift)), out_dtype=torch.float32, emulate=EMULATE
        )
        np.testing.assert_array_equal(bits(y), bits(plain))


def test_no_rows_no_columns_lost() -> None:
    rng = np.random.default_rng(7)
    w = weight(rng, NVFP4, (8,), 64)
    empty = matmul(torch.zeros((0, 64), dtype=torch.bfloat16, device="cuda"), w, emulate=EMULATE)
    assert (empty.shape, empty.dtype) == ((0, 8), torch.bfloat16)
    experts = weight(rng, NVFP4, (2, 8), 64)
    nothing = route(torch.zeros((0, 2), dtype=torch.int64, device="cuda"), 2)
    x = torch.zeros((0, 64), dtype=torch.bfloat16, device="cuda")
    assert grouped_matmul(x, experts, nothing, emulate=EMULATE).shape == (0, 8)


def test_routing_of_other_tokens_or_another_device_is_refused() -> None:
    rng = np.random.default_rng(8)
    w, x = weight(rng, NVFP4, (2, 8), 64), activations(rng, 3, 64)
    routing = route(torch.zeros((4, 1), dtype=torch.int64, device="cuda"), 2)
    with pytest.raises(ValueError, match="x has 3 tokens, the routing 4"):
        grouped_matmul(x, w, routing, emulate=EMULATE)
    with pytest.raises(ValueError, match="x has 3 rows, the routing 4"):
        grouped_matmul(x, w, routing, routed=True, emulate=EMULATE)
    on_cpu = Routing(*(t.cpu() for t in (routing.token, routing.offsets, routing.order)), 4)
    with pytest.raises(ValueError, match="the routing is on cpu, x on cuda"):
        grouped_matmul(x, w, on_cpu, emulate=EMULATE)
    with pytest.raises(ValueError, match="x is on cpu, the weight on cuda"):
        matmul(x.cpu(), weight(rng, NVFP4, (8,), 64), emulate=EMULATE)


def test_emulation_is_never_chosen_silently() -> None:
    w = weight(np.random.default_rng(9), NVFP4, (8,), 64)
    x = torch.ones((2, 64), dtype=torch.bfloat16, device="cuda")
    if EMULATE:
        with pytest.raises(KernelUnavailableError, match="has no warp-level FP4 mma"):
            matmul(x, w)
        assert w4a4.availability().state != "runs"
    else:
        np.testing.assert_array_equal(bits(matmul(x, w)), bits(matmul(x, w, emulate=True)))


def test_runs_inside_a_cuda_graph() -> None:
    rng = np.random.default_rng(10)
    w, x = weight(rng, NVFP4, (256,), 1024), activations(rng, 8, 1024)
    eager = matmul(x, w, emulate=EMULATE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = matmul(x, w, emulate=EMULATE)
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(bits(y), bits(eager))
