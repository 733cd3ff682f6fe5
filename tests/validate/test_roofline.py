"""The arithmetic of the roofline: bytes, flops, floors, checked against numbers worked out by hand."""

import pytest
from requant.kernels.formats import NumberFormat
from requant.validate.roofline import Ceilings, Work, weight_bytes, work_of

H200 = Ceilings(read_gbps=4420.0, copy_gbps=4290.0, peak_tflops=790.0)


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        (NumberFormat.NVFP4, 4096 * 4096 * 9 // 16 + 4),
        (NumberFormat.MXFP4, 4096 * 4096 * 17 // 32),
        (NumberFormat.FP8, 4096 * 4096),
        (NumberFormat.BF16, 4096 * 4096 * 2),
    ],
)
def test_bytes_of_a_weight(fmt, expected):
    assert weight_bytes(fmt, 4096, 4096) == expected


def test_dense_work_counts_x_and_y_once():
    work = work_of(NumberFormat.NVFP4, 4096, 2048, 8)
    assert work.weight_bytes == 4_718_596
    assert work.bytes == 4_718_596 + 8 * (2048 + 4096) * 2
    assert work.flops == 2 * 8 * 4096 * 2048
    assert work.intensity == work.flops / work.bytes


def test_moe_work_counts_the_experts_touched_and_a_row_of_y_per_slot():
    work = work_of(NumberFormat.MXFP4, 100, 64, 4, touched=7, slots=24)
    assert work.weight_bytes == 7 * (100 * 32 + 100 * 2)
    assert work.bytes == work.weight_bytes + (4 * 64 + 24 * 100) * 2
    assert work.flops == 2 * 24 * 100 * 64


def test_the_floor_is_memory_at_small_m_and_arithmetic_at_large():
    small, large = work_of(NumberFormat.NVFP4, 8192, 8192, 1), work_of(NumberFormat.NVFP4, 8192, 8192, 4096)
    assert small.floor_us(H200) == pytest.approx(8.5, abs=0.05)  # 37.7 MB over 4.42 TB/s
    assert small.floor_us(H200) == small.bytes / 4420e3
    assert large.floor_us(H200) == large.flops / 790e6


def test_fractions_of_time():
    work = Work(weight_bytes=4_420_000, bytes=4_420_000, flops=1_000_000)
    assert work.gbps(2.0) == 2210.0
    assert work.of_ceiling(2.0, H200) == 0.5
    assert work.of_floor(2.0, H200) == pytest.approx(0.5)
    assert work.tflops(2.0) == 0.5
