"""The sign-off's charts as files: whole pictures by themselves, with the numbers of the report."""

import re
import xml.etree.ElementTree as ET

import pytest
import report_pages as pages
from requant.validate.report_plots import plots_of

SVG = "{http://www.w3.org/2000/svg}"


def texts(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.fixture(scope="module")
def plots():
    return plots_of(pages.large(layers=6, experts=4))


def test_every_kind_of_chart_is_a_file(plots):
    assert sorted(plots) == [f"requant.signoff.{name}.svg" for name in ("bytes", "kl", "layers", "scales")]


def test_each_is_a_picture_by_itself(plots):
    for name, svg in plots.items():
        root = ET.fromstring(svg)
        assert root.tag == f"{SVG}svg", name
        width, height = float(root.get("width")), float(root.get("height"))
        assert root.get("viewBox") == f"0 -28 {root.get('width')} {root.get('height')}"
        assert next(root.iter(f"{SVG}text")).text == root.find(f"{SVG}title").text
        assert width >= 300, name
        assert height > 50, name
        ground = root.find(f"{SVG}rect")
        assert (ground.get("width"), ground.get("style")) == (root.get("width"), "fill: var(--page)")
        style = root.find(f"{SVG}style").text
        defined = set(re.findall(r"(--[a-z0-9-]+):", style))
        assert set(re.findall(r"var\((--[a-z0-9-]+)\)", svg)) <= defined, "every colour is there"
        assert "http" not in re.sub(r'xmlns="[^"]*"', "", svg), "nothing is fetched"


def test_they_show_the_numbers_of_the_report(plots):
    signoff = pages.large(layers=6, experts=4)
    census = signoff.stage("numerics").data["census"]
    ratio = census["output_bytes"] / census["source_bytes"]
    assert any(f"({ratio:.3f}x)" in text for text in texts(plots["requant.signoff.bytes.svg"]))
    octaves = signoff.stage("numerics").data["block_scales"]["octaves"]
    bars = ET.fromstring(plots["requant.signoff.scales.svg"]).iter(f"{SVG}title")
    said = [bar.text.rpartition(": ")[2] for bar in bars][1:]
    assert said == [f"{count:,}" for count in octaves if count]


def test_a_stage_that_measured_nothing_has_none():
    assert "requant.signoff.kl.svg" not in plots_of(pages.real())


def test_writing_a_sign_off_replaces_its_charts(tmp_path):
    from requant.validate.signoff import write_signoff

    (tmp_path / "requant.signoff.old.svg").write_text("stale")
    write_signoff(tmp_path, pages.real())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted([*plots_of(pages.real()), *(f"requant.signoff.{end}" for end in ("html", "json", "md"))])
