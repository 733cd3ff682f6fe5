"""W4A16 without a GPU: arguments are refused clearly, configurations fit, and the sources compile for every target."""

# ruff: noqa: C408  arguments read best as keywords
from __future__ import annotations

import re
import shutil
import subprocess
from itertools import product
from types import SimpleNamespace

import pytest
from requant.kernels import w4a16, w4a16_library
from requant.kernels import w4a16_configs as configs
from requant.kernels.formats import NumberFormat

NVCC = w4a16_library.find_nvcc()
SHAPES = [
    (4096, 4096),
    (7168, 2048),
    (5120, 2944),
    (12288, 4096),
    (8192, 8192),
    (2880, 2880),
    (7, 16),
    (64, 16384 + 16),
]


def weight(n=32, k=64, fmt=NumberFormat.NVFP4):
    import torch

    return torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k // fmt.group, dtype=torch.uint8)


def test_a_tensor_on_the_cpu_is_refused_by_name():
    import torch

    codes, scales = weight()
    with pytest.raises(ValueError, match="codes is on cpu: move it to a CUDA device, or use the CPU path"):
        w4a16.w4a16_matmul(torch.zeros(1, 64, dtype=torch.bfloat16), codes, scales, 1.0, fmt=NumberFormat.NVFP4)


def on_cuda(tensor):
    """The tensor's metadata with a CUDA device, so that the checks behind the device check can be reached."""
    fields = ("dtype", "shape", "dim", "is_contiguous", "stride", "numel", "data_ptr")
    return SimpleNamespace(is_cuda=True, device="cuda:0", **{name: getattr(tensor, name) for name in fields})


def call(x=None, codes=None, scales=None, global_scale=1.0, fmt=NumberFormat.NVFP4, out=None):
    import torch

    default_codes, default_scales = weight()
    x = torch.zeros(2, 64, dtype=torch.bfloat16) if x is None else x
    return w4a16.w4a16_matmul(
        on_cuda(x),
        on_cuda(default_codes if codes is None else codes),
        on_cuda(default_scales if scales is None else scales),
        global_scale,
        fmt=fmt,
        out=None if out is None else on_cuda(out),
    )


