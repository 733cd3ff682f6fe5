"""docs/manifest.md says what the schema says, key by key."""

from pathlib import Path

from module_files import load
from requant.manifests.schema import json_schema

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_is_what_the_generator_writes():
    assert (DOCS / "manifest.md").read_text(encoding="utf-8") == load(DOCS / "generate.py").reference()


def test_every_key_of_every_section_has_a_row_with_a_meaning():
    text = (DOCS / "manifest.md").read_text(encoding="utf-8")
    schema = json_schema()
    for name, section in [("Manifest", schema), *schema["$defs"].items()]:
        if section.get("type") != "object":
            continue
        page = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        rows = {row.split(" | ")[0].strip("|` "): row for row in page.splitlines() if row.startswith("| `")}
        assert set(rows) == set(section["properties"]), name
        assert all(len(row.rsplit(" | ", 1)[1]) > 10 for row in rows.values()), name
