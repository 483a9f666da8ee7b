"""Training with optimizer state, weights and sums of gradients in host memory: the same numbers."""

import dataclasses
import functools
import io
import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from forebay.errors import UserError
from forebay.train import program as programs
from forebay.train.config import OptimizerConfig, ProgramConfig
from forebay.train.data import DataConfig
from forebay.train.loop import train
from forebay.train.metrics import read_metrics
from forebay.train.program import make_program
from forebay.train.run_config import TrainConfig

pytestmark = pytest.mark.usefixtures("unwritten_host_memory")

SIZES = {"layers": 3, "embed": 32, "heads": 2, "kv_heads": 2, "head_dim": 16, "mlp": 64, "vocab": 264}


@pytest.fixture(autouse=True)
def nothing_is_too_small(monkeypatch):
    monkeypatch.setattr(programs, "Program", functools.partial(programs.Program, least_host_bytes=1))


def config(**changes) -> ProgramConfig:
    base = ProgramConfig(
        model="llama-tiny", sizes=SIZES, batch=8, seq=16, placement="minimal_offloaded", dtype="float32", steps=10,
        optimizer=OptimizerConfig(warmup_steps=1, learning_rate=1e-2),
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def run(config: ProgramConfig, steps: int = 3, devices: int = 1):
    program = make_program(config, jax.devices()[:devices])
    state, losses = program.init(jax.random.key(0)), []
    step = program.jit_step()
    for n in range(steps):
        tokens = np.random.default_rng(n).integers(0, 264, size=(2, config.batch, config.seq), dtype=np.int32)
        state, metrics = step(state, {"inputs": tokens[0], "targets": tokens[1]})
        losses.append([float(metrics[k]) for k in ("loss", "grad_norm", "learning_rate")])
    return program, state, losses


@functools.cache
def plain(accumulate: int):
    _, state, losses = run(config(accumulate=accumulate))
    return state, losses


def same(a, b, tolerance=1e-6):
    for ours, theirs in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("changes", "devices"),
    [
        pytest.param(
            {"parameters_host_fraction": 0.5, "optimizer_host_fraction": 0.5, "placement": "full"},
            1,
            marks=pytest.mark.slow,
        ),
        ({"parameters_host_fraction": 1.0, "optimizer_host_fraction": 1.0, "mesh": "fsdp=2,tensor=2"}, 4),
        ({"optimizer_host_fraction": 1.0, "accumulate": 2, "accumulate_on": "host"}, 1),
    ],
)
def test_numbers_do_not_depend_on_the_memory(changes, devices):
    expected, losses = plain(changes.get("accumulate", 1))
    program, state, found = run(config(**changes), devices=devices)
    np.testing.assert_allclose(found, losses, rtol=2e-5)
    same(state, expected, 2e-5)
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind == "pinned_host", state)
    assert kinds == program.hosted
    assert any(jax.tree.leaves(kinds))


def test_working_copies_follow_master_weights():
    _, state, losses = run(config(dtype="bfloat16", master_weights="host", optimizer_host_fraction=1.0))
    _, whole, expected = run(config(dtype="bfloat16"))
    assert state.weights.layers.gate_DF.dtype == jax.numpy.bfloat16
    assert state.weights.layers.mlp_norm_D.dtype == jax.numpy.float32
    assert state.master.layers.gate_DF.sharding.memory_kind == "pinned_host"
    same(state.weights.layers.gate_DF, np.asarray(state.master.layers.gate_DF).astype(jax.numpy.bfloat16), 0)
    # gradients are rounded to bfloat16 where without masters some are not: the same within that
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    same(state.master.layers.gate_DF, whole.weights.layers.gate_DF, 5e-3)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"optimizer_host_fraction": 1.5}, "between 0 and 1"),
        ({"parameters_host_fraction": float("nan")}, "between 0 and 1"),
        ({"master_weights": "hots"}, "host"),
        ({"master_weights": "host"}, "float32"),
        ({"accumulate_on": "hsot", "accumulate": 2}, "host"),
        ({"accumulate_on": "host"}, "accumulate=1"),
    ],
)
def test_what_cannot_be_is_refused(changes, what):
    with pytest.raises(UserError, match=what):
        make_program(config(**changes), jax.devices()[:1])


def test_a_run_resumes_with_its_state_in_host_memory(tmp_path):
    text = "".join(f"{i}: the water waits above the dam\n" for i in range(500))
    (tmp_path / "text.txt").write_text(text)

    def go(name: str, **changes) -> list[float]:
        c = TrainConfig(
            **{f.name: getattr(config(), f.name) for f in dataclasses.fields(ProgramConfig)} | changes.pop("program", {}),
            run_dir=str(tmp_path / name), data=DataConfig(path=str(tmp_path / "text.txt"), tokenizer="bytes"),
            sample_tokens=2, validation_batches=1, tensorboard=False, **changes,
        )  # fmt: skip
        program = make_program(c, jax.devices()[:1])
        train(c, program, Console(file=io.StringIO()))
        return [m["loss"] for m in read_metrics(tmp_path / name)]

    hosted_state = {"optimizer_host_fraction": 1.0, "parameters_host_fraction": 1.0, "steps": 4}
    expected = go("plain", program={"steps": 4})
    go("cut", program=hosted_state, checkpoint_every=2)
    # as if the run had ended after step 2
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "4")
    found = go("cut", program=hosted_state, resume=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    plan = json.loads((tmp_path / "cut" / "plan.json").read_text())
    assert plan["optimizer"]["host_fraction"] == 1.0
