"""One worker's way to the GPU and back: a stream, two slots of pinned memory, and the quantizers between them.

    slot = lane.slot()                                  # waits for nothing: the caller has waited for what was in it
    (read source bytes into slot.input)
    lane.queue(slot, Job("encode", ...), sent, fetched)
    lane.wait(slot)                                     # slot.output: codes and, from align(codes), block scales

While one slot is on its way the caller reads into the other and writes from it; lanes of several threads overlap their
transfers and kernels. Pinned and device memory is two slots of input and output a lane, beside what `hold` keeps.

Sums over the tiles of a group (`begin`, `end`):

    amax      a float's bits           census   halves of blocks by E8M0 byte and kind [8192]
    lossy     squared error per E8M0 byte [256], scales below 2^-6, halves that cannot be
    halves    shifted, lossy, below 2^-6, impossible
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from requant.kernels.gpu_quantize import Launcher

__all__ = [
    "PINNED_BYTES",
    "SLOT_BYTES",
    "FloatSource",
    "GpuLane",
    "Job",
    "Slot",
    "align",
    "input_bytes",
    "output_bytes",
]

SLOT_BYTES: Final = 8 * 2**20
"""Source bytes of a tile at most: 150 us on PCIe 5, against 10 us to queue it."""
_SUMS: Final = {"amax": 1, "census": 8192, "lossy": 256 + 2, "halves": 4}
_REBASE_S: Final = 30.0
"""CUDA gives times as FP32 milliseconds since an event: after half a minute their steps are 2 us."""


def align(nbytes: int) -> int:
    """Where the next array of a slot may begin."""
    return -(-nbytes // 256) * 256


def input_bytes(tile: int) -> int:
    """Room for a tile's two arrays."""
    return align(tile) + 256


