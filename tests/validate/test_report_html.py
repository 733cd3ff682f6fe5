"""The HTML page: well-formed, complete without its script, nothing fetched, nothing said that the data does not say."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from requant.validate.report_charts import layer_and_kind
from requant.validate.report_html import render_html
from requant.validate.results import StageResult, Status
from requant.validate.signoff import HTML_NAME, load_signoff, sign_off, write_signoff

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Page(HTMLParser):
    """Balanced tags, the text by element, every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", " ".join(data.split())))


@pytest.fixture(scope="module")
def real(pages) -> str:
    return render_html(pages.real())


@pytest.fixture(scope="module")
def large(pages) -> str:
    return render_html(pages.large())


@pytest.mark.parametrize("which", ["real", "large"])
def test_tags_balance_ids_are_unique_and_links_lead_somewhere(which: str, request) -> None:
    page = Page(request.getfixturevalue(which))
    assert page.faults == []
    assert page.open == []
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    targets = [value[1:] for tag, key, value in page.attributes if (tag, key) == ("a", "href")]
    assert len(targets) > 5
    assert set(targets) <= set(ids)


@pytest.mark.parametrize("which", ["real", "large"])
def test_nothing_is_fetched(which: str, request) -> None:
    page = Page(request.getfixturevalue(which))
    outside = [a for a in page.attributes if a[1] in ("src", "href", "srcset", "action") and a[2][:1] != "#"]
    assert outside == [("link", "href", "data:,")]
    text = request.getfixturevalue(which)
    assert "@import" not in text
    assert "url(" not in text
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_the_verdict_comes_before_everything_else_and_names_what_is_in_the_way(real: str, large: str) -> None:
    texts = [text for where, text in Page(large).texts if where not in ("style", "title", "script")]
    assert texts[:4] == ["Skip to the gates", "gptoss_nvfp4_cast", "✗", "Not signed off: numerics failed"]
    assert "Signed off: every required gate passed" in [text for _, text in Page(real).texts]


def test_the_numbers_are_those_of_the_comparison(real: str) -> None:
    texts = [text for where, text in Page(real).texts if where in ("td", "th")]

    def after(label: str) -> str:
        return texts[texts.index(label) + 1]

    assert after("blocks of 16: lossy") == "4 of 9,216"
    assert after("bytes after") == "171,456 (1.028x)"
    row = texts.index("mlp.experts.down_proj")
    assert texts[row + 1 : row + 6] == ["mxfp4 to nvfp4", "2", "49,152", "3,070", "2"]


def test_every_chart_is_well_formed_and_says_in_words_what_it_shows(large: str) -> None:
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", large, re.DOTALL)]
    space = "{http://www.w3.org/2000/svg}"
    titles = [chart.findtext(f"{space}title") for chart in charts]
    assert titles == [
        "Tensor bytes before and after",
        "Signal to quantization noise by layer, in dB",
        "Block scales of the output, by power of two",
        "KL divergence from the source, by position",
        "Tokens per second while decoding",
        "Tokens per second with prefills",
        "Time to first token, median",
        "Time between tokens, median",
        "Kernel time of a decode step",
        "FP4 kernels against BF16",
        "Roofline of the FP4 kernels",
        "Output tokens per second",
        "Time to first token, median",
        "Time between tokens, median",
    ]
    for chart in charts:
        assert chart.get("role") == "img"
        description = chart.findtext(f"{space}desc")
        assert description in chart.get("aria-label")
        assert "nan" not in ElementTree.tostring(chart, encoding="unicode").lower()
    words = {title: chart.findtext(f"{space}desc") for title, chart in zip(titles, charts, strict=True)}
    scales = words["Block scales of the output, by power of two"]
    assert "-9: 3; -8: 12; -7: 90; -6: 1; -5: 10" in scales
    assert "Marlin: below 2^-6 flushed to zero spans -6 to 8" in scales
    assert "native FP4 units: every E4M3 value spans -9 to 8" in scales
    assert "nvfp4: 100 at 1, 800 at 8, 1,600 at 16; mxfp4 source: 90 at 1" in words["Output tokens per second"]
    assert "0.3 at 85.17" in words["KL divergence from the source, by position"]


