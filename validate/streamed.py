"""Sign off what was converted window by window: source and output were never whole, so what the run compared is taken.

Contract rules look at headers, scales and sidecars, which are there. Gates that need the whole model are `not run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol, cast

from requant.manifests.errors import SourceError
from requant.manifests.schema import Manifest, NumericsGate
from requant.validate.contract import check_contract
from requant.validate.hashing import FileHash
from requant.validate.numerics_pieces import PiecewiseNumerics
from requant.validate.results import StageResult, Status
from requant.validate.signoff import sign_off, write_signoff
from requant.validate.verdict import SignOff

__all__ = ["NUMERICS_FILE", "Judge", "sign_off_streamed"]

NUMERICS_FILE: Final = ".requant-local/numerics.json"
"""Where a streamed run leaves what it compared, in the output."""
_WHY: Final = "the conversion was streamed: source and output are never whole on this disk"


class Bar(Protocol):
    """Opens a progress bar over bytes; the context's value is called with (done so far, in all)."""

    def __call__(self, label: str, /) -> AbstractContextManager[Callable[[int, int], None]]: ...


class Judge(PiecewiseNumerics):
    """The comparison of a streamed run, which ends as a file in the output."""

    def __init__(self, source: Path, output: Path, record: Path, gate: NumericsGate | None) -> None:
        super().__init__(source, output, record)
        self._gate = gate

    def save(self, output: Path) -> None:
        """Write the stage's result into the folder `output`."""
        target = output / NUMERICS_FILE
        target.parent.mkdir(mode=0o700, exist_ok=True)
        signoff = SignOff("", "", (), (self.result(self._gate),), (), {}, {})
        target.write_text(json.dumps(signoff.to_json()), encoding="utf-8")


def sign_off_streamed(
    output: Path, source: Path, manifest: Manifest, bar: Bar, known: Mapping[str, FileHash] | None = None
) -> SignOff:
    """Judge a streamed output and write the sign-off. source: its config and sidecars, and headers.

    known: hashes of files whose bytes were uploaded and freed; what stands under their names is not hashed again.
    """
    try:
        raw = cast("dict[str, Any]", json.loads((output / NUMERICS_FILE).read_text(encoding="utf-8")))
        numerics = SignOff.from_json(raw).stages[0]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SourceError(
            "what the run compared is not there", where=str(output / NUMERICS_FILE), hint="convert again with --force"
        ) from error
    asked = [name for name in ("kernels", "model", "speed", "serving") if getattr(manifest.validation, name)]
    stages = [
        check_contract(output, manifest.target.runtimes, source=source),
        numerics,
        *(StageResult(name, Status.NOT_RUN, _WHY) for name in asked),
    ]
    with bar("sha256") as progress:
        signed = sign_off(output, manifest, stages, progress=progress)
    freed = known or {}
    signed = replace(signed, files=tuple(freed.get(file.name, file) for file in signed.files))
    write_signoff(output, signed)
    return signed