def output_bytes(tile: int) -> int:
    """Room for what becomes of it: MXFP4 grows the most, 17 bytes to 18."""
    return align(tile) + align(tile // 8) + 256


PINNED_BYTES: Final = 2 * (input_bytes(SLOT_BYTES) + output_bytes(SLOT_BYTES))
"""Of the machine's memory, by one lane."""


@dataclass(frozen=True)
class FloatSource:
    """How weights are stored. kind: None for BF16, else enum Source of csrc/quantize_float.cuh.

    grid: for FP8, float32 scales [.., ceil(K/wide)] on the device, of blocks high x wide.
    """

    kind: int | None
    blocks_per_row: int
    grid: Any = None
    high: int = 0
    wide: int = 0


@dataclass(frozen=True)
class Job:
    """What to do with a tile. op: amax, encode (blocks of 16, from `source`), census, lossy, halves (blocks of 32).

    scales_at: where block scales begin behind the codes. row: of the tensor, where the tile starts. m: the exponent.
    """

    op: str
    blocks: int
    source: FloatSource | None = None
    scales_at: int = 0
    row: int = 0
    m: int = 0

    @property
    def codes_out(self) -> int:
        """Bytes of codes that come out."""
        return self.blocks * (8 if self.op == "encode" else 16)


_OPS: Final = ("amax", "encode", "census", "lossy", "halves")
"""enum TileOp of csrc/quantize.cu."""


class _Tile(ctypes.Structure):
    """RequantTile of csrc/quantize.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("host_in", "device_in", "host_out", "device_out")),
        *((name, ctypes.c_size_t) for name in ("sent", "fetched", "blocks", "scales_at", "out_scales_at")),
        *((name, ctypes.c_void_p) for name in ("sum", "scale_2", "grid")),
        ("row", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("op", "kind", "blocks_per_row", "high", "wide", "m")),
        ("marks", ctypes.c_void_p * 4),
        ("stream", ctypes.c_void_p),
    )


class Slot:
    """Pinned input and output of one tile, their copies on the device, and the events between."""

    def __init__(self, tile: int, device: torch.device) -> None:
        import torch

        sent, fetched = input_bytes(tile), output_bytes(tile)
        self._pinned_in = torch.empty(sent, dtype=torch.uint8, pin_memory=True)
        self._pinned_out = torch.empty(fetched, dtype=torch.uint8, pin_memory=True)
        self.device_in = torch.empty(sent, dtype=torch.uint8, device=device)
        self.device_out = torch.empty(fetched, dtype=torch.uint8, device=device)
        self.input: NDArray[np.uint8] = self._pinned_in.numpy()
        self.output: NDArray[np.uint8] = self._pinned_out.numpy()
        self.marks = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(4)]  # blocking: no spinning
        for mark in self.marks:
            mark.record()  # makes it
        self.base: tuple[torch.cuda.Event, float] | None = None

    def tile(self) -> _Tile:
        """Its addresses."""
        tile = _Tile(host_in=self._pinned_in.data_ptr(), device_in=self.device_in.data_ptr())
        tile.host_out, tile.device_out = self._pinned_out.data_ptr(), self.device_out.data_ptr()
        tile.marks = (ctypes.c_void_p * 4)(*(mark.cuda_event for mark in self.marks))
        return tile


class _Clock:
    """Event times as time.monotonic(), for all lanes of a device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base: tuple[torch.cuda.Event, float] | None = None

    def base(self) -> tuple[torch.cuda.Event, float]:
        """An event and when it was."""
        import torch

        with self._lock:
            if self._base is None or time.monotonic() - self._base[1] > _REBASE_S:
                event, aside = torch.cuda.Event(enable_timing=True), torch.cuda.Stream()
                event.record(aside)
                event.synchronize()
                self._base = event, time.monotonic()
            return self._base


_CLOCK: Final = _Clock()


class GpuLane:
    """See the head of this file. Used by one thread at a time, which `enter` has bound to the lane's stream."""

    def __init__(self, launch: Launcher, held_bytes: int, tile: int = SLOT_BYTES) -> None:
        import torch

        self._launch = launch
        self._device = launch.device
        self._held_bytes = held_bytes
        self._held: torch.Tensor | None = None
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()
            self._slots = [Slot(tile, self._device) for _ in range(2)]
            self._sums = {
                name: torch.zeros(size, dtype=torch.int64, device=self._device) for name, size in _SUMS.items()
            }
            self._scale = torch.ones(1, dtype=torch.float32, device=self._device)
            torch.cuda.synchronize()
        self._turn = 0
        self.tile = tile

    def enter(self) -> None:
        """This thread's CUDA calls go to this lane's device and stream from now on."""
        import torch

        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    def settle(self) -> None:
        """Wait for all that is queued; its results are dropped."""
        self._stream.synchronize()

    def slot(self) -> Slot:
        """The slots in turn."""
        self._turn ^= 1
        return self._slots[self._turn]

    def hold(self, nbytes: int) -> torch.Tensor | None:
        """Device memory for a whole group until the next call, or None where that is more than a lane may take."""
        import torch

        if nbytes > self._held_bytes:
            return None
        if self._held is None or self._held.numel() < nbytes:
            self._held = None
            try:
                self._held = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            except torch.OutOfMemoryError:
                return None
        return self._held

    def constant(self, values: NDArray[np.float32]) -> torch.Tensor:
        """A small array on the device."""
        import torch

        return torch.as_tensor(np.ascontiguousarray(values), device=self._device)

    def queue(self, slot: Slot, job: Job, sent: int, fetched: int, at: torch.Tensor | None = None) -> None:
        """Send `sent` bytes of the slot's input to its own device memory, or to `at`; do the job; fetch its output."""
        slot.base = _CLOCK.base()
        tile = slot.tile()
        if at is not None:
            tile.device_in = at.data_ptr()
        tile.sent, tile.fetched, tile.blocks, tile.scales_at = sent, fetched, job.blocks, job.scales_at
        tile.out_scales_at = align(job.codes_out)
        tile.op, tile.kind, tile.row, tile.m = _OPS.index(job.op), -1, job.row, job.m
        if job.source is not None:
            tile.kind = -1 if job.source.kind is None else job.source.kind
            tile.blocks_per_row, tile.high, tile.wide = job.source.blocks_per_row, job.source.high, job.source.wide
            tile.grid = None if job.source.grid is None else job.source.grid.data_ptr()
        tile.sum = self._sums[job.op].data_ptr() if job.op in _SUMS else None
        tile.scale_2, tile.stream = self._scale.data_ptr(), self._stream.cuda_stream
        self._launch.tile(tile)

    def wait(self, slot: Slot) -> list[tuple[str, float, float]]:
        """The slot's output is there, its input free. When its transfers and kernels ran, by time.monotonic()."""
        slot.marks[3].synchronize()
        if slot.base is None:
            return []
        event, zero = slot.base
        at = [zero + event.elapsed_time(mark) / 1e3 for mark in slot.marks]
        return [("to_gpu", at[0], at[1]), ("kernels", at[1], at[2]), ("from_gpu", at[2], at[3])]

    def begin(self, name: str) -> None:
        """Start a sum at zero."""
        self._sums[name].zero_()

    def end(self, name: str) -> NDArray[np.int64]:
        """A sum over all that was queued since (waits)."""
        return self._sums[name].cpu().numpy()

    def set_scale(self, scale: np.float32) -> None:
        """The global scale for `encode`."""
        self._scale.fill_(float(scale))
