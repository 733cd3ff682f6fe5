"""The kernels stage: every FP4 kernel that runs here, on weights of this very checkpoint, against float64.

A seeded sample of the FP4 matrices (all, if asked; every distinct shape at least once) is read and decoded to float64,
exactly; x @ w^T in float64 is the judge. Each path multiplies the same activations (kernel_cases.py): random ones, some
of a wide range, captured ones where a file of them is given, and once more under block scales at the edge of every
window. M goes through 1, 2, 4, ... 64 from matrix to matrix, so that every width of a kernel is met. Then some experts
of a layer of each shape, joined as a server joins them, go through the grouped kernels.

Judged are the relative error (Frobenius norm, the gate's `max_rel_error`) and the elementwise bound of
kernels/bounds.py; kernel_measure.py says of which product.

Beside that: what Marlin, which flushes block scales below 2^-6, would make of the same matrices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels import bounds, reference
from requant.kernels.availability import KernelUnavailableError, gpu
from requant.kernels.dispatch import Path, PathState, paths
from requant.kernels.formats import E4M3_VALUES, E8M0_VALUES, MARLIN_POW2_MIN, NumberFormat, PackedTensor
from requant.manifests.schema import KernelsGate
from requant.validate.collector import Collector
from requant.validate.fp4_weights import (
    Layer,
    NamedWeight,
    layers_of,
    packed_weights,
    read_input_scale,
    read_joined,
    read_packed,
    shapes_of,
)
from requant.validate.kernel_cases import TOKENS, Captured, bf16, edge_weight, wide
from requant.validate.kernel_measure import Dense, Experts, Held, Subject
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import open_folder
from requant.validate.results import JSON, StageResult, Status, status_of

__all__ = ["COLUMNS", "STAGE", "check_kernels"]

STAGE: Final = "kernels"
COLUMNS: Final = (
    "module", "n", "k", "format", "m", "activations", "path", "rel_error", "of_bound", "rounding_error",
)  # fmt: skip
"""of data["rows"]. of_bound: the largest error as a multiple of its bound; rounding_error: what rounding x to FP4 costs
(null for paths that do not)."""
_EMULATED: Final = 2
"""Matrices for the emulated path, which is slow."""
_EMULATED_TOKENS: Final = 8
_EXPERTS: Final = 4
"""Of a layer of experts, how many are read and multiplied together."""
_EXPERTS_TOKENS: Final = (1, 16)
"""Few, and so many that an expert has several: kernels take the two in different ways."""
_NAN: Final = "has NaN block scales: nothing can be computed with it"
_TABLES: Final = {NumberFormat.NVFP4: E4M3_VALUES, NumberFormat.MXFP4: E8M0_VALUES}
Floats = NDArray[np.float64]
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class _Found:
    """What the run has measured so far."""

    rows: list[list[JSON]] = field(default_factory=list[list[JSON]])
    worst: dict[Path, float] = field(default_factory=dict[Path, float])
    flushed: int = 0
    blocks: int = 0
    flushed_weights: int = 0
    layers: int = 0
    marlin_worst: float = 0.0
    chips: dict[Path, str] = field(default_factory=dict[Path, str])
    refused: dict[Path, str] = field(default_factory=dict[Path, str])
    broken: set[Path] = field(default_factory=set[Path])


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
    folder has no FP4 weight, or the gate asks for a GPU and no GPU path (emulation aside) has computed anything: then
    the CPU path runs all the same, and may fail it. A path that breaks off fails it. Never raises for what the folder
    holds.
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
    grouped = [layers[0] for shape, layers in shapes_of(layers_of(folder)).items() if shape.experts]
    reader, seen, steps = MappedReader(folder), _Found(), len(sample) + len(grouped)
    captured = Captured(activations)
    for index, named in enumerate(sample):
        weight = read_packed(reader, named.weight)
        scale = read_input_scale(reader, named)
        rng = np.random.default_rng([seed, index])
        _check_one(named.name, index, weight, scale, wanted, captured, seen, found, rng)
        if progress is not None:
            progress(index + 1, steps)
    for index, layer in enumerate(grouped, len(sample)):
        _check_experts(layer, reader, wanted, seen, found, np.random.default_rng([seed, index]))
        if progress is not None:
            progress(index + 1, steps)
    _judge(seen, gate, found)
    if gate.device == "cuda" and not lacking and not any(p.on_gpu and p is not Path.W4A4_EMULATED for p in seen.worst):
        whys = "; ".join(f"{path}: {why}" for path, why in seen.refused.items())
        lacking = f"the gate asks for a GPU, and no GPU path computed anything ({whys or 'none was tried'})"
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
            "layers_of_experts": {"checked": seen.layers, "experts_of_each": _EXPERTS},
            "captured": captured.note(),
            "max_rel_error": gate.max_rel_error,
            "refused": {path.value: why for path, why in seen.refused.items()},
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


# --- one matrix -------------------------------------------------------------------------------------------------------


def _check_one(
    name: str,
    index: int,
    weight: PackedTensor,
    input_scale: float | None,
    wanted: Sequence[Path],
    captured: Captured,
    seen: _Found,
    found: Collector,
    rng: np.random.Generator,
) -> None:
    k = weight.codes.shape[1] * 2
    tokens = TOKENS[index % len(TOKENS)]
    held = Held(weight)
    if not np.isfinite(held.numbers()).all():
        found.error("nan-scale", _NAN, where=name, hint="convert again")
        return
    x = bf16(rng.standard_normal((tokens, k)))
    subjects = [Dense("random", x, held), Dense("wide", wide(rng, tokens, k), held)]
    real = captured.of(name, k)
    if real is not None:
        subjects.append(Dense("captured", real, held))
    _marlin(weight, held.numbers(), x, seen)
    subjects.append(Dense("edges", x, Held(edge_weight(weight))))
    few = index < _EMULATED and tokens <= _EMULATED_TOKENS
    ours = [path for path in wanted if few or path is not Path.W4A4_EMULATED]
    for subject in subjects:
        _check(name, subject, ours, seen, found)
    if input_scale is not None and weight.format is NumberFormat.NVFP4:  # as a server of W4A4 rounds activations
        _check(name, Dense("static", x, held, input_scale), [p for p in ours if p.rounds_activations], seen, found)


def _check_experts(
    layer: Layer,
    reader: MappedReader,
    wanted: Sequence[Path],
    seen: _Found,
    found: Collector,
    rng: np.random.Generator,
) -> None:
    """Some experts of a layer, joined and multiplied as a server does it: one grouped product."""
    experts = [Held(read_joined(reader, layer, expert)) for expert in range(min(layer.shape.experts, _EXPERTS))]
    if not all(np.isfinite(weight.numbers()).all() for weight in experts):
        found.error("nan-scale", _NAN, where=layer.name, hint="convert again")
        return
    seen.layers += 1
    for tokens in _EXPERTS_TOKENS:
        top_k = min(max(layer.shape.top_k, 1), len(experts))
        ids = np.stack([rng.permutation(len(experts))[:top_k] for _ in range(tokens)]).astype(np.int32)
        subject = Experts("experts", bf16(rng.standard_normal((tokens, layer.shape.k))), experts, ids)
        few = seen.layers == 1 and tokens == 1
        _check(layer.name, subject, [p for p in wanted if few or p is not Path.W4A4_EMULATED], seen, found)


def _check(name: str, subject: Subject, wanted: Sequence[Path], seen: _Found, found: Collector) -> None:
    """One product by every path, into the rows; what is beyond the bound into the findings."""
    n, k, m, fmt = *subject.packed.codes.shape, subject.x.shape[0], subject.packed.format
    for path in (path for path in wanted if path not in seen.broken):
        try:
            made = subject.measure(path)
        except KernelUnavailableError as error:
            seen.refused.setdefault(path, _first_line(error))
            continue
        except ValueError as error:
            found.error("operand-refused", f"{path}: {error}", where=name, hint="convert again")
            continue
        except (MemoryError, RuntimeError) as error:  # a launch or an allocation; after one the GPU may be lost
            seen.broken.add(path)
            message = f"{path}, {subject.name} activations, M = {m}: {type(error).__name__}: {_first_line(error)}"
            found.error(
                "broke-off",
                message,
                where=name,
                hint="it was not tried again; see `requant doctor`, and the memory that is free",
            )
            continue
        seen.chips[path] = made.chip
        seen.worst[path] = max(seen.worst.get(path, 0.0), made.relative)
        cells: list[JSON] = [name, n, 2 * k, fmt.value, m, subject.name, path.value]
        seen.rows.append([*cells, _finite(made.relative), _finite(made.of_bound), made.rounding])
        if made.of_bound > 1:
            message = (
                f"{path}, {subject.name} activations, M = {m}: an output is off by {made.of_bound:.3g} times its bound"
            )
            found.error("beyond-bound", message, where=name, hint="this kernel must not serve this checkpoint")


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
    for path in [path for path in seen.refused if path not in seen.worst]:
        message = f"{path} runs on this machine, and took none of these weights: {seen.refused[path]}"
        found.warning("path-refused", message, hint="nothing is known of this path on this checkpoint")
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
    layers = f" and {seen.layers} layers of experts" if seen.layers else ""
    return f"{len(sample):,} of {len(everything):,} matrices{layers}; worst relative error: {worst}"


def _marlin_json(seen: _Found) -> Mapping[str, JSON]:
    return {
        "simulated": True,
        "block_scales": seen.blocks,
        "flushed": seen.flushed,
        "matrices": seen.flushed_weights,
        "worst_rel_error": seen.marlin_worst,
    }


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _finite(value: float) -> float | str:
    """JSON has no infinity."""
    return value if np.isfinite(value) else "inf"
