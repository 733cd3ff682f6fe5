"""Where a run computes: `execute.device` of the manifest, what a GPU takes of a plan, and why.

    cpu     the processor
    cuda    the GPU, for the groups that its kernels take; a machine without one is an EnvironmentFault
    auto    the GPU if there is one, the plan holds enough for it, and it is faster by a measurement at the start

The bytes are the same. What the GPU takes is weights that become NVFP4: plain ones and FP8 blocks under scale
`nearest`, and MXFP4 where codes must be looked at. MXFP4 within its window is a copy of the file's bytes, which the
system does by itself: sending those over PCIe and back would only cost. torch is imported once a GPU is to be used.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from requant.convert.compute import run_unit
from requant.convert.encode import quantizer_choice
from requant.convert.engine import ShardFiles
from requant.convert.gpu_units import GpuGroups, Lane, tile_rows
from requant.convert.meter import Meter
from requant.convert.plan import CopyUnit, GroupUnit, Member, Plan, Unit
from requant.kernels.gpu_lane import SLOT_BYTES
from requant.manifests.errors import EnvironmentFault, RequantError

__all__ = ["GpuCompute", "Shares", "choose_device", "gpu_refusal", "shares_of"]

WORTHWHILE_BYTES: Final = 8 * 10**9
"""Less source than this is not worth a measurement: one core quantizes it in some seconds."""
START_S: Final = 10.0
"""What torch, a CUDA context and pinned memory take to start, generously."""
FASTER: Final = 1.2
"""The GPU must beat all workers of the processor by this factor, or the processor stays."""
HELD_BYTES: Final = 2**30
"""Of GPU memory for one worker's group, between its two passes; less where half of what is free is less."""
_PROBE_ROWS: Final = 2048
_PROBE_COLUMNS: Final = 2048


def gpu_refusal(unit: GroupUnit) -> str:
    """Why the GPU does not take a group, or "" (an MXFP4 group in its window is not computed at all)."""
    number = unit.members[0].form.number
    if unit.kind in ("relayout", "share"):
        return "the same numbers under other names: copied"
    if number != "nvfp4":
        return f"no GPU kernel writes {number.upper()}"
    if unit.kind == "encode" and (unit.calibration or quantizer_choice(unit.scale) != "nearest"):
        return f"scale {unit.scale}" + (f", rounding {unit.rounding}" if unit.rounding != "nearest" else "")
    return next((why for why in map(_member_refusal, unit.members) if why), "")


def _member_refusal(member: Member) -> str:
    weight = member.weight
    if member.form.transposed:
        return "planes are written transposed"
    if weight.format not in ("mxfp4", "plain", "fp8") or weight.more.blocked:
        return f"no GPU kernel reads {'GGUF blocks' if weight.more.blocked else weight.format.upper()}"
    if member.step != 1 or weight.more.turned or weight.more.rotary or (weight.format == "fp8" and weight.experts):
        return "rows are not side by side in the source"
    if tile_rows(member, SLOT_BYTES) == 0:
        return f"a row is larger than {SLOT_BYTES >> 20} MiB"
    return ""


@dataclass(frozen=True, slots=True)
class Shares:
    """Of a plan: groups and source bytes for the GPU (repacked: MXFP4 groups); groups for the processor, by reason."""

    groups: int
    nbytes: int
    repacked: int
    refused: dict[str, int]

    @property
    def text(self) -> str:
        """For people."""
        lines = [f"on a GPU: {self.groups:,} of {self.groups + sum(self.refused.values()):,} groups"]
        if self.repacked:
            lines[0] += f", {self.repacked:,} of them MXFP4, which is copied unless codes must be looked at"
        lines += [f"on the processor: {count:,} groups, {why}" for why, count in sorted(self.refused.items())]
        return "\n".join(lines)


def shares_of(plan: Plan) -> Shares:
    """What `execute.device: cuda` does where."""
    taken = repacked = nbytes = 0
    refused: Counter[str] = Counter()
    for unit in plan.groups:
        why = gpu_refusal(unit)
        if why:
            refused[why] += 1
            continue
        taken += 1
        repacked += unit.kind == "repack"
        nbytes += unit.nbytes
    return Shares(taken, nbytes, repacked, dict(refused))


@dataclass
class GpuCompute:
    """Does units with a GPU (engine.LocalEngine.compute). reason: why the GPU; chip: its name.

    Lanes are handed from thread to thread, since a streamed run makes new threads for every window.
    """

    make_lane: Callable[[], Lane]
    chip: str
    reason: str
    workers: int
    meter: Meter = field(default_factory=Meter)
    _lanes: queue.SimpleQueue[Lane] = field(default_factory=queue.SimpleQueue[Any])
    _on_gpu: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, plan: Plan, unit: Unit, files: ShardFiles) -> dict[str, Any]:
        """compute.run_unit, timed. EnvironmentFault if the GPU fails: what was done is kept."""
        if isinstance(unit, CopyUnit) or unit.kind in ("relayout", "share"):
            with self.meter.time("copy", unit.nbytes):
                return run_unit(plan, unit, files)
        if gpu_refusal(unit):
            with self.meter.time("processor", unit.nbytes):
                return run_unit(plan, unit, files)
        # What is left of a repack beside its passes on the GPU is reading scales and copying codes.
        try:
            with self.lane() as lane, self.meter.time("copy" if unit.kind == "repack" else "gpu"):
                counts = run_unit(plan, unit, files, GpuGroups(lane, self.meter))
        except RequantError:
            raise
        except RuntimeError as error:
            raise EnvironmentFault(
                f"the GPU failed: {error}",
                where=self.chip,
                hint="run the same command again: it goes on where it stopped; or set execute.device: cpu",
            ) from error
        with self._lock:
            self._on_gpu += 1
        return counts

    @contextmanager
    def lane(self) -> Generator[Lane]:
        """A lane for this thread alone."""
        try:
            lane = self._lanes.get_nowait()
        except queue.Empty:
            lane = self.make_lane()
        try:
            lane.enter()
            yield lane
        finally:
            self._lanes.put(lane)

    def record(self, plan: Plan) -> dict[str, Any]:
        """What ran where, and what it waited for, as JSON."""
        shares = shares_of(plan)
        return {
            "name": "cuda",
            "chip": self.chip,
            "reason": self.reason,
            "groups_on_gpu": self._on_gpu,
            "groups_on_processor": shares.refused,
            **self.meter.record(),
        }


