"""Memory does not grow with the fused group: stacked experts of 12 and of 130 MB take the same, but for a little."""

import pytest
from module_files import load

bench = load("bench/bench_memory.py")

INTER, HIDDEN = 512, 512
SMALL, LARGE = 12, 128
"""Experts of a megabyte each in BF16."""
ROOM = 20
"""MB. Of the large group the codes alone, whole, would be 32 MB; malloc's arenas account for a few."""


@pytest.mark.parametrize("name", ["bf16-nearest", "bf16-mse", "bf16-fp8", "mxfp4-halves"])
def test_a_fused_group_is_never_held_as_a_whole(tmp_path, name):
    case = bench.CASES[name]
    peaks = {}
    for experts in (SMALL, LARGE * (4 if case.source == "mxfp4" else 1)):
        source = tmp_path / f"source-{experts}"
        size = bench.write_source(source, case, experts, INTER, HIDDEN)
        peaks[experts], _ = bench.peak(source, tmp_path / "out", case)
        (source / "model.safetensors").unlink()
    assert size > 130e6
    small, large = peaks.values()
    assert large < small + ROOM, peaks
    assert large < 400
