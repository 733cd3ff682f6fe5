"""pydantic's errors as faults with a place, in the words of the manifest.

pydantic says where in the *data* something is wrong; the tree says where that stands in a file. A field that takes
several kinds of value (a number or `auto`) yields one error for each kind; they become one sentence here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

from pydantic import BaseModel, ValidationError
from requant.manifests.faults import Fault, Place, did_you_mean
from requant.manifests.fields import FLOAT32_MAX, FLOAT32_MIN
from requant.manifests.merge import Path
from requant.manifests.schema import Manifest
from requant.manifests.yamltree import Items, Node, Scalar, Table

__all__ = ["explain", "key_paths", "place_of"]

PATTERN_HELP: Final = {
    "repo": "a repository on the Hub, owner/name",
    "name": "a name: up to 96 letters, digits, '.', '_' and '-', the first a letter or digit",
    "endpoint": "an address that starts with http:// or https://",
}
YAML11_TRUE: Final = frozenset({"yes", "y", "on", "1", "true"})
YAML11_FALSE: Final = frozenset({"no", "n", "off", "0", "false"})
_UNION_BRANCH: Final = re.compile(r"constrained-\w+|function-.*|literal\[.*|[A-Z]\w+")


@dataclass(frozen=True)
class _Error:
    """One error of pydantic: kind, path in the data (without the branches of unions), value, context.

    `branch` is the kind of value that was tried if the field at path[:union] takes several, else empty.
    """

    kind: str
    path: Path
    branch: str
    union: int
    value: object
    context: Mapping[str, object]
    message: str


def _errors(error: ValidationError) -> Iterator[_Error]:
    for entry in error.errors(include_url=False):
        loc = entry["loc"]
        key = loc[-1:] if entry["type"] in ("extra_forbidden", "missing") else ()  # may be spelled like a branch
        above = loc[: len(loc) - len(key)]
        branches = [part for part in above if isinstance(part, str) and _UNION_BRANCH.fullmatch(part)]
        path = (*(part for part in above if part not in branches), *key)
        union = next((place for place, part in enumerate(above) if part in branches), len(path))
        context = cast("Mapping[str, object]", entry.get("ctx", {}))
        branch = branches[0] if branches else ""
        yield _Error(entry["type"], path, branch, union, cast("object", entry["input"]), context, entry["msg"])


def key_paths(model: type[BaseModel] = Manifest, prefix: str = "") -> dict[str, str]:
    """Every key of the manifest with its dotted path, the outermost of a name: for `did you mean` across sections."""
    found: dict[str, str] = {}
    inner: dict[str, str] = {}
    for name, info in model.model_fields.items():
        key = info.alias or name
        _ = found.setdefault(key, f"{prefix}{key}")
        for kind in _models_in(info.annotation):
            inner = {**key_paths(kind, f"{prefix}{key}."), **inner}
    return {**inner, **found}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:  # pyright: ignore[reportExplicitAny, reportAny]  a type is a value here
    """The models that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _model_at(path: Path) -> type[BaseModel] | None:
    """The model of the mapping at a path."""
    model: type[BaseModel] | None = Manifest
    for part in path:
        if isinstance(part, int):
            continue
        fields = {info.alias or name: info for name, info in model.model_fields.items()} if model else {}
        model = next(_models_in(fields[part].annotation), None) if part in fields else None
    return model


def place_of(root: Node, path: Path, *, key: bool = False) -> Place:
    """Where the value (or its key) at a path stands; for what is missing, the mapping that lacks it."""
    node, place = root, root.place
    for part in path:
        if isinstance(node, Table) and part in node.entries:
            place, node = node.entries[str(part)]
        elif isinstance(node, Items) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
            place = node.place
        else:
            return place
    return node.place if isinstance(node, Scalar) and not key else place


def _scalar_at(root: Node, path: Path) -> Scalar | None:
    node: Node | None = root
    for part in path:
        if isinstance(node, Table):
            node = node.entries[str(part)][1] if part in node.entries else None
        elif isinstance(node, Items) and isinstance(part, int):
            node = node.items[part] if part < len(node.items) else None
        else:
            return None
    return node if isinstance(node, Scalar) else None


