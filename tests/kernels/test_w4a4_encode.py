"""The activation quantizer's rules, compiled for the host, against the CPU oracle byte for byte."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from requant.kernels import reference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler, "a C++ compiler is part of the development set-up"
    target = tmp_path_factory.mktemp("w4a4_encode") / "w4a4_encode_host.so"
    source = Path(__file__).with_name("w4a4_encode_host.cpp")
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fsanitize=undefined"]
    flags += ["-fno-sanitize-recover", "-fno-sanitize=float-divide-by-zero"]
    command = [compiler, *flags, "-shared", "-fPIC", f"-I{ROOT / 'kernels' / 'csrc'}", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.host_global_scale.argtypes, loaded.host_global_scale.restype = [ctypes.c_float], ctypes.c_float
    return loaded


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def nvfp4(library: ctypes.CDLL, bits: np.ndarray, global_scale: float) -> tuple[np.ndarray, np.ndarray]:
    """BF16 bits [blocks, 16] to codes [blocks, 8] and scale bytes [blocks]."""
    codes, scales = np.zeros((len(bits), 8), np.uint8), np.zeros(len(bits), np.uint8)
    library.host_encode_nvfp4(len(bits), pointer(bits), ctypes.c_float(global_scale), pointer(codes), pointer(scales))
    return codes, scales


def mxfp4(library: ctypes.CDLL, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = np.zeros((len(bits), 16), np.uint8), np.zeros(len(bits), np.uint8)
    library.host_encode_mxfp4(len(bits), pointer(bits), pointer(codes), pointer(scales))
    return codes, scales


def values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def finite_bits(rng: np.random.Generator, shape: tuple[int, int], spread: int) -> np.ndarray:
    """BF16 with exponents over 2^spread, both signs, a few exact zeros of both signs."""
    x = rng.standard_normal(shape).astype(np.float32) * np.exp2(rng.uniform(-spread / 2, spread / 2, shape))
    bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits[rng.random(shape) < 0.03] = 0
    bits[rng.random(shape) < 0.03] = 0x8000
    return bits


def near_ties(global_scale: float) -> np.ndarray:
    """Blocks whose largest value is 6 s and whose others sit on and beside every midpoint of the E2M1 grid."""
    rows = []
    for scale in (2.0**-9, 2.0**-7, 1.0, 1.125, 448.0):
        step = np.float32(scale) * np.float32(global_scale)
        ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32) * step
        for delta in (-1, 0, 1):
            bits = (ties.view(np.uint32) >> 16).astype(np.int64) + delta
            rows.append(np.concatenate([[np.float32(6 * step).view(np.uint32) >> 16], bits, bits ^ 0x8000, [1]]))
    return np.array(rows, np.int64).astype(np.uint16)


@pytest.mark.parametrize("spread", [2, 12, 40])
@pytest.mark.parametrize("global_scale", [1.0, 2.0**-10, 0.0123, 3.7e-4])
def test_nvfp4_bytes_equal_the_oracle(library: ctypes.CDLL, spread: int, global_scale: float) -> None:
    rng = np.random.default_rng(spread)
    bits = np.concatenate([finite_bits(rng, (4000, 16), spread), near_ties(global_scale)])
    codes, scales = nvfp4(library, bits, global_scale)
    expected_codes, expected_scales = reference.encode_nvfp4(values(bits), np.float32(global_scale))
    np.testing.assert_array_equal(scales, expected_scales[:, 0])
    np.testing.assert_array_equal(codes, expected_codes)


def test_nvfp4_every_finite_bf16_as_the_largest_of_its_block(library: ctypes.CDLL) -> None:
    magnitudes = np.arange(0x7F80, dtype=np.uint16)
    bits = np.zeros((len(magnitudes), 16), np.uint16)
    bits[:, 3], bits[:, 7], bits[:, 8] = magnitudes, magnitudes // 2, magnitudes | 0x8000
    codes, scales = nvfp4(library, bits, 0.25)
    expected_codes, expected_scales = reference.encode_nvfp4(values(bits), np.float32(0.25))
    np.testing.assert_array_equal(scales, expected_scales[:, 0])
    np.testing.assert_array_equal(codes, expected_codes)


@pytest.mark.parametrize("spread", [2, 12, 40])
def test_mxfp4_bytes_equal_the_oracle(library: ctypes.CDLL, spread: int) -> None:
    bits = finite_bits(np.random.default_rng(spread), (4000, 32), spread)
    codes, scales = mxfp4(library, bits)
    expected_codes, expected_scales = reference.encode_mxfp4(values(bits))
    np.testing.assert_array_equal(scales, expected_scales[:, 0])
    np.testing.assert_array_equal(codes, expected_codes)


def test_mxfp4_every_finite_bf16_as_the_largest_of_its_block(library: ctypes.CDLL) -> None:
    magnitudes = np.arange(0x7F80, dtype=np.uint16)
    bits = np.zeros((len(magnitudes), 32), np.uint16)
    bits[:, 3], bits[:, 30] = magnitudes, magnitudes | 0x8000
    codes, scales = mxfp4(library, bits)
    expected_codes, expected_scales = reference.encode_mxfp4(values(bits))
    np.testing.assert_array_equal(scales, expected_scales[:, 0])
    np.testing.assert_array_equal(codes, expected_codes)


@pytest.mark.parametrize("bad", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_a_block_that_is_not_finite_gets_the_nan_scale(library: ctypes.CDLL, bad: int) -> None:
    bits = np.full((2, 32), 0x3F80, np.uint16)
    bits[0, 20] = bad
    codes, scales = nvfp4(library, bits.reshape(4, 16), 1.0)
    assert scales.tolist() == [0x23, 0x7F, 0x23, 0x23]  # 1/6 is nearest to 11 * 2^-6
    assert codes[1].tolist() == [0] * 8
    assert (codes[[0, 2, 3]] == 0x77).all()
    codes, scales = mxfp4(library, bits)
    assert scales.tolist() == [0xFF, 125]
    assert codes[0].tolist() == [0] * 16
    assert (codes[1] == 0x66).all()


def test_a_step_below_the_range_of_float32_rounds_to_zero(library: ctypes.CDLL) -> None:
    bits = np.full((1, 16), 0x0001, np.uint16)  # 2^-133 under a global scale that makes scale * s2 vanish
    codes, scales = nvfp4(library, bits, 2.0**-149)
    assert scales[0] == 0x7E
    assert codes.tolist() != [[0] * 8], "448 * 2^-149 is still a float32"
    codes, scales = nvfp4(library, np.zeros((1, 16), np.uint16), 2.0**-149)
    assert (scales[0], codes.tolist()) == (0x38, [[0] * 8])


@pytest.mark.parametrize("amax", [0.0, 1e-38, 0.7, 3.0, 3.3895e38])
def test_the_global_scale_is_modelopts(library: ctypes.CDLL, amax: float) -> None:
    expected = reference.nvfp4_global_scale([np.array([amax, -amax / 2], np.float32)])
    assert np.float32(library.host_global_scale(amax)) == expected
