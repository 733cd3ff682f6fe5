"""Manifest text -> a tree that remembers where each piece stands, without YAML's surprises.

YAML 1.1, which PyYAML speaks, reads `no` as False, `1e-3` as a string, `010` as 8, `1:30` as 90, and of two equal keys
keeps the last. Here PyYAML only splits the text; what a plain scalar *is* follows the core schema of YAML 1.2 (as in
the YAML servers of editors), and whatever the two versions read differently stays text, so that no number and no
boolean is made of it by accident. Equal keys, tags, merge keys and several documents are refused, each with its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, cast

import yaml
from requant.manifests.faults import Fault, Place

__all__ = ["Items", "Node", "Scalar", "Table", "Value", "YamlFaultError", "parse_tree", "resolve_plain"]

MAX_NODES: Final = 100_000
"""Bound on the tree after aliases are expanded: ten nested lists of ten aliases each would be 10^10 nodes."""

TAG_PREFIX: Final = "tag:yaml.org,2002:"
LINE_BREAK: Final = re.compile("\r\n|[\r\n\x85\u2028\u2029]")  # what YAML counts as a line break (YAML 1.1, 5.4)

Value = str | int | float | bool | None

_INT: Final = re.compile(r"[-+]?(0|[1-9][0-9]{0,399})")
_FLOAT: Final = re.compile(
    r"[-+]?(\.[0-9]{1,400}|[0-9]{1,400}\.[0-9]{0,400}|(?=[1-9]|0[eE])[0-9]{1,400}(?=[eE]))([eE][-+]?[0-9]{1,9})?"
)
_CONSTANTS: Final[dict[str, Value]] = {
    **dict.fromkeys(("null", "Null", "NULL", "~"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
    **dict.fromkeys((sign + inf for sign in ("", "+") for inf in (".inf", ".Inf", ".INF")), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
}


@dataclass(frozen=True)
class Scalar:
    """A leaf: its text after YAML's unquoting, and whether it stood there without quotes."""

    text: str
    plain: bool
    place: Place


@dataclass
class Items:
    """A list."""

    items: list[Node]
    place: Place


@dataclass
class Table:
    """A mapping: the place of each key, and its value."""

    entries: dict[str, tuple[Place, Node]]
    place: Place


Node = Scalar | Items | Table


class YamlFaultError(Exception):
    """The text is no YAML tree: these faults, and nothing to go on with."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__(*faults)


def resolve_plain(text: str) -> Value:
    """What a scalar without quotes stands for: null, boolean, number or text (YAML 1.2 core schema, decimal only)."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Loader(yaml.SafeLoader):
    """PyYAML's composer, which gives every plain scalar the tag of a string and takes no tag from the text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  as in the base class

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = cast("yaml.Event", self.peek_event())  # pyright: ignore[reportUnknownMemberType]  untyped in the stubs
        tag = cast("str | None", getattr(event, "tag", None))
        if tag is not None:
            shown = tag.replace(TAG_PREFIX, "!!")
            raise yaml.MarkedYAMLError(problem=f"the tag {shown}", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


class _Reader:
    """Makes our tree of PyYAML's, and collects the faults it meets."""

    def __init__(self, file: str, lines: list[str]) -> None:
        self.file = file
        self.lines = lines
        self.faults: list[Fault] = []
        self.open: set[int] = set()
        self.count = 0

    def place(self, start: yaml.Mark, end: yaml.Mark | None = None) -> Place:
        """The place from one mark to another; only the first line counts."""
        text = self.lines[start.line] if start.line < len(self.lines) else ""
        stop = end.column if end is not None and end.line == start.line else len(text.rstrip())
        return Place(self.file, start.line + 1, start.column + 1, max(1, stop - start.column), text)

    def node(self, node: yaml.Node) -> Node:
        """The node and all below it."""
        place = self.place(node.start_mark, node.end_mark)
        self.count += 1
        if self.count > MAX_NODES:
            raise YamlFaultError(Fault(place, f"more than {MAX_NODES} values once its aliases are written out"))
        if isinstance(node, yaml.ScalarNode):
            return Scalar(node.value, node.style is None, place)
        if id(node) in self.open:
            raise YamlFaultError(Fault(place, "this anchor holds an alias to itself"))
        self.open.add(id(node))
        made = (
            self.table(node, place)
            if isinstance(node, yaml.MappingNode)
            else Items([self.node(item) for item in cast("list[yaml.Node]", node.value)], place)
        )
        self.open.remove(id(node))
        return made

    def table(self, node: yaml.MappingNode, place: Place) -> Table:
        """A mapping; the first of equal keys counts, so that the rest can still be judged."""
        entries: dict[str, tuple[Place, Node]] = {}
        for key, value in node.value:
            at = self.place(key.start_mark, key.end_mark)
            if not isinstance(key, yaml.ScalarNode):
                self.faults.append(Fault(at, "a key must be a word, not a list or a mapping"))
            elif key.value == "<<" and key.style is None:
                self.faults.append(Fault(at, "merge keys (<<) are not supported; use include, or repeat the lines"))
            elif key.value in entries:
                first = entries[key.value][0].line
                self.faults.append(Fault(at, f"the key '{key.value}' stands here twice (first in line {first})"))
            else:
                entries[key.value] = (at, self.node(value))
        return Table(entries, place)


