"""Write docs/manifest.md from the manifest's models, so that the reference cannot fall behind the schema.

    python docs/generate.py

A test compares the file with what `reference()` returns.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from requant.manifests.schema import json_schema

TARGET = Path(__file__).with_name("manifest.md")

HEAD = """\
# The manifest, version 1

Made by `python docs/generate.py` from the models in `manifests/`; edit those. `requant schema` prints the same as JSON
Schema, which editors understand: put `# yaml-language-server: $schema=PATH` on the first line of a manifest.
`requant check MANIFEST` lists all that is wrong with one, with line and column.

- A key that is not in these tables is an error.
- `${env:NAME}` and `${env:NAME:-default}` stand for environment variables.
- `--set a.b=value` on the command line wins over the file; the file wins over what it includes.
- `layers` are read from the top: the first rule that matches a module decides; a rule that matches nothing is an error.
- A section under `validate` is a required gate of the sign-off unless it says `required: false`.
"""


def kind(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """A field's type as a reader would say it: choices in full, sections by name."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return (
            f"[{name}](#{name.lower()})" if definitions[name].get("type") == "object" else kind(definitions[name], {})
        )
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(kind(option, definitions) for option in field["anyOf"]))
    if "allOf" in field:
        return kind(field["allOf"][0], definitions)
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return f"list of {kind(field.get('items', {}), definitions)}"
    return str(field.get("type", "any"))


def default(name: str, field: Mapping[str, Any], required: list[str]) -> str:
    """A field's default as YAML would write it."""
    if name in required:
        return "**required**"
    value = field.get("default")
    if isinstance(value, bool) or value is None:
        return f"`{str(value).lower()}`".replace("none", "null")
    if isinstance(value, dict):
        return ""
    return f"`{value}`".replace("'", "")


def table(title: str, section: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[str]:
    """One section of the manifest: what it is, then its keys."""
    yield f"\n## {title}\n"
    yield f"{section.get('description', '').strip()}\n"
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    required = section.get("required", [])
    for name, field in section["properties"].items():
        cells = [f"`{name}`", kind(field, definitions), default(name, field, required), field.get("description", "")]
        yield "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"


def named_sections(node: object, definitions: Mapping[str, Any]) -> Iterator[str]:
    """Names of the sections below a part of the schema, each before what it contains."""
    if isinstance(node, list):
        for item in node:
            yield from named_sections(item, definitions)
    elif isinstance(node, dict):
        if "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            yield name
            yield from named_sections(definitions[name], definitions)
        for key, value in node.items():
            if key not in ("$ref", "$defs"):
                yield from named_sections(value, definitions)


def reference() -> str:
    """The whole page."""
    schema: Mapping[str, Any] = json_schema()
    definitions: Mapping[str, Any] = schema["$defs"]
    lines = [HEAD.rstrip(), *table("Manifest", schema, definitions)]
    for name in dict.fromkeys(named_sections(schema, definitions)):
        if definitions[name].get("type") == "object":
            lines += table(name, definitions[name], definitions)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
