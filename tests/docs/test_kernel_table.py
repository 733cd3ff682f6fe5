"""Each kernel, its oracle test and its bench share a name: the table in docs/kernels.md against the files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs/kernels.md").read_text(encoding="utf-8").partition("## Kernel, oracle test, bench\n")[2]
ROWS = [line.strip("| ").split(" | ") for line in SECTION.partition("\n## ")[0].splitlines() if line.startswith("| `")]
NOT_KERNELS = {
    *("availability", "bounds", "dispatch", "formats", "matmul", "jit", "cuda_build", "empty_model"),  # around them
    *("reference", "reference_repack", "reference_torch", "reference_w4a4", "mma_model"),  # oracles
    *("cpu_dequant", "gpu_lane", "quantize_jit", "repack_jit"),  # parts of a kernel that is in the table
    *("w4a16_configs", "w4a16_library", "w4a16_routing", "w4a16_wgmma_configs", "w4a4_build", "w4a4_operands"),
}


def files(cell):
    return [name for name in re.findall(r"`([^`]+\.(?:py|cu))`", cell) if "/" in name]


def test_every_kernel_stands_in_the_table():
    listed = {Path(name).stem for row in ROWS for name in files(row[0]) if name.endswith(".py")}
    there = {path.stem for folder in ("kernels", "kernels/triton") for path in (ROOT / folder).glob("*.py")}
    parts = {stem for stem in there if stem.startswith(("w4a16_", "w4a4_"))}
    assert there - NOT_KERNELS - parts == listed
    assert not NOT_KERNELS - there, "names of files that are gone"


@pytest.mark.parametrize("row", ROWS, ids=[files(row[0])[0] for row in ROWS])
def test_what_a_row_names_is_there_and_shares_the_kernels_name(row):
    kernel, tests, timed = row
    for name in files(kernel) + files(tests) + files(timed):
        assert list(ROOT.glob(name)), f"{name} is not there"
    stem = Path(files(kernel)[0]).stem
    assert files(tests)
    assert all(stem in Path(name).stem for name in files(tests)), "a test of another name"
    benches = files(timed)
    if benches:
        assert f"bench_{stem}" in {Path(name).stem for name in benches}
    assert benches or re.match("`requant bench|the stage `speed`|not by itself: ", timed)
