"""Run the stages on a finished output, one after the other, and sign off.

A stage that the caller leaves out (`--only`), or that the manifest asks for and this version cannot run, is `not run`
with that reason: the sign-off counts it as missing, never as passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol

from requant.manifests.errors import UsageError
from requant.manifests.gates import ModelGate, ServingGate, SpeedGate
from requant.manifests.schema import Manifest
from requant.validate.contract import check_contract
from requant.validate.numerics import check_numerics
from requant.validate.results import StageResult, Status, weights_equal
from requant.validate.signoff import sign_off, write_signoff
from requant.validate.verdict import SignOff

__all__ = ["STAGES", "Bar", "validate_output"]

STAGES: Final = ("contract", "numerics", "kernels", "model", "speed", "serving")
"""All stages that a manifest can name, in the order in which they run."""


class Bar(Protocol):
    """Opens a progress bar over bytes; the context's value is called with (done so far, in all)."""

    def __call__(self, label: str) -> AbstractContextManager[Callable[[int, int], None]]: ...


def validate_output(
    output: Path,
    source: Path,
    manifest: Manifest,
    *,
    only: Sequence[str] | None = None,
    activations: Path | None = None,
    bar: Bar,
) -> SignOff:
    """Judge `output` against `source` by the manifest's gates; writes the sign-off into `output` and returns it.

    only: run just these stages; `kernels` also where the manifest does not ask for it, then as an optional gate.
    activations: captured inputs for `kernels`. UsageError for a name that is no stage.
    """
    wanted = STAGES if only is None else tuple(only)
    for name in wanted:
        if name not in STAGES:
            raise UsageError(f"no stage is called {name!r}", where="--only", hint=f"stages: {', '.join(STAGES)}")
    results: list[StageResult] = []
    for name in STAGES:
        if not _asked_for(name, manifest) and not (name == "kernels" and only is not None and name in only):
            continue
        if name not in wanted:
            results.append(_not_run(name, "left out by --only"))
        elif name == "contract":
            results.append(check_contract(output, manifest.target.runtimes, source=source))
        elif name == "numerics":
            with bar("numerics") as progress:
                results.append(check_numerics(source, output, manifest.validation.numerics, progress=progress))
        elif name == "model" and manifest.validation.model is not None:
            with bar("model, tokens") as progress:
                results.append(_model(output, source, manifest, manifest.validation.model, results, progress))
        elif name == "kernels":
            with bar("kernels, matrices") as progress:
                results.append(_kernels(output, manifest, activations, progress))
        elif name == "speed" and manifest.validation.speed is not None:
            with bar("speed, points") as progress:
                results.append(_speed(output, source, manifest.validation.speed, progress))
        elif name == "serving" and manifest.validation.serving is not None:
            with bar("serving, concurrencies") as progress:
                results.append(_serving(output, manifest.validation.serving, progress))
        else:
            results.append(_not_run(name, "this version has no such stage"))
    with bar("sha256") as progress:
        signed = sign_off(output, manifest, results, progress=progress)
    write_signoff(output, signed)
    return signed


def _asked_for(name: str, manifest: Manifest) -> bool:
    return name in ("contract", "numerics") or getattr(manifest.validation, name) is not None


def _model(
    output: Path,
    source: Path,
    manifest: Manifest,
    gate: ModelGate,
    earlier: Sequence[StageResult],
    progress: Callable[[int, int], None],
) -> StageResult:
    from requant.validate.model import check_model

    numerics = next((result for result in earlier if result.stage == "numerics"), None)
    return check_model(
        source,
        output,
        gate,
        target=manifest.target.format,
        lossless=numerics is not None and weights_equal(numerics),
        progress=progress,
    )


def _kernels(
    output: Path, manifest: Manifest, activations: Path | None, progress: Callable[[int, int], None]
) -> StageResult:
    from requant.validate.kernel_check import check_kernels

    return check_kernels(output, manifest.validation.kernels, activations=activations, progress=progress)


def _speed(output: Path, source: Path, gate: SpeedGate, progress: Callable[[int, int], None]) -> StageResult:
    from requant.validate.speed import check_speed

    return check_speed(output, gate, source=source, progress=progress)


def _serving(output: Path, gate: ServingGate, progress: Callable[[int, int], None]) -> StageResult:
    from requant.validate.serving import check_serving

    return check_serving(output, gate, progress=progress)


def _not_run(name: str, reason: str) -> StageResult:
    return StageResult(name, Status.NOT_RUN, reason, device="")
