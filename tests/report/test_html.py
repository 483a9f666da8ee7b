"""The report is one well-formed file that holds everything, loads nothing, and lets no name out of its place."""

import dataclasses
import json
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest

from forebay.cli.main import main
from forebay.report.html import render
from forebay.report.html.markup import el, fill, script_json
from forebay.report.html.spans import drawing, memory_curve
from forebay.timeline import Exposed, Gap, Span, Timeline

HOSTILE = [
    "</script><script>alert(1)</script>", "<!--", "<!--<script>", "]]>", "<img src=x onerror=alert(1)>", "\"'><b>", "&lt;b&gt;",
    "{{data}}", "\u2028", "\\u003c/script>",
]  # fmt: skip


def span(lane: str, kind: str, name: str, start: float, seconds: float, **other: Any) -> Span:
    rest = {
        "opcode": "fusion", "count": 1.0, "num_bytes": 0.0, "flops": 0.0, "phase": "forward", "tensor": "", "loop": "",
        "iteration": 0,
    }  # fmt: skip
    return Span(lane, kind, name, start_s=start, seconds=seconds, **(rest | other))


def waiting(name: str = "mlpwi_0") -> Timeline:
    """A loop of ten iterations of 100 ms: 60 ms of work, and 40 ms waiting for a copy that takes 80 ms. Six are skipped."""
    spans = []
    for n, start in enumerate((0.0, 0.1, 0.2, 0.9)):
        times = {"count": 7.0 if n == 2 else 1.0, "loop": "while.1", "iteration": n if n < 3 else 9}
        copy = {"opcode": "copy-start", "tensor": name, "num_bytes": 8e9, **times}
        spans += [
            span("compute", "work", "dot.1", start, 0.06, flops=6e12, **times),
            span("d2h", "transfer", "copy-start.1", start + 0.02, 0.08, **copy),
            span("compute", "wait", "copy-start.1", start + 0.06, 0.04, **copy),
        ]
    exposed = Exposed(name, "d2h", 8 * 10**9, 0.8, 0.4, 0.5, 10.0, 0.04, 0.04, None, "forward", "copy-start", "d2h")
    return Timeline(
        step_time_s=1.0, tflops_per_device=60.0, mfu=0.25, compute_s={"forward": 0.6, "backward": 0.0},
        exposed=(exposed,), source="simulated", hardware="toy", devices=4, waiting_s={"d2h": 0.4}, collective_s={},
        lanes={"compute": 0.6, "d2h": 0.8}, kinds={"matmul": 0.6}, model_flops=6e13, hardware_flops=6e13,
        spans=tuple(spans), gaps=(Gap("while.1", 0.3, 0.9, 6),), assumptions=("nothing was assumed of " + name,),
    )  # fmt: skip


def compiled(name: str = "mlpwi_0") -> dict[str, Any]:
    gib = 2**30
    return {
        "model": "toy", "parameters": 8 * 10**9, "hbm_bytes": 100 * gib, "fits": True, "notes": [],
        "device_bytes": {"total": 80 * gib}, "host_bytes": {"total": 5 * gib}, "versions": {"jaxlib": "1.2.3"},
        "peak": [
            {"name": "weights", "kind": "parameter", "bytes": 64 * gib},
            {"name": name, "kind": "activation", "bytes": 16 * gib},
        ],
        "host_peak": [{"name": name, "kind": "activation", "bytes": 5 * gib}],
    }  # fmt: skip


def plan(name: str = "mlpwi_0") -> dict[str, Any]:
    other = {"step_time_s": 1.5, "device_bytes": 2**30, "host_bytes": 0, "fits": False}
    return {
        "placements": [
            {"stack": "layers", "layers": [28, 32], "tensors": {name: "device"}},
            {"stack": "layers", "layers": [0, 28], "tensors": {name: "host"}},
        ],
        "reasons": [
            {"stack": "layers", "layers": [0, 28], "tensor": t, "where": "host", "bytes": 2**20, "alternatives": []}
            for t in (name, "context")
        ],
        "hardware": "toy", "devices": 4, "batch": 8, "seq": 256, "mesh": {"fsdp": 4}, "verified": True,
        "optimizer": {"host_fraction": 0.25}, "parameters": {"host_fraction": 0.0}, "notes": ["a note on the plan"],
        "predicted": {"step_time_s": 1.0, "device_bytes": 2 * 2**30, "host_bytes": 2**30},
        "alternatives": [{"name": "minimal_offloaded", **other}],
    }  # fmt: skip


