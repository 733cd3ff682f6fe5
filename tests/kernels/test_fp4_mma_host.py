"""fp4_mma.cuh compiled for the host: every golden bit, and the fragment layout of a whole emulated warp.

The same functions run on a GPU; there only the way a lane reads its neighbours differs (shuffles).
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from requant.kernels import mma_model
from requant.kernels.formats import NumberFormat
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "fp4_mma"
CASES = [(NumberFormat.NVFP4, "nvfp4_ue4m3_4x"), (NumberFormat.MXFP4, "mxfp4_ue8m0_2x")]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is part of the development set-up"
    target = tmp_path_factory.mktemp("fp4_mma") / "fp4_mma_host.so"
    source = Path(__file__).with_name("fp4_mma_host.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined", "-fno-sanitize-recover"]
    command = [compiler, *flags, "-shared", "-fPIC", f"-I{ROOT / 'kernels' / 'csrc'}", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def words(codes: np.ndarray) -> np.ndarray:
    """Bytes to little-endian 32-bit registers."""
    return np.ascontiguousarray(codes).view("<u4")


@pytest.mark.parametrize(("fmt", "name"), CASES)
def test_every_golden_bit(library: ctypes.CDLL, fmt: NumberFormat, name: str) -> None:
    case = load_file(GOLDENS / f"{name}.safetensors")
    a, b = words(case["a"]), words(case["b"])
    scale_a, scale_b = (words(np.pad(case[s], ((0, 0), (0, 4 - case[s].shape[1])))) for s in ("scale_a", "scale_b"))
    c, d = case["c"], np.full(len(a), np.nan, np.float32)
    library.host_outputs(fmt is NumberFormat.MXFP4, len(a), *map(pointer, (a, b, scale_a, scale_b, c, d)))
    assert len(d) == 4096
    np.testing.assert_array_equal(d.view(np.uint32), case["d"].view(np.uint32))


@pytest.mark.parametrize("fmt", [NumberFormat.NVFP4, NumberFormat.MXFP4])
@pytest.mark.parametrize("ta", [0, 1])
@pytest.mark.parametrize("tb", [0, 1, 2, 3])
def test_fragments_and_scale_selectors(library: ctypes.CDLL, fmt: NumberFormat, ta: int, tb: int) -> None:
    """Registers filled by the documented layout give the tile product of the bit model; unselected lanes hold junk."""
    rng = np.random.default_rng(10 * ta + tb)
    byte = 2 if fmt is NumberFormat.MXFP4 and tb % 2 else 0
    groups = 64 // fmt.group
    low, high = (0x28, 0x58) if fmt is NumberFormat.NVFP4 else (120, 134)
    a = rng.integers(0, 256, (16, 32), dtype=np.uint8)
    b = rng.integers(0, 256, (8, 32), dtype=np.uint8)
    scale_a = rng.integers(low, high, (16, groups), dtype=np.uint8)
    scale_b = rng.integers(low, high, (8, groups), dtype=np.uint8)
    c = rng.standard_normal((16, 8)).astype(np.float32) * 100

    lane = np.arange(32)
    g, p = lane // 4, lane % 4
    a_words, b_words = words(a), words(b)  # [16, 8], [8, 8]
    fragment_a = np.stack([a_words[g, p], a_words[g + 8, p], a_words[g, 4 + p], a_words[g + 8, 4 + p]], axis=1)
    fragment_b = np.stack([b_words[g, p], b_words[g, 4 + p]], axis=1)
    sfa, sfb = (rng.integers(0, 256, (32, 4), dtype=np.uint8) for _ in range(2))
    for row in range(16):
        sfa[4 * (row % 8) + 2 * ta + row // 8, byte : byte + groups] = scale_a[row]
    for column in range(8):
        sfb[4 * column + tb, byte : byte + groups] = scale_b[column]
    d = np.stack([c[g, 2 * p], c[g, 2 * p + 1], c[g + 8, 2 * p], c[g + 8, 2 * p + 1]], axis=1).copy()
    library.host_warp(
        fmt is NumberFormat.MXFP4,
        *map(pointer, (fragment_a, fragment_b, words(sfa), words(sfb), d)),
        byte,
        ta,
        tb,
    )

    expected = mma_model.fp4_mma(
        np.repeat(a, 8, axis=0),
        np.tile(b, (16, 1)),
        np.repeat(scale_a, 8, axis=0),
        np.tile(scale_b, (16, 1)),
        c.ravel(),
        fmt=fmt,
    ).reshape(16, 8)
    got = np.empty((16, 8), np.float32)
    got[g, 2 * p], got[g, 2 * p + 1], got[g + 8, 2 * p], got[g + 8, 2 * p + 1] = d.T
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_a_dot_of_every_pair_of_codes(library: ctypes.CDLL) -> None:
    """256 pairs of codes, each in all 64 places: 64 * value_a * value_b exactly."""
    pairs = np.array([(i, j) for i in range(16) for j in range(16)], np.uint8)
    a, b = (words(np.repeat(pairs[:, side, None] * 17, 32, axis=1)) for side in (0, 1))
    one = np.full(256, 0x38383838, np.uint32)
    c, d = np.zeros(256, np.float32), np.full(256, np.nan, np.float32)
    library.host_outputs(0, 256, *map(pointer, (a, b, one, one, c, d)))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    np.testing.assert_array_equal(d, 64 * values[pairs[:, 0]] * values[pairs[:, 1]])