def explain(error: ValidationError, root: Node, broken: set[Path]) -> tuple[list[Fault], set[Path]]:
    """The faults that pydantic found, but for those at broken paths; and the paths that are faulty."""
    groups: dict[Path, list[_Error]] = {}
    for one in _errors(error):
        groups.setdefault(one.path[: one.union], []).append(one)
    faults: list[Fault] = []
    paths: set[Path] = set()
    for path, group in groups.items():
        paths.add(path)
        if any(path[: len(gone)] == gone for gone in broken):
            continue
        if any(one.kind == "too_short" for one in group) and any(
            len(other) > len(path) and other[: len(path)] == path for other in groups
        ):
            continue  # pydantic counts the entries that were valid
        for one in _chosen(group):
            at, on_key = _target(one)
            faults.append(Fault(place_of(root, at, key=on_key), _sentence(one, group, _scalar_at(root, one.path))))
    return faults, paths


def _chosen(group: Sequence[_Error]) -> list[_Error]:
    """Of a union's errors those worth telling: a mapping's own faults if a mapping was given, else one for all."""
    if not any(one.branch for one in group):
        return list(group)
    if within := [one for one in group if len(one.path) > one.union or one.kind == "requant"]:
        return within
    bounds = [one for one in group if one.kind.startswith(("greater", "less", "finite"))]
    return bounds[:1] or [group[0]]


def _target(one: _Error) -> tuple[Path, bool]:
    """The path to point at, and whether at its key."""
    if one.kind == "requant":
        at = tuple(int(part) if part.isdigit() else part for part in str(one.context["at"]).split(".") if part)
        return (*one.path, *at), False
    return one.path, one.kind in ("extra_forbidden", "missing")


def _dotted(path: Path) -> str:
    return ".".join(map(str, path)) or "the manifest"


def _shown(one: _Error, scalar: Scalar | None) -> str:
    """The value as the user wrote it."""
    if scalar is not None and not isinstance(one.value, str):
        return f"'{scalar.text}'" if "${" not in scalar.text else f"'{one.value}'"
    if isinstance(one.value, str):
        return f"'{one.value}'"
    return "a list" if isinstance(one.value, list) else "a mapping" if isinstance(one.value, dict) else f"'{one.value}'"


def _sentence(one: _Error, group: Sequence[_Error], scalar: Scalar | None) -> str:
    """What is wrong, what would be right, and what was probably meant."""
    name = _dotted(one.path)
    shown = _shown(one, scalar)
    alone = one.kind.startswith(("missing", "extra_forbidden", "requant", "greater", "less", "finite"))
    if one.branch and len(one.path) == one.union and not alone:
        return _union(one, group, shown, scalar)
    match one.kind:
        case "requant":
            return f"{_dotted(_target(one)[0])}: {one.context['what']}"
        case "missing":
            model = _model_at(one.path[:-1])
            about = _describe(model, str(one.path[-1])) if model else ""
            return f"{_dotted(one.path[:-1])} lacks the key '{one.path[-1]}'{about}"
        case "extra_forbidden":
            return _unknown_key(one.path)
        case "literal_error":
            choices = _choices(one)
            hint = did_you_mean(one.value, choices) if isinstance(one.value, str) else ""
            if name == "version":
                return f"version: this program reads version 1, not {shown}"
            return f"{name}: {shown} is not one of {', '.join(choices)}{hint}"
        case "bool_type":
            return f"{name}: {shown} is not true or false{_bool_hint(one.value, scalar)}"
        case "int_type" | "int_from_float" | "float_type":
            wanted = "a number" if one.kind == "float_type" else "a whole number"
            return f"{name}: {shown} is not {wanted}{_number_hint(one.value, scalar)}"
        case "string_type":
            if isinstance(one.value, bool | int | float) or one.value is None:
                kind = "true or false" if isinstance(one.value, bool) else "null" if one.value is None else "a number"
                return f'{name}: YAML reads {shown} as {kind}, and text is needed; write "{shown[1:-1]}" in quotes'
            return f"{name}: text is needed, not {shown}"
        case "finite_number":
            return f"{name}: {shown} is not a finite number"
        case "greater_than" | "greater_than_equal" | "less_than_equal" | "less_than":
            return f"{name}: {shown} is out of range; it must be {_bound(one)}"
        case "string_too_short":
            return f"{name} must not be empty"
        case "too_short":
            return f"{name} is an empty list; give at least one entry"
        case "string_pattern_mismatch":
            return f"{name}: {shown} is not {PATTERN_HELP.get(str(one.path[-1]), 'of the right form')}"
        case "model_type" | "model_attributes_type" | "dict_type":
            model = _model_at(one.path)
            keys = f" with the keys {', '.join(_keys(model))}" if model else ""
            return f"{name} must be a mapping{keys}, not {shown}"
        case "tuple_type" | "list_type":
            return f"{name} must be a list, not {shown}" + (f"; write [{scalar.text}]" if scalar else "")
        case "value_error":
            return f"{name}: {one.context['error']}"
        case _:
            return f"{name}: {one.message}"


