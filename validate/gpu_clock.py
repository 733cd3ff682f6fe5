"""Times on a GPU: CUDA graphs of many launches, weights rotated past the L2 cache; and what this card can do at best.

A graph is replayed `_REPLAYS` times; the time of a launch is the median over replays, the spread their largest less
their least, and the host is out of the picture. Outputs that a caller names are filled with NaN after everything that
ran before the timed replays, so that whoever checks them afterwards sees what those wrote and nothing else.

The ceilings: reading (the amax kernel of csrc/quantize.cu over 4 GB), copying, and BF16 torch.matmul of
8192 x 8192 x 8192.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves CUDA graphs, events and device properties untyped.

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

import torch
from requant.kernels import gpu_quantize
from requant.kernels.cuda_build import architecture
from requant.validate.roofline import Ceilings

__all__ = ["copies_past_l2", "measure_bandwidth", "measure_ceilings", "past_l2", "timed"]

_DEVICE: Final = "cuda"
_REPLAYS: Final = 9
_LAUNCHES: Final = 48
"""Launches in a graph, about."""
_PAST_L2: Final = 4
"""Bytes between two uses of the same weight, in L2 caches."""
_MOST_COPIES: Final = 256
"""Weights under 1 MB or so cannot be rotated past the cache in a graph of this size; no large model has such."""
_BUFFER: Final = 4 << 30
_PEAK_SIZE: Final = 8192


def copies_past_l2(nbytes: int) -> int:
    """How many copies of `nbytes` are larger than the L2 cache, several times; at most `_MOST_COPIES`."""
    cache = int(torch.cuda.get_device_properties(0).L2_cache_size)
    return min(max(1, -(-_PAST_L2 * cache // max(nbytes, 1))), _MOST_COPIES)


def past_l2(nbytes: int) -> int:
    """The same, and at least 2: the sets of bytes to take in turn."""
    return max(2, copies_past_l2(nbytes))


def timed(
    calls: Sequence[Callable[[], object]],
    launches: int = _LAUNCHES,
    *,
    replays: int = _REPLAYS,
    poison: Sequence[torch.Tensor] = (),
) -> tuple[float, float]:
    """(median, spread) microseconds of one call, all of them in turn in one graph of about `launches`.

    poison: outputs to fill with NaN before the timed replays.
    """
    rounds = max(1, round(launches / len(calls)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up where capture may not: module loading, workspaces, the allocator
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    for output in poison:
        output.fill_(torch.nan)
    times: list[float] = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(times), max(times) - min(times)


def measure_ceilings() -> Ceilings:
    """Read, copy and BF16 matmul rates of this card, now."""
    read, copy = measure_bandwidth()
    a = torch.randn((_PEAK_SIZE, _PEAK_SIZE), device=_DEVICE).bfloat16()
    b = torch.randn((_PEAK_SIZE, _PEAK_SIZE), device=_DEVICE).bfloat16()
    y = torch.empty_like(a)
    peak_us, _ = timed([lambda: torch.matmul(a, b, out=y)], 8)
    return Ceilings(read, copy, 2 * _PEAK_SIZE**3 / peak_us / 1e6)


def measure_bandwidth() -> tuple[float, float]:
    """GB/s read, and read plus written by a copy."""
    library = gpu_quantize.load_library(architecture(torch.cuda.get_device_capability()))
    source = torch.randint(0, 1 << 30, (_BUFFER // 4,), dtype=torch.int32, device=_DEVICE)
    target = torch.empty_like(source)
    sink = torch.full((1,), 0x7FFFFFFF, dtype=torch.int32, device=_DEVICE)

    def read() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        library.requant_bf16_amax(source.data_ptr(), _BUFFER // 32, sink.data_ptr(), stream)

    read_us, _ = timed([read], 4)
    target.copy_(source)
    times: list[float] = []
    for _ in range(_REPLAYS):  # not in a graph: as a node of one it reached 2.8 TB/s on an H200, and 4.3 so
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return _BUFFER / read_us / 1e3, 2 * _BUFFER / statistics.median(times) / 1e3
