"""Contract, against the source: nothing of the source that a user needs got lost on the way.

config.json keeps every key that does not concern quantization (swiglu_limit, rope settings, unknown ones too: a lost
key is a silent change of the model), and every sidecar file is there, byte for byte (tokenizer, chat template, code).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from requant.validate.collector import Collector
from requant.validate.opened import WEIGHT_SUFFIXES, OpenedFolder, as_object

__all__ = ["check_config_kept", "check_sidecars"]

REWRITTEN = frozenset({"quantization_config", "compression_config"})
"""Keys of config.json, at any depth, that a conversion writes anew."""
OWN_FILES = frozenset({"config.json", "hf_quant_config.json", "README.md", ".gitattributes"})
"""Files that a conversion writes itself or that belong to the source's repository, not to the model."""
OTHER_FORMS = frozenset({"original", "metal", "onnx", "gguf", "openvino"})
"""Folders with the same model in another form."""


def check_config_kept(folder: OpenedFolder, source: Mapping[str, object], found: Collector) -> None:
    """Compare the two config.json key by key, at every depth."""
    for place, here, there in _differences(folder.config or {}, source, ""):
        if here is _ABSENT:
            message = f"the source has it ({_brief(there)}), the output has not"
            found.error("config-key-lost", message, where=place, hint="copy the source's key")
        elif there is not _ABSENT:
            message = f"is {_brief(here)}, the source says {_brief(there)}"
            found.error("config-key-changed", message, where=place, hint="keep the source's value")


_ABSENT = object()


def _differences(
    here: Mapping[str, object], there: Mapping[str, object], place: str
) -> Iterator[tuple[str, object, object]]:
    for key in dict.fromkeys([*there, *here]):
        where = f"{place}.{key}" if place else key
        mine, theirs = here.get(key, _ABSENT), there.get(key, _ABSENT)
        if key in REWRITTEN or mine == theirs:
            continue
        mine_object, their_object = as_object(mine), as_object(theirs)
        if mine_object is not None and their_object is not None:
            yield from _differences(mine_object, their_object, where)
        else:
            yield where, mine, theirs


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_sidecars(output: Path, source: Path, found: Collector) -> int:
    """Every sidecar of the source stands in the output with the same bytes; the number compared."""
    compared = 0
    for file in _sidecars(source):
        twin = output / file.relative_to(source)
        where = str(file.relative_to(source))
        compared += 1
        if not twin.is_file():
            found.error("sidecar-missing", "is in the source and not in the output", where=where, hint="copy it")
        elif twin.stat().st_size != file.stat().st_size or twin.read_bytes() != file.read_bytes():
            found.error("sidecar-differs", "differs from the source's", where=where, hint="copy it byte for byte")
    return compared


def _sidecars(source: Path) -> Iterator[Path]:
    for file in sorted(source.rglob("*")):
        relative = file.relative_to(source)
        hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
        if hidden or not file.is_file() or relative.parts[0] in OTHER_FORMS:
            continue
        name = file.name
        own = str(relative) in OWN_FILES or name.startswith("requant.") or name.endswith("hf_quant_config.json")
        if not own and not name.endswith((*WEIGHT_SUFFIXES, ".safetensors.index.json", ".bin.index.json")):
            yield file
