"""Fused groups by way of the GPU: the same passes over the same tiles as compute.py's, two of them in flight.

A tile is read from the source into pinned memory, sent, worked on, fetched and written at its planned offset; while one
is on its way the worker reads the next and writes the one before. A group that needs two passes (amax or census, then
the codes) stays in GPU memory between them where it fits, and is read twice where it does not.

Only groups that device.gpu_refusal lets through come here. What the source holds wrong (NaN, infinity) is left to the
CPU, which says where it lies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from requant.convert.decode import scale_grid
from requant.convert.files import read_into, write_all
from requant.convert.layouts.base import Rows
from requant.convert.meter import Interval, Meter
from requant.convert.plan import GroupUnit, Member
from requant.convert.rows import Opened
from requant.kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from requant.kernels.gpu_lane import FloatSource, Job, align
from requant.kernels.repack import Choice, Counts, choose_exponent

if TYPE_CHECKING:
    from requant.convert.outputs import Places

__all__ = ["GpuGroups", "Lane", "tile_rows"]

IN_FLIGHT: Final = 2
"""Slots of a lane."""
_KINDS: Final[dict[str, int | None]] = {"BF16": None, "F16": 0, "F32": 1, "F8_E4M3": 2}
"""Dtype of the values -> FloatSource.kind."""


class _Slot(Protocol):
    input: NDArray[np.uint8]
    output: NDArray[np.uint8]


class Lane(Protocol):
    """kernels/gpu_lane.py, or what stands in for it in tests. Buffers on the device are sliced by bytes."""

    tile: int

    def enter(self) -> None: ...
    def slot(self) -> Any: ...
    def hold(self, nbytes: int) -> Any: ...
    def constant(self, values: NDArray[np.float32]) -> Any: ...
    def queue(self, slot: Any, job: Job, sent: int, fetched: int, at: Any = None) -> None: ...
    def wait(self, slot: Any) -> list[tuple[str, float, float]]: ...
    def settle(self) -> None: ...
    def begin(self, name: str) -> None: ...
    def end(self, name: str) -> NDArray[np.int64]: ...
    def set_scale(self, scale: np.float32) -> None: ...


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows [first, first + count) of a member. held: where they lie in the group's GPU memory."""

    member: Member
    first: int
    count: int
    held: int

    @property
    def codes_bytes(self) -> int:
        """Of the source's codes or values."""
        return self.count * self.member.codes.row_bytes

    @property
    def nbytes(self) -> int:
        """In the slot: codes, and the block scales of MXFP4."""
        scales = self.member.scales
        return self.codes_bytes if scales is None else align(self.codes_bytes) + self.count * scales.row_bytes

    @property
    def weights(self) -> int:
        """How many."""
        return self.count * self.member.form.cols


def tile_rows(member: Member, tile: int) -> int:
    """Rows of a member that fit a slot; 0 if not even one does."""
    scales = member.scales
    return (tile - 256) // (member.codes.row_bytes + (scales.row_bytes if scales else 0))


def _tiles(unit: GroupUnit, tile: int) -> tuple[list[_Tile], int]:
    """The group cut into tiles, and the GPU memory that all of them take."""
    tiles: list[_Tile] = []
    held = 0
    for member in unit.members:
        step = tile_rows(member, tile)
        for first in range(0, member.form.rows, step):
            tiles.append(_Tile(member, first, min(step, member.form.rows - first), held))
            held += align(tiles[-1].nbytes)
    return tiles, held


