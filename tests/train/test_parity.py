"""Comparing gradients before a run: on a CPU nothing moves, so wrong copies are put in by hand."""

import functools
import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forebay.errors import EXIT_WRONG_NUMBERS, WrongNumbersError
from forebay.offload import scan
from forebay.train import parity
from forebay.train.config import ProgramConfig
from forebay.train.parity import check_numbers, differences, miniature, needs_check
from forebay.train.program import make_program

EVERYTHING = "minimal_offloaded,decoder_layer_input=host,context=host"


@functools.cache
def program(placement=EVERYTHING, **changes):
    sizes = {"layers": 9, "vocab": 4096, "embed": 512, "mlp": 1024}
    config = {"batch": 4, "seq": 64, "dtype": "float32", "mesh": "fsdp=2"} | changes
    return make_program(
        ProgramConfig(model="llama-tiny", sizes=sizes, placement=placement, **config), jax.devices()[:2]
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def late_reads(monkeypatch):
    """Copies from the host bring the layer's neighbour, as a stale index would."""
    read = scan._read

    def wrong(stack, i):
        return read(stack, jnp.maximum(i - 1, 0) if scan.on_host(stack) else i)

    monkeypatch.setattr(scan, "_read", wrong)


@pytest.fixture
def late_slices(monkeypatch):
    """Updates that write each slice to the place of the one before it."""
    put = jax.lax.dynamic_update_slice_in_dim
    monkeypatch.setattr(
        jax.lax, "dynamic_update_slice_in_dim",
        lambda x, part, start, axis, **kw: put(x, part, jnp.maximum(start - part.shape[axis], 0), axis, **kw),
    )  # fmt: skip


# ------------------------------------------------------------------ the small instance


def test_ranges_keep_their_placements_and_the_parity_of_their_layers():
    small = miniature(program("minimal_offloaded@0:8;minimal@8:9"))
    assert [(p.layers, dict(p.tensors)) for p in small.plan.placements] == [
        ((0, 6), dict(program("minimal_offloaded").plan.placements[0].tensors)),
        ((6, 7), dict(program("minimal").plan.placements[0].tensors)),
    ]
    assert small.model.stacks == {"layers": 7}
    assert miniature(program()).model.stacks == {"layers": 7}, "9 is odd, and so is 7"


def test_it_is_small_and_the_mesh_still_splits_it():
    """Llama 3.1 405B as 128 devices would split it is not made here: its sizes are what is asked for."""
    big = make_program(
        ProgramConfig(model="llama3.1-8b", sizes={"layers": 2}, batch=8, seq=8192, accumulate=4, placement="full",
                      mesh="fsdp=2,tensor=4", dtype="bfloat16"),
        jax.devices(),
    )  # fmt: skip
    small = miniature(big)
    assert small.model.parameter_count < 4e6
    config = small.model.config
    assert (config.head_dim, config.heads // config.kv_heads) == (128, 4), "as the kernel sees it"
    assert (small.config.batch, small.config.seq, small.config.accumulate) == (2 * 2, 512, 2)
    assert small.dtype == jnp.bfloat16 and dict(small.sharding.mesh.shape) == dict(big.sharding.mesh.shape)


def test_only_runs_that_move_something_on_a_device_are_checked():
    def on(platform, placement, **changes) -> Any:
        device = SimpleNamespace(platform=platform)
        mesh = SimpleNamespace(devices=np.asarray([device]))
        return SimpleNamespace(offloads=program(placement, **changes).offloads, sharding=SimpleNamespace(mesh=mesh))

    assert needs_check(on("gpu", EVERYTHING)) and needs_check(on("tpu", "minimal", optimizer_host_fraction=0.5))
    assert not needs_check(on("gpu", "minimal")) and not needs_check(on("cpu", EVERYTHING))


# ------------------------------------------------------------------ comparing


ON_HOST = {"optimizer_host_fraction": 0.5, "parameters_host_fraction": 0.5, "accumulate": 2, "batch": 8}


@pytest.mark.parametrize(
    "changes", [{"dtype": "float32"}, {"dtype": "bfloat16", "master_weights": "host", "accumulate_on": "host"} | ON_HOST],
    ids=["activations", "everything"],
)  # fmt: skip
def test_right_copies_agree_on_the_loss_and_all_of_the_state(changes):
    small = miniature(program(**changes))
    if "optimizer_host_fraction" in changes:
        assert all(jax.tree.leaves((small.hosted.optimizer[0].mu, small.hosted.weights.layers, small._sums_hosted)))
    found = differences(small, {})
    assert len(found) == 4 + len(jax.tree.leaves(small.abstract_state))
    leaves = {d.leaf for d in found}
    assert {"the loss of step 2", "weights.layers.gate_DF", "optimizer.mu.layers.gate_DF"} <= leaves
    assert max(d.relative for d in found) <= parity.TOLERANCE[changes["dtype"]] / 8, "far from the tolerance"


# each alone, since a small difference in one must not hide behind a large one in another
@pytest.mark.parametrize(
    ("placement", "dtype"),
    [
        pytest.param("decoder_layer_input=host", "bfloat16", marks=pytest.mark.slow),
        ("query_proj=host", "float32"),
    ],
    ids=str,
)
def test_wrong_copies_are_found_by_far(placement, dtype, late_reads):
    worst = max(d.relative for d in differences(miniature(program(placement, dtype=dtype)), {}))
    assert worst > 4 * parity.TOLERANCE[dtype]


def test_wrong_slices_of_the_state_are_found_by_far(late_slices):
    worst = max(d.relative for d in differences(miniature(program("minimal", optimizer_host_fraction=1.0)), {}))
    assert worst > 4 * parity.TOLERANCE["float32"]


def test_a_run_is_refused_with_the_leaf_and_the_difference(monkeypatch, cache):
    found = [parity.Difference("weights.v", 1e-5), parity.Difference("weights.w", 0.5)]
    monkeypatch.setattr(parity, "differences", lambda *_: found)
    with pytest.raises(
        WrongNumbersError, match=r": weights.w is off by 50 % of its norm and may be off by 0.391 %"
    ) as error:
        check_numbers(program())
    assert error.value.exit_code == EXIT_WRONG_NUMBERS and "\n" not in str(error.value)
    assert not list(cache.glob("**/*.json")), "what is wrong is not kept"


def test_what_is_not_a_number_is_refused(monkeypatch):
    monkeypatch.setattr(parity, "differences", lambda *_: [parity.Difference("the loss of step 1", float("nan"))])
    with pytest.raises(WrongNumbersError, match="the loss of step 1 is off by nan %"):
        check_numbers(program())


# ------------------------------------------------------------------ keeping the outcome


@pytest.fixture
def counted(monkeypatch):
    """The comparisons that are made, each of which finds a small difference."""
    made = []

    def differences(program, options):
        made.append(program)
        return [parity.Difference("the loss of step 1", 1e-7), parity.Difference("weights.w", 1e-5)]

    monkeypatch.setattr(parity, "differences", differences)
    return made


def test_the_same_run_again_does_not_compare_again(counted, cache):
    assert not check_numbers(program()).known
    again = check_numbers(program())
    assert again.known and again.worst == parity.Difference("weights.w", 1e-5)
    assert len(counted) == 1 and len(list(cache.glob("parity/*.json"))) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setattr(parity, "versions", lambda: {"jaxlib": "0.99"}),
        lambda m: m.setattr(parity, "_scan_version", lambda: "another"),
        lambda m: m.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=true"),
    ],
    ids=["another version", "another scan", "other flags"],
)
def test_another_compiler_is_compared_again(counted, monkeypatch, change):
    check_numbers(program())
    change(monkeypatch)
    assert not check_numbers(program()).known and len(counted) == 2


