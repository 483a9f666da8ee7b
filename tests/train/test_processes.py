"""Runs of several processes: the same numbers as one, and an end in good order whatever happens to one of them."""

import dataclasses
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from forebay.cli.main import main
from forebay.sharding import Sharding, make_mesh, parse_mesh
from forebay.train import launch as launching
from forebay.train import processes
from forebay.train.config import OptimizerConfig
from forebay.train.launch import run_together
from forebay.train.loop import train
from forebay.train.metrics import read_metrics
from forebay.train.program import make_program
from forebay.train.run_config import TrainConfig, to_yaml

# --- what they must agree on ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("fsdp=4", [(0, 2), (1, 2)]),
        ("fsdp=2,expert=2", [(0, 2), (1, 2)]),
        ("fsdp=2,tensor=2", [(0, 2), (1, 2)]),
        # what does not split the batch over the processes gives both the same rows
        ("tensor=4", [(0, 1), (0, 1)]),
        ("sequence=2,tensor=2", [(0, 1), (0, 1)]),
    ],
)
def test_rows_of_a_process(mesh, expected):
    devices = jax.devices()[:4]
    sharding = Sharding(make_mesh(parse_mesh(mesh, 4), devices)).named(("batch", "sequence"))
    found = []
    for mine in (devices[:2], devices[2:]):  # as if they were of two processes
        of_process: Any = SimpleNamespace(
            addressable_devices_indices_map=lambda shape, mine=mine: {
                d: i for d, i in sharding.devices_indices_map(shape).items() if d in mine
            }
        )
        found.append(processes.rows_here(of_process, (8, 16)))
    assert found == expected


def test_a_vote_to_stop_is_heard_one_step_later_by_all():
    vote = processes.StopVote(jax.sharding.Mesh(np.asarray(jax.devices()), "x"), alone=False)
    assert [vote([]), vote([signal.SIGINT]), vote([])] == [False, False, True]


def test_one_process_asks_nobody():
    vote = processes.StopVote(jax.sharding.Mesh(np.asarray(jax.devices()), "x"))
    assert [vote([]), vote([signal.SIGINT])] == [False, True]


# --- bad input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--processes 0", "processes=0 must be at least 1"),
        ("--processes 2 --devices 3", "devices=3 do not divide over processes=2"),
        ("--processes 2 --mesh fsdp=3", "devices=3 do not divide over processes=2"),
        ("--processes 2 --mesh fsdp=2,expert=2 --devices 8", "fsdp=2,expert=2"),
        ("--devices 0", "devices=0 must be at least 1"),
        ("--process_id 1 --processes 2", "--coordinator"),
        ("--coordinator here --processes 2 --process_id 0", "write host:port"),
        ("--coordinator here:1 --processes 2", "give --process_id"),
        ("--coordinator here:1 --processes 2 --process_id 2", "count from 0 to 1"),
        ("--coordinator auto", "does not recognise a cluster"),
    ],
)
def test_refused_before_anything_starts(capfd, tmp_path, monkeypatch, flags, message):
    for name in [n for n in os.environ if n.startswith(("SLURM_", "OMPI_", "KUBERNETES_"))]:
        monkeypatch.delenv(name)
    # detection looks at the environment, and must come before jax's devices, which this process has
    monkeypatch.setattr(jax.distributed, "initialize", _detects_nothing)
    monkeypatch.setattr(processes, "_keep_stdout", lambda: None)
    assert main(["train", "--run_dir", str(tmp_path / "run"), *flags.split()]) == 2
    err = capfd.readouterr().err
    assert message in err and err.startswith("forebay: ") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def _detects_nothing(**_):
    raise ValueError("coordinator_address should be defined.")


