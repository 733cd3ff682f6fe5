"""An output folder as a stranger finds it: shards, index, config files. Opened read-only, values read on demand.

Nothing here knows how the folder was written. Every shard is opened by the safetensors library (which checks offsets,
coverage and file size), then its JSON header is read once for names, dtypes and shapes: 70,000 tensors take a fraction
of a second that way. Tensor bytes come through `TensorReader`, one shard mapped at a time, one tensor or a range of its
rows at a time, always as uint8: torch has no arithmetic for E4M3, E8M0 or packed FP4 and needs none here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from requant.validate.collector import Collector

__all__ = ["MAX_HEADER_BYTES", "OpenedFolder", "Tensor", "TensorReader", "as_object", "open_folder"]

MAX_HEADER_BYTES = 100_000_000
"""The safetensors library refuses longer headers (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""
INDEX = "model.safetensors.index.json"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".gguf", ".h5", ".msgpack", ".onnx")
"""Files that some loader would take for weights."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's header entry. dtype: as safetensors spells it (U8, F8_E4M3, F32 ...). nbytes: its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    nbytes: int

    @property
    def elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class OpenedFolder:
    """What the folder holds. config and hf_quant are None where the file is absent or unreadable."""

    path: Path
    tensors: Mapping[str, Tensor]
    files: tuple[str, ...]
    config: Mapping[str, object] | None
    hf_quant: Mapping[str, object] | None
    lock: Mapping[str, object] | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _Slice(Protocol):
    def __getitem__(self, rows: slice) -> _TorchTensor: ...


class _TorchTensor(Protocol):
    def item(self) -> float: ...

    def view(self, dtype: object) -> _TorchTensor: ...

    def reshape(self, shape: int) -> _TorchTensor: ...

    def contiguous(self) -> _TorchTensor: ...

    def numpy(self) -> NDArray[np.uint8]: ...


class _Handle(Protocol):
    def get_tensor(self, name: str) -> _TorchTensor: ...

    def get_slice(self, name: str) -> _Slice: ...

    def metadata(self) -> dict[str, str] | None: ...


def _safe_open(path: Path) -> _Handle:
    from safetensors import safe_open

    return cast("_Handle", safe_open(str(path), framework="pt"))


class TensorReader:
    """Reads tensor bytes through the safetensors library, holding one shard open at a time.

    Read in file order: every change of shard maps another file.
    """

    def __init__(self, folder: OpenedFolder) -> None:
        self._folder = folder
        self._file = ""
        self._handle: _Handle | None = None

    def _open(self, file: str) -> _Handle:
        if self._handle is None or self._file != file:
            self._handle = _safe_open(self._folder.path / file)
            self._file = file
        return self._handle

    def bytes_of(self, tensor: Tensor) -> NDArray[np.uint8]:
        """All bytes of a tensor, uint8; one-byte dtypes keep their shape, others come flat."""
        import torch

        raw = self._open(tensor.file).get_tensor(tensor.name).contiguous()
        flat = raw.reshape(-1).view(torch.uint8).numpy()
        return flat.reshape(tensor.shape) if tensor.nbytes == tensor.elements else flat

    def rows(self, tensor: Tensor, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) along the first axis of a one-byte tensor, uint8."""
        import torch

        raw = self._open(tensor.file).get_slice(tensor.name)[start:stop].contiguous()
        flat = raw.reshape(-1).view(torch.uint8).numpy()
        return flat.reshape(min(stop, tensor.shape[0]) - start, *tensor.shape[1:])

    def chunks(self, tensor: Tensor, nbytes: int = 1 << 24) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """The tensor in runs of rows of about `nbytes`, each with the index of its first row."""
        rows = max(1, nbytes // max(1, tensor.nbytes // max(1, tensor.shape[0])))
        for start in range(0, tensor.shape[0], rows):
            yield start, self.rows(tensor, start, min(start + rows, tensor.shape[0]))

    def f32(self, tensor: Tensor) -> list[float]:
        """An F32 tensor's values, flat; one value comes the short way, for there are two of those per expert."""
        if tensor.elements == 1:
            return [self._open(tensor.file).get_tensor(tensor.name).item()]
        return self.bytes_of(tensor).view("<f4").astype(np.float64).tolist()


def as_object(value: object) -> Mapping[str, object] | None:
    """`value` if it is a JSON object, None otherwise."""
    return cast("Mapping[str, object]", value) if isinstance(value, dict) else None


def open_folder(path: Path, found: Collector) -> OpenedFolder:
    """Open every shard and metadata file of `path`; what is wrong with the containers goes to `found`.

    Never raises for what a folder holds: an unreadable shard is a finding and its tensors are absent.
    """
    config = _read_json(path, "config.json", found)
    if config is None and not found.has("json-unreadable"):
        found.error(
            "config-missing", "there is no config.json", where="config.json", hint="copy the source's config.json"
        )
    hf_quant = _read_json(path, "hf_quant_config.json", found)
    lock = _read_json(path, "requant.lock.json", found)
    index = _read_json(path, INDEX, found)
    _check_complete(path, lock, found)

    names = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors") and entry.is_file())
    weight_map = _weight_map(index, found) if index is not None else None
    listed = sorted(set(weight_map.values())) if weight_map is not None else None
    files = _choose_files(path, names, listed, found)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for tensor in _read_shard(path, file, found):
            if tensor.name in tensors:
                message = f"stands in {tensors[tensor.name].file} and in {file}"
                found.error("duplicate-tensor", message, where=tensor.name, hint="keep one of the two")
            tensors[tensor.name] = tensor
    if not names:
        tensors |= _read_ggufs(path, files, found)
    if weight_map is not None and index is not None:
        _check_index(index, weight_map, tensors, found)
    _check_strays(path, set(files), found)
    if not tensors:
        found.error("no-tensors", "the folder holds no readable tensor", where=str(path), hint="convert again")
    return OpenedFolder(path, tensors, tuple(files), config, hf_quant, lock)


def _read_ggufs(path: Path, files: list[str], found: Collector) -> dict[str, Tensor]:
    """The tensors of a folder of GGUF files, which only a source can be; their names go to `files`."""
    ggufs = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".gguf") and entry.is_file())
    if not ggufs:
        return {}
    from requant.validate.gguf_tensors import read_gguf

    files += ggufs
    tensors: dict[str, Tensor] = {}
    for name in ggufs:
        for tensor in read_gguf(path / name, found):
            tensors[tensor.name] = cast("Tensor", tensor)
    return tensors


