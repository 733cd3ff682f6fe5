"""A fault in a manifest, with its place, as the user reads it.

```
m.yaml:7:11: target.format: 'nvpf4' is not one of nvfp4, mxfp4; did you mean 'nvfp4'?
    7 |   format: nvpf4
      |           ^~~~~
```
Lines and columns count from 1, columns in characters. The line is shown as it is in the file, but for control
characters (a manifest must not be able to write to the terminal) and for lines too long to read.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from requant.manifests.errors import ManifestError

__all__ = ["Fault", "Place", "did_you_mean", "manifest_error"]

SHOWN_WIDTH: Final = 120
"""Characters of a line that are shown at most."""
CLOSE_ENOUGH: Final = 0.6
"""difflib's own default for a close match."""
SYNONYMS: Final = {
    "gpu": "cuda",  # difflib would propose cpu
    "copy": "keep",
    "skip": "keep",
    "bfloat16": "bf16",
    "float8": "fp8",
    "tensorrt-llm": "trtllm",
    "hf": "transformers",
    "pr": "pull_request",
}
"""What other tools call our choices."""


_CREDENTIALS: Final = re.compile(r"(://(?=[^\s/@\"']*@)|://[^\s?\"']*\?)([^\s@\"'}]+)")


@dataclass(frozen=True, order=True)
class Place:
    """Where something stands: file (or `--set`), line and column from 1, how many characters, and the line itself."""

    file: str
    line: int
    column: int
    width: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def excerpt(self) -> str:
        """The line, and a caret under the place."""
        start = max(0, self.column - 1 - SHOWN_WIDTH // 2) if len(self.text) > SHOWN_WIDTH else 0
        shown = self.text[start : start + SHOWN_WIDTH]
        before = shown[: self.column - 1 - start]
        width = max(1, min(self.width, len(shown) - len(before)))
        pad = "".join("\t" if char == "\t" else " " * _columns(char) for char in before)
        number = f"{self.line:5}"
        return f"{number} | {_printable(_masked(shown))}\n{' ' * len(number)} | {pad}^{'~' * (width - 1)}"


@dataclass(frozen=True)
class Fault:
    """What is wrong, and where."""

    place: Place
    what: str

    def render(self) -> str:
        """`file:line:column: what`, the line, and a caret."""
        return f"{self.place}: {self.what}\n{self.place.excerpt()}" if self.place.text else f"{self.place}: {self.what}"


def _columns(char: str) -> int:
    """Columns that a terminal gives the character."""
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _masked(text: str) -> str:
    """The text with stars for what stands in an address as credentials or options, character by character."""
    return _CREDENTIALS.sub(lambda found: found[1] + "*" * len(found[2]), text)


def _printable(text: str) -> str:
    """The text without characters that would move the cursor."""
    return "".join(char if char.isprintable() or char == "\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The known word that is meant, most likely, as `; did you mean 'x'?`, or the empty string."""
    if (synonym := SYNONYMS.get(_plain(word))) in known:
        return f"; did you mean '{synonym}'?"
    by_plain = {_plain(candidate): candidate for candidate in known}
    if close := difflib.get_close_matches(_plain(word), by_plain, n=1, cutoff=CLOSE_ENOUGH):
        return f"; did you mean '{by_plain[close[0]]}'?"
    return ""


def _plain(word: str) -> str:
    """Spelling without case, and with one kind of dash."""
    return word.casefold().replace("_", "-")


def manifest_error(faults: Iterable[Fault], files: Iterable[str] = ()) -> ManifestError:
    """One error that shows every fault once, file by file in the order given, then by line."""
    order = {file: rank for rank, file in enumerate(files)}
    unique = sorted(set(faults), key=lambda fault: (order.get(fault.place.file, len(order)), fault.place, fault.what))
    rendered = [fault.render() for fault in unique]
    if len(unique) > 1:
        rendered.append(f"{len(unique)} faults; nothing was read or written")
    return ManifestError("\n".join(rendered))