class Page(HTMLParser):
    """Checks that elements nest, and collects text, attributes, scripts and tables' rows."""

    VOID = ("meta", "link", "input", "br", "col")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.rows: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], "elements that are not closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        assert len({k for k, _ in attrs}) == len(attrs), (tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append("")

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.text += data
            if "tr" in self.open:
                self.rows[-1] += data + "|"


def page(name: str = "mlpwi_0") -> Page:
    return Page(render(waiting(name), title=f"a {name} step", compiled=compiled(name), plan=plan(name)))


def test_everything_is_in_it():
    made = page()
    for text in (
        "1.000 s",
        "60",
        "25.0%",
        "400.000 ms",
        "40.0% of the step waits",
        "4 x toy",
        "simulated",
        "not measured",
    ):
        assert text in made.text, text
    assert "80.00 GiB of the 100.00 GiB that XLA may use" in made.text
    assert "mlpwi_0|D2H|forward|10|7.45 GiB|800.000 ms|400.000 ms|40.0%|50%|" in made.rows
    assert "activation|mlpwi_0|16.00|" in made.rows
    assert "tensor|MiB a layer|layers 0:28|layers 28:32|" in made.rows
    assert "mlpwi_0|1.0|host|device|" in made.rows
    assert "context|1.0|recompute|recompute|" in made.rows
    assert "this plan|1.000 s|2.00|1.00|Pareto front|" in made.rows
    assert any(row.startswith("minimal_offloaded|1.500 s|+50.0%|1.00|0.00|does not fit") for row in made.rows)
    for text in ("nothing was assumed of mlpwi_0", "a note on the plan", "jaxlib", "25% of the optimizer state"):
        assert text in made.text, text


def test_without_a_compile_or_a_plan_their_parts_are_left_out():
    made = Page(render(waiting(), title="step.hlo"))
    assert not {"memory", "plan", "considered"} & {v for _, k, v in made.attributes if k == "id"}


def test_a_step_that_waits_for_nothing():
    timeline = dataclasses.replace(waiting(), exposed=(), waiting_s={}, spans=(), gaps=())
    assert "The step waits for nothing." in Page(render(timeline, title="t")).text


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_text(name):
    made, plain = page(name), page()
    assert made.tags == plain.tags, "a name made an element"
    assert made.text.count(name) == plain.text.count("mlpwi_0")
    assert made.scripts[1:] == plain.scripts[1:]
    assert json.loads(made.scripts[0])["texts"] == [
        name if t == "mlpwi_0" else t for t in json.loads(plain.scripts[0])["texts"]
    ]
    assert not re.search("<|>|&", made.scripts[0]), "what an HTML parser could take for its own"


def test_it_loads_nothing():
    text = render(waiting("https://example.org/x"), title="t", compiled=compiled(), plan=plan())
    made = Page(text)
    for tag, key, value in made.attributes:
        assert key not in ("src", "srcset", "action", "data") and not key.startswith("on"), (tag, key)
        assert key != "href" or value == "data:,", value
    style = re.search("<style>(.*?)</style>", text, re.S)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    assert not any(
        word in script for script in made.scripts[1:] for word in ("http:", "https:", "fetch(", "import(", "WebSocket")
    )
    assert "default-src 'none'" in text


def test_the_drawing_has_every_span_and_ties_waits_to_transfers():
    made = waiting()
    data = drawing(made)
    spans, texts = data["spans"], data["texts"]
    assert {len(column) for column in spans.values()} == {len(made.spans)}
    rows = [
        (
            data["lanes"][spans["lane"][n]]["name"],
            texts[spans["kind"][n]],
            spans["start"][n],
            spans["end"][n],
            spans["of"][n],
        )
        for n in range(6)
    ]
    assert rows == [
        ("compute", "work", 0, 60_000_000, -1),
        ("d2h", "transfer", 20_000_000, 100_000_000, -1),
        ("compute", "wait", 60_000_000, 100_000_000, 1),
        ("compute", "work", 100_000_000, 160_000_000, -1),
        ("d2h", "transfer", 120_000_000, 200_000_000, -1),
        ("compute", "wait", 160_000_000, 200_000_000, 4),
    ]
    assert [spans["row"][n] for n in range(3)] == [-1, 0, 0]
    assert data["gaps"] == [[300_000_000, 900_000_000, 6, "while.1"]]
    assert data["rows"] == [[800_000_000, 400_000_000, 10.0, 0.5, 40_000_000]]
    assert data["memory"] is None


