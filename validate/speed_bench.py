"""How fast the FP4 kernels are on the shapes of one checkpoint: `requant bench`, and the kernel part of stage `speed`.

Every distinct (format, N, K, experts, top-k) as a runtime multiplies it (fp4_weights.py), with weights of the
checkpoint itself, at each number of tokens: time, bytes, GB/s, fraction of the card's own read ceiling and of the
roofline's floor, against BF16 torch.matmul and against the source's format (the same codes under E8M0 scales, through
the same kernel). speed_gpu.py measures; without a GPU the CPU path is timed instead, which gives right numbers and says
nothing about decoding.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Final

import numpy as np
from requant.kernels.dispatch import Choice, Path, choose
from requant.kernels.formats import NumberFormat
from requant.manifests.errors import SourceError
from requant.validate.collector import Collector
from requant.validate.fp4_weights import Layer, Shape, layers_of, read_joined, shapes_of
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import open_folder
from requant.validate.results import JSON
from requant.validate.roofline import Ceilings, work_of

if TYPE_CHECKING:
    from requant.kernels.w4a4_operands import Fp4Tensor

__all__ = ["TOKENS", "Bench", "Point", "bench_kernels", "has_gpu"]

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64)
_CPU_REPEATS: Final = 3
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One shape at one number of tokens. Times are microseconds; fractions of the card's own ceilings.

    bytes and flops: the least that the product needs (roofline.py). of_bound: the largest error of the output that was
    timed, as a multiple of its bound; above 1 it is wrong. bf16_us, mxfp4_us: the same product by BF16 torch.matmul (on
    a CPU: FP32 BLAS) and from the source's format; None where not measured.
    """

    layer: str
    shape: str
    n: int
    k: int
    experts: int
    top_k: int
    format: str
    tokens: int
    path: str
    kernel: str
    us: float
    spread_us: float
    touched: float
    bytes: int
    flops: int
    gbps: float
    of_ceiling: float | None
    of_floor: float | None
    of_bound: float
    bf16_us: float | None = None
    mxfp4_us: float | None = None

    @property
    def against_bf16(self) -> float | None:
        """How many times as fast as BF16."""
        return None if self.bf16_us is None else self.bf16_us / self.us

    @property
    def against_mxfp4(self) -> float | None:
        """How many times as fast as the source's format."""
        return None if self.mxfp4_us is None else self.mxfp4_us / self.us


@dataclass(frozen=True, slots=True)
class Bench:
    """All points of one run. device: the chip; on_gpu: whether times say anything about decoding."""

    device: str
    on_gpu: bool
    choice: str
    ceilings: Ceilings | None
    points: tuple[Point, ...]
    seconds: float
    versions: str

    @property
    def wrong(self) -> tuple[Point, ...]:
        """The points whose output was beyond its bound."""
        return tuple(point for point in self.points if not point.of_bound <= 1)

    def to_json(self) -> dict[str, JSON]:
        """As json.dumps takes it."""
        points: list[JSON] = []
        for point in self.points:
            row: dict[str, JSON] = {key: _number(value) for key, value in asdict(point).items()}
            points.append({**row, "against_bf16": point.against_bf16, "against_mxfp4": point.against_mxfp4})
        ceilings: JSON = None if self.ceilings is None else {k: round(v, 1) for k, v in asdict(self.ceilings).items()}
        return {
            "device": self.device,
            "on_gpu": self.on_gpu,
            "path": self.choice,
            "versions": self.versions,
            "seconds": round(self.seconds, 1),
            "ceilings": ceilings,
            "points": points,
        }


def bench_kernels(
    output: FilePath,
    *,
    tokens: Sequence[int] = TOKENS,
    device: str = "auto",
    path: Path | str = "auto",
    progress: Progress | None = None,
) -> Bench:
    """Time every distinct FP4 shape of the checkpoint in `output` at these numbers of tokens.

    device: cuda, cpu, or auto (a GPU if there is one). Raises SourceError where the folder has no FP4 weight,
    KernelUnavailableError where the path cannot run.
    """
    started = time.perf_counter()
    if path == Path.W4A4_EMULATED:
        raise ValueError(f"{path} proves the W4A4 kernels; its speed means nothing, so it is not timed")
    if not output.is_dir():
        raise SourceError("is not a folder", where=str(output), hint="give the folder that `requant run` wrote")
    folder = open_folder(output, Collector())
    shapes = shapes_of(layers_of(folder))
    if not shapes:
        raise SourceError("holds no FP4 weight", where=str(output), hint="give a folder that `requant run` wrote")
    on_gpu = has_gpu() if device == "auto" else device == "cuda"
    reader = MappedReader(folder)
    ceilings, why, points, steps = None, "", list[Point](), len(shapes) * len(tokens)
    if on_gpu:
        from requant.validate.gpu_clock import measure_ceilings

        first = next(iter(shapes))
        choose(path, first.format, first.n, first.k, on_gpu=True)  # an answer before anything is loaded
        ceilings = measure_ceilings()
    chip = ""
    for shape, layers in shapes.items():
        choice = choose(path, shape.format, shape.n, shape.k, on_gpu=on_gpu, grouped=shape.experts > 0)
        chip, why = choice.chip, f"{choice.path}: {choice.reason}"
        measure = _gpu_points if on_gpu else _cpu_points
        for point in measure(layers[0], choice, tokens, reader):
            points.append(_with_roofline(point, shape, ceilings))
            if progress is not None:
                progress(len(points), steps)
    device_name = f"cuda:0 {chip}" if on_gpu else _cpu_name()
    return Bench(device_name, on_gpu, why, ceilings, tuple(points), time.perf_counter() - started, _versions())


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def _gpu_points(layer: Layer, choice: Choice, tokens: Sequence[int], reader: MappedReader) -> list[Point]:
    from requant.validate import speed_gpu

    weight = _load(layer, reader)
    mxfp4 = speed_gpu.as_mxfp4(weight) if weight.format is NumberFormat.NVFP4 else None
    plain = speed_gpu.Bf16(weight)
    points: list[Point] = []
    for count in tokens:
        ours = speed_gpu.time_fp4(choice.path, weight, count, layer.shape.top_k)
        bf16 = plain.time(count, layer.shape.top_k)
        source = speed_gpu.time_fp4(choice.path, mxfp4, count, layer.shape.top_k) if mxfp4 is not None else None
        wrong = max(ours.of_bound, bf16.of_bound, source.of_bound if source else 0.0)
        point = _point(layer, choice, count, ours.us, ours.spread_us, ours.touched, wrong)
        points.append(replace(point, bf16_us=bf16.us, mxfp4_us=source.us if source else None))
    return points


