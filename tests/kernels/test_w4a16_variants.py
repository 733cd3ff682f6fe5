"""What is compiled into the W4A16 library holds every configuration that is chosen, and nothing that wgmma replaced.

The preprocessor says what is compiled in, with the flags of the build; without a GPU nothing else would notice a
configuration without a kernel before its launch.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache

import pytest
from requant.kernels import w4a16_configs as configs
from requant.kernels import w4a16_library as lib
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a16_h200 import H200_DENSE

NVCC = lib.find_nvcc()
FORMATS = {NumberFormat.NVFP4: "kNvfp4", NumberFormat.MXFP4: "kMxfp4"}
ALIGNMENTS = ("kScale16", "kScale8", "kScale4", "kGeneral")
WORD = r"(\w+)"
N, K = (7, 16, 100, 2880, 4096, 5760, 201088), (32, 272, 288, 512, 1040, 2048, 2816, 2880, 2944, 4096, 8192, 65536)


@cache
def compiled(arch):
    """Arguments of `variant` and of those for streams, splits and residents: numbers, after format and alignment."""
    source = str(lib.SOURCES / "w4a16.cu")
    command = [NVCC, "-std=c++17", *lib.defines(arch), "-E", f"-arch=compute_{arch}", source]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def found(name, enums, numbers):
        listed = ", ".join([rf"(?:{enum}::)?{WORD}" for enum in enums] + [r"(\d+)"] * numbers)
        rows = re.findall(rf"(?<!\w){name}<{listed}>\(\)", text)
        return {(*row[: len(enums)], *map(int, row[len(enums) :])) for row in rows}

    return (
        found("variant", ("Format", "Alignment"), 5),
        found("stream_variant", ("Format", "Alignment"), 3),
        found("split_variant", ("Format",), 3),
        found("resident_variant", ("Alignment",), 1),
    )


def has_dense(arch, fmt, tokens, k, c):
    """A kernel at least that wide, as csrc/w4a16.cu looks for one; 0 tokens: grouped."""
    at, threads = ALIGNMENTS[configs.alignment(fmt, k)], c.column_warps * c.row_warps * 32
    return any(
        v[:2] == (FORMATS[fmt], at)
        and (v[2] == 0 if tokens == 0 else v[2] >= tokens)
        and v[3:5] == (c.row_tiles, c.depth)
        and threads <= v[5]
        for v in compiled(arch)[0]
    )


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_configuration_that_is_chosen_has_a_kernel(fmt, capability):
    arch, streams = lib.architecture(*capability), set()
    shapes = [*H200_DENSE, *((n, k) for n in N for k in K)]
    for n, k in shapes:
        for tokens in (1, 2, 3, 8, 9, 17, 64):
            c = configs.choose(fmt, tokens, n, k, capability=capability)
            if isinstance(c, configs.Config) and c.stream == configs.RESIDENT:
                assert tokens == 1 and fmt is NumberFormat.NVFP4
                assert (ALIGNMENTS[configs.alignment(fmt, k)], c.row_tiles) in compiled(arch)[3], (n, k, c)
                assert c.column_warps * configs.STAGE_K >= k
            elif isinstance(c, configs.Config):  # wgmma's are a table of widths
                assert has_dense(arch, fmt, tokens, k, c), (n, k, tokens, c)
        for slots in (1, 8, 128, 5000):
            c = configs.choose_grouped(fmt, slots, n, k, experts=128, capability=capability)
            streams.add(c.stream)
            if c.stream == configs.SPLIT:
                steps = k // c.column_warps // 64
                assert (FORMATS[fmt], steps, c.column_warps, c.depth) in compiled(arch)[2], (n, k, slots, c)
            elif c.stream:
                at = ALIGNMENTS[configs.alignment(fmt, k)]
                assert (FORMATS[fmt], at, c.row_tiles, c.depth, c.row_warps) in compiled(arch)[1], (n, k, slots, c)
            else:
                assert has_dense(arch, fmt, 0, k, c), (n, k, slots, c)
    assert streams == ({0} if capability < (9, 0) else {0, 2} if capability == (12, 0) else {0, 1, 2})


@pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
def test_kernels_of_mma_sync_that_wgmma_replaced_are_left_out_for_it_alone():
    wide = {arch: {v[1] for v in compiled(arch)[0] if v[2] > configs.DENSE_WIDTH} for arch in ("80", "90a", "120a")}
    assert wide == {"80": set(ALIGNMENTS), "90a": {"kGeneral"}, "120a": set(ALIGNMENTS)}