def _keys(model: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in model.model_fields.items()]


def _describe(model: type[BaseModel], key: str) -> str:
    """What a key is for, in parentheses."""
    for name, info in model.model_fields.items():
        if key == (info.alias or name) and info.description:
            return f" ({info.description.split('. ')[0].rstrip('.')})"
    return ""


def _unknown_key(path: Path) -> str:
    """The sentence for a key that does not exist at its place."""
    key, model = str(path[-1]), _model_at(path[:-1])
    where = f" in {_dotted(path[:-1])}" if path[:-1] else ""
    known = _keys(model) if model else []
    if hint := did_you_mean(key, known):
        return f"unknown key '{key}'{where}{hint}"
    elsewhere = key_paths().get(key)
    if elsewhere:
        return f"unknown key '{key}'{where}; did you mean {elsewhere}?"
    return f"unknown key '{key}'{where}; it takes {', '.join(known)}"


def _choices(one: _Error) -> list[str]:
    """The choices that pydantic lists as `'a', 'b' or 'c'`."""
    return re.findall(r"'([^']*)'", str(one.context["expected"])) or [str(one.context["expected"])]


def _union(one: _Error, group: Sequence[_Error], shown: str, scalar: Scalar | None) -> str:
    """One sentence for a value that is none of several kinds."""
    wanted: list[str] = []
    literal: list[str] = []
    for other in group:
        if other.kind == "literal_error":
            literal = _choices(other)
            wanted += literal
        elif other.kind.startswith(("int", "float")):
            wanted.append("a whole number" if other.kind.startswith("int") else "a number")
        elif other.kind.startswith("model") and (model := next(iter(_models_of(one.path)), None)) is not None:
            wanted.append(f"{{{', '.join(f'{key}: ...' for key in _keys(model))}}}")
    hint = did_you_mean(one.value, literal) if isinstance(one.value, str) else ""
    return f"{_dotted(one.path)}: {shown} is neither {' nor '.join(wanted)}{hint or _number_hint(one.value, scalar)}"


def _models_of(path: Path) -> Iterator[type[BaseModel]]:
    model = _model_at(path[:-1])
    if model:
        for name, info in model.model_fields.items():
            if path[-1] == (info.alias or name):
                yield from _models_in(info.annotation)


def _bool_hint(value: object, scalar: Scalar | None) -> str:
    word = str(value).casefold()
    if word in ("true", "false") and scalar is not None and not scalar.plain:
        return f"; write {word} without quotes"
    if word in YAML11_TRUE:
        return "; write true"
    return "; write false" if word in YAML11_FALSE else ""


def _number_hint(value: object, scalar: Scalar | None) -> str:
    """Why text that looks like a number is none."""
    if not isinstance(value, str):
        return ""
    if scalar is not None and not scalar.plain and re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", value):
        return f"; write {value} without quotes"
    if re.fullmatch(r"[-+]?0[0-9]+", value):
        octal = f" or {int(value, 8)}" if re.fullmatch(r"[-+]?0[0-7]+", value) else ""
        return f" (a leading zero: YAML 1.1 would read it in octal); write {int(value)}{octal}"
    if re.fullmatch(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?", value):
        return " (YAML 1.1 would read it in base 60)"
    if re.fullmatch(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?", value):
        return f"; write {value.replace('_', '')}"
    if re.fullmatch(r"[-+]?0[xXoObB][0-9a-fA-F_]+", value):
        return "; write it in decimal"
    return ""


def _bound(one: _Error) -> str:
    """The bound in words."""
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    limits = cast("Mapping[str, float]", one.context)
    if limits.get("ge") == FLOAT32_MIN:
        return "above 0 and a normal FP32 number"
    if limits.get("le") == FLOAT32_MAX:
        return "an FP32 number"
    return ", ".join(f"{words[key]} {limit:g}" for key, limit in limits.items() if key in words)
