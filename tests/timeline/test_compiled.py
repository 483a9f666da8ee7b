"""The timeline of real compiled steps: one for GPUs that are not there, through the command line."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from forebay.cli.main import main
from forebay.hardware import get_hardware
from forebay.timeline import CostModel, Timeline
from forebay.timeline.simulate import simulate
from forebay.xla.load import load_module
from forebay.xla.schedule import read_schedule

SIZES = ["--sizes.layers", "12", "--sizes.embed", "1024", "--sizes.heads", "8", "--sizes.kv_heads", "8"]
STEP = [
    "--model", "llama-tiny", *SIZES, "--sizes.head_dim", "128", "--sizes.mlp", "4096", "--batch", "8", "--seq", "1024",
    "--hardware", "h200", "--devices", "8", "--attention", "blockwise",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With the timeline, the trace and the HLO of the step."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        argv = ["timeline", *STEP, "--placement", "mlpwi_0=host", "--profile", "copies", "-o", str(folder / "t.json")]
        argv += ["--perfetto", str(folder / "trace.json"), "--save_hlo", str(folder / "step.hlo")]
        argv += ["--html", str(folder / "report.html")]
        assert main(argv) == 0
    return folder


@pytest.fixture(scope="module")
def made(folder) -> Timeline:
    return Timeline.load(folder / "t.json")


def test_work_and_waits_are_the_step(made):
    assert sum(made.compute_s.values()) + made.exposed_s == pytest.approx(made.step_time_s)
    assert all(made.compute_s[part] > 0 for part in ("forward", "backward", "recompute", "optimizer"))
    assert made.unknown == ()


def test_the_tensor_goes_to_the_host_and_comes_back_once_a_layer(made):
    # one sequence of 1024 tokens of width 4096 in bfloat16, for each of 12 layers
    for direction in ("d2h", "h2d"):
        copies = [e for e in made.exposed if e.kind == direction]
        assert {(e.name, e.num_bytes) for e in copies} == {("mlpwi_0", 1024 * 4096 * 2)}
        assert sum(e.count for e in copies) == pytest.approx(12)
        # alone on the link: 8 MiB at 55 GB/s, and 5 us
        assert sum(e.time_s for e in copies) >= 12 * (1024 * 4096 * 2 / 55e9 + 5e-6) * (1 - 1e-9)


def test_a_profile_of_the_steps_own_times_never_makes_it_slower(made, tmp_path):
    argv = ["timeline", *STEP, "--placement", "mlpwi_0=host", "--profile", "timeline", "-o", str(tmp_path / "t.json")]
    assert main([*argv, "--save_hlo", str(tmp_path / "step.hlo")]) == 0
    again = Timeline.load(tmp_path / "t.json")
    assert again.step_time_s <= made.step_time_s * (1 + 1e-9)
    (note,) = [a for a in again.assumptions if "the timeline's times" in a]
    assert ("scheduled with" in note) == (again.step_time_s < made.step_time_s)
    assert [f.name for f in tmp_path.glob("step.hlo*")] == ["step.hlo"]
    # the kept program is the one that was written
    simulated = simulate(read_schedule(load_module(tmp_path / "step.hlo"), "cuda"), CostModel(get_hardware("h200"), 8))
    assert simulated.seconds == pytest.approx(again.step_time_s)


def test_the_report_has_the_memory_table_and_the_curve_reaches_its_total(folder):
    text = (folder / "report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # pyright: ignore[reportOptionalSubscript]
    rows = dict(re.findall(r"<td>([^<]*)</td><td class=\"n\">([\d.,]+)</td>", text.partition('id="memory"')[2]))
    assert "weights" in rows and any("mlpwi_0" in name for name in rows)
    most, gaps = max(data["memory"]["bytes"]) / 2**20, float(rows.get("gaps between buffers", 0))
    total = float(re.search(r"<b class=\"good\">fits</b>: ([\d.]+) MiB", text)[1])  # pyright: ignore[reportOptionalSubscript]
    assert most + gaps == pytest.approx(total, abs=1)
    assert data["memory"]["time"] == sorted(data["memory"]["time"]) and data["memory"]["time"][0] == 0


def test_flops_are_those_of_the_arithmetic(made):
    tokens, layers, embed, mlp, vocab = 1024, 12, 1024, 4096, 512
    weights = layers * (4 * embed * embed + 3 * embed * mlp)
    # every product with weights forward and twice backward, at most once more for recompute; the head likewise;
    # attention at most five times its two products in full
    products = tokens * (weights + vocab * embed)
    assert 6 * products < made.hardware_flops < 8 * products + 5 * layers * 4 * tokens**2 * embed
    assert made.mfu == pytest.approx(made.tflops_per_device * 1e12 / 989.4e12)


def test_the_trace_has_the_lanes(folder):
    trace = json.loads((folder / "trace.json").read_text())
    lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"compute", "d2h", "h2d", "interconnect"} <= lanes


def test_everything_happens_as_often_as_the_program_says(folder):
    module = load_module(folder / "step.hlo")
    schedule = read_schedule(module, "cuda")
    done = simulate(schedule, CostModel(get_hardware("h200"), schedule.devices))
    seen = Counter[int]()
    for event in done.events:
        if event.kind in ("work", "transfer"):
            seen[id(event.op)] += round(event.count)
    for computation, ops in schedule.ops.items():
        for op in ops:
            if op.role in ("run", "start"):
                assert seen[id(op)] == module.executions[computation], op.instruction
    assert done.skipped, "not every iteration is run"


def test_the_same_from_its_hlo(folder, made, capsys):
    assert main(["timeline", "--hlo", str(folder / "step.hlo"), "--hardware", "h200", "--json"]) == 0
    again = Timeline.from_json(json.loads(capsys.readouterr().out))
    assert (again.step_time_s, again.exposed, again.devices) == (made.step_time_s, made.exposed, 8)
