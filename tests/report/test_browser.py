"""The report in a headless Chromium: it opens, tells what is under the pointer, zooms, sorts, and fetches nothing."""

import dataclasses
from pathlib import Path

import pytest
from chromium import BINARY, Chromium
from test_html import HOSTILE, compiled, plan, span, waiting

from forebay.report.html import render

pytestmark = [
    pytest.mark.skipif(BINARY is None, reason="no Chromium is installed"),
]
USAGE = {"dot.1": 5 * 2**30}


@pytest.fixture(scope="module")
def browser():
    with Chromium() as browser:
        yield browser


def write(folder: Path, name: str = "mlpwi_0") -> Path:
    file = folder / "report.html"
    file.write_text(render(waiting(name), title=f"{name} step", compiled=compiled(name), plan=plan(name), usage=USAGE))
    return file


def place(browser: Chromium, seconds: float, lane: int) -> tuple[float, float]:
    """Where a moment of the whole step is on the screen in a lane; nothing may be folded."""
    left, top, width = browser.evaluate(
        "(() => { const c = document.getElementById('lanes'); c.scrollIntoView({block: 'center'});"
        "const r = c.getBoundingClientRect(); return [r.left, r.top, r.width]; })()"
    )
    return left + width * seconds, top + (55, 103, 150)[lane]


def tip(browser: Chromium) -> str:
    return browser.evaluate("document.getElementById('tip').hidden ? '' : document.getElementById('tip').innerText")


def unfolded(browser: Chromium, file: Path, **window) -> None:
    browser.open(file, **window)
    browser.evaluate("document.getElementById('fold').click()")
    browser.settle()


def test_it_opens_and_fetches_nothing(browser, tmp_path):
    file = write(tmp_path)
    for dark in (False, True):
        browser.open(file, dark=dark)
        assert browser.evaluate("document.title") == "mlpwi_0 step: forebay timeline"
        assert browser.requests() == [file.as_uri()]
        assert browser.complaints() == []


def test_hovering_tells_the_name(browser, tmp_path):
    unfolded(browser, write(tmp_path))
    browser.mouse("Moved", *place(browser, 0.03, 0))
    assert tip(browser).startswith("dot.1") and "100 TFLOP/s" in tip(browser)
    browser.mouse("Moved", *place(browser, 0.08, 0))
    assert tip(browser).startswith("waits for mlpwi_0") and "40.00 ms" in tip(browser)
    browser.mouse("Moved", *place(browser, 0.05, 1))
    told = tip(browser)
    assert told.startswith("mlpwi_0")
    for text in (
        "copy-start",
        "7.45 GiB at 100.0 GB/s",
        "80.00 ms from",
        "40.00 ms of it",
        "covers 50 %",
        "while.1, iteration 1",
    ):
        assert text in told, text
    browser.mouse("Moved", *place(browser, 0.6, 0))
    assert "\u00d76" in tip(browser) and "while.1" in tip(browser)
    browser.mouse("Moved", *place(browser, 0.05, 2))
    assert "5.00 GiB of HBM in use" in tip(browser)
    browser.mouse("Moved", 2, 2)
    assert tip(browser) == ""
    assert browser.complaints() == []


def test_exposed_time_has_its_colour(browser, tmp_path):
    unfolded(browser, write(tmp_path))
    pixel = (
        "(() => {{ const c = document.getElementById('lanes'), s = c.width / c.clientWidth;"
        "return [...c.getContext('2d').getImageData({} * c.width, {} * s, 1, 1).data].slice(0, 3); }})()"
    )
    red, work, hidden = [0xE4, 0x00, 0x2B], [0x5A, 0xA0, 0xDD], [0x74, 0xA7, 0x9B]
    assert browser.evaluate(pixel.format(0.098, 55)) == red
    assert browser.evaluate(pixel.format(0.055, 55)) == work
    assert browser.evaluate(pixel.format(0.098, 103)) == red, "a copy's exposed part, in its own lane"
    assert browser.evaluate(pixel.format(0.055, 103)) == hidden


def test_paper_is_light(browser, tmp_path):
    browser.open(write(tmp_path), dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    assert browser.evaluate(background) == "rgb(18, 21, 26)"
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="print", features=dark)
    browser.settle()
    assert browser.evaluate(background) == "rgb(246, 247, 249)"
    work = "[...document.getElementById('lanes').getContext('2d').getImageData(1, 40, 1, 1).data].slice(0, 3)"
    assert browser.evaluate(work) == [0x5A, 0xA0, 0xDD], "the canvas is drawn anew"
    browser.call("Emulation.setEmulatedMedia", media="", features=[])


def test_wheel_zooms_at_the_pointer_and_dragging_moves(browser, tmp_path):
    unfolded(browser, write(tmp_path))
    x, y = place(browser, 0.14, 0)
    for _ in range(20):
        browser.mouse("Wheel", x, y, deltaX=0, deltaY=-120)
    browser.mouse("Moved", x, y)
    assert tip(browser).startswith("dot.1"), "what is under the pointer stays there"
    browser.mouse("Moved", x + 300, y)
    assert tip(browser).startswith("dot.1"), "zoomed so far that work of 60 ms fills the screen"
    browser.evaluate("document.querySelector('[data-do=fit]').click()")
    browser.settle()
    browser.mouse("Moved", *place(browser, 0.95, 0))
    assert "iteration 10" in tip(browser)
    browser.evaluate("document.querySelector('[data-do=in]').click()")
    browser.mouse("Pressed", x, y, button="left", clickCount=1)
    browser.mouse("Moved", x - 600, y, button="left", buttons=1)
    browser.mouse("Released", x - 600, y, button="left", clickCount=1)
    assert browser.evaluate("document.getElementById('details').textContent") == "", "a drag chooses nothing"
    browser.mouse("Moved", x, y)
    assert "\u00d76" in tip(browser)