@pytest.mark.parametrize(
    "other", [{"placement": "minimal_offloaded"}, {"dtype": "bfloat16"}, {"accumulate": 2}], ids=str
)
def test_another_program_is_compared_again(counted, other):
    check_numbers(program())
    assert not check_numbers(program(**other)).known


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": "forebay.parity/1"}', "\x00\x01"])
def test_a_damaged_file_is_compared_again_and_replaced(counted, cache, text):
    check_numbers(program())
    (file,) = cache.glob("parity/*.json")
    file.write_text(text)
    assert not check_numbers(program()).known
    assert json.loads(file.read_text())["worst"] == {"leaf": "weights.w", "relative": 1e-5}
    assert check_numbers(program()).known


def test_a_file_of_another_subject_is_not_believed(counted, cache):
    """Names are digests: one that is not of what the file says is about something else."""
    check_numbers(program())
    (file,) = cache.glob("parity/*.json")
    record = json.loads(file.read_text())
    record["subject"]["device_kind"] = "another"
    file.write_text(json.dumps(record))
    assert not check_numbers(program()).known


def test_a_cache_that_cannot_be_written_costs_only_the_next_comparison(counted, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="FOREBAY_CACHE_DIR"):
        assert not check_numbers(program()).known


def test_where_the_cache_is(monkeypatch, tmp_path):
    from forebay.cache import cache_dir

    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FOREBAY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "forebay"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "forebay"


# ------------------------------------------------------------------ the verbs


def test_forebay_train_refuses_before_it_makes_a_run(monkeypatch, capsys, tmp_path):
    from forebay.cli.main import main

    monkeypatch.setattr(parity, "differences", lambda *_: [parity.Difference("weights.w", 0.5)])
    monkeypatch.setattr(parity, "needs_check", lambda program: True)  # as on a device
    text = tmp_path / "text.txt"
    text.write_text("some text to train on\n" * 200)
    run_dir = tmp_path / "run"
    argv = ["train", "--data.path", str(text), "--run_dir", str(run_dir), "--placement", "query_proj=host",
            "--batch", "8", "--seq", "64", "--steps", "200", "--sizes.layers", "2"]  # fmt: skip
    assert main(argv) == EXIT_WRONG_NUMBERS
    err = capsys.readouterr().err
    assert err.startswith("forebay: offloading gives wrong numbers on cpu") and err.count("\n") == 1
    assert not run_dir.exists()
