"""The kernels stage: every FP4 kernel that runs here, on weights of this very checkpoint, against float64.

A seeded sample of the FP4 matrices (all, if asked; every distinct shape at least once) is read and decoded to float64,
exactly; x @ w^T in float64 is the judge. Each path multiplies the same activations: `random` (normal), `wide`
(exponents over 2^20, and outlier channels 64 times the rest), `edges` (random again, on a weight of this matrix's codes
whose block scales stand at every edge of every window) and `captured`, where a safetensors file of real activations is
given. M goes through 1, 2, 4, ... 64 from matrix to matrix, so that every width of a kernel is met.

Judged are the relative error (Frobenius norm, the gate's `max_rel_error`) and the elementwise bound of
kernels/bounds.py. Paths that round activations to FP4 are judged against the float64 product of the rounded
activations, made here by the oracle; what the rounding itself costs is a column of its own.

Beside that: what Marlin, which flushes block scales below 2^-6, would make of the same matrices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from requant.kernels import bounds, reference
from requant.kernels.availability import KernelUnavailableError, gpu
from requant.kernels.dispatch import Path, PathState, paths
from requant.kernels.formats import E4M3_VALUES, E8M0_VALUES, MARLIN_POW2_MIN, NumberFormat, PackedTensor
from requant.kernels.matmul import decode, matmul, stack
from requant.kernels.reference_w4a4 import round_activations
from requant.manifests.errors import SourceError
from requant.manifests.schema import KernelsGate
from requant.validate.collector import Collector
from requant.validate.fp4_weights import NamedWeight, packed_weights, read_packed
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import open_folder
from requant.validate.results import JSON, StageResult, Status, status_of

if TYPE_CHECKING:
    import torch
    from requant.kernels.w4a4_operands import Fp4Tensor

__all__ = ["COLUMNS", "STAGE", "check_kernels"]

STAGE: Final = "kernels"
COLUMNS: Final = (
    "module", "n", "k", "format", "m", "activations", "path", "rel_error", "of_bound", "rounding_error",
)  # fmt: skip
"""of data["rows"]. of_bound: the largest error as a multiple of its bound; rounding_error: what rounding x to FP4 costs
(null for paths that do not)."""
_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64)
_EMULATED: Final = 2
"""Matrices for the emulated path, which is slow."""
_EMULATED_TOKENS: Final = 8
_EDGE_ROWS: Final = 64
_EDGE_BYTES: Final = {
    NumberFormat.NVFP4: (0x01, 0x02, 0x07, 0x08, 0x09, 0x38, 0x77, 0x78, 0x7E, 0x00),  # 2^-9 ... 2^-6 | 1 | 2^8 448 0
    NumberFormat.MXFP4: (108, 110, 111, 119, 127, 128),  # 17 and 14 octaves under the largest, and between
}
_TABLES: Final = {NumberFormat.NVFP4: E4M3_VALUES, NumberFormat.MXFP4: E8M0_VALUES}
Floats = NDArray[np.float64]
Activation = tuple[str, NDArray[np.float32]]
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Found:
    """What the run has measured so far."""

    rows: list[list[JSON]] = field(default_factory=list[list[JSON]])
    worst: dict[Path, float] = field(default_factory=dict[Path, float])
    flushed: int = 0
    blocks: int = 0
    flushed_weights: int = 0
    marlin_worst: float = 0.0
    chips: dict[Path, str] = field(default_factory=dict[Path, str])


def check_kernels(
    output: FilePath,
    gate: KernelsGate | None,
    *,
    activations: FilePath | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> StageResult:
    """Run every path that this machine has on the FP4 weights of `output`.

    activations: a safetensors file with one tensor [tokens, K] per module, by the module's name. `not run` where the
    folder has no FP4 weight, or the gate asks for a GPU and there is none: then the CPU path runs all the same, and may
    fail it. Never raises for what the folder holds.
    """
    started = time.perf_counter()
    gate = gate or KernelsGate()
    states = paths()
    listed: list[JSON] = [_path_json(state) for state in states]
    wanted = [state.path for state in states if state.runs and state.path is not Path.REFERENCE]
    if gate.device == "cpu":
        wanted = [path for path in wanted if not path.on_gpu]
    lacking = ""
    if gate.device == "cuda" and not any(path.on_gpu for path in wanted):
        lacking = f"the gate asks for a GPU, and no GPU path runs here: {gpu()[0]}"
    found = Collector()
    folder = open_folder(output, Collector())
    everything = packed_weights(folder)
    if not everything:
        return _not_run("the checkpoint holds no FP4 weight", listed)
    sample = _sample(everything, gate.modules, seed)
    reader, seen = MappedReader(folder), _Found()
    captured = _Captured(activations)
    for index, named in enumerate(sample):
        weight = read_packed(reader, named.weight)
        _check_one(named.name, index, weight, wanted, captured, seen, found, np.random.default_rng([seed, index]))
        if progress is not None:
            progress(index + 1, len(sample))
    _judge(seen, gate, found)
    device = next((chip for path, chip in seen.chips.items() if path.on_gpu), "")
    status, reason = status_of(found.findings()), _reason(seen, sample, everything, found)
    if lacking and status is Status.PASSED:  # what the CPU path found wrong is wrong; what it found right is not enough
        status, reason = Status.NOT_RUN, f"{lacking}; the CPU path is right on {reason}"
    return StageResult(
        STAGE,
        status,
        reason,
        found.findings(),
        {
            "paths": listed,
            "modules": {"checked": len(sample), "of": len(everything), "seed": seed},
            "captured": captured.note(),
            "max_rel_error": gate.max_rel_error,
            "worst": {path.value: _finite(error) for path, error in seen.worst.items()},
            "marlin": _marlin_json(seen),
            "columns": list(COLUMNS),
            "rows": [list(row) for row in seen.rows],
        },
        f"cuda:0 {device}" if device else "cpu",
        time.perf_counter() - started,
    )


def _not_run(reason: str, listed: list[JSON]) -> StageResult:
    return StageResult(STAGE, Status.NOT_RUN, reason, (), {"paths": listed}, "")


def _path_json(state: PathState) -> dict[str, JSON]:
    return {
        "path": state.path.value,
        "kernel": state.path.kernel,
        "state": state.availability.state.value,
        "reason": state.availability.reason,
    }


def _sample(everything: Sequence[NamedWeight], count: int | str, seed: int) -> list[NamedWeight]:
    """`count` of them in their order: the first of every shape, and then at random, always the same."""
    if isinstance(count, str) or count >= len(everything):
        return list(everything)
    first: dict[tuple[NumberFormat, int, int], int] = {}
    for index, named in enumerate(everything):
        first.setdefault((named.weight.format, named.weight.rows, named.weight.k), index)
    chosen = set(list(first.values())[:count])
    rest = [i for i in np.random.default_rng(seed).permutation(len(everything)).tolist() if i not in chosen]
    return [everything[i] for i in sorted([*chosen, *rest[: count - len(chosen)]])]


class _Handle(Protocol):
    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class _Captured:
    """Real activations by module, if a file of them was given. SourceError if it cannot be read."""

    def __init__(self, file: FilePath | None) -> None:
        self._file = file
        self._used = 0
        self._handle: _Handle | None = None
        if file is not None:
            from safetensors import safe_open

            try:
                self._handle = cast("_Handle", safe_open(str(file), framework="pt"))
            except Exception as error:
                raise SourceError(f"cannot be read: {error}", where=str(file), hint="a safetensors file") from error

    def of(self, module: str, k: int) -> NDArray[np.float32] | None:
        """The first 64 tokens that entered this module, as BF16 values in float32; None where there are none."""
        name = module.partition("[")[0]
        if self._handle is None or name not in self._handle.keys():  # noqa: SIM118 - no mapping
            return None
        values = self._handle.get_tensor(name).float().numpy()
        if values.ndim != 2 or values.shape[1] != k:
            return None
        self._used += 1
        return _bf16(values[: _TOKENS[-1]])

    def note(self) -> JSON:
        """For the report: how many of the checked matrices had any."""
        return None if self._file is None else {"file": self._file.name, "matrices": self._used}


# --- one matrix -------------------------------------------------------------------------------------------------------


def _check_one(
    name: str,
    index: int,
    weight: PackedTensor,
    wanted: Sequence[Path],
    captured: _Captured,
    seen: _Found,
    found: Collector,
    rng: np.random.Generator,
) -> None:
    k = weight.codes.shape[1] * 2
    tokens = _TOKENS[index % len(_TOKENS)]
    exact = decode(weight)
    if not np.isfinite(exact).all():
        found.error(
            "nan-scale", "has NaN block scales: nothing can be computed with it", where=name, hint="convert again"
        )
        return
    cases = [("random", _bf16(rng.standard_normal((tokens, k)))), ("wide", _wide(rng, tokens, k))]
    real = captured.of(name, k)
    if real is not None:
        cases.append(("captured", real))
    _marlin(weight, exact, cases[0][1], seen)
    edge = _edge_weight(weight)
    for case, x, w, values in [*((case, x, weight, exact) for case, x in cases), ("edges", cases[0][1], edge, None)]:
        judge = _Exact(x, decode(w) if values is None else values, w.format)
        held = _OnGpu(w)
        for path in wanted:
            if path is Path.W4A4_EMULATED and (index >= _EMULATED or tokens > _EMULATED_TOKENS):
                continue
            try:
                row = _measure(path, x, w, judge, held, seen)
            except ValueError as error:
                found.error("operand-refused", f"{path}: {error}", where=name, hint="convert again")
                continue
            if row is None:
                continue
            error, of_bound, rounding = row
            seen.worst[path] = max(seen.worst.get(path, 0.0), error)
            cells: list[JSON] = [name, w.codes.shape[0], k, w.format.value, x.shape[0], case, path.value]
            seen.rows.append([*cells, _finite(error), _finite(of_bound), rounding])
            if of_bound > 1:
                message = (
                    f"{path}, {case} activations, M = {x.shape[0]}: an output is off by {of_bound:.3g} times its bound"
                )
                found.error("beyond-bound", message, where=name, hint="this kernel must not serve this checkpoint")


class _OnGpu:
    """A weight's copy on the GPU, made when it is first asked for."""

    def __init__(self, weight: PackedTensor) -> None:
        self._weight = weight
        self._copy: Fp4Tensor | None = None

    def get(self) -> Fp4Tensor:
        """[N, K]."""
        if self._copy is None:
            from requant.kernels.w4a4_operands import Fp4Tensor

            stacked = stack([self._weight])
            self._copy = Fp4Tensor(stacked.format, stacked.codes[0], stacked.scales[0], stacked.global_scale)
        return self._copy