def parse_tree(text: str, file: str, shown: str | None = None) -> tuple[Node, list[Fault]]:
    """The tree of a text and the faults that leave a tree; YamlFaultError if there is none.

    `shown` is the text to quote in messages, if it is not the text itself (`--set` arguments).
    """
    lines = LINE_BREAK.split(text if shown is None else shown)
    reader = _Reader(file, lines)
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise YamlFaultError(Fault(Place(file, 1, 1), "the file is empty; a manifest starts with `version: 1`"))
        return reader.node(root), reader.faults
    except yaml.reader.ReaderError as error:
        before = LINE_BREAK.split(text[: error.position])
        place = Place(file, len(before), len(before[-1]) + 1, 1, lines[len(before) - 1])
        what = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise YamlFaultError(Fault(place, what)) from None
    except yaml.MarkedYAMLError as error:
        raise YamlFaultError(_syntax_fault(error, reader)) from None
    except RecursionError:
        raise YamlFaultError(Fault(Place(file, 1, 1), "nested too deeply to be a manifest")) from None
    finally:
        if loader is not None:
            loader.dispose()  # pyright: ignore[reportUnknownMemberType]  untyped in the stubs


def _syntax_fault(error: yaml.MarkedYAMLError, reader: _Reader) -> Fault:
    """PyYAML's first syntax error in words that say what to do."""
    mark = error.problem_mark or error.context_mark
    if error.context_mark is not None and "end of stream" in (error.problem or ""):
        mark = error.context_mark  # where the quotes open; the end of the file helps nobody
    if mark is None:
        return Fault(Place(reader.file, 1, 1), str(error))
    line = reader.lines[mark.line] if mark.line < len(reader.lines) else ""
    tab = line.find("\t") if not line[: line.find("\t")].strip() else -1
    problem, context = error.problem or "", error.context or ""
    if tab >= 0 and ("\\t" in problem or tab < mark.column or "mapping" in problem):
        place = Place(reader.file, mark.line + 1, tab + 1, 1, line)
        return Fault(place, "a tab; YAML is indented with spaces only")
    column = mark.column
    star = _unquoted_star(line, column, problem, context)
    if star is not None:
        start, word = star
        place = Place(reader.file, mark.line + 1, start + 1, len(word), line)
        return Fault(place, f'a value that begins with * must be quoted, or YAML takes it for an alias: write "{word}"')
    return Fault(reader.place(mark, mark), _explain_syntax(problem, context, line, column))


def _unquoted_star(line: str, column: int, problem: str, context: str) -> tuple[int, str] | None:
    """Start and text of the unquoted word with a star that PyYAML stumbled over, if that is what happened."""
    if "alias" not in problem and "alias" not in context:
        return None
    start = line.rfind("*", 0, column + 1) if "undefined" not in problem else min(column, len(line))
    while start > 0 and line[start - 1] not in " \t[,{=":
        start = line.rfind("*", 0, start)
    if start < 0:
        return None
    flow = line[:start].count("{") + line[:start].count("[") > line[:start].count("}") + line[:start].count("]")
    found = re.match(r"[^,\]}\s]+" if flow else r"\S+", line[start:])
    return (start, found[0]) if found else None


_SYNTAX_HELP: Final = (
    # (part of PyYAML's message, what to say)
    ("another document", "a second document begins here; a manifest is one document"),
    ("unknown escape character", "in double quotes \\ starts an escape; write regular expressions in 'single quotes'"),
    ("the tag ", "{problem} is not supported; a manifest holds plain values only"),
    ("mapping values are not allowed here", "a second `: ` in one value; put the value in quotes"),
    (
        "could not find expected ':'",
        "a key without `: ` (a space follows the colon), or a line indented too little",
    ),
    ("found character '\\t'", "a tab; YAML is indented with spaces only"),
    ("that cannot start any token", "a value cannot begin with this character; put it in quotes"),
    ("unexpected end of stream", "the quotes or brackets opened before are never closed"),
    ("found undefined alias", "*name refers to an anchor (&name) that does not exist"),
    (
        "expected ',' or '}'",
        "expected , or }} here (inside {{ }}, quote a value that holds braces, such as ${{env:X}})",
    ),
    ("expected ',' or ']'", "expected , or ] here (inside [ ], quote a value that holds brackets)"),
    ("expected <block end>", "this line does not fit the indentation or the list above it"),
)


def _explain_syntax(problem: str, context: str, line: str, column: int) -> str:
    """What a syntax error of PyYAML means for the writer of a manifest."""
    if "${" in line and "{" in line.replace("${", "") and ("flow mapping" in context or "flow" in problem):
        return "inside { } a value with ${env:NAME} must be quoted"
    if "mapping values are not allowed" in problem and ": " not in line[:column]:
        return "a key cannot stand here: the line above lacks its `: `, or this line is indented too far"
    if "expected <block end>" in problem and line[:column].strip():
        return "this follows a value that is already complete; put the whole value in quotes"
    for part, said in _SYNTAX_HELP:
        if part in problem:
            return said.format(problem=problem)
    return f"not valid YAML: {problem}" + (f" ({context})" if context else "")
