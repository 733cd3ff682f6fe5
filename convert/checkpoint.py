"""The catalogue: every tensor of a checkpoint folder, from its headers alone.

Read once, nothing is loaded. The index decides which shards belong to the checkpoint; what else lies in the folder is
either a sidecar (tokenizer, code, chat template: copied byte for byte) or reported and left. Paths cannot leave the
folder, save for the Hub cache's own links from `snapshots/<commit>` into `blobs`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import eq, itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

from requant.convert.canonical import index_of
from requant.convert.shards import Shard, TensorInfo, is_lfs_pointer, read_shard_header
from requant.manifests.errors import SourceError

__all__ = ["Catalogue", "open_checkpoint", "read_json"]

INDEX_SUFFIX: Final = ".safetensors.index.json"
GGUF_SUFFIX: Final = ".gguf"
SPLIT_GGUF: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
"""Parts of one model, as llama.cpp's gguf-split names them."""
PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SKIPPED_FOLDERS: Final = {".cache", ".git", "__pycache__", ".requant", ".requant-local", "original", "metal"}
"""Caches, and the producer's second copy of the weights (`original/`, `metal/` of gpt-oss and Llama)."""
WEIGHT_SUFFIXES: Final = (*PICKLE_SUFFIXES, ".safetensors", ".gguf", ".h5", ".msgpack", ".onnx")
OWN_PREFIX: Final = "requant."
WRITTEN_ANEW: Final = {"config.json", "hf_quant_config.json"}


@dataclass(frozen=True, slots=True)
class Catalogue:
    """A checkpoint as its headers describe it.

    tensors: by name, in file order. sidecars: relative paths to copy. ignored: (path, reason) of what is not taken.
    """

    root: Path
    shards: tuple[Shard, ...]
    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    sidecars: tuple[str, ...] = ()
    ignored: tuple[tuple[str, str], ...] = ()
    hf_quant_config: Mapping[str, Any] | None = None
    total_bytes: int = field(default=0)

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """The source's quantization_config wherever it stands (top level or text_config), or an empty mapping."""
        text = self.config.get("text_config")
        for place in (self.config, text):
            found = cast("Mapping[str, Any]", place).get("quantization_config") if isinstance(place, dict) else None
            if found:
                return cast("Mapping[str, Any]", found)
        return {}