def _read_json(path: Path, name: str, found: Collector) -> Mapping[str, object] | None:
    file = path / name
    if not file.is_file():
        return None
    try:
        value: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found.error("json-unreadable", f"cannot be read as JSON: {error}", where=name, hint="write the file again")
        return None
    if as_object(value) is None:
        found.error("json-unreadable", "is not a JSON object", where=name, hint="write the file again")
    return as_object(value)


def _check_complete(path: Path, lock: Mapping[str, object] | None, found: Collector) -> None:
    partial = path.name.endswith(".partial") or (path / ".requant").exists()
    if partial or (lock is not None and lock.get("complete") is not True):
        where = "requant.lock.json" if not partial else str(path)
        message = "this is the folder of a run that has not finished"
        found.error("output-incomplete", message, where=where, hint="run the same command again: it resumes")


def _weight_map(index: Mapping[str, object], found: Collector) -> dict[str, str]:
    raw = as_object(index.get("weight_map"))
    if raw is None:
        found.error("index-malformed", "has no weight_map object", where=INDEX, hint="rebuild the index")
        return {}
    kept: dict[str, str] = {}
    inside: dict[str, bool] = {}
    for name, file in raw.items():
        if not isinstance(file, str):
            found.error("index-malformed", f"{name} has no file name", where=INDEX, hint="rebuild the index")
        elif not inside.setdefault(file, file in inside or _is_inside(file)):
            message = f"{name} points to {file}, outside the folder"
            found.error("index-path-escapes", message, where=INDEX, hint="an index may only name files of its folder")
        else:
            kept[name] = file
    return kept


def _is_inside(file: str) -> bool:
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts


