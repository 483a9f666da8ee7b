"""Runs of a tiny model: what they write, how they resume, how they fail."""

import dataclasses
import io
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from forebay.errors import MissingExtraError, UserError
from forebay.hardware.present import machine_of
from forebay.models.llama import Llama
from forebay.planner.plan import Plan
from forebay.train import loop
from forebay.train.checkpoint import Checkpoints
from forebay.train.config import OptimizerConfig
from forebay.train.data import DataConfig
from forebay.train.loop import NonFiniteLossError, train
from forebay.train.metrics import read_metrics
from forebay.train.program import make_program
from forebay.train.run_config import TrainConfig
from forebay.train.sample import sample

pytestmark = [
    # Orbax leaves reads behind when one of them fails
    pytest.mark.filterwarnings("ignore:Exception ignored in. <coroutine object _read_array"),
]

SIZES = {"layers": 2, "embed": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "mlp": 64, "vocab": 264}
TEXT = "".join(f"{i}: the water waits above the dam, {i * i} litres of it\n" for i in range(2000))


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nearly all runs here are of one program, and compiling it is nearly all their time."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for settings in (options, before):
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        if settings is options:
            yield


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    return TrainConfig(
        sizes=SIZES, batch=8, seq=32, steps=6, dtype="float32", placement="minimal_offloaded",
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2), run_dir=str(tmp_path / "run"),
        data=DataConfig(path=str(tmp_path / "text.txt")), validate_every=3, validation_batches=2, sample_tokens=0,
    )  # fmt: skip


def run(config: TrainConfig, devices=None):
    program = make_program(config, devices or jax.devices()[:1])
    output = io.StringIO()
    result = train(config, program, Console(file=output, width=120))
    return result, output.getvalue()


def losses(config: TrainConfig) -> list[float]:
    return [r["loss"] for r in read_metrics(Path(config.run_dir))]


def test_a_run_directory_holds_what_is_promised(config):
    result, output = run(dataclasses.replace(config, sample_tokens=5))
    run_dir = Path(config.run_dir)
    assert {"config.yaml", "plan.json", "metrics.jsonl", "checkpoints", "loss.png"} <= {
        p.name for p in run_dir.iterdir()
    }
    assert any((run_dir / "tensorboard").iterdir())
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert Plan.load(run_dir / "plan.json").for_stack("layers")[0].tensors["query_proj"] == "host"
    records = read_metrics(run_dir)
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "validation_loss" in r] == [3, 6]
    # the first step compiles, the fourth follows a validation: neither has a time of its own
    assert [r["step_time_s"] is None for r in records] == [True, False, False, True, False, False]
    assert [r["learning_rate"] for r in records[:3]] == pytest.approx([0.0, 5e-3, 1e-2])
    assert result.step == 6
    assert result.sample is not None and result.sample.startswith("def ")
    assert "step 6/6" in output


def test_throughput_figures_follow_from_step_time(config):
    run(config)
    record = read_metrics(Path(config.run_dir))[-1]
    program = make_program(config, jax.devices()[:1])
    assert record["tokens_per_s"] == pytest.approx(8 * 32 / record["step_time_s"])
    expected = program.model.flops_per_token(32) * 8 * 32 / record["step_time_s"] / 1e12
    assert record["model_tflops_per_device"] == pytest.approx(expected)
    assert record["mfu"] is None  # no peak is known for a CPU


def test_loss_falls_below_the_unigram_entropy(config):
    result, _ = run(dataclasses.replace(config, steps=80, validate_every=0))
    assert result.validation_loss is not None and result.unigram_entropy is not None
    assert result.validation_loss < result.unigram_entropy