def _load(layer: Layer, reader: MappedReader) -> Fp4Tensor:
    """The layer's weight on the GPU, parts joined along N, experts stacked."""
    import torch
    from requant.kernels.w4a4_operands import Fp4Tensor

    experts = [read_joined(reader, layer, index) for index in range(len(layer.parts))]
    codes = torch.stack([torch.as_tensor(e.codes).cuda() for e in experts])
    scales = torch.stack([torch.as_tensor(e.block_scales).cuda() for e in experts])
    found = [float(e.global_scale) for e in experts if e.global_scale is not None]
    globals_ = torch.tensor(found, dtype=torch.float32).cuda() if found else None
    if not layer.shape.experts:
        codes, scales = codes[0], scales[0]
    return Fp4Tensor.weight(codes, scales, globals_)


# --- on a CPU ---------------------------------------------------------------------------------------------------------


def _cpu_points(layer: Layer, choice: Choice, tokens: Sequence[int], reader: MappedReader) -> list[Point]:
    """The CPU path on one expert (or the dense weight), every token through it."""
    from requant.kernels import bounds
    from requant.kernels.matmul import decode, matmul

    weight = read_joined(reader, layer, 0)
    exact = decode(weight)
    plain = exact.astype(np.float32)
    points: list[Point] = []
    for count in tokens:
        x = np.random.default_rng(count).standard_normal((count, layer.shape.k)).astype(np.float32)
        y = matmul(x, weight, choice.path).y
        us, spread = _timed_cpu(lambda x=x: matmul(x, weight, choice.path))
        blas, _ = _timed_cpu(lambda x=x: x @ plain.T)
        x64 = x.astype(np.float64)
        wrong = bounds.excess(y.astype(np.float64), x64 @ exact.T, np.abs(x64) @ np.abs(exact).T)
        points.append(replace(_point(layer, choice, count, us, spread, 1, wrong), bf16_us=blas))
    return points


def _timed_cpu(call: Callable[[], object]) -> tuple[float, float]:
    times: list[float] = []
    for _ in range(_CPU_REPEATS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times), max(times) - min(times)


# --- both -------------------------------------------------------------------------------------------------------------


def _point(
    layer: Layer, choice: Choice, tokens: int, us: float, spread: float, touched: float, of_bound: float
) -> Point:
    shape = layer.shape
    return Point(
        layer=layer.name, shape=str(shape), n=shape.n, k=shape.k, experts=shape.experts, top_k=shape.top_k,
        format=shape.format.value, tokens=tokens, path=choice.path.value, kernel=choice.kernel, us=us, spread_us=spread,
        touched=touched, bytes=0, flops=0, gbps=0.0, of_ceiling=None, of_floor=None, of_bound=of_bound,
    )  # fmt: skip


def _with_roofline(point: Point, shape: Shape, ceilings: Ceilings | None) -> Point:
    """The point with what it had to move, and how near its time is to the floor. touched is a mean over routings."""
    slots = point.tokens * shape.top_k if shape.experts and ceilings is not None else point.tokens
    work = work_of(shape.format, shape.n, shape.k, point.tokens, touched=point.touched, slots=slots)
    if ceilings is None:
        return replace(point, bytes=work.bytes, flops=work.flops, gbps=work.gbps(point.us))
    return replace(
        point,
        bytes=work.bytes,
        flops=work.flops,
        gbps=work.gbps(point.us),
        of_ceiling=work.of_ceiling(point.us, ceilings),
        of_floor=work.of_floor(point.us, ceilings),
    )


def _number(value: str | int | float | None) -> JSON:
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else str(value)
    return value


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    from requant.kernels.availability import gpu

    return gpu()[1] is not None


def _cpu_name() -> str:
    return f"cpu ({platform.processor() or platform.machine()})"


def _versions() -> str:
    import torch

    cuda = torch.version.cuda
    return f"torch {torch.__version__}" + (f", CUDA {cuda}" if cuda else "") + f", numpy {np.__version__}"
