"""A checkpoint of random weights, streamed to disk: any size, a few hundred megabytes of memory, the same bytes for the
same seed.

Each kind of content is drawn once, as a pool of 32 MiB, and every tensor is a run of its pool from a place that the
seed and the tensor's number decide: the file is written as fast as the disk takes it, and no file system can leave
holes. Values are of a size at which a forward pass stays finite: normal with a deviation of 0.02, and MXFP4 codes under
exponents of 2^-14 to 2^-7, which every window of NVFP4 holds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from requant.convert.synthetic import Format, Spec, specs_of
from requant.manifests.errors import EnvironmentFault, UsageError

__all__ = ["synthetic_bytes", "write_synthetic"]

_POOL: Final = 32 << 20
_CHUNK: Final = 8 << 20
_MARK: Final = ".requant-random"
"""Says that an unfinished folder is ours, and may be begun anew."""
_DEVIATION: Final = 0.02
_EXPONENTS: Final = (113, 121)
"""E8M0 bytes from 2^-14 up to 2^-7: eight octaves."""
_FP8_POSITIVE: Final = 0x40
"""E4M3 bytes below this, with either sign, are finite and at most 2."""


def synthetic_bytes(config: dict[str, object], form: Format) -> int:
    """Bytes of all tensors."""
    return sum(spec.nbytes for spec in specs_of(config, form))


def write_synthetic(
    folder: Path,
    config: dict[str, object],
    form: Format,
    *,
    seed: int,
    shard_size: int,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> list[str]:
    """Write the checkpoint into `folder`, which must not exist; the shards' names. progress: bytes written since.

    Everything lies under `<folder>.partial` until it is whole. UsageError: the folder exists, or something else lies
    under that name. EnvironmentFault: the disk is too small, or fails.
    """
    if folder.exists():
        raise UsageError("exists already", where=str(folder), hint="choose another name, or remove it")
    specs = specs_of(config, form)
    total = sum(spec.nbytes for spec in specs)
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < total:
            message = f"{total / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free"
            raise EnvironmentFault(message, where=str(folder.parent), hint="fewer --layers, or another disk")
        if partial.exists() and not (partial / _MARK).exists():  # an unfinished conversion of that name, perhaps
            raise UsageError(
                "is in the way, and not left by an earlier --random",
                where=str(partial),
                hint="what is not whole yet goes there: move it away, or choose another name",
            )
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        (partial / _MARK).touch()
        names = _write_shards(partial, _shards(specs, shard_size), seed, config, progress)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / _MARK).unlink()
        partial.rename(folder)
    except OSError as error:
        raise EnvironmentFault(f"cannot be written: {error}", where=str(folder)) from error
    return names


def _shards(specs: Sequence[Spec], shard_size: int) -> list[list[Spec]]:
    """Tensors in order, a new shard where the next would not fit."""
    shards: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > shard_size:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _write_shards(
    folder: Path,
    shards: Sequence[Sequence[Spec]],
    seed: int,
    config: dict[str, object],
    progress: Callable[[int], None],
) -> list[str]:
    pools = _Pools(seed, config)
    count = len(shards)
    names = [
        f"model-{n + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors" for n in range(count)
    ]
    number = 0
    for name, members in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(members))
            for spec in members:
                for chunk in pools.chunks(spec, number):
                    file.write(chunk)
                    progress(len(chunk))
                number += 1
    if count > 1:
        weight_map = {spec.name: name for name, members in zip(names, shards, strict=True) for spec in members}
        total = sum(spec.nbytes for members in shards for spec in members)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return names


def _header(members: Sequence[Spec]) -> bytes:
    """The safetensors header: length, JSON, padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in members:
        end = position + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(entries).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


class _Pools:
    """Random bytes by content and dtype, each pool drawn when it is first needed."""

    def __init__(self, seed: int, config: dict[str, object]) -> None:
        self._seed = seed
        self._experts = int(str(config.get("n_routed_experts") or 1))
        self._made: dict[tuple[str, str], memoryview] = {}

    def chunks(self, spec: Spec, number: int) -> list[memoryview]:
        """The tensor's bytes: a run of its pool from a place of its own, round and round if it is longer."""
        pool = self._pool(spec)
        width = max(1, spec.nbytes // max(1, _count(spec.shape)))
        at = int(np.random.default_rng([self._seed, 1, number]).integers(0, len(pool) // width)) * width
        out: list[memoryview] = []
        left = spec.nbytes
        while left:
            take = min(left, _CHUNK, len(pool) - at)
            out.append(pool[at : at + take])
            left -= take
            at = (at + take) % len(pool)
        return out

    def _pool(self, spec: Spec) -> memoryview:
        key = spec.content, spec.dtype
        if key not in self._made:
            kinds = ("normal", "ones", "codes", "exponents", "fp8", "expert ids")
            rng = np.random.default_rng([self._seed, 0, kinds.index(spec.content), len(spec.dtype)])
            self._made[key] = memoryview(self._draw(spec, rng)).cast("B")
        return self._made[key]

    def _draw(self, spec: Spec, rng: np.random.Generator) -> bytes:
        if spec.content == "codes":
            return rng.bytes(_POOL)
        if spec.content == "exponents":
            return rng.integers(*_EXPONENTS, _POOL, dtype=np.uint8).tobytes()
        if spec.content == "fp8":
            drawn = rng.integers(0, 2 * _FP8_POSITIVE, _POOL, dtype=np.uint8)
            return np.where(drawn < _FP8_POSITIVE, drawn, drawn + 0x40).astype(np.uint8).tobytes()
        if spec.content == "expert ids":
            return rng.integers(0, self._experts, _POOL // 8, dtype=np.int64).astype("<i8").tobytes()
        width = 4 if spec.dtype == "F32" else 2
        values = np.ones(_POOL // width, np.float32)
        if spec.content == "normal":
            values = rng.standard_normal(_POOL // width, dtype=np.float32) * np.float32(_DEVIATION)
        if spec.dtype == "F32":
            return values.astype("<f4").tobytes()
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
