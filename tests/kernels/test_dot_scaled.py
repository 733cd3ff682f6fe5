"""Triton's dot_scaled: the instructions it compiles to without a GPU, and its numbers where the interpreter is right.

Each test starts a fresh Python: the interpreter is chosen by the environment before Triton is imported.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

try:
    TRITON = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
except importlib.metadata.PackageNotFoundError:
    TRITON = (0, 0)

pytestmark = pytest.mark.skipif(TRITON < (3, 8), reason="dot_scaled with E4M3 scales needs Triton 3.8 or later")

COMPILE = """
import json, sys
from requant.kernels.formats import NumberFormat
from requant.kernels.triton.dot_scaled import compile_ptx
print(json.dumps(compile_ptx(int(sys.argv[1]), NumberFormat(sys.argv[2]))))
"""

INTERPRET = """
import numpy as np, torch
from requant.kernels import reference
from requant.kernels.triton.dot_scaled import matmul
from requant.kernels.w4a4_operands import Fp4Tensor

rng = np.random.default_rng(0)
for m, n, k in ((5, 130, 96), (129, 3, 320)):
    x, w = (
        Fp4Tensor.weight(
            torch.from_numpy(rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)),
            torch.from_numpy(rng.integers(120, 134, (rows, k // 32), dtype=np.uint8)),
        )
        for rows in (m, n)
    )
    xs, ws = (reference.dequantize_mxfp4(t.codes.numpy(), t.scales.numpy()) for t in (x, w))
    exact, magnitude = xs @ ws.T, np.abs(xs) @ np.abs(ws).T
    y = matmul(x, w, torch.float32).double().numpy()
    assert y.shape == (m, n)
    assert (np.abs(y - exact) <= 2.0**-20 * magnitude).all(), np.abs(y - exact).max()
assert matmul(Fp4Tensor(x.format, x.codes[:0], x.scales[:0], None), w).shape == (0, 3)
try:
    matmul(x, Fp4Tensor.weight(w.codes[:, :32].contiguous(), w.scales[:, :2].contiguous()))
except ValueError as error:
    assert "K = 320" in str(error) and "K = 64" in str(error)
    print("right")
"""


def python(code: str, *args: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "TRITON_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("capability", "fmt", "instruction"),
    [
        ("100", "nvfp4", r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale\.(block16|scale_vec::4X)"),
        ("100", "mxfp4", r"tcgen05\.mma\.cta_group::1\.kind::mxf4\.block_scale\.(block32|scale_vec::2X)"),
        (
            "120",
            "nvfp4",
            r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\.scale_vec::4X"
            r"\.f32\.e2m1\.e2m1\.f32\.ue4m3",
        ),
    ],
)
def test_compiles_to_the_fp4_tensor_cores(capability: str, fmt: str, instruction: str, tmp_path: Path) -> None:
    ptx = json.loads(python(COMPILE, capability, fmt, folder=tmp_path, TRITON_INTERPRET="0").splitlines()[-1])
    found = Counter(re.findall(r"(?:tcgen05\.mma|mma\.sync|wgmma\.mma)[^\s;]*", ptx))
    assert found
    assert all(re.fullmatch(instruction, name) for name in found), f"another matrix instruction: {dict(found)}"
    # A 128 x 128 x 256 tile: k64 per instruction of 128 x 128 (tcgen05), or of 16 x 8 over four warps (mma.sync).
    assert sum(found.values()) == (4 if capability == "100" else 128 * 128 * 256 // (16 * 8 * 64) // 4)


@pytest.mark.skipif(TRITON < (3, 9), reason="the interpreter has dot_scaled from Triton 3.9 on")
def test_the_interpreter_keeps_the_bound_for_mxfp4(tmp_path: Path) -> None:
    assert python(INTERPRET, folder=tmp_path, TRITON_INTERPRET="1").endswith("right\n")
