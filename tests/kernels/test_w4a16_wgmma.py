"""The wgmma kernel of W4A16 as far as no GPU is needed: which layers it takes, its configurations, its machine code."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import pytest
from requant.kernels import w4a16_configs, w4a16_library
from requant.kernels import w4a16_wgmma_configs as configs
from requant.kernels.cuda_build import find_cuda_tool
from requant.kernels.formats import NumberFormat

NVCC, CUOBJDUMP = w4a16_library.find_nvcc(), find_cuda_tool("cuobjdump")
NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4
SHAPES = [(4096, 4096), (7168, 2048), (5120, 2944), (12288, 4096), (8192, 8192), (64, 128), (1, 64), (100000, 16384)]


@pytest.mark.parametrize("fmt", [NVFP4, MXFP4])
@pytest.mark.parametrize("tokens", [9, 16, 17, 32, 33, 64])
def test_every_shape_gets_a_configuration_that_fits_and_covers_its_rows(fmt, tokens):
    width = configs.width_for(tokens)
    for n, k in SHAPES:
        c = configs.choose(fmt, tokens, n, k)
        assert configs.shared_bytes(fmt, width, c) <= configs.SHARED_LIMIT, (n, k, c)
        assert c.blocks * c.row_groups * configs.TILE_ROWS >= n
        assert c.row_groups * c.k_groups <= configs.MAX_GROUPS
        assert (c.k_groups in (1, 2, 4), c.cluster in range(1, 9)) == (True, True)
        assert c.x_depth >= 2, "the kernel frees a stage of x while it reads the next"
        # no participant without a share of K, but for K below one stage
        assert c.cluster * c.k_groups <= max(1, -(-k // configs.STAGE_K))


def test_it_runs_where_the_chip_and_the_layer_allow_it():
    taken = [(NVFP4, 16, 4096, (9, 0)), (NVFP4, 9, 2880, (9, 0)), (MXFP4, 64, 2944, (9, 0))]
    left = [(NVFP4, 16, 4096, (8, 0)), (NVFP4, 16, 4096, (10, 0)), (NVFP4, 8, 4096, (9, 0))]
    left += [(NVFP4, 16, 2896, (9, 0)), (MXFP4, 16, 2880, (9, 0)), (NVFP4, 64, 32, (9, 0))]
    for fmt, tokens, k, capability in taken + left:
        chosen = w4a16_configs.choose(fmt, tokens, 512, k, capability=capability)
        assert isinstance(chosen, configs.WgmmaConfig) == ((fmt, tokens, k, capability) in taken)


def test_a_configuration_fills_the_fields_of_a_call():
    call = w4a16_library.Call()
    names = {name for name, _ in call._fields_}
    wgmma = configs.WgmmaConfig(2, 1, 64, cluster=2, depth=5, x_depth=3).launch_fields()
    assert wgmma == {
        "wgmma": 1,
        "row_warps": 2,
        "column_warps": 1,
        "cluster": 2,
        "depth": 5,
        "x_stages": 3,
        "blocks": 64,
    }
    assert set(w4a16_configs.Config(2, 4, 64).launch_fields()) | {"wgmma"} <= names


@pytest.mark.skipif(NVCC is None or CUOBJDUMP is None, reason="needs nvcc and cuobjdump of the CUDA toolkit")
def test_machine_code_multiplies_on_the_warpgroup_tensor_cores_from_registers(tmp_path):
    probe, cubin = tmp_path / "probe.cu", tmp_path / "probe.cubin"
    kinds = [("kNvfp4", 8), ("kNvfp4", 16), ("kNvfp4", 64), ("kMxfp4", 32)]
    lines = [
        f"template __global__ void requant::w4a16_wgmma_kernel<requant::Format::{f}, {t}>"
        "(const __grid_constant__ requant::WgmmaParams);"
        for f, t in kinds
    ]
    probe.write_text('#include "w4a16_wgmma.cuh"\n' + "\n".join(lines))
    command = [NVCC, "-std=c++17", "-O3", "-I", str(w4a16_library.SOURCES), "-cubin", "-o", str(cubin)]
    command += ["-gencode", "arch=compute_90a,code=sm_90a", str(probe)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "wgmma" not in built.stderr, "ptxas says so when it has to wait for every wgmma"
    sass = subprocess.run(
        [str(CUOBJDUMP), "--dump-sass", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    found = Counter(re.findall(r"HGMMA\.(\S+) R\d+, R\d+, gdesc", sass))  # R: A comes from registers
    # the k steps of 128 k with x sorted, of 64 k with codes gathered
    assert found == {f"64x{t}x16.F32.BF16": 4 if t == 64 else 8 for _, t in kinds}
    assert "UTMALDG.2D" in sass
    assert "UTMALDG.3D" in sass
    assert re.search(r"LDGSTS\.E\.BYPASS\.LTC128B\.128", sass), "block scales go to shared memory 16 bytes at a time"
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spill"
