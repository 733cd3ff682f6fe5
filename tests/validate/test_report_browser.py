"""The HTML page as a browser has it: no error, no request, tables that sort by mouse and keyboard, paging, print."""

from __future__ import annotations

import shutil
import time

import pytest
from requant.validate.report_html import render_html

if not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
    pytest.skip("needs Chromium (Debian's package chromium)", allow_module_level=True)
HEAD = "#tensor-table thead th"


@pytest.fixture(scope="module")
def browser(tmp_path_factory, pages):
    from chromium import Chromium

    folder = tmp_path_factory.mktemp("page")
    (folder / "large.html").write_text(render_html(pages.large()), encoding="utf-8")
    one = Chromium(tmp_path_factory.mktemp("profile"))
    one.url = (folder / "large.html").as_uri()
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def page(browser):
    browser.open(browser.url)
    yield browser
    assert browser.problems == []


def column(page, table, number):
    rows = f"[...document.querySelectorAll('{table} tbody tr')]"
    return page.js(f"{rows}.map(row => row.cells[{number}].textContent)")


def sort_of(page, selector):
    return page.js(f"document.querySelector({selector!r}).getAttribute('aria-sort')")


def test_it_opens_with_its_title_and_a_hostile_name_runs_nothing(page) -> None:
    assert page.js("document.title") == "Sign-off of gptoss_nvfp4_cast: not signed off"
    assert page.js("document.querySelectorAll('#tensor-table tbody tr').length") == 100


def test_a_click_sorts_and_a_second_one_turns_it_round(page) -> None:
    assert column(page, "#gates table", 2) == ["passed", "failed", "passed", "not run", "passed"]
    page.click("#gates th:nth-child(3) button")
    assert column(page, "#gates table", 2) == ["failed", "not run", "passed", "passed", "passed"]
    assert sort_of(page, "#gates th:nth-child(3)") == "ascending"
    page.click("#gates th:nth-child(3) button")
    assert column(page, "#gates table", 2)[-1] == "failed"
    assert sort_of(page, "#gates th:nth-child(3)") == "descending"
    page.click("#gates th:nth-child(1) button")
    assert sort_of(page, "#gates th:nth-child(3)") == "none"


def test_the_keyboard_alone_reaches_and_sorts_a_column(page) -> None:
    page.js("document.querySelector('#converted [aria-label=Formats]').focus()")
    for _ in range(4):
        page.key("Tab", 9)
    assert page.js("document.activeElement.textContent") == "weights"
    page.key("Enter", 13, "\r")
    numbers = [int(text.replace(",", "")) for text in column(page, "#converted [aria-label=Formats] table", 3)]
    assert len(numbers) == 8
    assert numbers == sorted(numbers)
    page.key(" ", 32, " ")
    assert sort_of(page, "#converted th:nth-child(4)") == "descending"


def test_thirty_thousand_tensors_sort_filter_and_page_at_once(page) -> None:
    begin = time.perf_counter()
    page.click(f"{HEAD}:nth-child(11) button")
    values = [float(text) for text in column(page, "#tensor-table", 10)]
    assert time.perf_counter() - begin < 5
    assert values == sorted(values)
    assert values[0] < 45
    status = "document.getElementById('tensor-status').textContent"
    assert page.js(status) == "Tensors 1 to 100 of 30,256."
    page.click("#tensor-next")
    assert page.js(status) == "Tensors 101 to 200 of 30,256."
    assert float(column(page, "#tensor-table", 10)[0]) >= values[-1]
    page.js("document.getElementById('tensor-filter').focus()")
    page.call("Input.insertText", text="LAYERS.7.self_attn")
    assert page.js(status) == "Tensors 1 to 4 of 4 that match, of 30,256."
    assert all(name.startswith("model.layers.7.self_attn.") for name in column(page, "#tensor-table", 0))
    assert page.js("document.getElementById('tensor-next').disabled") is True


def test_what_is_missing_comes_last_either_way(page) -> None:
    page.js("document.getElementById('tensor-filter').value = 'layers.1.'")
    for _ in range(2):
        page.click(f"{HEAD}:nth-child(11) button")
        cells = column(page, "#tensor-table", 10)
        assert "-" in cells
        known = [cell for cell in cells if cell != "-"]
        assert len(known) >= 3
        assert cells[len(known) :] == ["-"] * (len(cells) - len(known))


def test_dark_and_print_have_their_own_colours_and_no_controls_are_printed(page, tmp_path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.js(background) == "rgb(255, 255, 255)"
    page.media(scheme="dark")
    assert page.js(background) == "rgb(20, 22, 26)"
    page.media(kind="print", scheme="dark")
    assert page.js(background) == "rgb(255, 255, 255)"
    assert page.js("getComputedStyle(document.querySelector('nav')).display") == "none"
    number = "document.querySelector('#layers td.number')"
    assert page.js(f"getComputedStyle({number}).whiteSpace") == "nowrap"  # no number is broken over two lines
    word = "[...document.querySelectorAll('#gates td')].find(cell => cell.textContent == 'required')"
    assert page.js(f"getComputedStyle({word}).whiteSpace") == "nowrap"  # and no short word
    assert page.js(f"getComputedStyle({word}).overflowWrap") == "normal"
    assert page.js("getComputedStyle(document.querySelector('thead')).display") == "table-row-group"
    page.media()
    page.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_nothing_is_wider_than_a_telephone_but_what_scrolls_by_itself(page) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    try:
        page.open(page.url)
        assert page.js("document.documentElement.scrollWidth") <= 390
    finally:
        page.call("Emulation.clearDeviceMetricsOverride")