def test_memory_over_time_counts_what_lies_between():
    # schedule: a, a copy's start that holds 9 until b, a loop's body c, d
    usage = {"a": 1, "start": 9, "b": 4, "c": 5, "d": 2}
    names = ["a", "b", "c", "c", "d"]
    spans = [span("compute", "work", name, float(n), 1.0) for n, name in enumerate(names)]
    assert memory_curve(spans, usage) == {
        "time": [0, 10**9, 2 * 10**9, 4 * 10**9],
        "bytes": [1, 9, 5, 2],
    }
    assert memory_curve([], usage) is None


def test_markup():
    assert el("a", "<", el("b", "&"), None, class_="x y", data_row=3, hidden=True, id=None) == (
        '<a class="x y" data-row="3" hidden>&lt;<b>&amp;</b></a>'
    )
    assert el("td", title="\"'<") == '<td title="&quot;&#x27;&lt;"></td>'
    assert json.loads(script_json({"</script>": "<!-- & -->"})) == {"</script>": "<!-- & -->"}
    assert fill("{{a}} {{b}}", {"a": "{{b}}", "b": "1"}) == "{{b}} 1"
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_the_files_are_in_the_package():
    names = {f.name for f in resources.files("forebay.report.html").iterdir()}
    assert {"report.html", "report.css", "timeline.js", "tables.js"} <= names


HLO = """HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (x: s8[]) -> s8[] {
  ROOT %k = s8[100]{0} iota(), iota_dimension=0
}
"""


def test_the_command_line(capsys, tmp_path):
    hlo, report = tmp_path / "<step>.hlo", tmp_path / "report.html"
    hlo.write_text(HLO)
    for _ in range(2):  # a report may be made again
        assert main(["timeline", "--hlo", str(hlo), "--html", str(report)]) == 0
        assert "written to" in capsys.readouterr().out
        assert "<step>.hlo" in Page(report.read_text()).text


def test_a_plan_beside_hlo_is_shown(tmp_path):
    hlo, report, file = tmp_path / "step.hlo", tmp_path / "report.html", tmp_path / "plan.json"
    hlo.write_text(HLO)
    file.write_text(json.dumps({"schema": "forebay.plan/1", **plan()}))
    assert main(["timeline", "--hlo", str(hlo), "--plan", str(file), "--html", str(report)]) == 0
    assert "mlpwi_0|1.0|host|device|" in Page(report.read_text()).rows


def test_a_damaged_plan(capsys, tmp_path):
    hlo, file = tmp_path / "step.hlo", tmp_path / "plan.json"
    hlo.write_text(HLO)
    damaged = plan()
    del damaged["alternatives"][0]["step_time_s"]
    file.write_text(json.dumps({"schema": "forebay.plan/1", **damaged}))
    assert main(["timeline", "--hlo", str(hlo), "--plan", str(file), "--html", str(tmp_path / "r.html")]) == 2
    assert "the plan is damaged (KeyError: 'step_time_s'): make it again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no/such/folder/r.html", "its directory does not exist"),
        (".", "is a directory"),
        ("step.hlo", "exists and is no report of forebay: choose another name"),
    ],
)
def test_bad_places_for_the_report(capsys, tmp_path, monkeypatch, target, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.hlo").write_text(HLO)
    assert main(["timeline", "--hlo", "step.hlo", "--html", target]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and message in err
    assert (tmp_path / "step.hlo").read_text() == HLO


def test_two_outputs_in_one_file(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.hlo").write_text(HLO)
    assert main(["timeline", "--hlo", "step.hlo", "--html", "a", "-o", "./a"]) == 2
    assert "html and output are the same file" in capsys.readouterr().err