def forget_after_step_3(config: TrainConfig) -> None:
    """Leaves a run of 6 steps, with checkpoints every 3, as if its process had died later, in the middle of a line."""
    checkpoints = Path(config.run_dir) / "checkpoints"
    assert {p.name for p in checkpoints.iterdir() if p.name.isdigit()} == {"3", "6"}
    shutil.rmtree(checkpoints / "6")
    with (Path(config.run_dir) / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 7, "lo')


def newest_state(config: TrainConfig) -> list[np.ndarray]:
    checkpoints = Checkpoints(Path(config.run_dir) / "checkpoints", keep=2)
    state, _ = checkpoints.restore(make_program(config, jax.devices()[:1]))
    checkpoints.close()
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def test_resuming_continues_bit_for_bit(config):
    config = dataclasses.replace(config, checkpoint_every=3, validate_every=0)
    run(config)
    straight_losses, straight_state = losses(config), newest_state(config)
    forget_after_step_3(config)
    result, _ = run(dataclasses.replace(config, resume=True))
    assert result.step == 6
    assert [r["step"] for r in read_metrics(Path(config.run_dir))] == [1, 2, 3, 4, 5, 6]
    assert losses(config) == straight_losses
    for resumed, straight in zip(newest_state(config), straight_state, strict=True):
        np.testing.assert_array_equal(resumed, straight)


def test_a_model_of_experts_trains_tells_its_balance_and_resumes_bit_for_bit(config):
    sizes = {
        "embed": 32, "heads": 2, "layers": 2, "query_lora": 16, "kv_lora": 16, "nope_dim": 8, "rope_dim": 8, "value_dim": 8,
        "mlp": 64, "moe_mlp": 16, "experts": 8, "experts_per_token": 2, "expert_groups": 1, "groups_per_token": 1, "vocab": 264,
        "mtp": False, "bias_speed": 0.01,
    }  # fmt: skip
    config = dataclasses.replace(
        config, model="deepseek-tiny", sizes=sizes, checkpoint_every=3, validate_every=0, placement="none",
    )  # fmt: skip
    run(config)
    straight, state = losses(config), newest_state(config)
    assert straight[-1] < straight[0] - 0.5
    for record in read_metrics(Path(config.run_dir)):
        assert 0 <= record["moe_max_violation"] == record["moe_worst_violation"] <= 3  # one layer; all tokens to 2 of 8
        assert record["moe_balance_loss"] > 0.9 and record["moe_overflow"] == 0
    # six steps of the router's bias, each up or down (or not at all)
    (bias,) = (s for s in state if s.shape == (1, 8) and 0 < np.abs(s).max() < 0.1)
    np.testing.assert_allclose(bias, 0.01 * np.round(bias / 0.01), atol=1e-7)
    forget_after_step_3(config)
    run(dataclasses.replace(config, resume=True))
    assert losses(config) == straight
    for resumed, before in zip(newest_state(config), state, strict=True):
        np.testing.assert_array_equal(resumed, before)


def test_a_run_stops_where_the_model_refuses_to_go_on(config, monkeypatch):
    monkeypatch.setattr(Llama, "refusal", lambda self, record: "enough" if record["step"] == 3 else None)
    with pytest.raises(UserError, match=r"^step 3: enough$"):
        run(dataclasses.replace(config, validate_every=0))
    assert [r["step"] for r in read_metrics(Path(config.run_dir))] == [1, 2, 3]  # what it refused is on record


def test_the_plan_may_change_on_resume_and_changes_no_number(config):
    config = dataclasses.replace(config, checkpoint_every=3, validate_every=0)
    run(config)
    straight = losses(config)
    forget_after_step_3(config)
    run(dataclasses.replace(config, resume=True, placement="none"))
    assert losses(config) == pytest.approx(straight, rel=1e-6)
    # the files say what the run went on with, and beside them what it did before
    run_dir = Path(config.run_dir)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["placement"] == "none"
    assert yaml.safe_load((run_dir / "config.until-step-3.yaml").read_text())["placement"] == "minimal_offloaded"
    assert Plan.load(run_dir / "plan.json").for_stack("layers")[0].tensors == {"*": "device"}
    assert Plan.load(run_dir / "plan.until-step-3.json").for_stack("layers")[0].tensors["query_proj"] == "host"


def test_placements_and_meshes_train_alike(config):
    one, _ = run(config)
    other = dataclasses.replace(
        config, run_dir=config.run_dir + "-mesh", mesh="data=2,fsdp=2,tensor=1,sequence=2", placement="none"
    )
    eight, _ = run(other, jax.devices())
    assert losses(other) == pytest.approx(losses(config), rel=1e-4)
    assert eight.validation_loss == pytest.approx(one.validation_loss, rel=1e-4)


def test_microbatches_train_alike(config):
    run(config)
    parts = dataclasses.replace(config, run_dir=config.run_dir + "-parts", accumulate=4)
    run(parts)
    assert losses(parts) == pytest.approx(losses(config), rel=1e-4)


def test_a_checkpoint_of_another_shape_is_refused(config):
    run(config)
    other = dataclasses.replace(config, sizes={**SIZES, "mlp": 96}, resume=True, steps=9)
    with pytest.raises(UserError, match=r"is of another model .*\[2, 32, 64\] in it and \[2, 32, 96\]"):
        run(other)
    assert len(losses(config)) == 6


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [empty, Path.unlink, flip_a_bit])
def test_a_damaged_checkpoint_is_named(config, damage):
    run(dataclasses.replace(config, validation_batches=0))
    # the largest file holds the weights
    state = Path(config.run_dir) / "checkpoints" / "6" / "state"
    damage(max((f for f in state.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size))
    before = (Path(config.run_dir) / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="checkpoints/6 cannot be read"):
        run(dataclasses.replace(config, resume=True, steps=9))
    assert (Path(config.run_dir) / "metrics.jsonl").read_text() == before


def test_a_finished_run_is_not_resumed_and_an_existing_one_not_overwritten(config):
    run(config)
    metrics = Path(config.run_dir) / "metrics.jsonl"
    with metrics.open("a") as lines:
        lines.write('{"step": 7}\n')  # of a step after the checkpoint: a resumed run would drop it
    before = metrics.read_text()
    with pytest.raises(UserError, match="has done its 6 steps: raise --steps"):
        run(dataclasses.replace(config, resume=True))
    assert metrics.read_text() == before
    with pytest.raises(UserError, match="is not empty"):
        run(config)
    with pytest.raises(UserError, match="no run with checkpoints"):
        run(dataclasses.replace(config, resume=True, run_dir=config.run_dir + "-none"))


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_a_loss_that_is_no_number_stops_the_run_and_is_not_kept(config):
    # the learning rate of step 1 is zero; step 2 makes weights of 1e30, and step 3 cannot work with them
    broken = OptimizerConfig(learning_rate=1e30, warmup_steps=1, clip_norm=0)
    config = dataclasses.replace(config, optimizer=broken, steps=20, checkpoint_every=2, validate_every=0)
    with pytest.raises(NonFiniteLossError, match=r"step 3: .*nan.*; the last checkpoint is of step 2") as error:
        run(config)
    assert error.value.exit_code == 3
    assert [p.name for p in (Path(config.run_dir) / "checkpoints").glob("[0-9]*")] == ["2"]
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse_constant) for line in lines]
    assert [r["step"] for r in records] == [1, 2, 3]
    assert None in (records[2]["loss"], records[2]["grad_norm"])


