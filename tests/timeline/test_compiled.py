"""The timeline of real compiled steps: one for GPUs that are not there, through the command line."""

import json

import pytest

from forebay.cli.main import main
from forebay.timeline import Timeline

SIZES = ["--sizes.layers", "12", "--sizes.embed", "1024", "--sizes.heads", "8", "--sizes.kv_heads", "8"]
STEP = [
    "--model", "llama-tiny", *SIZES, "--sizes.head_dim", "128", "--sizes.mlp", "4096", "--batch", "8", "--seq", "1024",
    "--hardware", "h200", "--devices", "8", "--attention", "blockwise",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Timeline, dict]:
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        argv = ["timeline", *STEP, "--placement", "mlpwi_0=host", "-o", str(folder / "t.json")]
        assert main([*argv, "--perfetto", str(folder / "trace.json")]) == 0
    return Timeline.load(folder / "t.json"), json.loads((folder / "trace.json").read_text())


def test_work_and_waits_are_the_step(made):
    timeline, _ = made
    assert sum(timeline.compute_s.values()) + timeline.exposed_s == pytest.approx(timeline.step_time_s)
    assert all(timeline.compute_s[part] > 0 for part in ("forward", "backward", "recompute", "optimizer"))
    assert timeline.unknown == ()


def test_the_tensor_goes_to_the_host_and_comes_back_once_a_layer(made):
    timeline, _ = made
    # one sequence of 1024 tokens of width 4096 in bfloat16, for each of 12 layers
    for direction in ("d2h", "h2d"):
        copies = [e for e in timeline.exposed if e.kind == direction]
        assert {(e.name, e.num_bytes) for e in copies} == {("mlpwi_0", 1024 * 4096 * 2)}
        assert sum(e.count for e in copies) == pytest.approx(12)
        # alone on the link: 8 MiB at 55 GB/s, and 5 us
        assert sum(e.time_s for e in copies) >= 12 * (1024 * 4096 * 2 / 55e9 + 5e-6) * (1 - 1e-9)


def test_flops_are_those_of_the_arithmetic(made):
    timeline, _ = made
    tokens, layers, embed, mlp, vocab = 1024, 12, 1024, 4096, 512
    weights = layers * (4 * embed * embed + 3 * embed * mlp)
    # every product with weights forward and twice backward, at most once more for recompute; the head likewise;
    # attention at most five times its two products in full
    products = tokens * (weights + vocab * embed)
    assert 6 * products < timeline.hardware_flops < 8 * products + 5 * layers * 4 * tokens**2 * embed
    assert timeline.mfu == pytest.approx(timeline.tflops_per_device * 1e12 / 989.4e12)


def test_the_trace_has_the_lanes(made):
    _, trace = made
    lanes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"compute", "d2h", "h2d", "interconnect"} <= lanes