class _Exact:
    """x @ w^T and sum |w x| in float64, of x as it is and of x rounded to FP4 as a path does; each made once."""

    def __init__(self, x: NDArray[np.float32], numbers: Floats, fmt: NumberFormat) -> None:
        self._x, self._numbers, self._format = x, numbers, fmt
        self._made: dict[str, tuple[Floats, Floats]] = {}

    def of(self, path: Path | None) -> tuple[Floats, Floats]:
        """(product, terms), each [M, N], of what this path multiplies; None: of x itself."""
        rounding = path.granularity if path is not None and path.rounds_activations else ""
        if rounding not in self._made:
            x = self._x.astype(np.float64)
            if rounding:
                x = round_activations(self._x, self._format, granularity=rounding)
            self._made[rounding] = x @ self._numbers.T, np.abs(x) @ np.abs(self._numbers).T
        return self._made[rounding]


def _measure(
    path: Path, x: NDArray[np.float32], w: PackedTensor, exact: _Exact, held: _OnGpu, seen: _Found
) -> tuple[float, float, float | None] | None:
    """(relative error, largest error in bounds, error of rounding x); None where the path does not take this shape."""
    y = _multiply(path, x, w, held, seen)
    if y is None:
        return None
    product, terms = exact.of(path)
    rounding = bounds.relative_error(product, exact.of(None)[0]) if path.rounds_activations else None
    return bounds.relative_error(y, product), bounds.excess(y, product, terms), rounding


