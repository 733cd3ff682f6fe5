"""MXFP4 -> NVFP4 and BF16 -> NVFP4 on the GPU hold the CPU's bytes.

Without a GPU: the rules compiled for the host against the CPU loops, the machine code, and what is refused. With one
(`-m gpu`): the kernels themselves, and their speed against a copy.
"""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from requant.kernels import cuda_build, gpu_quantize, reference, repack_jit
from requant.kernels.availability import KernelUnavailableError, State
from requant.kernels.cpu_dequant import dequantize_fp8_block
from requant.kernels.quantize import NonFiniteError, amax, bf16_to_nvfp4, nvfp4_global_scale
from requant.kernels.repack import repack as cpu_repack

ROOT = Path(__file__).parents[2]
NVCC, CUOBJDUMP = cuda_build.find_cuda_tool("nvcc"), cuda_build.find_cuda_tool("cuobjdump")
SUBSETS = [[0, 8], [0, 1, 9], [2, 3, 0, 10], [4, 5, 6, 7], [6], [4, 6, 2, 0], list(range(16)), [5, 7, 13], [1, 2, 4]]
"""Codes a half may hold: all dead, not halvable, halvable once, twice, three times, doublable, anything."""


def random_mxfp4(rng, rows, blocks, low, high):
    """codes [rows, blocks * 16], E8M0 bytes [rows, blocks]; each half draws from one of SUBSETS."""
    chosen = [SUBSETS[i] for i in rng.integers(0, len(SUBSETS), rows * blocks * 2)]
    codes = np.concatenate([rng.choice(subset, 16) for subset in chosen]).astype(np.uint8).reshape(rows, -1)
    return reference.pack_nibbles(codes), rng.integers(low, high + 1, (rows, blocks)).astype(np.uint8)


