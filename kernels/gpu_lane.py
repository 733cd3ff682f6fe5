"""One worker's way to the GPU and back: a stream, two slots of pinned memory, and the quantizers between them.

    slot = lane.slot()                          # waits for nothing: the caller has waited for what was in it
    (read source bytes into slot.input)
    lane.open(slot); at = lane.upload(slot, nbytes); lane.encode(slot, at, ...); lane.close(slot, nbytes)
    lane.wait(slot)                             # then slot.output holds codes and, from align(codes), block scales

While one slot is on its way the caller reads into the other and writes from it; lanes of several threads overlap their
transfers and kernels. Pinned and device memory is two slots of input and output a lane, beside what `hold` keeps.

Sums over the tiles of a group (`begin`, `end`): amax, census, lossy, halves; see csrc/quantize.cu for what they hold.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from requant.kernels.gpu_quantize import Launcher

__all__ = ["SLOT_BYTES", "FloatSource", "GpuLane", "Slot", "align", "input_bytes", "output_bytes"]

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
        self.base: tuple[torch.cuda.Event, float] | None = None

    def send(self, nbytes: int, target: torch.Tensor) -> None:
        """Queue the copy of the first nbytes of input."""
        target[:nbytes].copy_(self._pinned_in[:nbytes], non_blocking=True)

    def fetch(self, nbytes: int) -> None:
        """Queue the copy of the first nbytes of output."""
        self._pinned_out[:nbytes].copy_(self.device_out[:nbytes], non_blocking=True)


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

    # --- a tile -------------------------------------------------------------------------------------------------------

    def open(self, slot: Slot) -> None:
        """What follows belongs to this slot's tile."""
        slot.base = _CLOCK.base()
        slot.marks[0].record()
        slot.marks[1].record()

    def upload(self, slot: Slot, nbytes: int, target: torch.Tensor | None = None) -> torch.Tensor:
        """Send the slot's input to its own device memory, or to `target`; where it is then."""
        buffer = slot.device_in if target is None else target
        slot.send(nbytes, buffer)
        slot.marks[1].record()
        return buffer

    def close(self, slot: Slot, nbytes: int) -> None:
        """Fetch nbytes of output, once the kernels are done."""
        slot.marks[2].record()
        if nbytes:
            slot.fetch(nbytes)
        slot.marks[3].record()

    def wait(self, slot: Slot) -> list[tuple[str, float, float]]:
        """The slot's output is there, its input free. When its transfers and kernels ran, by time.monotonic()."""
        slot.marks[3].synchronize()
        if slot.base is None:
            return []
        event, zero = slot.base
        at = [zero + event.elapsed_time(mark) / 1e3 for mark in slot.marks]
        return [("to_gpu", at[0], at[1]), ("kernels", at[1], at[2]), ("from_gpu", at[2], at[3])]

    # --- the quantizers -----------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        """Start a sum at zero."""
        self._sums[name].zero_()

    def end(self, name: str) -> NDArray[np.int64]:
        """A sum over all that was queued since (waits)."""
        return self._sums[name].cpu().numpy()

    def amax(self, at: torch.Tensor, blocks: int, source: FloatSource, row: int) -> None:
        """Raise the sum `amax` (a float's bits) to the largest |w| of blocks of 16, from row `row` on."""
        if source.kind is None:
            self._launch("bf16_amax", at, blocks, self._sums["amax"])
        else:
            self._launch("float_amax", *self._float(at, blocks, source, row), self._sums["amax"])

    def set_scale(self, scale: np.float32) -> None:
        """The global scale for `encode`."""
        self._scale.fill_(float(scale))

    def encode(self, slot: Slot, at: torch.Tensor, blocks: int, source: FloatSource, row: int) -> None:
        """Blocks of 16 to NVFP4, into the slot's output: codes, then scales."""
        out = slot.device_out, slot.device_out[align(8 * blocks) :]
        if source.kind is None:
            self._launch("bf16_nvfp4", at, blocks, self._scale, *out)
        else:
            self._launch("float_nvfp4", *self._float(at, blocks, source, row), self._scale, *out)

    @staticmethod
    def _float(at: torch.Tensor, blocks: int, source: FloatSource, row: int) -> tuple[torch.Tensor | int | None, ...]:
        return source.kind, at, blocks, source.blocks_per_row, source.grid, source.high, source.wide, row

    def census(self, codes: torch.Tensor, scales: torch.Tensor, blocks: int) -> None:
        """Add halves of blocks of 32 to the sum `census`."""
        self._launch("half_census", codes, scales, blocks, self._sums["census"])

    def lossy(self, codes: torch.Tensor, scales: torch.Tensor, blocks: int, m: int) -> None:
        """Add to the sum `lossy` what m costs: squared error per E8M0 byte [256], scales below 2^-6, what cannot be."""
        total = self._sums["lossy"]
        self._launch("lossy_error", codes, scales, blocks, m, total, total[256:])

    def halves(self, slot: Slot, codes: torch.Tensor, scales: torch.Tensor, blocks: int, m: int) -> None:
        """Blocks of 32 to NVFP4 under 2^m, into the slot's output; counts go to the sum `halves`."""
        out = slot.device_out, slot.device_out[align(16 * blocks) :]
        self._launch("repack_halves", codes, scales, blocks, m, *out, self._sums["halves"])
