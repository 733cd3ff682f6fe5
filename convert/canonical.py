"""Headers in the very form in which the safetensors library writes them, taken apart by splitting.

    {"__metadata__":{...},"NAME":{"dtype":"U8","shape":[3072,1792],"data_offsets":[0,5505024]},...}

JSON parsers make a dictionary and two lists for each entry, which half a million tensors pay for with seconds. Here
three separators cut the text into (name, dtype and shape, offsets), few dtypes and shapes are parsed once each, and the
offsets are numbers in one array. The index beside the shards (name -> file) is cut at its quotation marks.

This is a shortcut and no second opinion: whatever is not exactly of that form, or not entirely in order, is left to
json.loads and the checks that follow it (shards.py, checkpoint.py), which also find the words for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, Final, NamedTuple, cast

import numpy as np

__all__ = ["Columns", "columns_of", "index_of"]

_METADATA: Final = b'{"__metadata__":'
_SEPARATORS: Final = (b'":{"dtype":"', b'],"data_offsets":[', b']},"')
"""Between name and dtype, shape and offsets, one entry and the next: cut at, in turn."""
_KIND: Final = re.compile(r'([A-Z][A-Z0-9_]*)","shape":\[((?:0|[1-9]\d*)(?:,(?:0|[1-9]\d*))*|)', re.ASCII)
_QUOTES: Final = 3
"""Quotation marks inside a kind, as the pattern has them."""
_SPACE: Final = " \t\n\r"
"""JSON's white space."""
_LONGEST: Final = 38
"""Two offsets below 2**63 and a comma fit."""


class Columns(NamedTuple):
    """Entries in the order of the header, a column each. begins: from the data's start."""

    metadata: Mapping[str, Any]
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    begins: list[int]
    sizes: list[int]


def columns_of(raw: bytes, data_bytes: int, nbytes_of: Callable[[str, tuple[int, ...]], int]) -> Columns | None:
    """The header `raw`, its tensors side by side from 0 to `data_bytes`; None where the slow way has to look.

    nbytes_of: bytes of a tensor of a dtype and shape; KeyError or ValueError where there is no such thing.
    """
    metadata, body = _open(raw)
    fields = None if metadata is None else _fields(body)
    if metadata is None or fields is None:
        return None
    names, kinds, offsets = fields[0::3], fields[1::3], fields[2::3]
    known: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for kind in set(kinds):
        match = _KIND.fullmatch(kind)
        if match is None:
            return None
        try:
            shape = tuple(int(n) for n in match[2].split(",")) if match[2] else ()
            known[kind] = match[1], shape, nbytes_of(match[1], shape)
        except (KeyError, ValueError):
            return None
    if len(set(names)) != len(names) or "__metadata__" in names:
        return None
    dtypes, shapes, sizes = map(list, zip(*map(known.__getitem__, kinds), strict=True))
    begins = _begins(offsets, cast("list[int]", sizes), data_bytes)
    if begins is None:
        return None
    return Columns(metadata, names, cast("list[str]", dtypes), shapes, begins, cast("list[int]", sizes))


def _open(raw: bytes) -> tuple[Mapping[str, Any] | None, bytes]:
    """The metadata, or None, and the entries from the first name to the last offset."""
    end = raw.rstrip(b" ")
    if not end.endswith(b"]}}"):
        return None, b""
    if not end.startswith(_METADATA):
        return ({}, end[2:-3]) if end.startswith(b'{"') else (None, b"")
    close = end.find(b'},"', len(_METADATA)) + 1
    try:
        metadata: object = json.loads(end[len(_METADATA) : close])
    except (ValueError, RecursionError):
        return None, b""
    return (cast("Mapping[str, Any]", metadata), end[close + 2 : -3]) if isinstance(metadata, dict) else (None, b"")


def _fields(body: bytes) -> list[str] | None:
    """name, kind, offsets, name, kind, ...; None if anything but the three separators, in turn, holds them apart."""
    if b"\\" in body or bool((np.frombuffer(body, np.uint8) < ord(" ")).any()):
        return None
    for mark, separator in enumerate(_SEPARATORS):
        body = body.replace(separator, bytes([mark]))
    text = np.frombuffer(body, np.uint8)
    marks = text[text < len(_SEPARATORS)]
    entries, left = divmod(len(marks) + 1, 3)
    if left or not np.array_equal(marks, np.resize(np.arange(3, dtype=np.uint8), len(marks))):
        return None
    if int(np.count_nonzero(text == ord('"'))) != _QUOTES * entries:  # a name holds none
        return None
    try:
        return body.translate(bytes.maketrans(b"\1\2", b"\0\0")).decode().split("\0")
    except UnicodeDecodeError:
        return None


def _begins(offsets: list[str], sizes: list[int], data_bytes: int) -> list[int] | None:
    """Where each begins, if the ranges stand side by side and every one is as long as its tensor."""
    if set(map(str.count, offsets, repeat(","))) != {1} or max(map(len, offsets)) > _LONGEST:
        return None
    joined = ",".join(offsets).encode()
    if joined.startswith(b",") or joined.endswith(b",") or b",," in joined:  # a number is missing
        return None
    text = np.frombuffer(joined, np.uint8)
    if not joined.replace(b",", b"").isdigit() or _leading_zero(text):
        return None
    if sum(sizes) != data_bytes:
        return None
    numbers = np.fromstring(joined.decode(), np.int64, sep=",")
    begins, ends = numbers[0::2], numbers[1::2]
    if int(begins[0]) or not np.array_equal(ends, np.cumsum(np.array(sizes, np.int64))):
        return None
    return begins.tolist() if np.array_equal(begins[1:], ends[:-1]) else None


def _leading_zero(text: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    """Numbers like 007, which JSON does not know."""
    first = np.concatenate(([True], text[:-1] == ord(",")))
    more = np.concatenate((text[1:] != ord(","), [False]))
    return bool((first & more & (text == ord("0"))).any())


def index_of(raw: bytes) -> dict[str, Any] | None:
    """An index file as json.loads reads it; None where the slow way has to look."""
    mark = b'"weight_map"'
    start = raw.find(b"{", raw.find(mark) + len(mark))
    end = raw.find(b"}", start) + 1
    if start < 0 or not end or raw.count(mark) != 1 or b"\\" in raw:
        return None
    try:
        pieces = raw[start + 1 : end - 1].decode().split('"')
        rest: object = json.loads(raw[:start] + b"{}" + raw[end:])
    except (ValueError, RecursionError):
        return None
    index = cast("dict[str, Any]", rest) if isinstance(rest, dict) else {}
    names, files = pieces[1::4], pieces[3::4]
    between = [{piece.strip(_SPACE) for piece in set(pieces[first:-1:4])} for first in (2, 4)]
    if index.get("weight_map") != {} or len(pieces) % 4 != 1 or between != [{":"}, {","}]:
        return None
    if (pieces[0] + pieces[-1]).strip(_SPACE) or not all(map(str.isprintable, (*names, *set(files)))):
        return None
    index["weight_map"] = dict(zip(names, files, strict=True))
    return index if len(index["weight_map"]) == len(names) else None
