"""The report of two timelines: both on one scale, what changed, no name out of its place, nothing fetched."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from chromium import BINARY, Chromium
from test_html import HOSTILE, waiting

from forebay.cli.main import main
from forebay.report.html import render_diff
from forebay.timeline import Timeline

BEFORE = waiting()
"""1 s: 0.6 s forward and 0.4 s waiting for copies of one tensor."""


def faster(name: str = "mlpwi_0") -> Timeline:
    """0.9 s: half of the wait is gone, and 0.1 s of recompute is there that was not."""
    made = waiting(name)
    (copy,) = made.exposed
    return dataclasses.replace(
        made, step_time_s=0.9, tflops_per_device=66.7, compute_s={"forward": 0.6, "recompute": 0.1}, waiting_s={"d2h": 0.2},
        exposed=(dataclasses.replace(copy, exposed_s=0.2, window=0.75),),
    )  # fmt: skip


def rows(text: str, section: str) -> list[list[str]]:
    """The cells of a section's table, as text."""
    part = text[text.index(f'<section id="{section}"') :]
    body = part[part.index("<tbody>") : part.index("</tbody>")]
    return [[re.sub("<[^>]*>", "", c) for c in re.findall(r"<td.*?</td>", row)] for row in body.split("<tr")[1:]]


def test_parts_and_waits_add_up_to_both_steps():
    found = {row[0]: row[1:] for row in rows(render_diff(BEFORE, faster(), names=("a", "b")), "parts")}
    assert found == {
        "forward": ["600.000 ms", "600.000 ms", "-", "-"],
        "recompute": ["-", "100.000 ms", "+100.000 ms", "+10.00%"],
        "exposed: D2H": ["400.000 ms", "200.000 ms", "-200.000 ms", "-20.00%"],
        "step": ["1.000 s", "900.000 ms", "-100.000 ms", "-10.00%"],
    }


def test_a_transfer_of_both_is_one_row_and_one_of_either_is_there():
    other = dataclasses.replace(faster().exposed[0], name="context", exposed_s=0.0)
    after = dataclasses.replace(faster(), exposed=(*faster().exposed, other))
    first, second = rows(render_diff(BEFORE, after, names=("a", "b")), "changed")
    assert first[:3] == ["mlpwi_0", "D2H", "forward"]
    assert first[3:9] == ["400.000 ms", "200.000 ms", "-200.000 ms", "-20.00%", "50% to 75%", "10"]
    assert second[:3] == ["context", "D2H", "forward"] and second[7:9] == ["- to 75%", "0 to 10"]


def test_bars_are_on_one_scale():
    widths = re.findall(r'class="bar"[^>]*style="width:([\d.]+)%"', render_diff(BEFORE, faster(), names=("a", "b")))
    assert [float(w) for w in widths] == [100, 90]


def test_what_was_assumed_of_both_is_said_once():
    other = dataclasses.replace(faster(), assumptions=(*BEFORE.assumptions, "loops run once"))
    text = render_diff(BEFORE, other, names=("a", "b"))
    assert text.count(f"<li>{BEFORE.assumptions[0]}</li>") == 1 and "<code>b</code>: loops run once" in text


def test_a_saved_timeline_and_two_of_them_become_reports(tmp_path, capsys):
    BEFORE.save(tmp_path / "a.json")
    faster().save(tmp_path / "b.json")
    assert main(["timeline", "--hlo", str(tmp_path / "a.json"), "--html", str(tmp_path / "one.html")]) == 0
    assert "mlpwi_0" in (tmp_path / "one.html").read_text()
    argv = ["timeline", "--diff", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert main([*argv, f"--html={tmp_path / 'two.html'}"]) == 0
    assert "written to" in capsys.readouterr().out
    text = (tmp_path / "two.html").read_text()
    assert text == render_diff(BEFORE, faster(), names=("a.json", "b.json"))


def test_a_file_that_is_no_report_is_not_overwritten(tmp_path, capsys):
    BEFORE.save(tmp_path / "a.json")
    precious = tmp_path / "precious.html"
    precious.write_text("mine")
    assert main(["timeline", "--diff", *[str(tmp_path / "a.json")] * 2, "--html", str(precious)]) == 2
    assert precious.read_text() == "mine" and "is no report" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser():
    if BINARY is None:
        pytest.skip("no Chromium is installed")
    with Chromium() as browser:
        yield browser


def opened(browser: Chromium, folder: Path, name: str = "mlpwi_0", **window) -> None:
    file = folder / "diff.html"
    file.write_text(render_diff(waiting(name), faster(name), names=(f"{name}.json", "after.json")), encoding="utf-8")
    browser.open(file, **window)
    assert browser.requests() == [file.as_uri()] and browser.complaints() == []


def test_it_opens_and_fetches_nothing_in_light_dark_and_on_a_phone(browser, tmp_path):
    windows: tuple[dict[str, Any], ...] = ({}, {"dark": True}, {"width": 390, "mobile": True})
    for window in windows:
        opened(browser, tmp_path, **window)
        assert browser.evaluate("document.title") == "mlpwi_0.json and after.json: forebay timelines"
        assert browser.evaluate("document.documentElement.scrollWidth") <= window.get("width", 1280)


def test_its_table_sorts_and_filters(browser, tmp_path):
    opened(browser, tmp_path)
    visible = "[...document.querySelectorAll('#transfers tbody tr')].filter(r => !r.hidden).length"
    assert browser.evaluate(visible) == 1
    browser.evaluate(
        "(() => { const f = document.getElementById('filter'); f.value = 'h2d'; f.dispatchEvent(new Event('input')); })()"
    )
    assert browser.evaluate(visible) == 0
    browser.evaluate("document.querySelector('#transfers th button').click()")
    assert browser.evaluate("document.querySelectorAll('#transfers th[aria-sort]').length") == 1
    assert browser.complaints() == []


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_gets_out_of_its_place(browser, tmp_path, name):
    opened(browser, tmp_path, name)
    shown = browser.evaluate("document.querySelector('#transfers tbody code').textContent")
    assert shown == name
    assert browser.evaluate("document.scripts.length") == 1 and browser.evaluate("document.images.length") == 0
