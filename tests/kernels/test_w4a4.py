"""W4A4 without a GPU: refused operands, the choice of tiles, routing, the machine code, and what doctor says."""

import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from requant.kernels import cuda_build, w4a4, w4a4_build
from requant.kernels.availability import KernelUnavailableError, State
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a4 import Fp4Tensor, grouped_matmul, matmul, quantize, route

NVCC = w4a4_build.find_cuda_tool("nvcc")
CUOBJDUMP = w4a4_build.find_cuda_tool("cuobjdump")


def nvfp4(n: int, k: int, experts: int | None = None) -> Fp4Tensor:
    lead = () if experts is None else (experts,)
    codes = torch.zeros((*lead, n, k // 2), dtype=torch.uint8)
    scales = torch.full((*lead, n, k // 16), 0x38, dtype=torch.uint8)
    return Fp4Tensor.weight(codes, scales, 1.0)


# --- operands -------------------------------------------------------------------------------------------------------


def test_the_format_follows_from_the_global_scale() -> None:
    codes = torch.zeros((3, 32), dtype=torch.uint8)
    w = Fp4Tensor.weight(codes, torch.ones((3, 4), dtype=torch.float8_e4m3fn), 0.5)
    assert (w.format, w.k, w.scales.tolist()) == (NumberFormat.NVFP4, 64, [[0x38] * 4] * 3)
    assert w.global_scale is not None
    assert w.global_scale.tolist() == [0.5]
    w = Fp4Tensor.weight(codes, torch.ones((3, 2), dtype=torch.float8_e8m0fnu))
    assert (w.format, w.scales.tolist(), w.global_scale) == (NumberFormat.MXFP4, [[127] * 2] * 3, None)


def test_one_global_scale_serves_all_experts() -> None:
    w = Fp4Tensor.weight(
        torch.zeros((4, 2, 8), dtype=torch.uint8), torch.zeros((4, 2, 1), dtype=torch.uint8), torch.tensor(2.0)
    )
    assert w.global_scale is not None
    assert w.global_scale.tolist() == [2.0] * 4


U8 = {"dtype": torch.uint8}
REFUSED = {
    "K = 24 is not a multiple of 16": (torch.zeros((4, 12), **U8), torch.zeros((4, 1), **U8), 1.0),
    "K = 48 is not a multiple of 32": (torch.zeros((4, 24), **U8), torch.zeros((4, 1), **U8), None),
    "codes must be uint8": (torch.zeros((4, 8)), torch.zeros((4, 1), **U8), 1.0),
    "block scales must be uint8 or float8_e4m3fn, not torch.float16": (
        torch.zeros((4, 8), **U8),
        torch.zeros((4, 1), dtype=torch.float16),
        1.0,
    ),
    "block scales must be uint8 or float8_e8m0fnu, not torch.float8_e4m3fn": (
        torch.zeros((4, 16), **U8),
        torch.zeros((4, 1), dtype=torch.float8_e4m3fn),
        None,
    ),
    r"block scales \[4, 2\] do not fit K = 16": (torch.zeros((4, 8), **U8), torch.zeros((4, 2), **U8), 1.0),
    "codes .* are not contiguous": (torch.zeros((8, 4), **U8).T, torch.zeros((4, 1), **U8), 1.0),
    "codes start at an address": (torch.zeros(33, **U8)[1:].reshape(4, 8), torch.zeros((4, 1), **U8), 1.0),
    "an empty weight": (torch.zeros((0, 8), **U8), torch.zeros((0, 1), **U8), 1.0),
    r"codes must be \[N, K/2\]": (torch.zeros(8, **U8), torch.zeros(1, **U8), 1.0),
    "global scale 0.0 of weight 0": (torch.zeros((4, 8), **U8), torch.zeros((4, 1), **U8), 0.0),
    "global scale -1.0 of weight 0": (torch.zeros((4, 8), **U8), torch.zeros((4, 1), **U8), -1.0),
    "global scale nan of weight 0": (torch.zeros((4, 8), **U8), torch.zeros((4, 1), **U8), float("nan")),
    "global scale inf of weight 1": (
        torch.zeros((2, 4, 8), **U8),
        torch.zeros((2, 4, 1), **U8),
        torch.tensor([1.0, float("inf")]),
    ),
    "3 global scales for 2 weights": (torch.zeros((2, 4, 8), **U8), torch.zeros((2, 4, 1), **U8), torch.ones(3)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_weight_that_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fp4Tensor.weight(*REFUSED[message])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros((2, 64)), "x must be bfloat16, not torch.float32"),
        (torch.zeros((2, 32), dtype=torch.bfloat16), r"x must be \[M, 64\], not \[2, 32\]"),
        (torch.zeros(64, dtype=torch.bfloat16), r"x must be \[M, 64\], not \[64\]"),
        (torch.zeros((64, 2), dtype=torch.bfloat16).T, "rows of x .* are not contiguous"),
        (torch.zeros(65, dtype=torch.bfloat16)[1:].reshape(1, 64), "rows of x start at an address"),
    ],
)
def test_an_x_that_does_not_fit_is_refused(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        matmul(x, nvfp4(8, 64))


def test_options_that_mean_nothing_are_refused() -> None:
    x = torch.zeros((2, 64), dtype=torch.bfloat16)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="input_scale must be finite and positive"):
            matmul(x, nvfp4(8, 64), input_scale=scale)
    with pytest.raises(ValueError, match="MXFP4 has no global scale"):
        quantize(x, NumberFormat.MXFP4, input_scale=1.0)
    with pytest.raises(ValueError, match="fp8 is no FP4 format"):
        quantize(x, NumberFormat.FP8)
    with pytest.raises(ValueError, match="K = 40 is not a positive multiple of 16"):
        quantize(torch.zeros((2, 40), dtype=torch.bfloat16), NumberFormat.NVFP4)
    with pytest.raises(ValueError, match=r"y can be bfloat16 or float32, not torch\.float16"):
        matmul(x, nvfp4(8, 64), out_dtype=torch.float16)
    with pytest.raises(ValueError, match="block_rows must be one of"):
        matmul(x, nvfp4(8, 64), block_rows=48)
    with pytest.raises(ValueError, match="2 stacked weights need grouped_matmul"):
        matmul(x, nvfp4(8, 64, experts=2))
    with pytest.raises(ValueError, match="not a stack of the routing's 3 experts"):
        grouped_matmul(x, nvfp4(8, 64, experts=2), route(torch.zeros((2, 1), dtype=torch.int64), 3))
    mxfp4 = Fp4Tensor.weight(torch.zeros((8, 32), **U8), torch.zeros((8, 2), **U8))
    with pytest.raises(ValueError, match="which does not go with mxfp4 of K = 64"):
        matmul(nvfp4(2, 64), mxfp4)


def test_without_a_gpu_there_is_an_error_and_no_number() -> None:
    x = torch.zeros((2, 64), dtype=torch.bfloat16)
    for emulate in (False, True):
        with pytest.raises(KernelUnavailableError, match="run on an NVIDIA GPU; the tensors are on cpu"):
            matmul(x, nvfp4(8, 64), emulate=emulate)


# --- plan -----------------------------------------------------------------------------------------------------------


def test_the_tile_is_the_smallest_that_holds_the_rows() -> None:
    assert [w4a4.choose_block_rows(m) for m in (1, 16, 17, 32, 64, 65, 128, 5000)] == [
        16,
        16,
        32,
        32,
        64,
        128,
        128,
        128,
    ]


def test_k_is_split_until_the_chip_is_full_and_no_further() -> None:
    assert w4a4.choose_splits(tiles=32, k=4096, multiprocessors=188) == 5
    assert w4a4.choose_splits(tiles=188, k=4096, multiprocessors=188) == 1
    assert w4a4.choose_splits(tiles=5000, k=4096, multiprocessors=188) == 1
    assert w4a4.choose_splits(tiles=1, k=512, multiprocessors=188) == 2, "a part has at least one slice of K"
    assert w4a4.choose_splits(tiles=1, k=1 << 20, multiprocessors=188) == 16


def test_routing_sorts_pairs_by_expert_and_can_be_undone() -> None:
    ids = torch.tensor([[3, 0], [0, 3], [1, 3]])
    routing = route(ids, 5)
    assert routing.offsets.tolist() == [0, 2, 3, 3, 6, 6]
    assert routing.token.tolist() == [0, 1, 2, 0, 1, 2]
    assert routing.order.tolist() == [1, 2, 4, 0, 3, 5]
    assert (routing.experts, routing.tokens) == (5, 3)
    back = torch.empty(6, dtype=torch.int64)
    back[routing.order] = ids.reshape(-1)[routing.order]
    assert back.tolist() == ids.reshape(-1).tolist()


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
def test_an_expert_that_does_not_exist_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=f"expert id {bad} is out of range: there are 4 experts"):
        route(torch.tensor([[0, 3], [bad, 1]]), 4)


def test_expert_ids_of_another_type_or_shape_are_refused() -> None:
    for ids in (torch.zeros((2, 2)), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match="expert_ids must be int32 or int64"):
            route(ids, 4)


# --- build ----------------------------------------------------------------------------------------------------------


def test_without_nvcc_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_build, "find_cuda_tool", lambda name: None)
    monkeypatch.setenv("REQUANT_CACHE_DIR", str(tmp_path))
    with pytest.raises(KernelUnavailableError, match=r"no nvcc.*set CUDA_HOME"):
        w4a4_build.build_library("120a", emulate=False)
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_leaves_no_library_and_shows_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'no such architecture' >&2\nexit 3\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(cuda_build, "find_cuda_tool", lambda name: nvcc)
    monkeypatch.setenv("REQUANT_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(KernelUnavailableError, match=r"exit 3(.|\n)*no such architecture"):
        w4a4_build.build_library("120a", emulate=False)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_is_built_once_per_source_and_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nfor last; do :; done\necho made > "$last"\n')
    nvcc.chmod(0o755)
    monkeypatch.setattr(cuda_build, "find_cuda_tool", lambda name: nvcc)
    monkeypatch.setenv("REQUANT_CACHE_DIR", str(tmp_path / "cache"))
    first = w4a4_build.build_library("120a", emulate=False)
    assert w4a4_build.build_library("120a", emulate=False) == first
    emulated = w4a4_build.build_library("120a", emulate=True)
    assert emulated != first
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2
    assert "-gencode=arch=compute_120a,code=sm_120a" in calls[0]
    assert "-DREQUANT_FP4_EMULATE" in calls[1]
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == sorted([first.name, emulated.name])


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.skipif(CUOBJDUMP is None, reason="no cuobjdump: the CUDA toolkit or Triton's wheel has it")
def test_sm120_machine_code_uses_the_fp4_tensor_cores(tmp_path: Path) -> None:
    cubin = tmp_path / "w4a4.cubin"
    w4a4_build.build_cubin("120a", cubin)
    sass = subprocess.run(
        [str(CUOBJDUMP), "--dump-sass", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    # 4 m16 x n8 x k64 steps per slice; 1, 2, 2, 4 x 4 tiles a warp for 16 .. 128 rows; three alignments of each.
    instructions = 3 * 4 * 4 * (1 + 2 + 2 + 4)
    assert Counter(re.findall(r"OMMA\.\S+", sass)) == {
        "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": instructions,
        "OMMA.SF.16864.F32.E2M1.E2M1.E8": instructions,
    }
    assert "LDSM.16.M88.4" in sass
    assert re.search(r"LDGSTS\.E\.BYPASS\.128", sass), "codes go to shared memory 16 bytes at a time"
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spill"


def test_doctor_names_the_chip_or_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(w4a4, "find_cuda_tool", lambda name: Path("/opt/cuda/bin/nvcc"))
    assert w4a4.availability().state is State.COMPILES
    assert "for SM120 by /opt/cuda/bin/nvcc; there is no GPU" in str(w4a4.availability())
    monkeypatch.setattr(w4a4, "find_cuda_tool", lambda name: None)
    assert str(w4a4.availability()) == "unavailable because there is no GPU and no nvcc"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Card")
    assert "Card (SM120) could run it, but there is no nvcc" in str(w4a4.availability())
    monkeypatch.setattr(w4a4, "find_cuda_tool", lambda name: Path("nvcc"))
    assert w4a4.availability().state is State.RUNS
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert w4a4.availability().state is State.COMPILES
    assert "Card (SM90) has no warp-level FP4 mma" in w4a4.availability().reason


def test_padding_along_k_leaves_the_sum_alone() -> None:
    """The kernel fills up K with code 0 and scale byte 0, which is 2^-127 in E8M0: it must add nothing all the same."""
    from requant.kernels import mma_model

    c = np.array([1.5, -(2.0**-140), 3e38], np.float32)
    zeros = np.zeros((3, 32), np.uint8)
    for fmt, groups in ((NumberFormat.NVFP4, 4), (NumberFormat.MXFP4, 2)):
        pad = np.zeros((3, groups), np.uint8)
        np.testing.assert_array_equal(mma_model.fp4_mma(zeros, zeros, pad, pad, c, fmt=fmt), c)