def test_a_taken_port_is_refused(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_keep_stdout", lambda: None)
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process_id", "0"]
        assert main(["train", "--run_dir", str(tmp_path / "run"), *flags]) == 2
    err = capfd.readouterr().err
    assert f"port {port} cannot be used" in err and err.count("\n") == 1


def test_a_batch_that_does_not_divide_is_refused_once(capfd, tmp_path):
    """Every process finds it; one line tells."""
    flags = ["--processes", "2", "--mesh", "fsdp=2", "--batch", "3", "--placement", "full"]
    assert main(["train", "--run_dir", str(tmp_path / "run"), *flags]) == 2
    err = capfd.readouterr().err
    assert "batch=3" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


# --- how they end ----------------------------------------------------------------------------------------

FOREVER = "import time; time.sleep(100)"
ENDS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
STOPS = (
    "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(130)); print('ready', flush=True);"
    "time.sleep(100)"
)


def says(line: str, code: int) -> str:
    return f"import sys; print({line!r}, file=sys.stderr); sys.exit({code})"


LATE_REASON = f"import time; time.sleep(0.3); {says('forebay: the reason', 3)}"


def together(*programs: str) -> int:
    return run_together([[sys.executable, "-c", p] for p in programs], os.environ)


@pytest.mark.parametrize(
    ("programs", "code", "line"),
    [
        (["pass", "pass"], 0, ""),
        ([FOREVER, says("forebay: the reason", 2)], 2, "forebay: the reason\n"),
        ([says("forebay: the reason", 2)] * 2, 2, "forebay: the reason\n"),
        # one that lost another is not the cause
        ([says("forebay: lost", 1), says("forebay: the reason", 3)], 3, "forebay: the reason\n"),
        # what that one has to say of it is not passed on, though it says it before the other's end is noticed
        (
            [f"import sys; print('lost', file=sys.stderr, flush=True); {FOREVER}", LATE_REASON],
            3,
            "forebay: the reason\n",
        ),
        ([FOREVER, says("Traceback", 1)], 1, "Traceback\nforebay: process 1 of 2 failed with exit code 1\n"),
        ([FOREVER, ENDS_ITSELF], 1, "forebay: process 1 of 2 was ended by signal 9 (SIGKILL): the others were ended"),
    ],
)
def test_all_end_with_one_line(capfd, programs, code, line):
    start = time.monotonic()
    assert together(*programs) == code
    assert time.monotonic() - start < 30
    err = capfd.readouterr().err
    assert err.startswith(line) and err.count("\n") == line.count("\n") + (not line.endswith("\n") and line != "")


def test_what_a_process_warns_of_is_passed_on_while_it_runs(capfd):
    seen = []

    def look():
        time.sleep(2.5)
        seen.append(capfd.readouterr().err)

    threading.Thread(target=look, daemon=True).start()
    warns = "import sys, time; print('careful', file=sys.stderr, flush=True); time.sleep(4)"
    assert together(warns, "pass") == 0
    assert seen == ["careful\n"] and capfd.readouterr().err == ""


def test_xlas_log_is_quiet_unless_somebody_asked(monkeypatch):
    """jax sets a level of its own in the environment when it is imported."""
    told = []
    monkeypatch.setattr(launching, "run_together", lambda _, environment: told.append(environment) or 0)
    for level, expected in (("1", "3"), ("0", "0")):
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
        launching.launch("", 2, None)
        assert told.pop()["TF_CPP_MIN_LOG_LEVEL"] == expected


def test_an_interrupt_reaches_all(capfd):
    def interrupt():
        while "ready" not in capfd.readouterr().out:
            time.sleep(0.05)
        time.sleep(0.5)  # the second one's output is nobody's
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert together(STOPS, STOPS) == 130


def test_they_end_with_the_one_that_started_them():
    child = "from forebay.train.processes import watch_parent; watch_parent(); import time; time.sleep(100)"
    parent = (
        "import os, subprocess, sys; from forebay.train.processes import tied;"
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], env=tied(os.environ), stdin=subprocess.PIPE);"
        "print(p.pid, flush=True); import time; time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        started.kill()
    for _ in range(600):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it outlived the process that started it")


# --- the same numbers --------------------------------------------------------------------------------------

CONFIG = TrainConfig(
    model="deepseek-tiny", sizes={"layers": 2, "mtp": False}, mesh="expert=4", batch=8, seq=32, dtype="float32",
    placement="full", steps=4, optimizer=OptimizerConfig(warmup_steps=1), checkpoint_every=1, keep_checkpoints=4,
    validation_batches=0, sample_tokens=0,
)  # fmt: skip
"""The expert axis crosses two processes of two devices each; the text is the default corpus."""


def in_one_process(directory: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    """The records of a run in this process, on four of its devices."""
    config = dataclasses.replace(CONFIG, run_dir=str(directory), resume=resume)
    train(config, make_program(config, jax.devices()[:4]), Console(file=io.StringIO()))
    return read_metrics(directory)


def in_two_processes(directory: Path, *flags: str) -> list[dict[str, Any]]:
    file = directory.parent / "run.yaml"
    file.write_text(to_yaml(dataclasses.replace(CONFIG, run_dir=str(directory))))
    # compiling is most of it: of one step each
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    command = [sys.executable, "-m", "forebay.cli.main", "train", "--config", str(file), "--processes", "2", *flags]
    done = subprocess.run(command, env={**os.environ, "XLA_FLAGS": quick}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 cpu devices of 2 processes" in done.stdout and "Gloo" not in done.stdout
    return read_metrics(directory)


def forget_from(directory: Path, step: int) -> None:
    for checkpoint in (directory / "checkpoints").iterdir():
        if int(checkpoint.name) >= step:
            shutil.rmtree(checkpoint)


def assert_same(records: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Sums are added up in another order, so losses of some 6 nats are the same to 1e-5 and not to the bit."""
    assert [r["step"] for r in records] == [1, 2, 3, 4], "each step stands once: one process writes"
    for name in ("loss", "grad_norm", "moe_max_violation"):
        assert [r[name] for r in records] == pytest.approx([r[name] for r in expected], abs=1e-5, rel=1e-5)


def test_two_processes_go_on_where_one_stopped(tmp_path):
    one = in_one_process(tmp_path / "one")
    assert len({r["loss"] for r in one}) == 4, "or steps that were mixed up would not be noticed"
    both = tmp_path / "both"
    shutil.copytree(tmp_path / "one", both)
    forget_from(both, 2)
    assert_same(in_two_processes(both, "--resume"), one)
    assert (both / "config.yaml").read_text() == (tmp_path / "one" / "config.yaml").read_text().replace("one", "both")


@pytest.mark.slow
def test_two_processes_start_as_one_does_which_goes_on_where_they_stopped(tmp_path):
    one, two = in_one_process(tmp_path / "one"), in_two_processes(tmp_path / "two")
    assert_same(two, one)
    assert {p.name for p in (tmp_path / "two").iterdir()} == {p.name for p in (tmp_path / "one").iterdir()}
    forget_from(tmp_path / "two", 3)  # what is left was written by two processes
    assert_same(in_one_process(tmp_path / "two", resume=True), one)
