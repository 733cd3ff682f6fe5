"""Which module names a rule of the manifest speaks of.

A pattern is either a glob over the *whole* name, in which `*` stands for any run of characters (dots too, as in the
exclude lists of the runtimes) and `?` for exactly one, or `re:` and a regular expression that must match the whole
name. Brackets and braces in a glob mean themselves.

A glob becomes one regular expression in which every piece between two stars sits in an atomic group: the leftmost
place for a piece is always as good as a later one, so nothing is ever tried twice and a name of length n costs O(n)
per piece even for `*a*a*a*a*b`. (The trick is that of `fnmatch.translate` in the standard library.)
"""

from __future__ import annotations

import re
from collections.abc import Callable

from requant.manifests.errors import ManifestError

__all__ = ["REGEX_PREFIX", "compile_match", "pattern_fault"]

REGEX_PREFIX = "re:"


def _piece(glob: str) -> str:
    """Regular expression of a run of the glob without a star."""
    return "".join("." if char == "?" else re.escape(char) for char in glob)


def _translate(glob: str) -> str:
    """Regular expression, for fullmatch with DOTALL, that accepts what the glob accepts."""
    head, *rest = glob.split("*")
    if not rest:
        return _piece(head)
    *middles, tail = rest
    steps = [f"(?>.*?{_piece(middle)})" for middle in middles if middle]
    return f"{_piece(head)}{''.join(steps)}.*{_piece(tail)}"


def _compile(pattern: str) -> re.Pattern[str]:
    """The compiled pattern; `re.error` if a regular expression is invalid."""
    if pattern.startswith(REGEX_PREFIX):
        return re.compile(pattern.removeprefix(REGEX_PREFIX))
    return re.compile(_translate(pattern), re.DOTALL)


def pattern_fault(pattern: str) -> str:
    """What is wrong with a pattern, or the empty string."""
    if pattern in ("", REGEX_PREFIX):
        return "an empty pattern matches no module"
    try:
        _ = _compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"not a valid regular expression: {error}"
    return ""


def compile_match(pattern: str) -> Callable[[str], bool]:
    """A test of one module name against a rule's `match`; ManifestError if the pattern is invalid."""
    if fault := pattern_fault(pattern):
        raise ManifestError(f"{fault}: {pattern!r}", hint="see `match` in the manifest's schema")
    if not pattern.strip("*"):
        return lambda name: True
    fullmatch = _compile(pattern).fullmatch
    return lambda name: fullmatch(name) is not None
