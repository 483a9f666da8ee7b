"""The type: what it promises in JSON, traces, differences; and the command line on a program written by hand."""

import itertools
import json
from typing import Any

import pytest
from programs import CONDITION, START, WIDE, argument, hlo, kernel, loop, on_host, product, repeated, timeline, to_host

import forebay
from forebay.cli.main import main
from forebay.timeline import Timeline
from forebay.timeline.diff import diff, diff_json
from forebay.timeline.perfetto import trace

approx = pytest.approx


def program(work_flops: int) -> str:
    body = repeated(
        "body", argument("a", 100, 1), to_host("c", 100, scope="jit(f)/jvp()/save:layers:mlpwi_0/copy"),
        product("p", work_flops, op_name="jit(f)/jvp()/dot"), on_host("d", 100, "c"),
    )  # fmt: skip
    return hlo(f"{START}\n{loop('w', 'body', 30)}\nROOT {kernel('k', 100)}", CONDITION, body)


def test_json_has_what_the_format_promises_and_is_read_back():
    made = timeline(program(4000), WIDE)
    data = json.loads(json.dumps(made.to_json()))
    assert data["schema"] == "forebay.timeline/1"
    assert {"step_time_s", "tflops_per_device", "mfu", "compute_s", "exposed", "source"} <= data.keys()
    assert set(data["compute_s"]) == {"forward", "backward", "recompute", "optimizer", "compiler_remat"}
    assert {"name", "kind", "bytes", "time_s", "exposed_s", "window"} <= data["exposed"][0].keys()
    assert data["exposed"][0]["name"] == "mlpwi_0"
    assert data["source"] == "simulated"
    assert Timeline.from_json(data) == made


def test_saved_and_loaded(tmp_path):
    made = timeline(program(4000), WIDE)
    made.save(tmp_path / "t.json")
    assert Timeline.load(tmp_path / "t.json") == made


def test_unknown_keys_of_a_later_writer_are_passed_over():
    made = timeline(program(4000), WIDE)
    data: dict[str, Any] = made.to_json() | {"memory": [1, 2]}
    data["exposed"][0]["colour"] = "red"
    assert Timeline.from_json(data) == made


def test_a_trace_has_lanes_intervals_and_what_was_skipped():
    made = timeline(program(4000), WIDE)
    events = trace(made)["traceEvents"]
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(threads) == ["compute", "d2h", "skipped iterations"]
    intervals = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in intervals)
    assert max(e["ts"] + e["dur"] for e in intervals) == approx(made.step_time_s * 1e6)
    # 30 iterations of 10 s: the first two and the last are drawn, 27 are skipped
    assert [e["dur"] for e in intervals if e["tid"] == threads["d2h"]] == [approx(10e6)] * 3
    assert [(e["name"], e["dur"]) for e in intervals if e["cat"] == "skipped"] == [("27 more of w", approx(270e6))]
    waits = [e for e in intervals if e["cat"] == "wait"]
    assert [(e["name"], e["tid"], e["dur"]) for e in waits] == [("wait: mlpwi_0", threads["compute"], approx(6e6))] * 3


def test_intervals_of_a_lane_do_not_overlap():
    made = timeline(program(4000), WIDE)
    for lane in {s.lane for s in made.spans}:
        spans = sorted((s.start_s, s.seconds) for s in made.spans if s.lane == lane)
        for (start, seconds), (following, _) in itertools.pairwise(spans):
            assert start + seconds <= following + 1e-9


def test_difference_of_two_timelines():
    before, after = timeline(program(4000), WIDE), timeline(program(7000), WIDE)
    changes = {(c.group, c.name): c.change_s for c in diff(before, after)}
    # of ten seconds of copy 7 are now covered instead of 4; the step is as long as the copies
    assert changes["step", "step"] == approx(0)
    assert changes["compute", "forward"] == approx(90)
    assert changes["waiting", "d2h"] == approx(-90)
    assert changes["exposed", "d2h mlpwi_0 (forward)"] == approx(-90)
    assert diff_json(before, after)["speedup"] == approx(1)


def test_parts_and_waits_of_a_difference_add_up_to_the_step():
    before, after = timeline(program(4000), WIDE), timeline(program(12000), WIDE)
    changes = diff(before, after)
    step = next(c for c in changes if c.group == "step")
    assert step.change_s == approx(60)
    assert sum(c.change_s for c in changes if c.group in ("compute", "waiting")) == approx(step.change_s)


def test_the_public_surface(tmp_path):
    file = tmp_path / "step.hlo"
    file.write_text(program(4000))
    made = forebay.timeline(file, "h200")
    assert isinstance(made, forebay.Timeline)
    assert (made.hardware, made.devices) == ("h200", 4)
    # 30 x 4000 FLOPs, and nothing computed again
    assert made.hardware_flops == made.model_flops == 120_000


def test_the_command_line(capsys, tmp_path):
    file = tmp_path / "step.hlo"
    file.write_text(program(4000))
    trace_file, out = tmp_path / "trace.json", tmp_path / "t.json"
    assert main(["timeline", "--hlo", str(file), "--perfetto", str(trace_file), "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "what it waits for most" in printed and "mlpwi_0" in printed
    assert json.loads(trace_file.read_text())["traceEvents"]
    assert main(["timeline", "--hlo", str(file), "--json"]) == 0
    assert Timeline.from_json(json.loads(capsys.readouterr().out)) == Timeline.load(out)
    assert main(["timeline", "--hardware", "h200", "--diff", str(out), str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speedup"] == approx(1)
    assert main(["timeline", "--diff", str(out), str(file)]) == 0
    assert "step" in capsys.readouterr().out