def test_wrong_arguments_are_refused_with_what_was_found_and_what_is_needed():
    import torch

    codes, scales = weight()
    cases = [
        (dict(codes=codes.int()), "codes is torch.int32: it must be torch.uint8"),
        (dict(scales=scales.float()), "block_scales is torch.float32"),
        (dict(x=torch.zeros(2, 64)), "x is torch.float32: it must be torch.bfloat16"),
        (
            dict(x=torch.zeros(2, 48, dtype=torch.bfloat16)),
            r"x has shape \(2, 48\): with these codes it must be \[M, 64\]",
        ),
        (dict(scales=scales[:, :3]), "block_scales has strides"),
        (dict(scales=scales[:, :3].contiguous()), r"block_scales has shape \(32, 3\)"),
        (dict(codes=torch.zeros(32, 12, dtype=torch.uint8)), r"K is 24 .* for nvfp4 it must be a multiple of 16"),
        (dict(codes=weight(k=48)[0], fmt=NumberFormat.MXFP4), "for mxfp4 it must be a multiple of 32"),
        (dict(codes=torch.zeros(64, 32, dtype=torch.uint8).t()), "codes has strides"),
        (dict(codes=torch.zeros(32 * 32 + 8, dtype=torch.uint8)[8:].view(32, 32)), "codes starts 8 bytes past"),
        (dict(codes=codes[None]), r"codes has shape \(1, 32, 32\): it must be \[N, K/2\]"),
        (dict(global_scale=0.0), "global_scale is 0.0: it must be positive"),
        (dict(global_scale=-1.0), "global_scale is -1.0"),
        (dict(global_scale=float("nan")), "global_scale is nan"),
        (dict(global_scale=torch.ones(2)), r"global_scale is torch.float32 \(2,\): it must be one float32 value"),
        (dict(out=torch.zeros(2, 31, dtype=torch.bfloat16)), r"out has shape \(2, 31\): it must be \(2, 32\)"),
        (dict(fmt=NumberFormat.FP8), "W4A16 knows nvfp4, mxfp4"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            call(**arguments)


@pytest.mark.parametrize("limit", [0.0, -7.0, float("nan")])
def test_an_activations_limit_is_positive_or_none(limit):
    with pytest.raises(ValueError, match=f"limit is {limit}: it must be positive, or None"):
        w4a16.GatedActivation(limit=limit)
    assert w4a16.GatedActivation(limit=7.0).limit == 7.0


def test_no_tokens_is_an_empty_answer_and_no_launch():
    import torch

    out = torch.zeros(0, 32, dtype=torch.bfloat16)
    assert call(x=torch.zeros(0, 64, dtype=torch.bfloat16), out=out).shape == (0, 32)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("fmt", [NumberFormat.NVFP4, NumberFormat.MXFP4])
def test_every_shape_gets_a_configuration_that_fits_the_card(fmt, capability):
    limit = configs.shared_limit(capability)
    for n, k in SHAPES:
        for tokens in (1, 2, 3, 8, 16, 33, 64):
            c = configs.choose(fmt, tokens, n, k, capability=capability)
            if not isinstance(c, configs.Config):
                continue  # test_w4a16_wgmma.py
            width = configs.width_for(tokens)
            assert configs.shared_bytes(fmt, k, width, c) <= limit, (n, k, tokens, c)
            assert c.column_warps * c.row_warps in range(2, 17)
            # every row is someone's, and a cluster's blocks do one unit each
            assert c.cluster == 1 or (capability[0] == 9 and c.blocks * 16 * c.row_tiles * c.row_warps >= n)
        for slots in (1, 6, 128, 5000):
            c = configs.choose_grouped(fmt, slots, n, k, experts=128, capability=capability)
            assert c.cluster == 1
            if c.stream == 2:  # the same, and whole tiles of block scales in 16-byte pieces
                assert capability >= (9, 0) and slots <= 256 and n * (k // fmt.group) % 16 == 0
                assert configs.split_shared_bytes(fmt, k, c) <= limit
                assert k // c.column_warps in (192, 256)
            elif c.stream:  # it takes four tokens of an expert at a time, and needs rows of scales that start at words
                assert capability >= (9, 0) and slots <= 256 and k % 64 == 0
                assert configs.stream_shared_bytes(fmt, k, c) <= limit
            else:
                assert configs.shared_bytes(fmt, k, configs.GROUPED_WIDTH, c, grouped=True) <= limit


def test_no_grid_is_larger_than_the_driver_takes():
    """A grid's y ends at 65535: a layer of more row groups has blocks that take several, or larger ones."""
    for n, k, tokens in [(4_000_000, 64, 1), (4_000_000, 64, 8), (5_000_000, 64, 16), (2_200_000, 16, 3)]:
        for processors in (132, 70_000):  # the second: no block stays
            c = configs.choose(NumberFormat.NVFP4, tokens, n, k, processors=processors)
            assert 1 <= c.blocks <= 65535
            if isinstance(c, configs.Config):
                assert c.cluster == 1
            else:
                assert c.blocks * c.row_groups * 64 >= n
    with pytest.raises(ValueError, match="N is 20000000: with 64 tokens it may be 16776960 at most"):
        configs.choose(NumberFormat.NVFP4, 64, 20_000_000, 64)


@pytest.mark.parametrize("fmt", [NumberFormat.NVFP4, NumberFormat.MXFP4])
def test_what_the_library_for_wgmma_leaves_out_is_never_asked_for(fmt):
    """-DREQUANT_WGMMA: `mma.sync` beyond eight tokens only where block scales start at any byte."""
    for k in range(fmt.group, 8192, fmt.group):
        for tokens in (9, 16, 17, 64):
            if isinstance(configs.choose(fmt, tokens, 256, k), configs.Config):
                assert configs.alignment(fmt, k) == configs.GENERAL


@pytest.mark.parametrize("fmt", [NumberFormat.NVFP4, NumberFormat.MXFP4])
def test_a_stream_never_reads_block_scales_past_the_last_expert(fmt):
    """Its copies take whole 16-byte pieces around four stages' bytes of a row; only the last tile's are clamped."""
    wanted, streams = configs.SCALE_STAGES * configs.STAGE_K // fmt.group, 0
    for k in range(fmt.group * 4, 2048, fmt.group * 4):
        pitch, box = k // fmt.group, (-(-k // configs.STAGE_K) - 1) // configs.SCALE_STAGES * wanted
        for n in range(1, 97):
            c = configs.choose_grouped(fmt, 4096, n, k, experts=4096)
            if c.stream != 1 or configs.alignment(fmt, k) == configs.SCALE16:
                continue  # boxes of the copy engine end where the tensor ends
            streams, rows = streams + 1, 16 * c.row_tiles
            end = ((rows - 1) * pitch & ~15) + box + wanted + 16  # of the copies, from the tile's first row on
            for experts, first in product(range(1, 36), range(0, n, rows)):  # from this one to the last, the tile in it
                behind = experts * n - first
                assert behind <= rows or end <= behind * pitch, (n, k, experts, first)
    assert streams > 200


def test_experts_of_gpt_oss_are_read_in_memory_order_where_their_block_scales_are_whole_pieces():
    chosen = [
        configs.choose_grouped(fmt, slots, n, 2880, experts=128).stream
        for fmt in (NumberFormat.NVFP4, NumberFormat.MXFP4)
        for n, slots in ((5760, 4), (2880, 4), (2880, 256), (2880, 257), (2882, 128), (64, 4))
    ]
    assert chosen == [2, 2, 2, 0, 0, 0, 2, 2, 2, 0, 0, 0]
    deepseek = [
        configs.choose_grouped(fmt, slots, 4096, k, experts=256).stream
        for fmt in (NumberFormat.NVFP4, NumberFormat.MXFP4)
        for k, slots in ((4096, 6), (2048, 6), (4096, 48), (2048, 513))
    ]
    assert deepseek == [2, 2, 2, 0] * 2
    small = configs.choose_grouped(NumberFormat.NVFP4, 128, 2880, 2880, experts=128, capability=(12, 0))
    assert small.stream == 0  # 99 KB hold no ring of four tiles


def test_alignment_follows_from_k_as_the_kernel_reads_it():
    nvfp4, mxfp4 = NumberFormat.NVFP4, NumberFormat.MXFP4
    expected = [(nvfp4, 4096, 0), (nvfp4, 2944, 1), (nvfp4, 2880, 2), (nvfp4, 2896, 3), (nvfp4, 16, 3)]
    expected += [(mxfp4, 4096, 0), (mxfp4, 2816, 1), (mxfp4, 2944, 2), (mxfp4, 2880, 3)]
    assert [configs.alignment(fmt, k) for fmt, k, _ in expected] == [want for *_, want in expected]


def test_a_missing_compiler_is_named_with_the_ways_out(monkeypatch, tmp_path):
    monkeypatch.setattr(w4a16_library, "find_nvcc", lambda: None)
    monkeypatch.setenv("REQUANT_KERNEL_CACHE", str(tmp_path))
    with pytest.raises(
        w4a16_library.KernelBuildError, match=r"nvcc was not found .* set CUDA_HOME, or use path='triton'"
    ):
        w4a16_library.build("90a")


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("arch", ["80", "90a", "120a"])
def test_the_sources_compile_for(arch, tmp_path):
    """The front end and ptxas accept one variant of each kind; the whole library takes a minute and is built on use."""
    probe = tmp_path / "probe.cu"
    kinds = [
        ("kNvfp4", 0, "kScale16"),
        ("kNvfp4", 16, "kGeneral"),
        ("kNvfp4", 32, "kScale4"),
        ("kMxfp4", 16, "kScale8"),
    ]
    lines = [
        f"template __global__ void requant::w4a16_kernel<requant::Format::{f}, {t}, 1, 3, requant::Alignment::{a}, 512,"
        " 1>"
        "(const __grid_constant__ requant::Params);"
        for f, t, a in kinds
    ]
    lines += [
        f"template __global__ void requant::w4a16_dense_kernel<requant::Format::{f}, {t}, 1, 3,"
        f" requant::Alignment::{a}, 384, 2>"
        "(const __grid_constant__ requant::Params, const __grid_constant__ CUtensorMap);"
        for f, t, a in [
            ("kNvfp4", 1, "kScale16"),
            ("kNvfp4", 8, "kGeneral"),
            ("kMxfp4", 2, "kScale8"),
            ("kMxfp4", 4, "kScale4"),
        ]
    ]
    lines += [
        f"template __global__ void requant::w4a16_stream_kernel<requant::Format::{f}, 2, 8, 3, requant::Alignment::{a}>"
        "(const __grid_constant__ requant::Params, const __grid_constant__ requant::TensorMaps);"
        for f, a in [("kNvfp4", "kScale16"), ("kMxfp4", "kScale4")]
    ]
    lines += [
        f"template __global__ void requant::w4a16_split_kernel<requant::Format::{f}, {division}>"
        "(const __grid_constant__ requant::Params, const __grid_constant__ requant::TensorMaps);"
        for f, division in [("kNvfp4", "3, 15, 4, false"), ("kMxfp4", "3, 15, 4, true"), ("kNvfp4", "4, 16, 3, true")]
    ]
    lines += [
        "template __global__ void requant::w4a16_split_turns_kernel<requant::Format::kNvfp4, 3, 15, 4, 4>"
        "(const __grid_constant__ requant::Params, const __grid_constant__ requant::TensorMaps);"
    ]
    probe.write_text(
        '#include "w4a16_core.cuh"\n#include "w4a16_dense.cuh"\n#include "w4a16_split_turns.cuh"\n' + "\n".join(lines)
    )
    command = [
        NVCC,
        "-std=c++17",
        "-O1",
        "-I",
        str(w4a16_library.SOURCES),
        "-cubin",
        "-o",
        str(tmp_path / "probe.cubin"),
    ]
    command += ["-gencode", f"arch=compute_{arch},code=sm_{arch}", str(probe)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "probe.cubin").stat().st_size > 10_000


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
def test_nothing_that_another_kernel_wrote_is_read_as_a_constant(tmp_path):
    """The compiler moves loads of constants over the wait for the kernel before, which has not written them then."""
    probe, ptx = tmp_path / "probe.cu", tmp_path / "probe.ptx"
    params = "const __grid_constant__ requant::Params"
    maps = "const __grid_constant__ requant::TensorMaps"
    nvfp4, wgmma = "requant::Format::kNvfp4", "requant::WgmmaParams"
    lines = [
        '#include "w4a16_core.cuh"',
        '#include "w4a16_dense.cuh"',
        '#include "w4a16_split_turns.cuh"',
        '#include "w4a16_wgmma.cuh"',
        f"template __global__ void requant::w4a16_split_kernel<{nvfp4}, 4, 16, 3, true>({params}, {maps});",
        f"template __global__ void requant::w4a16_split_turns_kernel<{nvfp4}, 3, 15, 4, 4>({params}, {maps});",
        f"template __global__ void requant::w4a16_wgmma_kernel<{nvfp4}, 32>(const __grid_constant__ {wgmma});",
        f"template __global__ void requant::w4a16_stream_kernel<{nvfp4}, 2, 8, 3, requant::Alignment::kScale16>"
        f"({params}, {maps});",
        f"template __global__ void requant::w4a16_kernel<{nvfp4}, 0, 1, 3, requant::Alignment::kScale16, 512, 1>"
        f"({params});",
        f"template __global__ void requant::w4a16_dense_kernel<{nvfp4}, 4, 1, 3, requant::Alignment::kScale16, 512, 1>"
        f"({params}, const __grid_constant__ CUtensorMap);",
    ]
    probe.write_text("\n".join(lines))
    command = [NVCC, "-std=c++17", "-I", str(w4a16_library.SOURCES), "-ptx", "-arch=compute_90a", "-o", str(ptx)]
    run = subprocess.run([*command, str(probe)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    text = ptx.read_text()
    assert text.count("griddepcontrol.wait") >= 6
    # Biases are BF16; scales of experts are FP32, routing and x integers, alone or four at a time.
    assert set(re.findall(r"ld\.global\.nc\.([.\w]+)", text)) <= {"u16", "b16"}


def test_availability_says_what_is_missing_here(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state, reason = w4a16.availability()
    assert (state, "no NVIDIA GPU" in reason) == ("compiles" if shutil.which("nvcc") or NVCC else "unavailable", True)
    monkeypatch.setattr(w4a16_library, "find_nvcc", lambda: None)
    assert w4a16.availability() == ("unavailable", "no NVIDIA GPU is visible to torch, and nvcc was not found")
