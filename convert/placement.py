"""Where each output tensor will lie: shard and byte offset, known before the first byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from requant.convert.layouts.writing import Output
from requant.convert.shards import nbytes_of, render_header

__all__ = ["OutShard", "OutTensor", "place"]

HEADER_BUDGET: Final = 50_000_000
"""Bytes of header per output shard, half of what readers accept (safetensors: 100,000,000)."""


class OutTensor(NamedTuple):
    """An output tensor and its place: `begin` is the absolute byte offset in shard number `shard`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    shard: int
    begin: int


@dataclass(frozen=True, slots=True)
class OutShard:
    """An output shard: final name, its header's bytes, total size in bytes."""

    file: str
    header: bytes
    size: int


def place(outputs: Sequence[Output], shard_size: int) -> tuple[tuple[OutShard, ...], tuple[OutTensor, ...]]:
    """Cut the outputs, in order, into shards; inside one, wider dtypes come first: then every tensor is aligned."""
    bins: list[list[int]] = [[]]
    data = header = 0
    sizes = [nbytes_of(output.dtype, output.shape) for output in outputs]
    widths = {dtype: -_itemsize(dtype) for dtype in {output.dtype for output in outputs}}
    for index, (output, nbytes) in enumerate(zip(outputs, sizes, strict=True)):
        entry = len(output.name) + 120
        if bins[-1] and (data + nbytes > shard_size or header + entry > HEADER_BUDGET):
            bins.append([])
            data = header = 0
        bins[-1].append(index)
        data += nbytes
        header += entry
    placed: list[OutTensor | None] = [None] * len(outputs)
    shards: list[OutShard] = []
    for number, members in enumerate(bins):
        name = "model.safetensors" if len(bins) == 1 else f"model-{number + 1:05d}-of-{len(bins):05d}.safetensors"
        members.sort(key=lambda i: widths[outputs[i].dtype])
        offsets: list[tuple[int, int]] = []
        position = 0
        for index in members:
            offsets.append((position, position + sizes[index]))
            position += sizes[index]
        raw = render_header(
            (
                (outputs[i].name, outputs[i].dtype, outputs[i].shape, *span)
                for i, span in zip(members, offsets, strict=True)
            ),
            {"format": "pt"},
        )
        for index, (begin, _) in zip(members, offsets, strict=True):
            output = outputs[index]
            placed[index] = OutTensor(output.name, output.dtype, output.shape, sizes[index], number, len(raw) + begin)
        shards.append(OutShard(name, raw, len(raw) + position))
    return tuple(shards), tuple(t for t in placed if t is not None)


def _itemsize(dtype: str) -> int:
    return max(nbytes_of(dtype, (2,)) // 2, 1)
