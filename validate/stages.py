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
from requant.manifests.schema import Manifest
from requant.validate.contract import check_contract
from requant.validate.numerics import check_numerics
from requant.validate.results import StageResult, Status
from requant.validate.signoff import sign_off, write_signoff
from requant.validate.verdict import SignOff

__all__ = ["STAGES", "Bar", "validate_output"]

STAGES: Final = ("contract", "numerics", "kernels", "model", "speed", "serving")
"""All stages that a manifest can name, in the order in which they run."""


class Bar(Protocol):
    """Opens a progress bar over `total` bytes; the context's value takes the bytes just done."""

    def __call__(self, total: int, label: str) -> AbstractContextManager[Callable[[int], object]]: ...


def validate_output(
    output: Path, source: Path, manifest: Manifest, *, only: Sequence[str] | None = None, bar: Bar
) -> SignOff:
    """Judge `output` against `source` by the manifest's gates; writes the sign-off into `output` and returns it.

    only: run just these stages. UsageError for a name that is no stage.
    """
    wanted = STAGES if only is None else tuple(only)
    for name in wanted:
        if name not in STAGES:
            raise UsageError(f"no stage is called {name!r}", where="--only", hint=f"stages: {', '.join(STAGES)}")
    results: list[StageResult] = []
    for name in STAGES:
        if not _asked_for(name, manifest):
            continue
        if name not in wanted:
            results.append(_not_run(name, "left out by --only"))
        elif name == "contract":
            results.append(check_contract(output, manifest.target.runtimes, source=source))
        elif name == "numerics":
            with bar(_weight_bytes(source), "numerics") as update:
                results.append(check_numerics(source, output, manifest.validation.numerics, progress=_absolute(update)))
        else:
            results.append(_not_run(name, "this version has no such stage"))
    with bar(_weight_bytes(output), "sha256") as update:
        signed = sign_off(output, manifest, results, progress=_absolute(update))
    write_signoff(output, signed)
    return signed


def _asked_for(name: str, manifest: Manifest) -> bool:
    return name in ("contract", "numerics") or getattr(manifest.validation, name) is not None


def _not_run(name: str, reason: str) -> StageResult:
    return StageResult(name, Status.NOT_RUN, reason, device="")


def _weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _absolute(update: Callable[[int], object]) -> Callable[[int, int], None]:
    """From (done so far, total) to a bar that takes steps."""
    last = 0

    def progress(done: int, _: int) -> None:
        nonlocal last
        update(done - last)
        last = done

    return progress
