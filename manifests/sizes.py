"""Amounts of bytes as people write them: `5GB` is 5 * 10^9, `512MiB` is 512 * 2^20, a bare integer is bytes."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

__all__ = ["SIZE_PATTERN", "format_size", "parse_size"]

_UNITS: Final = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
_BY_FOLDED: Final = {unit.casefold(): factor for unit, factor in _UNITS.items()}

SIZE_PATTERN: Final = r"^[0-9]{1,15}(\.[0-9]{1,15})? ?([kKmMgGtT][iI]?)?[bB]$"
"""What `parse_size` takes, for the JSON Schema."""


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB`, `1.5 GiB` or `900 kB`; ValueError says what is wrong."""
    if not re.match(SIZE_PATTERN, text, re.ASCII):
        bare = re.fullmatch(r"([0-9.]+) ?([kKmMgGtT][iI]?)?", text, re.ASCII)
        wanted = f"; did you mean '{bare[1]}{(bare[2] or 'G')[0].upper()}B'?" if bare else ""
        raise ValueError(f"'{text}' is not a size: write a number and a unit, such as 5GB or 512MiB{wanted}")
    number = text.rstrip("kKmMgGtTiIbB ")
    count = Decimal(number) * _BY_FOLDED[text[len(number) :].strip().casefold()]
    if count != count.to_integral_value():
        raise ValueError(f"'{text}' is not a whole number of bytes")
    return int(count)


def format_size(count: int) -> str:
    """The shortest exact spelling of a number of bytes: `5GB`, `512MiB`, `1234B`."""
    for unit, factor in sorted(_UNITS.items(), key=lambda item: -item[1]):
        if count and count % factor == 0:
            return f"{count // factor}{unit}"
    return f"{count}B"