def _choose_files(path: Path, names: list[str], listed: list[str] | None, found: Collector) -> list[str]:
    if listed is None:
        if len(names) > 1:
            message = f"{len(names)} shards and no {INDEX}: loaders read model.safetensors only, or all files"
            found.error(
                "index-missing", message, where=INDEX, hint="write an index that maps every tensor to its shard"
            )
        return names
    for file in listed:
        if not (path / file).is_file():
            message = "is named in the index and not there"
            hint = "restore the shard; some loaders start without it"
            found.error("shard-missing", message, where=file, hint=hint)
    return [file for file in listed if (path / file).is_file()]


def _read_shard(path: Path, name: str, found: Collector) -> list[Tensor]:
    file = path / name
    with file.open("rb") as stream:
        head = stream.read(64)
    if head.startswith(b"version https://git-lfs"):
        found.error("shard-unreadable", "is a Git LFS pointer, not the shard", where=name, hint="run `git lfs pull`")
        return []
    try:
        handle = _safe_open(file)
        metadata = handle.metadata() or {}
        entries = _header(file)
    except Exception as error:  # noqa: BLE001  (the library raises its own untyped errors; each is the same finding)
        found.error(
            "shard-unreadable", f"the safetensors library refuses it: {error}", where=name, hint="convert again"
        )
        return []
    if metadata.get("format") != "pt":
        message = 'the header has no metadata {"format": "pt"}'
        found.warning("shard-format-metadata", message, where=name, hint="transformers reads the framework from it")
    tensors: list[Tensor] = []
    for key, entry in entries.items():
        begin, end = cast("tuple[int, int]", tuple(cast("list[int]", entry["data_offsets"])))
        shape = tuple(cast("list[int]", entry["shape"]))
        tensors.append(Tensor(key, str(entry["dtype"]), shape, name, end - begin))
    return tensors


def _header(file: Path) -> dict[str, Mapping[str, object]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"header of {length} bytes")
        header = cast("dict[str, Mapping[str, object]]", json.loads(stream.read(length)))
    header.pop("__metadata__", None)
    return header


def _check_index(
    index: Mapping[str, object], weight_map: Mapping[str, str], tensors: Mapping[str, Tensor], found: Collector
) -> None:
    for name, file in weight_map.items():
        tensor = tensors.get(name)
        if tensor is None:
            message = f"is in the index under {file} and in no shard"
            found.error("index-key-without-tensor", message, where=name, hint="rebuild the index from the shards")
        elif tensor.file != file:
            message = f"the index says {file}, the tensor is in {tensor.file}"
            found.error("index-wrong-shard", message, where=name, hint="rebuild the index from the shards")
    for name, tensor in tensors.items():
        if name not in weight_map:
            message = f"is in {tensor.file} and not in the index: loaders will not see it"
            found.error("tensor-not-in-index", message, where=name, hint="rebuild the index from the shards")
    metadata = as_object(index.get("metadata")) or {}
    total, written = metadata.get("total_size"), sum(tensor.nbytes for tensor in tensors.values())
    if total != written:
        message = f"metadata.total_size is {total}, the tensors are {written} bytes"
        found.error("index-total-size", message, where=INDEX, hint="total_size is the sum of the tensors' bytes")


def _check_strays(path: Path, files: set[str], found: Collector) -> None:
    for entry in sorted(path.iterdir()):
        if entry.name in files or not entry.is_file() or not entry.name.endswith(WEIGHT_SUFFIXES):
            continue
        severity = (
            "error" if entry.name.endswith(".safetensors") else "warning"
        )  # loaders prefer safetensors to the rest
        message = "is a weight file that the index does not name: loaders that glob would read it too"
        found.add("stray-weight-file", severity, message, where=entry.name, hint="remove it from the output")
    seconds = [
        e.name for e in path.iterdir() if e.name.endswith("hf_quant_config.json") and e.name != "hf_quant_config.json"
    ]
    for name in sorted(seconds):
        message = "a second file whose name ends in hf_quant_config.json: SGLang globs for it and may read this one"
        found.error("second-hf-quant-config", message, where=name, hint="remove or rename it")
