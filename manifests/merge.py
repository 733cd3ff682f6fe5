"""Trees into one tree: includes under the file, `--set` over it, `${env:NAME}` in it; then plain values.

Mappings are merged key by key, everything else is replaced as a whole. Keys that exclude each other displace each
other: a file (or `--set`) that says `source.path` takes the place of an included `source.repo` and its revision.
Interpolation comes last, so that a variable matters only where its value is used. A value without quotes is read as
YAML again after it: `workers: ${env:N:-4}` is a number; text from the environment can become no more than a scalar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from requant.manifests.faults import Fault, Place, did_you_mean
from requant.manifests.yamltree import Items, Node, Scalar, Table, Value, YamlFaultError, parse_tree, resolve_plain

__all__ = ["Data", "Path", "Resolver", "apply_set", "merge", "quote_interpolation"]

Data = Value | list["Data"] | dict[str, "Data"]
Path = tuple[str | int, ...]

SET_FILE: Final = "--set"

DISPLACED: Final[dict[Path, dict[str, tuple[str, ...]]]] = {
    ("source",): {"path": ("repo", "revision"), "repo": ("path",)},
    ("activations",): {"input_scale": ("calibrate",), "calibrate": ("input_scale",)},
    ("validate", "serving"): {"endpoint": ("launch",), "launch": ("endpoint",)},
}
"""By mapping: which inherited keys a key displaces, unless they are given together with it."""

_KEY_PATH: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ENV: Final = re.compile(r"\$\$\{|\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^}]*)?\}|\$\{[^}]*\}?")


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.plain and node.text != "" and resolve_plain(node.text) is None


def merge(base: Node, over: Node, path: Path = ()) -> Node:
    """`over` on top of `base`: mappings key by key, anything else replaced."""
    if not isinstance(base, Table) or not isinstance(over, Table):
        return over
    entries = dict(base.entries)
    for key in _displaced(path, over):
        _ = entries.pop(key, None)
    for key, (place, node) in over.entries.items():
        entries[key] = (place, merge(entries[key][1], node, (*path, key)) if key in entries else node)
    return Table(entries, over.place)


def _displaced(path: Path, over: Table) -> set[str]:
    """Keys that a mapping on top takes out of the one below."""
    rules = DISPLACED.get(path, {})
    given = [key for key in rules if key in over.entries and not _is_null(over.entries[key][1])]
    return {out for key in given for out in rules[key] if out not in over.entries}


def apply_set(root: Node, argument: str) -> tuple[Node, list[Fault]]:
    """The tree with one `a.b.0.c=value` applied, and the faults of the argument."""
    path, equals, value = argument.partition("=")
    whole = Place(SET_FILE, 1, 1, len(argument), argument)
    keys = path.split(".")
    if not equals or not _KEY_PATH.fullmatch(path):
        return root, [Fault(whole, f"{argument!r} is not of the form a.b=value")]
    if not value:
        return root, [Fault(whole, f'no value after =; write null, or "" for empty text: {path}=\'""\'')]
    try:
        # Padded, so that columns count in the argument as the user typed it.
        node, faults = parse_tree(" " * (len(path) + 1) + value, SET_FILE, argument)
    except YamlFaultError as error:
        return root, list(error.faults)
    try:
        return _put(root, keys, 0, node, argument), faults
    except YamlFaultError as error:
        return root, [*faults, *error.faults]


def _put(at: Node | None, keys: Sequence[str], depth: int, node: Node, argument: str) -> Node:
    """A copy of `at` in which keys[depth:] leads to `node`."""
    if depth == len(keys):
        return node
    key = keys[depth]
    start = sum(len(before) + 1 for before in keys[:depth])
    place = Place(SET_FILE, 1, start + 1, len(key), argument)
    so_far = ".".join(keys[:depth])
    if isinstance(at, Items):
        if not key.isascii() or not key.isdigit() or int(key) >= len(at.items):
            has = f"{len(at.items)} entries, counted from 0" if at.items else "no entries"
            raise YamlFaultError(Fault(place, f"'{key}' is no entry of {so_far}, which has {has}"))
        items = list(at.items)
        items[int(key)] = _put(items[int(key)], keys, depth + 1, node, argument)
        return Items(items, at.place)
    if at is None or _is_null(at) or (isinstance(at, Scalar) and at.plain and not at.text):
        at = Table({}, place)
    if isinstance(at, Scalar):
        raise YamlFaultError(Fault(place, f"{so_far} is the value '{at.text}', so it has no '{key}' to set"))
    path: Path = tuple(keys[:depth])
    below = at.entries.get(key, (place, None))[1]
    entry = (place, _put(below, keys, depth + 1, node, argument))
    gone = _displaced(path, Table({key: entry}, place))
    return Table({**{old: kept for old, kept in at.entries.items() if old not in gone}, key: entry}, at.place)


@dataclass
class Resolver:
    """Turns a tree into plain values; collects faults, and the paths whose value could not be had."""

    environ: Mapping[str, str]
    faults: list[Fault] = field(default_factory=list)
    broken: set[Path] = field(default_factory=set)

    def data(self, node: Node, path: Path = ()) -> Data:
        """The values of a tree."""
        if isinstance(node, Table):
            return {key: self.data(value, (*path, key)) for key, (_, value) in node.entries.items()}
        if isinstance(node, Items):
            return [self.data(item, (*path, index)) for index, item in enumerate(node.items)]
        return self.scalar(node, path)

    def scalar(self, node: Scalar, path: Path) -> Value:
        """The value of a leaf; None, and the path marked, if there is none."""
        if node.plain and not node.text:
            name = ".".join(map(str, path)) or "the manifest"
            self._fault(node.place, f"{name} has no value; write one, or null for none, or {{}} for all defaults", path)
            return None
        if any(not (char.isprintable() or char in "\n\t") for char in node.text):
            self._fault(node.place, "a control character in the text (in double quotes \\b is a backspace)", path)
            return None
        text = self._interpolate(node, path)
        return resolve_plain(text) if node.plain else text

    def _interpolate(self, node: Scalar, path: Path) -> str:
        def value(found: re.Match[str]) -> str:
            if found[0] == "$${":
                return "${"
            place = node.place
            if (at := place.text.find(found[0], place.column - 1)) >= 0:
                place = Place(place.file, place.line, at + 1, len(found[0]), place.text)
            if found["name"] is None:
                what = f"{found[0]} is not understood; write ${{env:NAME}} or ${{env:NAME:-default}} ($${{ for ${{)"
                self._fault(place, what, path)
                return ""
            given, default = self.environ.get(found["name"], ""), found["default"]
            if given or default is not None:
                return given or default.removeprefix(":-")
            empty = found["name"] in self.environ
            state = "empty" if empty else "not set"
            hint = "" if empty else did_you_mean(found["name"], self.environ)
            self._fault(
                place,
                f"the environment variable {found['name']} is {state}{hint or ';'} "
                f"{'or give' if hint else 'give'} a default: ${{env:{found['name']}:-...}}",
                path,
            )
            return ""

        return _ENV.sub(value, node.text)

    def _fault(self, place: Place, what: str, path: Path) -> None:
        self.faults.append(Fault(place, what))
        self.broken.add(path)


def quote_interpolation(text: str) -> str:
    """The text in a form that interpolation gives back unchanged."""
    return text.replace("${", "$${")