def choose_device(plan: Plan, workers: int) -> tuple[GpuCompute | None, str]:
    """What computes (None: the processor) and why. EnvironmentFault if the manifest demands a GPU that is not there."""
    device = plan.manifest.execute.device
    if device == "cpu":
        return None, "execute.device: cpu"
    if device == "cuda":
        return _gpu(workers, "execute.device: cuda"), "execute.device: cuda"
    encoded = sum(unit.nbytes for unit in plan.groups if unit.kind == "encode" and not gpu_refusal(unit))
    if encoded < WORTHWHILE_BYTES:
        return None, f"auto: {encoded / 1e9:.1f} GB to quantize, too little for a GPU"
    if not _driver_finds_gpu():
        return None, "auto: no NVIDIA GPU"
    here = _processor_rate() * workers
    if encoded < START_S * here * 1e9:
        return None, f"auto: {encoded / 1e9:.1f} GB to quantize, measured {here:.1f} GB/s here; a GPU starts no faster"
    try:
        compute = _gpu(workers, "")
    except EnvironmentFault as fault:
        return None, f"auto: {fault.message}"
    try:
        there = _gpu_rate(compute)
    except RuntimeError as error:  # out of memory, say: another program has it
        return None, f"auto: the GPU failed: {error}"
    measured = f"measured {there:.1f} GB/s of BF16 through {compute.chip}, {here:.1f} on {workers} workers"
    if there < FASTER * here:
        return None, f"auto: {measured}"
    compute.reason = f"auto: {measured}"
    return compute, compute.reason


def _driver_finds_gpu() -> bool:
    """Whether NVIDIA's driver is there and sees a GPU, without importing torch."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def _gpu(workers: int, reason: str) -> GpuCompute:
    """The first GPU with its kernels loaded, or EnvironmentFault."""
    from requant.kernels.availability import State, gpu

    hint = "set execute.device: cpu (or auto); `requant doctor` says what this machine has"
    try:
        import torch
        from requant.kernels import gpu_quantize
        from requant.kernels.gpu_lane import GpuLane

        found = gpu_quantize.availability()
        name, capability = gpu()
        if found.state is not State.RUNS:
            why = found.reason if capability else name
            raise EnvironmentFault(f"no GPU can convert here: {why}", where="execute.device", hint=hint)
        launch = gpu_quantize.Launcher(torch.device("cuda", 0))
        held = min(HELD_BYTES, torch.cuda.mem_get_info(0)[0] // (2 * workers))
    except (ImportError, RuntimeError, OSError) as error:  # of torch's CUDA, nvcc, the library
        raise EnvironmentFault(f"no GPU can convert here: {error}", where="execute.device", hint=hint) from error
    return GpuCompute(lambda: GpuLane(launch, held), torch.cuda.get_device_name(0), reason, workers)


def _processor_rate() -> float:
    """GB of BF16 per second that one core quantizes."""
    import numpy as np
    from requant.kernels.quantize import amax, bf16_to_nvfp4, nvfp4_global_scale

    bits = np.random.default_rng(0).integers(0x3C00, 0x4000, (_PROBE_ROWS, _PROBE_COLUMNS), dtype=np.uint16)
    codes = np.empty((_PROBE_ROWS, _PROBE_COLUMNS // 2), np.uint8)
    scales = np.empty((_PROBE_ROWS, _PROBE_COLUMNS // 16), np.uint8)
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        bf16_to_nvfp4(bits, nvfp4_global_scale(amax(bits)), codes, scales)
        best = min(best, time.perf_counter() - begin)
    return bits.nbytes / best / 1e9


def _gpu_rate(compute: GpuCompute) -> float:
    """GB of BF16 per second over PCIe, encoded and back, one lane."""
    import numpy as np
    from requant.kernels.gpu_lane import FloatSource, Job

    source, nbytes = FloatSource(None, _PROBE_COLUMNS // 16), SLOT_BYTES // 2
    blocks, flights = nbytes // 32, 24
    best = float("inf")
    with compute.lane() as lane:
        lane.set_scale(np.float32(1.0))
        for _ in range(2):
            flying: list[Any] = []
            begin = time.perf_counter()
            for _ in range(flights):
                if len(flying) == 2:
                    lane.wait(flying.pop(0))
                slot = lane.slot()
                lane.queue(slot, Job("encode", blocks, source), nbytes, nbytes // 4 + nbytes // 32)
                flying.append(slot)
            for slot in flying:
                lane.wait(slot)
            best = min(best, time.perf_counter() - begin)
    return flights * nbytes / best / 1e9
