"""Several manifests in one go: each is carried through, one that fails does not stop the next, a table says what came.

The exit code is that of the worst, where worst is furthest from done: a bug, then a wrong manifest, a source or a
machine that is not as it should be, an unfinished conversion, a missing sign-off, a refused upload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from requant.convert.show import table
from requant.manifests.errors import ExitCode, RequantError, UsageError

__all__ = ["Row", "carry_out", "expand", "summary_text", "worst"]

SUFFIXES: Final = (".yaml", ".yml")
BEST_TO_WORST: Final = (
    ExitCode.OK,
    ExitCode.PUBLISH,
    ExitCode.NOT_SIGNED_OFF,
    ExitCode.INCOMPLETE,
    ExitCode.ENVIRONMENT,
    ExitCode.SOURCE,
    ExitCode.USAGE,
    ExitCode.BUG,
)
_WORDS: Final = {
    ExitCode.OK: "signed off",
    ExitCode.PUBLISH: "not published",
    ExitCode.NOT_SIGNED_OFF: "not signed off",
    ExitCode.INCOMPLETE: "incomplete",
    ExitCode.ENVIRONMENT: "environment",
    ExitCode.SOURCE: "source",
    ExitCode.USAGE: "manifest",
    ExitCode.BUG: "bug",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one manifest. said: its output, or the error's first line."""

    manifest: str
    code: ExitCode
    said: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As json.dumps takes it."""
        return {
            "manifest": self.manifest,
            "exit_code": int(self.code),
            "result": _WORDS[self.code],
            "said": self.said,
            "seconds": round(self.seconds, 3),
        }


def expand(refs: Sequence[str]) -> list[str]:
    """The manifests that files, built-in names and folders stand for. UsageError for a folder without any."""
    found: list[str] = []
    for ref in refs:
        folder = Path(ref)
        if not folder.is_dir():
            found.append(ref)
            continue
        inside = sorted(str(path) for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
        if not inside:
            raise UsageError("holds no manifest (*.yaml)", where=ref, hint="name manifests, or a folder of them")
        found += inside
    repeated = next((ref for ref in found if found.count(ref) > 1), None)
    if repeated is not None:
        raise UsageError("is named twice", where=repeated, hint="name each manifest once")
    return found


def carry_out(refs: Iterable[str], one: Callable[[str], str], failed: Callable[[RequantError], None]) -> list[Row]:
    """Do `one` for each manifest; an error of the user's world is told to `failed` and ends only that one."""
    rows: list[Row] = []
    for ref in refs:
        begin = time.perf_counter()
        try:
            said, code = one(ref), ExitCode.OK
        except RequantError as error:
            failed(error)
            said, code = error.render().partition("\n")[0], error.exit_code
        rows.append(Row(ref, code, said, time.perf_counter() - begin))
    return rows


def worst(rows: Iterable[Row]) -> ExitCode:
    """The exit code of the whole."""
    return max((row.code for row in rows), key=BEST_TO_WORST.index, default=ExitCode.OK)


def summary_text(rows: Sequence[Row]) -> str:
    """A line for each manifest, and the count."""
    lines = [[Path(row.manifest).name, _WORDS[row.code], f"{row.seconds:.1f} s", row.said] for row in rows]
    good = sum(row.code is ExitCode.OK for row in rows)
    return f"{table(['manifest', 'result', 'time', ''], lines)}\n\n{good} of {len(rows)} signed off"
