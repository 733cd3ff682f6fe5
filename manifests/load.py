"""A manifest file, or the name of a built-in one -> a `Manifest`, or one error that shows every fault.

```
file + includes -> tree (yamltree) -> merged, --set applied, ${env:} filled in (merge) -> models (schema) -> Manifest
                        every fault on the way keeps its file, line and column (faults, explain)
```
Only what leaves no tree at all (unreadable file, YAML syntax) stops a file early; everything else is collected.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import yaml
from pydantic import TypeAdapter, ValidationError
from requant.manifests.checks import disagreements
from requant.manifests.errors import ManifestError
from requant.manifests.explain import explain, place_of
from requant.manifests.faults import Fault, Place, did_you_mean, manifest_error
from requant.manifests.merge import Data, Resolver, apply_set, merge, quote_interpolation
from requant.manifests.merge import Path as KeyPath
from requant.manifests.schema import Manifest, with_default_input_scale
from requant.manifests.yamltree import LINE_BREAK, Items, Node, Scalar, Table, YamlFaultError, parse_tree, resolve_plain

__all__ = ["LIBRARY", "LoadedManifest", "dump_manifest", "library_names", "load_manifest"]

LIBRARY: Final = Path(__file__).parent / "library"
"""Built-in manifests, one file for each known checkpoint."""
MAX_BYTES: Final = 1 << 20
"""No manifest that a person wrote is larger; a weight file given by mistake is."""
MAX_INCLUDES: Final = 100
"""Files that one manifest may draw in."""


@dataclass(frozen=True)
class LoadedManifest:
    """A manifest and where it came from.

    `resolved_yaml` is the manifest with includes, `--set` and environment worked in and every default written out; it
    loads again to an equal manifest. `sha256` is of that text. `conversion_sha256` covers only what decides the bytes
    of the output (not how to run, what to prove or where to publish), so that a run may be resumed with other workers.
    """

    manifest: Manifest
    path: Path
    sha256: str
    resolved_yaml: str
    conversion_sha256: str
    files: tuple[Path, ...]


def library_names() -> tuple[str, ...]:
    """Names of the built-in manifests, sorted."""
    return tuple(sorted(path.stem for path in LIBRARY.glob("*.yaml")))


def load_manifest(
    ref: str | Path, sets: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> LoadedManifest:
    """The manifest at a path or of a built-in name, with `a.b=value` settings; ManifestError shows every fault."""
    path = _find(ref)
    reader = _Files(os.environ if environ is None else environ)
    tree = reader.read(path, str(path))
    if tree is None:
        raise manifest_error(reader.faults, reader.labels)
    for argument in sets:
        tree, faults = apply_set(tree, argument)
        reader.faults += faults
    manifest = _build(tree, reader)
    if manifest is None or reader.faults:
        raise manifest_error(reader.faults, reader.labels)
    text = dump_manifest(manifest)
    return LoadedManifest(
        manifest=manifest,
        path=path,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        resolved_yaml=text,
        conversion_sha256=hashlib.sha256(_conversion_yaml(manifest).encode()).hexdigest(),
        files=tuple(reader.seen),
    )


def _find(ref: str | Path) -> Path:
    """The file that a path or a built-in name stands for."""
    path, name = Path(ref), str(ref)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = 0
    except (OSError, ValueError) as error:
        raise ManifestError(f"cannot be read: {getattr(error, 'strerror', error)}", where=name) from None
    if stat.S_ISREG(mode):
        return path
    if name in library_names():
        return LIBRARY / f"{name}.yaml"
    if stat.S_ISDIR(mode):
        hint = f"requant init {name} makes a manifest of a checkpoint"
        raise ManifestError("this is a folder, not a manifest", where=name, hint=hint)
    if mode:
        raise ManifestError("not a regular file", where=name, hint="a manifest is a YAML file")
    known = library_names()
    hint = did_you_mean(name.removesuffix(".yaml").removesuffix(".yml"), known)
    raise ManifestError(
        f"no such file, and no built-in manifest of that name{hint}",
        where=name,
        hint=f"built-in manifests: {', '.join(known)}",
    )


class _Files:
    """Reads a file and what it includes; keeps the faults, the files in the order read, and the open ones."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.faults: list[Fault] = []
        self.seen: list[Path] = []
        self.labels: list[str] = []
        self.open: list[Path] = []

    def read(self, path: Path, label: str) -> Node | None:
        """The tree of a file with its includes merged under it; None, and a fault, if it has none."""
        self.labels.append(label)
        real = path.resolve()
        if real not in self.seen:
            self.seen.append(real)
        try:
            text = _text(path, label)
            tree, faults = parse_tree(text, label)
        except YamlFaultError as error:
            self.faults += error.faults
            return None
        self.faults += faults
        if not isinstance(tree, Table):
            kind = "a list" if isinstance(tree, Items) else "a single value"
            self.faults.append(Fault(tree.place, f"a manifest is a mapping (key: value), not {kind}"))
            return None
        self.open.append(real)
        below = self._includes(tree, path)
        _ = self.open.pop()
        own = Table({key: entry for key, entry in tree.entries.items() if key != "include"}, tree.place)
        return own if below is None else merge(below, own)

    def _includes(self, tree: Table, path: Path) -> Node | None:
        """The merged trees of what a file includes, in order."""
        if "include" not in tree.entries:
            return None
        place, listed = tree.entries["include"]
        if not isinstance(listed, Items):
            if not (isinstance(listed, Scalar) and listed.plain and listed.text and resolve_plain(listed.text) is None):
                self.faults.append(Fault(place, "include must be a list of files: write include: [base.yaml]"))
            return None
        merged: Node | None = None
        for item in listed.items:
            included = self._include(item, path)
            merged = included if merged is None or included is None else merge(merged, included)
        return merged

    def _include(self, item: Node, path: Path) -> Node | None:
        """The tree of one entry of an include list."""
        resolver = Resolver(self.environ)
        name = resolver.scalar(item, ("include",)) if isinstance(item, Scalar) else None
        self.faults += resolver.faults
        if resolver.faults:
            return None
        if not isinstance(name, str) or not name:
            self.faults.append(Fault(item.place, "an entry of include must be the name of a file"))
            return None
        target = path.parent / name
        if not target.is_file() and name in library_names():
            target = LIBRARY / f"{name}.yaml"
        if target.resolve() in self.open:
            chain = " -> ".join(part.name for part in [*self.open, target])
            self.faults.append(Fault(item.place, f"this include leads back to a file that is being read: {chain}"))
            return None
        if not target.is_file():
            near = [entry.name for entry in path.parent.glob("*.y*ml")]
            hint = did_you_mean(name, [*near, *library_names()])
            self.faults.append(Fault(item.place, f"no such file: {target}{hint}"))
            return None
        if len(self.labels) > MAX_INCLUDES:
            self.faults.append(Fault(item.place, f"more than {MAX_INCLUDES} included files"))
            return None
        return self.read(target, str(target))