class GpuGroups:
    """Does fused groups on one lane, for one thread at a time (compute.Accelerator)."""

    def __init__(self, lane: Lane, meter: Meter) -> None:
        self._lane = lane
        self._meter = meter

    def repack(self, plan: Places, unit: GroupUnit, files: Opened) -> tuple[Choice, Counts]:
        """MXFP4 -> NVFP4, step 2: census, choice of the exponent, rewriting."""
        lane = self._lane
        tiles, total = _tiles(unit, lane.tile)
        passes = _Passes(lane, self._meter, tiles, lane.hold(total), files)

        def job(op: str, m: int = 0) -> Callable[[_Tile], Job]:
            return lambda tile: Job(op, tile.weights // MXFP4_GROUP, scales_at=align(tile.codes_bytes), m=m)

        lane.begin("census")
        passes.over(job("census"))

        def lossy_cost(m: int) -> tuple[int, NDArray[np.int64]]:
            lane.begin("lossy")
            passes.over(job("lossy", m))
            found = lane.end("lossy")
            return int(found[256]), found[:256]

        choice = choose_exponent(lane.end("census").reshape(256, 4, 4, 2), lossy_cost)
        lane.begin("halves")
        passes.over(job("halves", choice.m), _Writer(plan, files, self._meter))
        shifted, lossy, below, impossible = (int(n) for n in lane.end("halves"))
        if impossible:
            raise ValueError(f"{unit.group}: {impossible} halves do not fit 2^{choice.m}, which the census chose")
        blocks = sum(tile.weights for tile in tiles) // NVFP4_GROUP
        return choice, Counts(blocks - shifted - lossy, shifted, lossy, below)

    def encode(self, plan: Places, unit: GroupUnit, files: Opened) -> np.float32 | None:
        """Floats -> NVFP4, scale nearest; the global scale. None if a value is not finite: nothing is written then."""
        from requant.kernels.quantize import nvfp4_global_scale

        lane = self._lane
        tiles, total = _tiles(unit, lane.tile)
        passes = _Passes(lane, self._meter, tiles, lane.hold(total), files)
        sources = {member.module: self._source(member, files) for member in unit.members}

        def job(op: str) -> Callable[[_Tile], Job]:
            return lambda tile: Job(
                op, tile.weights // NVFP4_GROUP, sources[tile.member.module], row=tile.member.start + tile.first
            )

        lane.begin("amax")
        passes.over(job("amax"))
        largest = float(lane.end("amax").astype(np.uint64).astype(np.uint32).view(np.float32)[0])
        if not np.isfinite(largest):
            return None
        scale = nvfp4_global_scale(largest)
        lane.set_scale(scale)
        passes.over(job("encode"), _Writer(plan, files, self._meter))
        return scale

    def _source(self, member: Member, files: Opened) -> FloatSource:
        kind, per_row = _KINDS[member.weight.codes.dtype], member.form.cols // NVFP4_GROUP
        if member.weight.format != "fp8":
            return FloatSource(kind, per_row)
        grid = self._lane.constant(scale_grid(member.weight, files))
        return FloatSource(kind, per_row, grid, *member.weight.more.block)


class _Passes:
    """Passes over a group's tiles. The first brings them to the GPU; later ones find them there, if memory was held."""

    def __init__(self, lane: Lane, meter: Meter, tiles: Sequence[_Tile], held: Any, files: Opened) -> None:
        self._lane = lane
        self._meter = meter
        self._tiles = tiles
        self._held = held
        self._files = files
        self._there = False

    def over(self, job: Callable[[_Tile], Job], writer: _Writer | None = None) -> None:
        """Do the job of every tile, and write what comes back."""
        lane, flying = self._lane, deque[tuple[_Tile, Any, int, int]]()
        try:
            for tile in self._tiles:
                if len(flying) == IN_FLIGHT:
                    self._land(*flying.popleft(), writer)
                slot = lane.slot()
                sent = 0 if self._there else tile.nbytes
                if sent:
                    with self._meter.time("read", tile.codes_bytes):
                        self._read(tile, slot)
                at = None if self._held is None else self._held[tile.held : tile.held + align(tile.nbytes)]
                fetched = _output_bytes(tile) if writer else 0
                lane.queue(slot, job(tile), sent, fetched, at)
                flying.append((tile, slot, sent, fetched))
            while flying:
                self._land(*flying.popleft(), writer)
        except BaseException:
            lane.settle()  # the slots' memory must not be written to by what is still queued
            raise
        self._there = self._held is not None

    def _read(self, tile: _Tile, slot: _Slot) -> None:
        begin = 0
        for rows in _planes(tile.member):
            nbytes = tile.count * rows.row_bytes
            fd = self._files.source(rows.tensor.file)
            read_into(
                fd, slot.input[begin : begin + nbytes], rows.begin + tile.first * rows.row_bytes, rows.tensor.file
            )
            begin = align(nbytes)

    def _land(self, tile: _Tile, slot: Any, sent: int, fetched: int, writer: _Writer | None) -> None:
        with self._meter.time("gpu"):
            intervals = [Interval(*interval) for interval in self._lane.wait(slot)]
        self._meter.ran(intervals, sent, fetched)
        if writer:
            writer(tile, slot)


def _planes(member: Member) -> Iterator[Rows]:
    yield member.codes
    if member.scales is not None:
        yield member.scales


def _output_bytes(tile: _Tile) -> int:
    return align(tile.weights // 2) + tile.weights // NVFP4_GROUP


class _Writer:
    """Codes and block scales of a tile, from the slot to their places."""

    def __init__(self, plan: Places, files: Opened, meter: Meter) -> None:
        self._plan = plan
        self._files = files
        self._meter = meter

    def __call__(self, tile: _Tile, slot: _Slot) -> None:
        member, begin = tile.member, 0
        with self._meter.time("write", tile.weights // 2 + tile.weights // NVFP4_GROUP):
            for out, per in ((member.out_codes, 2), (member.out_scales, NVFP4_GROUP)):
                if out is None:
                    raise ValueError(f"{member.module} has no place for block scales")
                target, nbytes = self._plan.tensors[out], tile.weights // per
                offset = target.begin + tile.first * member.form.cols // per
                write_all(self._files.output(target.shard), slot.output[begin : begin + nbytes], offset)
                begin = align(nbytes)