def _multiply(path: Path, x: NDArray[np.float32], w: PackedTensor, held: _OnGpu, seen: _Found) -> Floats | None:
    try:
        if not path.on_gpu:
            y, choice = matmul(x, w, path)
            seen.chips[path] = choice.chip
            return y.astype(np.float64)
        import torch

        on_gpu = torch.as_tensor(x).to(torch.bfloat16).cuda()
        result, choice = matmul(on_gpu, held.get(), path)
        seen.chips[path] = choice.chip
        return result.double().cpu().numpy()
    except KernelUnavailableError:
        return None  # runs here, but does not take this shape: no row says so


def _bf16(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Rounded to BF16 (toward zero: which BF16 it is does not matter), as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def _wide(rng: np.random.Generator, tokens: int, k: int) -> NDArray[np.float32]:
    """Exponents over 2^20, and one channel in 200 (at least one) 64 times the rest."""
    x = rng.standard_normal((tokens, k)) * np.exp2(rng.integers(-20, 1, (tokens, k)))
    x[:, rng.integers(0, k, max(1, k // 200))] *= 64
    return _bf16(x)


def _edge_weight(weight: PackedTensor) -> PackedTensor:
    """Some rows of the weight's codes under block scales at the edges of what kernels keep and flush."""
    codes = np.ascontiguousarray(weight.codes[:_EDGE_ROWS])
    edges = np.array(_EDGE_BYTES[weight.format], dtype=np.uint8)
    shape = (codes.shape[0], weight.block_scales.shape[1])
    scales = np.resize(edges, shape[0] * shape[1]).reshape(shape)
    return PackedTensor(weight.format, codes, scales, weight.global_scale)


def _marlin(weight: PackedTensor, exact: Floats, x: NDArray[np.float32], seen: _Found) -> None:
    """Flush as Marlin does, and see what it does to y."""
    seen.blocks += weight.block_scales.size
    if weight.format is not NumberFormat.NVFP4:
        return
    values = _TABLES[weight.format][weight.block_scales]
    flushed = (values != 0) & (values < 2.0**MARLIN_POW2_MIN)
    count = int(np.count_nonzero(flushed))
    seen.flushed += count
    if not count:
        return
    seen.flushed_weights += 1
    lost = exact * np.repeat(flushed, weight.format.group, axis=1)
    y = reference.matmul(x, exact)
    seen.marlin_worst = max(seen.marlin_worst, bounds.relative_error(y - reference.matmul(x, lost), y))


# --- the verdict ------------------------------------------------------------------------------------------------------


def _judge(seen: _Found, gate: KernelsGate, found: Collector) -> None:
    for path, error in seen.worst.items():
        if not error <= gate.max_rel_error:
            message = f"{path}: relative error {error:.3g}, the gate allows {gate.max_rel_error:.3g}"
            found.error("rel-error", message, hint="see the rows of this path in the JSON report")
    if seen.flushed:
        message = (
            f"Marlin would flush {seen.flushed:,} of {seen.blocks:,} block scales, in {seen.flushed_weights} of the "
            f"matrices checked; simulated, the worst output is then off by {seen.marlin_worst:.3g}"
        )
        found.warning("marlin-flush", message, runtime="vllm", hint="serve with a kernel that keeps E4M3 subnormals")


def _reason(seen: _Found, sample: Sequence[NamedWeight], everything: Sequence[NamedWeight], found: Collector) -> str:
    errors = [finding for finding in found.findings() if finding.severity == "error"]
    if errors:
        return f"{len(errors)} findings, the first: {errors[0].message}"
    worst = ", ".join(f"{path} {error:.2g}" for path, error in seen.worst.items())
    return f"{len(sample):,} of {len(everything):,} matrices; worst relative error: {worst}"


def _marlin_json(seen: _Found) -> Mapping[str, JSON]:
    return {
        "simulated": True,
        "block_scales": seen.blocks,
        "flushed": seen.flushed,
        "matrices": seen.flushed_weights,
        "worst_rel_error": seen.marlin_worst,
    }


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if np.isfinite(value) else "inf"