def test_all_tensors_lie_in_the_page_and_a_hostile_name_is_text(large: str, pages) -> None:
    block = re.search(r'<script type="application/json" id="tensor-data">(.*?)</script>', large, re.DOTALL)
    rows = json.loads(block[1])
    assert len(rows) == 61 * (4 + 3 * 164)
    assert rows[-1][0] == pages.HOSTILE
    assert pages.HOSTILE not in large
    assert len(large) < 6e6
    script = pages.HOSTILE.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;")
    small = render_html(pages.large(layers=1, experts=1))
    assert script in small


def test_tables_have_captions_column_heads_and_row_heads(large: str) -> None:
    page = Page(large)
    tables = large.count("<table")
    assert tables == large.count("<caption") == large.count("<thead>") == 14
    scopes = [(key, value) for tag, key, value in page.attributes if tag == "th" and key == "scope"]
    assert len(scopes) == large.count("<th ")
    assert {value for _, value in scopes} == {"col", "row"}


def test_a_models_speed_is_shown_like_a_servers_with_its_breakdown_and_bottleneck() -> None:
    from requant.validate.verdict import SignOff

    points = [{"concurrency": c, "completed": 8, "errors": 0, "output_tokens_per_s": 100.0 * c} for c in (1, 8)]
    data = {
        "runs": [{"label": "nvfp4", "points": points}],
        "breakdown": [{"kind": "norm", "us": 20.0}, {"kind": "MoE", "us": 60.0}],
        "bottleneck": "The experts' weights: 71% of the bandwidth.",
    }
    stage = StageResult("speed", Status.PASSED, "2.1x BF16", data=data, device="cuda:0 H200")
    page = render_html(SignOff("x", "now", (), (stage,), (), {}, {}))
    assert "nvfp4: 100 at 1, 800 at 8" in page
    assert "MoE: 60.0 us (75%); norm: 20.0 us (25%)" in page
    assert [t for where, t in Page(page).texts if where == "li"] == ["The experts' weights: 71% of the bandwidth."]


def test_a_sign_off_without_measurements_is_a_page_too() -> None:
    from requant.validate.verdict import SignOff

    failed = StageResult("contract", Status.NOT_RUN, "the folder <is> empty", device="")
    page = render_html(SignOff("x & y", "now", (), (failed,), (), {}, {}))
    parsed = Page(page)
    assert parsed.faults == []
    assert "<svg" not in page
    assert "tensor-data" not in page.replace("getElementById", "").replace('("tensor-data")', "")
    assert [text for where, text in parsed.texts if where == "h1"] == ["x & y"]


def test_the_page_lies_beside_the_sign_off_and_is_made_again_from_it(tmp_path, pages) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_signoff(tmp_path, sign_off(tmp_path, None, [pages.CONTRACT]))
    first = (tmp_path / HTML_NAME).read_text(encoding="utf-8")
    assert render_html(load_signoff(tmp_path)) == first
    assert str(tmp_path) not in first
    assert [file.name for file in load_signoff(tmp_path).files] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("model.layers.3.self_attn.q_proj", ("3", "self_attn.q_proj")),
        ("layers.12.ffn.experts.255.w1", ("12", "ffn.experts.*.w1")),
        ("model.layers.0.mlp.experts.down_proj", ("0", "mlp.experts.down_proj")),
        ("lm_head", ("-", "lm_head")),
        ("model.blocks.7", ("7", "model.blocks")),
    ],
)
def test_a_module_has_its_place_in_the_map(module: str, place: tuple[str, str]) -> None:
    assert layer_and_kind(module) == place


def test_numbers_over_neighbouring_bars_have_two_digits() -> None:
    from requant.validate.svg import histogram

    chart = histogram(["1", "2", "3", "4", "5"], [879_412, 2_710_000, 999_999, 7, 345], [], "t", "x")
    texts = re.findall(r'class="small">([^<]*)<', str(chart))
    assert texts == ["880k", "2.7M", "1M", "7", "345"]