def random_bf16(rng, rows, k, spread):
    """BF16 bits with exponents over 2^spread from block to block, both zeros, both signs."""
    x = rng.standard_normal((rows, k // 16, 16)) * np.exp2(rng.uniform(-spread / 2, spread / 2, (rows, k // 16, 1)))
    bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(rows, k)
    bits[rng.random(bits.shape) < 0.03] = 0
    bits[rng.random(bits.shape) < 0.03] = 0x8000
    return bits


def values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def cpu_nvfp4(bits, global_scale):
    codes = np.zeros((bits.shape[0], bits.shape[1] // 2), np.uint8)
    scales = np.zeros((bits.shape[0], bits.shape[1] // 16), np.uint8)
    bf16_to_nvfp4(bits, np.float32(global_scale), codes, scales)
    return codes, scales


# --- the rules, on the host -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is part of the development set-up"
    target = tmp_path_factory.mktemp("gpu_quantize") / "gpu_quantize_host.so"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined"]
    flags += ["-fno-sanitize-recover", "-fno-sanitize=float-divide-by-zero"]
    source = Path(__file__).with_name("gpu_quantize_host.cpp")
    command = [compiler, *flags, "-shared", "-fPIC", f"-I{ROOT / 'kernels' / 'csrc'}", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("m", [-135, -14, 0, 5, 110])
def test_step_2_on_the_host_equals_the_cpu_loops(host, m):
    rng = np.random.default_rng(abs(m))
    codes, scales = random_mxfp4(rng, 4000, 1, max(m + 127 - 20, 0), min(m + 127 + 8, 254))
    got = np.zeros_like(codes), np.zeros((4000, 2), np.uint8), np.zeros(4, np.int64)
    host.host_repack(4000, pointer(codes), pointer(scales), m, *map(pointer, got))
    codes_expected, scales_expected = np.empty_like(codes), np.empty((4000, 2), np.uint8)
    counts = np.zeros(4, np.int64)
    repack_jit.repack_tile(codes, scales, m, codes_expected, scales_expected, counts)
    np.testing.assert_array_equal(got[0], codes_expected)
    np.testing.assert_array_equal(got[1], scales_expected)
    assert got[2].tolist() == [*counts[1:], 0]
    assert (counts > 0).all() or m == -135, "the case must reach every way"


def test_doubling_into_the_range_and_what_cannot_be_doubled(host):
    """p = 9, 10, 11 double once, twice, three times; codes that do not double are reported, not clamped."""
    halves = np.array([[0x11] * 16, [0x22] * 16, [0x77] * 16], np.uint8)
    scales, counts = np.full((3, 1), 127 + 10, np.uint8), np.zeros(4, np.int64)
    out = np.zeros_like(halves), np.zeros((3, 2), np.uint8)
    host.host_repack(3, pointer(halves), pointer(scales), 0, *map(pointer, out), pointer(counts))
    assert out[0][:2, 0].tolist() == [0x44, 0x66]  # .5 * 4 = 2, 1 * 4 = 4
    assert out[1][:2].tolist() == [[0x78, 0x78]] * 2
    assert counts.tolist() == [4, 0, 0, 2]


def test_the_limits_equal_the_tables_for_every_pair_of_codes(host):
    words = np.array([int(f"{a:x}{b:x}" * 8, 16) for a in range(16) for b in range(16)], np.uint64)
    found = np.zeros((len(words), 3), np.int32)
    host.host_limits(len(words), pointer(words), pointer(found))
    halvings, doublings = (99, 0, 1, 0, 2, 1, 3, 2), (99, 3, 2, 2, 1, 1, 0, 0)
    expected = []
    for word in range(256):
        magnitudes = {word >> 4 & 7, word & 7} - {0}
        times = [min((table[q] for q in magnitudes), default=0) for table in (halvings, doublings)]
        expected.append([*times, int(bool(magnitudes))])
    assert found.tolist() == expected


def host_floats(host, kind, w, blocks_per_row, grid, block, across, row, scale):
    """Through load_values and encode_nvfp4_values: codes, scales, and amax as a float."""
    blocks = w.size // 16
    codes, scales = np.zeros((blocks, 8), np.uint8), np.zeros(blocks, np.uint8)
    amax = np.zeros(1, np.uint32)
    host.host_float_nvfp4(
        kind, pointer(w), blocks, blocks_per_row, pointer(grid), *block, across, row, ctypes.c_float(scale),
        *map(pointer, (codes, scales, amax)),
    )  # fmt: skip
    return codes.reshape(w.shape[0], -1), scales.reshape(w.shape[0], -1), float(amax.view(np.float32)[0])


@pytest.mark.parametrize("spread", [2, 20, 60])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_f16_and_f32_on_the_host_equal_the_cpu_loops(host, dtype, spread):
    rng = np.random.default_rng(spread)
    w = rng.standard_normal((300, 20, 16)) * np.exp2(rng.uniform(-spread / 2, spread / 4, (300, 20, 1)))
    w = np.clip(w, -60000, 60000).astype(dtype).reshape(300, 320)
    w[5, :16], w[6, 3] = 0, -0.0
    scale = nvfp4_global_scale(amax(w))
    got = host_floats(host, int(dtype is np.float32), w, 20, np.zeros(1, np.float32), (0, 0), 0, 0, scale)
    codes, scales = np.zeros((300, 160), np.uint8), np.zeros((300, 20), np.uint8)
    bf16_to_nvfp4(w, scale, codes, scales)
    assert got[2] == amax(w)
    np.testing.assert_array_equal(got[1], scales)
    np.testing.assert_array_equal(got[0], codes)


@pytest.mark.parametrize(
    ("rows", "k", "block", "first"),
    [
        (130, 272, (128, 128), 64),
        (70, 96, (32, 32), 0),
        (9, 320, (1, 320), 3),
        (40, 160, (200, 160), 7),
        (20, 96, (16, 24), 5),
    ],
)
def test_fp8_on_the_host_equals_decoding_and_the_cpu_loops(host, rows, k, block, first):
    """Blocks of every shape, ragged ones and edges inside a group of 16; scales down to FP32's subnormals."""
    rng = np.random.default_rng(rows)
    w = rng.integers(0, 256, (rows, k)).astype(np.uint8)
    w[(w & 0x7F) == 0x7F] = 0x80
    shape = -(-(first + rows) // block[0]), -(-k // block[1])
    grid = np.exp2(rng.uniform(-20, 20, shape)).astype(np.float32)
    grid[0, 0] = 2.0**-127
    decoded = np.empty((rows, k), np.float32)
    dequantize_fp8_block(w, grid, block, decoded, first)
    scale = nvfp4_global_scale(amax(decoded))
    got = host_floats(host, 2, w, k // 16, grid, block, shape[1], first, scale)
    codes, scales = np.zeros((rows, k // 2), np.uint8), np.zeros((rows, k // 16), np.uint8)
    bf16_to_nvfp4(decoded, scale, codes, scales)
    assert got[2] == amax(decoded)
    np.testing.assert_array_equal(got[1], scales)
    np.testing.assert_array_equal(got[0], codes)


def test_values_that_are_not_finite_show_in_amax_and_in_the_block_scale(host):
    for kind, w in ((0, np.full((1, 16), np.inf, np.float16)), (1, np.full((1, 16), np.nan, np.float32)),
                    (2, np.full((1, 16), 0xFF, np.uint8))):  # fmt: skip
        codes, scales, top = host_floats(host, kind, w, 1, np.ones(1, np.float32), (1, 16), 1, 0, 1.0)
        assert (not np.isfinite(top), scales.tolist(), codes.any()) == (True, [[0x7F]], False)


def host_nvfp4(host, bits, global_scale):
    blocks = bits.size // 16
    codes, scales = np.zeros((blocks, 8), np.uint8), np.zeros(blocks, np.uint8)
    taken = np.zeros(blocks, np.uint8)
    host.host_bf16_nvfp4(blocks, pointer(bits), ctypes.c_float(global_scale), *map(pointer, (codes, scales, taken)))
    return codes.reshape(bits.shape[0], -1), scales.reshape(bits.shape[0], -1), taken


@pytest.mark.parametrize("spread", [2, 12, 40])
@pytest.mark.parametrize("scale", [None, 1.0, 0.0123, 2.0**-100, 1e30])
def test_bf16_on_the_host_equals_the_cpu_loops(host, spread, scale):
    bits = random_bf16(np.random.default_rng(spread), 500, 320, spread)
    global_scale = reference.nvfp4_global_scale([values(bits)]) if scale is None else np.float32(scale)
    codes, scales, taken = host_nvfp4(host, bits, global_scale)
    expected = cpu_nvfp4(bits, global_scale)
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(codes, expected[0])
    if scale is None and spread < 40:
        assert taken.mean() > 0.999, "ordinary weights must take the fast way"


def test_every_bf16_in_the_fast_way_equals_a_true_division(host):
    """Each of 32640 magnitudes beside its block's largest, under every normal scale byte: the corrected quotient."""
    rng = np.random.default_rng(5)
    largest = rng.integers(0x3F80, 0x4400, 32640).astype(np.uint16)
    bits = np.zeros((32640, 16), np.uint16)
    bits[:, 0] = largest
    ratio = rng.integers(0, 0x300, (32640, 15))
    bits[:, 1:] = np.maximum(largest[:, None].astype(np.int64) - ratio, 0) | rng.integers(0, 2, (32640, 15)) << 15
    global_scale = np.float32(values(largest).max()) / np.float32(2688)
    codes, scales, taken = host_nvfp4(host, bits, global_scale)
    expected = cpu_nvfp4(bits, global_scale)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scales, expected[1])
    assert taken.mean() > 0.95
    assert len(set(scales.ravel().tolist())) > 50


# --- the machine code -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump: the CUDA toolkit or Triton's wheel has it")
@pytest.mark.parametrize("target", ["80", "90a", "120a"])
def test_the_kernels_compile_and_keep_their_blocks_in_registers(tmp_path, target):
    cubin = tmp_path / "quantize.cubin"
    cuda_build.build_cubin(cuda_build.CSRC / "quantize.cu", target, cubin)
    dump = subprocess.run([str(CUOBJDUMP), "--dump-sass", str(cubin)], capture_output=True, text=True, check=True)
    functions = dict(zip(*[iter(re.split(r"Function : (\S+)", dump.stdout)[1:])] * 2, strict=True))
    encode = next(code for name, code in functions.items() if "bf16_nvfp4_kernel" in name)
    window = next(code for name, code in functions.items() if "window_kernel" in name)
    for code in (encode, window):
        assert re.search(r"LDG\.E\S*\.128", code), "16 bytes a load"
        assert not re.search(r"\b(LDL|STL)\b", code), "registers spill"
    assert re.search(r"STG\.E\S*\.128", window)


# --- what is refused, and what doctor says -------------------------------------------------------------------------


def u8(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("codes", "scales", "message"),
    [
        (u8(4, 24), u8(4, 1), r"scales \[4, 1\] do not fit codes \[4, 24\]"),
        (u8(4, 16), u8(4, 2), r"expected \[4, 1\]"),
        (u8(4, 32)[:, ::2], u8(4, 1), "contiguous"),
        (u8(5, 32).reshape(-1)[1:129].view(4, 32), u8(4, 2), "multiple of 16 bytes"),
        (torch.zeros(4, 16), u8(4, 1), r"codes must be torch\.uint8"),
        (u8(4, 16), torch.zeros((4, 1), dtype=torch.float32), r"block scales must be torch\.uint8"),
    ],
)
def test_mxfp4_operands_that_do_not_fit_are_refused(codes, scales, message):
    with pytest.raises(ValueError, match=message):
        gpu_quantize.repack([(codes, scales)])


@pytest.mark.parametrize(
    ("weights", "scale", "error", "message"),
    [
        ([torch.zeros((2, 24), dtype=torch.bfloat16)], None, ValueError, "K = 24 is not a multiple of 16"),
        ([torch.zeros((2, 16))], None, ValueError, r"must be torch\.bfloat16"),
        ([], None, ValueError, "at least one member"),
        ([torch.zeros((2, 16), dtype=torch.bfloat16)], None, KernelUnavailableError, "these are on cpu"),
        ([torch.zeros((2, 16), dtype=torch.bfloat16)], 0.0, ValueError, "global scale 0.0 is not a positive finite"),
        ([torch.zeros((2, 16), dtype=torch.bfloat16)], -1.0, ValueError, "global scale -1.0 is not"),
        ([torch.zeros((2, 16), dtype=torch.bfloat16)], float("nan"), ValueError, "global scale nan is not"),
        ([torch.zeros((2, 32), dtype=torch.bfloat16)[:, ::2]], None, ValueError, "contiguous"),
        ([torch.zeros(72, dtype=torch.bfloat16)[4:68].view(4, 16)], None, ValueError, "multiple of 16 bytes"),
    ],
)
def test_bf16_operands_that_do_not_fit_are_refused(weights, scale, error, message):
    with pytest.raises(error, match=message):
        gpu_quantize.quantize(weights, scale)


def test_doctor_names_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_build, "find_cuda_tool", lambda name: Path("/opt/nvcc"))
    assert str(gpu_quantize.availability()) == "compiles: for SM80 and later by /opt/nvcc; there is no GPU"
    monkeypatch.setattr(cuda_build, "find_cuda_tool", lambda name: None)
    assert str(gpu_quantize.availability()) == "unavailable because there is no GPU and no nvcc"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert gpu_quantize.availability().reason == "Card (SM75) is older than SM80 and no nvcc"
    monkeypatch.setattr(cuda_build, "find_cuda_tool", lambda name: Path("/opt/nvcc"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert gpu_quantize.availability().state is State.RUNS


# --- on the GPU -----------------------------------------------------------------------------------------------------


def to_gpu(array):
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def bf16_gpu(bits):
    return to_gpu(bits.view(np.int16)).view(torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("low", "high", "shape"),
    [(110, 124, (96, 40)), (119, 119, (1, 1)), (90, 124, (64, 33)), (100, 118, (300, 3)), (1, 40, (40, 10))],
)
def test_repack_equals_the_cpu(low, high, shape):
    rng = np.random.default_rng([low, high])
    members = [
        random_mxfp4(rng, *shape, low, high),
        random_mxfp4(rng, shape[0] + 7, shape[1], min(low + 1, high), high),
    ]
    expected = cpu_repack(members)
    got = gpu_quantize.repack([(to_gpu(c), to_gpu(s)) for c, s in members])
    assert (got.m, got.counts) == (expected.m, expected.counts)
    for mine, theirs in zip(got.members, expected.members, strict=True):
        np.testing.assert_array_equal(mine[0].cpu().numpy(), theirs[0])
        np.testing.assert_array_equal(mine[1].cpu().numpy(), theirs[1])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [-14, 0, 6])
def test_halves_under_a_given_exponent_equal_the_cpu(m):
    codes, scales = random_mxfp4(np.random.default_rng(m + 20), 700, 9, m + 107, m + 135)
    codes_expected, scales_expected = np.empty_like(codes), np.empty((700, 18), np.uint8)
    counts = np.zeros(4, np.int64)
    repack_jit.repack_tile(codes, scales, m, codes_expected, scales_expected, counts)
    new_codes, new_scales, found = gpu_quantize.repack_halves(to_gpu(codes), to_gpu(scales), m)
    np.testing.assert_array_equal(new_codes.cpu().numpy(), codes_expected)
    np.testing.assert_array_equal(new_scales.cpu().numpy(), scales_expected)
    assert [found.exact, found.shifted, found.lossy, found.below_marlin] == counts.tolist()


@pytest.mark.gpu
def test_a_nan_scale_and_an_exponent_too_small_are_refused():
    codes, scales = random_mxfp4(np.random.default_rng(0), 8, 4, 110, 120)
    scales[5, 2] = 255
    with pytest.raises(ValueError, match=r"member 0: E8M0 scale 255 \(NaN\) at \[5, 2\]"):
        gpu_quantize.repack([(to_gpu(codes), to_gpu(scales))])
    with pytest.raises(ValueError, match=r"2\^0 is too small: 2 halves"):
        gpu_quantize.repack_halves(to_gpu(np.full((1, 16), 0x77, np.uint8)), to_gpu(np.full((1, 1), 140, np.uint8)), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [2, 12, 40])
@pytest.mark.parametrize("shape", [(1, 16), (300, 2880), (4096, 512)])
def test_bf16_equals_the_cpu(spread, shape):
    rng = np.random.default_rng([spread, *shape])
    members = [random_bf16(rng, *shape, spread), random_bf16(rng, *shape, spread)]
    expected_scale = reference.nvfp4_global_scale([values(bits) for bits in members])
    got = gpu_quantize.quantize([bf16_gpu(bits) for bits in members])
    assert np.float32(got.global_scale.item()) == expected_scale
    for bits, (codes, scales) in zip(members, got.members, strict=True):
        expected = cpu_nvfp4(bits, expected_scale)
        np.testing.assert_array_equal(scales.cpu().numpy(), expected[1])
        np.testing.assert_array_equal(codes.cpu().numpy(), expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 2.0**-30, 1e20])
def test_bf16_under_a_given_scale_equals_the_cpu(scale):
    bits = random_bf16(np.random.default_rng(3), 64, 256, 20)
    got = gpu_quantize.quantize([bf16_gpu(bits)], scale)
    expected = cpu_nvfp4(bits, scale)
    np.testing.assert_array_equal(got.members[0][1].cpu().numpy(), expected[1])
    np.testing.assert_array_equal(got.members[0][0].cpu().numpy(), expected[0])


@pytest.mark.gpu
def test_no_rows_are_an_empty_answer():
    nothing = gpu_quantize.quantize([torch.zeros((0, 32), dtype=torch.bfloat16, device="cuda")])
    assert (nothing.global_scale.item(), nothing.members[0][0].shape) == (1.0, (0, 16))
    empty = (
        torch.zeros((0, 16), dtype=torch.uint8, device="cuda"),
        torch.zeros((0, 1), dtype=torch.uint8, device="cuda"),
    )
    repacked = gpu_quantize.repack([empty])
    assert (repacked.counts.blocks, repacked.members[0][1].shape) == (0, (0, 2))
    assert gpu_quantize.repack_halves(*empty, 0)[2].blocks == 0


@pytest.mark.gpu
def test_zeros_and_values_that_are_not_finite():
    zeros = gpu_quantize.quantize([torch.zeros((2, 32), dtype=torch.bfloat16, device="cuda")])
    assert zeros.global_scale.item() == 1.0
    assert zeros.members[0][1].unique().tolist() == [0x38]  # a block of zeros has the scale 1
    assert not zeros.members[0][0].any()
    for bad in (float("inf"), float("-inf"), float("nan")):
        w = torch.ones((3, 64), dtype=torch.bfloat16, device="cuda")
        w[2, 33] = bad
        with pytest.raises(NonFiniteError, match="row 2, column 33"):
            gpu_quantize.quantize([w])
        unchecked = gpu_quantize.quantize([w], 1.0, check=False)
        assert unchecked.members[0][1][2].tolist()[2] == 0x7F