def test_weights_that_validate_to_no_number_are_not_kept(config):
    # the second update overflows: learning rate x weight decay is beyond float32
    broken = OptimizerConfig(learning_rate=3e38, warmup_steps=1, clip_norm=0, weight_decay=1e3)
    with pytest.raises(NonFiniteLossError, match=r"step 2: .*the validation loss nan; there is no checkpoint"):
        run(dataclasses.replace(config, optimizer=broken, steps=2))
    assert not list((Path(config.run_dir) / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize(
    ("module", "package"),
    [("orbax.checkpoint", "orbax-checkpoint"), ("matplotlib", "matplotlib"), ("tensorboardX", "tensorboardX")],
)
def test_a_package_that_the_end_of_a_run_needs_is_missed_before_its_start(config, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"needs the package '{package}'.*forebay\[train\]"):
        run(config)
    assert not Path(config.run_dir).exists()


def test_an_empty_prompt_is_refused_before_the_start(config, monkeypatch):
    class WithoutBOS:
        vocab_size, bos_id, eos_id = 258, None, None

        def encode(self, text: str) -> np.ndarray:
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    monkeypatch.setattr(loop, "load_tokenizer", lambda spec: WithoutBOS())
    with pytest.raises(UserError, match="sample_prompt is empty"):
        run(dataclasses.replace(config, sample_tokens=5, sample_prompt=""))
    assert not Path(config.run_dir).exists()


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("seed", -1, 0),
        ("checkpoint_every", -1, 0),
        ("keep_checkpoints", 0, 1),
        ("validate_every", -1, 0),
        ("validation_batches", -1, 0),
        ("sample_tokens", -5, 0),
        ("sample_temperature", -0.1, 0),
        ("sample_temperature", float("nan"), 0),
    ],
)
def test_numbers_outside_of_their_range_are_refused(field, value, least):
    with pytest.raises(UserError, match=f"{field}={value} must be at least {least}"):
        TrainConfig(**{field: value})


def test_an_interrupt_finishes_the_step_and_keeps_it(config, monkeypatch):
    real = loop._place
    calls = []

    def place(*arguments):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(loop, "_place", place)
    result, _ = run(dataclasses.replace(config, validation_batches=0))
    assert (result.interrupted, result.step) == (True, 3)
    monkeypatch.setattr(loop, "_place", real)
    result, _ = run(dataclasses.replace(config, validation_batches=0, resume=True))
    assert (result.interrupted, result.step) == (False, 6)
    assert [r["step"] for r in read_metrics(Path(config.run_dir))] == [1, 2, 3, 4, 5, 6]


def test_sampling_is_seeded_and_greedy_at_temperature_zero(config):
    program = make_program(config, jax.devices()[:1])
    weights = program.init(jax.random.key(0)).weights
    prompt = np.array([10, 20, 30], np.int32)
    options = {"tokens": 40, "vocab": 258}  # longer than the window of 32
    greedy = sample(program, weights, prompt, temperature=0.0, seed=0, **options)
    assert (greedy == sample(program, weights, prompt, temperature=0.0, seed=1, **options)).all()
    context = jnp.asarray([[*prompt]])
    first = program.model.logits(weights, context, sharding=program.sharding, dtype=jnp.float32)[0, -1, :258].argmax()
    assert greedy[0] == first
    warm = sample(program, weights, prompt, temperature=1.0, seed=0, **options)
    assert (warm == sample(program, weights, prompt, temperature=1.0, seed=0, **options)).all()
    assert (warm != sample(program, weights, prompt, temperature=1.0, seed=1, **options)).any()
    assert warm.max() < 258


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("cpu", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_devices_are_recognised_by_their_kind(kind, name):
    class Device:
        device_kind = kind

    found = machine_of(Device())
    assert (found.name if found else None) == name


def test_metrics_lines_are_json_objects(config):
    run(config)
    for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines():
        assert {"step", "loss", "grad_norm", "tokens_per_s", "step_time_s"} <= json.loads(line).keys()