def _text(path: Path, label: str) -> str:
    """The text of a file, which must be UTF-8 and small."""
    start = Place(label, 1, 1)
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise YamlFaultError(Fault(start, f"{size} bytes; a manifest is a small YAML file, not a weight file"))
        raw = path.read_bytes()
    except OSError as error:
        raise YamlFaultError(Fault(start, f"cannot be read: {error.strerror}")) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        lines = LINE_BREAK.split(raw[: error.start].decode("utf-8-sig"))
        shown = LINE_BREAK.split(raw[error.start :].decode("utf-8", "replace"))[0]
        place = Place(label, len(lines), len(lines[-1]) + 1, 1, lines[-1] + shown)
        looks = " (the file looks like UTF-16)" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        what = f"byte 0x{raw[error.start]:02X} is not UTF-8{looks}; save the file as UTF-8"
        raise YamlFaultError(Fault(place, what)) from None


def _build(tree: Node, reader: _Files) -> Manifest | None:
    """The models of a tree; None, and faults, if they cannot be had."""
    resolver = Resolver(reader.environ)
    data = resolver.data(tree)
    reader.faults += resolver.faults
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        faults, faulty = explain(error, tree, resolver.broken)
        reader.faults += faults
        if not isinstance(data, dict):
            return None
        bad = {path[0] for path in (*faulty, *resolver.broken) if path}
        for path, what in _partial_disagreements({key: part for key, part in data.items() if key not in bad}):
            keys: KeyPath = tuple(int(part) if part.isdigit() else part for part in path.split("."))
            reader.faults.append(Fault(place_of(tree, keys), f"{path}: {what}"))
        return None
    return manifest


def _partial_disagreements(data: Mapping[str, Data]) -> list[tuple[str, str]]:
    """What the good sections of a manifest contradict each other in, though others are faulty."""
    data = cast("Mapping[str, Data]", with_default_input_scale(data))
    known: dict[str, Any] = {}  # pyright: ignore[reportExplicitAny]  each section has a type of its own
    for name in ("source", "target", "layers", "activations", "execute", "validation", "publish"):
        info = Manifest.model_fields[name]
        key = info.alias or name
        kind = cast("type[object]", info.annotation)
        known[name] = TypeAdapter(kind).validate_python(data[key]) if key in data else None
    return list(disagreements(**known))  # pyright: ignore[reportAny]


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes wherever our loader would not read it back as the same text."""


def _text_node(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if resolve_plain(text) == text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)  # pyright: ignore[reportUnknownMemberType]


_Dumper.add_representer(str, _text_node)


def _quoted(value: object) -> object:
    """The value with every text safe from interpolation."""
    if isinstance(value, str):
        return quote_interpolation(value)
    if isinstance(value, list):
        return [_quoted(part) for part in cast("list[object]", value)]
    if isinstance(value, dict):
        return {key: _quoted(part) for key, part in cast("dict[str, object]", value).items()}
    return value


def _yaml(value: object) -> str:
    return yaml.dump(_quoted(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def dump_manifest(manifest: Manifest) -> str:
    """The manifest as YAML, every default written out; it loads again to an equal manifest."""
    return _yaml(manifest.model_dump(mode="json", by_alias=True))


def _conversion_yaml(manifest: Manifest) -> str:
    """What decides the bytes of the output: not its folder, nor what is run, proven or published."""
    whole = cast("dict[str, dict[str, object]]", manifest.model_dump(mode="json", by_alias=True))
    target = {key: part for key, part in whole["target"].items() if key not in ("output", "runtimes")}
    keys = ("version", "source", "layers", "activations", "kv_cache")
    return _yaml({**{key: whole[key] for key in keys}, "target": target})