def read_json(path: Path, where: str) -> dict[str, Any]:
    """A JSON object from `path`; SourceError naming `where` otherwise."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", where=where, hint="check the folder") from error
    except (ValueError, RecursionError) as error:
        if is_lfs_pointer(path):
            raise _lfs_pointer(where) from error
        raise SourceError(f"is not JSON: {error}", where=where, hint="download the file again") from error
    if not isinstance(value, dict):
        raise SourceError("is not a JSON object", where=where, hint="download the file again")
    return cast("dict[str, Any]", value)


def _lfs_pointer(where: str) -> SourceError:
    return SourceError(
        "is a Git LFS pointer, not the file", where=where, hint="run `git lfs pull` in the folder, or use `hf download`"
    )


def _check_config(config: Mapping[str, Any]) -> None:
    """The parts of config.json that are read must be what they are taken for."""
    for prefix, place in (("", config), ("text_config.", config.get("text_config"))):
        found = cast("Mapping[str, Any]", place).get("quantization_config") if isinstance(place, dict) else None
        if found is not None and not isinstance(found, dict):
            raise SourceError(
                f"{prefix}quantization_config is not an object", where="config.json", hint="download the file again"
            )


def open_checkpoint(root: Path) -> Catalogue:
    """Catalogue the checkpoint in `root`. Reads headers and JSON files only; SourceError on anything out of order."""
    if not root.is_dir():
        raise SourceError("is not a folder", where=str(root), hint="give the folder that holds config.json")
    config_path = root / "config.json"
    if not config_path.exists():
        raise SourceError("config.json is missing", where=str(root), hint="give the folder that holds config.json")
    config = read_json(_resolve(root, "config.json"), "config.json")
    _check_config(config)
    index = _index_file(root)
    files, weight_map = _weight_files(root, index)
    left_out: list[tuple[str, str]] = []
    shards = tuple(_read_shard(_resolve(root, file), file, left_out) for file in files)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        before = len(tensors)
        tensors.update(zip(map(itemgetter(0), shard.tensors), shard.tensors, strict=True))
        if len(tensors) != before + len(shard.tensors):
            raise _twice(shards, shard)
    if weight_map is not None:
        _check_index(weight_map, tensors)
    if not tensors:
        raise SourceError("holds no tensor", where=str(root), hint="is this the right folder?")
    sidecars, ignored = _sidecars(root, {*files, *([index] if index else [])})
    ignored = (*ignored, *left_out)
    quant_path = root / "hf_quant_config.json"
    return Catalogue(
        root=root,
        shards=shards,
        tensors=tensors,
        config=config,
        sidecars=sidecars,
        ignored=ignored,
        hf_quant_config=read_json(_resolve(root, quant_path.name), quant_path.name) if quant_path.exists() else None,
        total_bytes=sum(map(itemgetter(5), tensors.values())),
    )


def _twice(shards: Sequence[Shard], second: Shard) -> SourceError:
    """The error for a tensor of `second` that stands somewhere before, too."""
    first = {t.name: shard.file for shard in shards[: shards.index(second)] for t in shard.tensors}
    name = ""
    for tensor in second.tensors:
        name = tensor.name
        if name in first:
            break
        first[name] = second.file
    return SourceError(
        f"{name} also stands in {first[name]}",
        where=second.file,
        hint="two shards hold the same tensor: remove the stale file or fix the index",
    )


def _read_shard(path: Path, file: str, left_out: list[tuple[str, str]]) -> Shard:
    """The header of a shard of either container; what it holds and the checkpoint does not goes to left_out."""
    if not file.endswith(GGUF_SUFFIX):
        return read_shard_header(path, file)
    from requant.convert.gguf_source import read_gguf

    shard, ignored = read_gguf(path, file)
    left_out += ignored
    return shard


def _index_file(root: Path) -> str | None:
    """The index of the checkpoint, if it has one."""
    indices = sorted(root.glob(f"*{INDEX_SUFFIX}"))
    if len(indices) > 1:
        names = [p.name for p in indices]
        if "model.safetensors.index.json" not in names:
            raise SourceError(
                f"several index files: {', '.join(names)}", where=str(root), hint="keep the one that is meant"
            )
        return "model.safetensors.index.json"
    return indices[0].name if indices else None


def _weight_files(root: Path, index: str | None) -> tuple[list[str], dict[str, str] | None]:
    """The shards that make up the checkpoint, and the index's weight map if there is an index."""
    if index is not None:
        weight_map = _read_index(_resolve(root, index), index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise SourceError("weight_map is missing or empty", where=index, hint="download the file again")
        mapping = cast("dict[str, Any]", weight_map)
        odd = next((file for file in mapping.values() if not isinstance(file, str)), "")
        files = [cast("str", odd)] if odd != "" else list(dict.fromkeys(mapping.values()))
        for file in files:
            _check_relative(file, index)
            if file.endswith(PICKLE_SUFFIXES):
                raise _pickle(file)
            if not (root / file).exists():
                missing = sum(1 for f in mapping.values() if f == file)
                raise SourceError(
                    f"shard is missing ({missing} tensors of the index lie in it)",
                    where=file,
                    hint="download it again: the index names it",
                )
        return sorted(files), mapping
    shards = sorted(p.name for p in root.glob("*.safetensors"))
    ggufs = sorted(p.name for p in root.glob(f"*{GGUF_SUFFIX}"))
    if not shards and ggufs:
        parts = [name for name in ggufs if SPLIT_GGUF.search(name)]
        if len(ggufs) > 1 and len(parts) != len(ggufs):
            raise SourceError(
                f"{len(ggufs)} GGUF files: {', '.join(ggufs[:4])}", where=str(root), hint="keep the one that is meant"
            )
        return ggufs, None
    if not shards:
        pickles = sorted(p.name for p in root.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise _pickle(pickles[0])
        raise SourceError("no .safetensors file", where=str(root), hint="is the download complete?")
    if len(shards) > 1 and "model.safetensors" not in shards:
        raise SourceError(
            f"{len(shards)} shards and no model{INDEX_SUFFIX}",
            where=str(root),
            hint="download the index too: without it a missing shard cannot be told from a complete checkpoint",
        )
    return (["model.safetensors"] if "model.safetensors" in shards else shards), None


def _read_index(path: Path, where: str) -> dict[str, Any]:
    """The index, whatever it holds."""
    try:
        quick = index_of(path.read_bytes())
    except OSError:
        quick = None
    return read_json(path, where) if quick is None else quick


def _pickle(file: str) -> SourceError:
    return SourceError(
        "is a pickle: loading it would run code from the checkpoint",
        where=file,
        hint="save the model as safetensors first (save_pretrained), or use the safetensors of the repo",
    )


def _check_relative(file: object, index: str) -> None:
    if not isinstance(file, str) or not file:
        raise SourceError(f"weight_map holds {file!r} instead of a file name", where=index, hint="fix the index")
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or "\\" in file or "\0" in file:
        raise SourceError(
            f"{file!r} leads out of the checkpoint's folder",
            where=index,
            hint="the index is damaged or hostile: shards must lie beside it",
        )


def _resolve(root: Path, file: str) -> Path:
    """`root/file`, which must lie in the folder; the Hub cache's links into its own `blobs` are allowed."""
    real_root, real = root.resolve(), (root / file).resolve()
    if real.is_relative_to(real_root):
        return real
    if real_root.parent.name == "snapshots":
        repository = real_root.parent.parent
        if any(real.is_relative_to(folder / "blobs") for folder in (repository, repository.parent)):
            return real  # the latter: huggingface_hub 2 keeps Xet files once for all repositories
    raise SourceError(
        "is a link that leads out of the checkpoint's folder",
        where=file,
        hint="copy the file into the folder, or point the manifest at the folder the link leads to",
    )


def _check_index(weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    files = map(itemgetter(3), tensors.values())
    if len(weight_map) == len(tensors) and all(map(eq, map(weight_map.get, tensors), files)):
        return
    for name, file in weight_map.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.file != file:
            found = f"it lies in {tensor.file}" if tensor else "no shard holds it"
            raise SourceError(
                f"the index says {file}, but {found}", where=name, hint="index and shards are of two exports"
            )
    if len(weight_map) != len(tensors):
        extra = next(name for name in tensors if name not in weight_map)
        raise SourceError(
            f"lies in {tensors[extra].file} but not in the index",
            where=extra,
            hint="index and shards are of two exports",
        )


def _sidecars(root: Path, taken: set[str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """What to copy beside the weights, and what is left with the reason."""
    copied: list[str] = []
    ignored: list[tuple[str, str]] = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        file = relative.as_posix()
        if path.is_dir():
            if path.is_symlink():
                ignored.append((file + "/", "a link to a folder"))
            elif relative.name in SKIPPED_FOLDERS and not set(relative.parts[:-1]) & SKIPPED_FOLDERS:
                ignored.append((file + "/", "cache or the producer's second copy of the weights"))
            continue
        if set(relative.parts[:-1]) & SKIPPED_FOLDERS or file in taken:
            continue
        if path.suffix in WEIGHT_SUFFIXES:
            ignored.append((file, "a weight file that the index does not name"))
        elif file in WRITTEN_ANEW:
            continue
        elif relative.name.endswith(INDEX_SUFFIX):
            ignored.append((file, "an index of weights that are not taken"))
        elif relative.name.endswith("hf_quant_config.json"):
            ignored.append((file, "SGLang takes any such file for the checkpoint's own"))
        elif relative.name.startswith(OWN_PREFIX):
            ignored.append((file, "an earlier run's record"))
        else:
            _check_sidecar(_resolve(root, file), file)
            copied.append(file)
    return tuple(copied), tuple(ignored)


def _check_sidecar(path: Path, file: str) -> None:
    """What will be copied after hours of work must be readable, and be itself, before they begin."""
    if not path.is_file():
        what = "is a link to nothing" if not path.exists() else "is not a regular file"
        raise SourceError(what, where=file, hint="download the file again, or delete it")
    try:
        pointer = is_lfs_pointer(path)
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", where=file, hint="check its permissions") from error
    if pointer:
        raise _lfs_pointer(file)