def test_the_page_scrolls_where_there_is_nothing_to_zoom(browser, tmp_path):
    unfolded(browser, write(tmp_path))
    x, y = place(browser, 0.5, 0)
    before = browser.evaluate("scrollY")
    browser.mouse("Wheel", x, y, deltaX=0, deltaY=200)
    browser.wait_for(f"scrollY > {before}")


def test_keys_and_the_largest_wait(browser, tmp_path):
    browser.open(write(tmp_path))
    browser.evaluate("document.getElementById('lanes').focus()")
    details = "document.getElementById('details').innerText"
    browser.key("n")
    assert browser.evaluate(details).startswith("waits for mlpwi_0")
    assert browser.evaluate("document.getElementById('rank').textContent") == "1/4"
    browser.key("ArrowLeft")
    assert browser.evaluate(details).startswith("dot.1")
    browser.key("ArrowDown")
    assert browser.evaluate(details).startswith("mlpwi_0")
    browser.key("Escape")
    assert browser.evaluate(details) == ""


def test_a_click_keeps_and_a_row_shows(browser, tmp_path):
    unfolded(browser, write(tmp_path))
    x, y = place(browser, 0.05, 1)
    browser.mouse("Pressed", x, y, button="left", clickCount=1)
    browser.mouse("Released", x, y, button="left", clickCount=1)
    assert browser.evaluate("document.getElementById('details').innerText").startswith("mlpwi_0")
    browser.evaluate("document.querySelector('#waits tr[data-row]').click()")
    assert browser.evaluate("document.getElementById('details').innerText").startswith("waits for mlpwi_0")


def test_tables_sort_and_filter(browser, tmp_path):
    browser.open(write(tmp_path))
    names = "[...document.querySelectorAll('#candidates tbody tr')].map((r) => r.cells[0].textContent)"
    assert browser.evaluate(names) == ["this plan", "minimal_offloaded"]
    browser.evaluate("document.querySelector('#candidates th:nth-child(2) button').click()")
    assert browser.evaluate(names) == ["minimal_offloaded", "this plan"]
    rows = "document.querySelectorAll('#transfers tbody tr:not([hidden])').length"
    for text, left in (("d2h", 1), ("d2h nothing", 0)):
        browser.evaluate(
            f"(() => {{ const f = document.getElementById('filter'); f.value = '{text}'; f.dispatchEvent(new Event('input')); }})()"
        )
        assert browser.evaluate(rows) == left


def test_on_a_phone_nothing_is_wider_than_the_screen_and_a_tap_tells(browser, tmp_path):
    unfolded(browser, write(tmp_path), width=390, height=844, mobile=True)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    x, y = place(browser, 0.05, 1)
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.settle()
    assert browser.evaluate("document.getElementById('details').innerText").startswith("mlpwi_0")


def test_two_fingers_zoom(browser, tmp_path):
    unfolded(browser, write(tmp_path), width=390, height=844, mobile=True)
    x, y = place(browser, 0.5, 0)
    for kind, apart in (("touchStart", 20), ("touchMove", 60), ("touchMove", 180)):
        points = [{"x": x - apart / 2, "y": y, "id": 1}, {"x": x + apart / 2, "y": y, "id": 2}]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.settle()
    x, y = place(browser, 0.01, 0)
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.settle()
    assert "\u00d76" in browser.evaluate("document.getElementById('details').innerText"), (
        "the step's start is out of view"
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_shown_as_they_are(browser, tmp_path, name):
    unfolded(browser, write(tmp_path, name))
    browser.mouse("Moved", *place(browser, 0.05, 1))
    assert browser.evaluate("document.querySelector('#tip h4').textContent") == name
    assert browser.evaluate("document.querySelector('#waits td').textContent") == name
    assert browser.complaints() == [] and len(browser.requests()) == 1


def test_a_hundred_thousand_spans_stay_fluid(browser, tmp_path):
    spans = [
        s
        for n in range(50_000)
        for s in (
            span("compute", "work", f"dot.{n % 1000}", n * 2e-5, 1.5e-5),
            span("d2h", "transfer", f"copy.{n % 1000}", n * 2e-5, 1e-5, tensor="x"),
        )
    ]
    file = tmp_path / "report.html"
    file.write_text(render(dataclasses.replace(waiting(), spans=tuple(spans), gaps=()), title="t"))
    browser.open(file)
    seconds = browser.evaluate(
        """(async () => {
          const frame = () => new Promise((done) => requestAnimationFrame(done)), start = performance.now();
          for (let n = 0; n < 20; n++) {
            document.querySelector(n < 10 ? '[data-do=in]' : '[data-do=out]').click();
            await frame();
          }
          return (performance.now() - start) / 20e3;
        })()"""
    )
    assert seconds < 0.25  # about 0.03 on an idle machine without a GPU
