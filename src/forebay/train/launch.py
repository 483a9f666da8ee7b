"""Starting the processes of a run on this machine, each with its share of CPU devices, and ending them together.

The processes are told what a launcher would tell them (`forebay.train.processes`), so a run that works here takes the
same path as one on a cluster.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from forebay.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from forebay.train.processes import tied

_GRACE_S = 3.0
"""How long the others may take to say why they end too, once one has failed."""
_SAVING_S = 60.0
"""The same once one was interrupted: the others may still be writing their part of the checkpoint."""
_HELD_S = 1.0
"""How long what a process says is held back: one that lost another says so at length, before it is known here that the
other has ended."""
_LINE = "forebay: "
_LOG_LEVEL, _JAX_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL", "1"
"""What jax sets the level of XLA's log to, in the environment, where nobody has set it."""


def launch(config_yaml: str, processes: int, devices: int | None) -> int:
    """Runs `forebay train` with this configuration in several processes, which share `devices`; returns when all have
    ended. What the first one prints is printed.

    Returns:
        The exit code, as `run_together`.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-train-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(config_yaml)
        command = [sys.executable, "-m", "forebay.cli.main", "train", "--config", str(file)]
        command += ["--coordinator", f"127.0.0.1:{_free_port()}", "--processes", str(processes)]
        command += ["--devices", str(devices or processes), "--process_id"]
        # of the coordination service's goodbyes; what is wrong is raised
        level = os.environ.get(_LOG_LEVEL, _JAX_LOG_LEVEL)
        quieter = {_LOG_LEVEL: "3" if level == _JAX_LOG_LEVEL else level}
        return run_together(
            [[*command, str(n)] for n in range(processes)], {**os.environ, "JAX_PLATFORMS": "cpu", **quieter}
        )


def run_together(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> int:
    """Runs processes that need each other. When one fails the others are ended, and one line says why.

    Returns:
        0; 130 where they were interrupted; the exit code of the process that failed first; 1 where a signal ended it.
    """
    running = [_Running(n, command, tied(environment), quiet=n > 0) for n, command in enumerate(commands)]
    try:
        with _passing_on_signals(running):
            return _finish(running)
    finally:
        for one in running:
            one.end()


class _Running:
    """One process. Its lines on standard error are held for a while and passed on, except those that say why it failed:
    these are kept."""

    def __init__(self, number: int, command: Sequence[str], environment: Mapping[str, str], *, quiet: bool):
        self.number = number
        self.said: list[str] = []
        self._held: deque[tuple[float, str]] = deque()
        # in a group of its own, so that a terminal's ctrl-C reaches it once, through this process
        self.process = subprocess.Popen(
            list(command), env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL if quiet else None,
            stderr=subprocess.PIPE, text=True, errors="replace", process_group=0,
        )  # fmt: skip
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            if line.startswith(_LINE):
                self.said.append(line.removeprefix(_LINE).strip())
            else:
                self._held.append((time.monotonic(), line))

    def pass_on(self, held_s: float = 0.0) -> None:
        """Prints the lines that were held for so long."""
        until = time.monotonic() - held_s
        while self._held and self._held[0][0] <= until:
            sys.stderr.write(self._held.popleft()[1])
        sys.stderr.flush()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def end(self) -> None:
        """At once: it may wait for one that is gone, and would not hear a polite word."""
        if self.code is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(timeout=1)


def _finish(running: Sequence[_Running]) -> int:
    while not any(one.code for one in running):
        if all(one.code == EXIT_OK for one in running):
            _end(running, say=running)
            return EXIT_OK
        for one in running:
            one.pass_on(_HELD_S)
        time.sleep(0.02)
    interrupted = any(one.code == EXIT_INTERRUPTED for one in running)
    deadline = time.monotonic() + (_SAVING_S if interrupted else _GRACE_S)
    while any(one.code is None for one in running) and time.monotonic() < deadline:
        time.sleep(0.02)
    ended = [one for one in running if one.code is not None]
    cause = _cause(ended)
    _end(running, say=ended if cause is None else [cause])
    if cause is None:
        return EXIT_INTERRUPTED
    code = cause.code or EXIT_FAILED
    if code < 0:
        print(
            f"{_LINE}process {cause.number} of {len(running)} was ended by {_signal_name(-code)}: the others were ended too; "
            f"continue with --resume from the last checkpoint",
            file=sys.stderr,
        )
        return EXIT_FAILED
    silent = f"process {cause.number} of {len(running)} failed with exit code {code}"
    print(f"{_LINE}{cause.said[-1] if cause.said else silent}", file=sys.stderr)
    return code


def _end(running: Sequence[_Running], *, say: Sequence[_Running]) -> None:
    """Ends all, and prints what some of them said last: that of the others is of being left alone."""
    for one in running:
        one.end()
    for one in say:
        one.pass_on()


def _cause(ended: Sequence[_Running]) -> _Running | None:
    """The process because of which the run failed; None where it was interrupted. One that lost another is not the
    cause."""
    codes = [(one, one.code or EXIT_OK) for one in ended]
    by_signal = [one for one, code in codes if code < 0]
    if by_signal:
        return by_signal[0]
    failed = [(one, code) for one, code in codes if code not in (EXIT_OK, EXIT_INTERRUPTED)]
    return min(failed, key=lambda f: (f[1] == EXIT_FAILED, not f[0].said))[0] if failed else None


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _passing_on_signals(running: Sequence[_Running]) -> Iterator[None]:
    """SIGINT and SIGTERM go to all processes, which agree on a step, keep a checkpoint and end."""

    def pass_on(number: int, _: object) -> None:
        for one in running:
            if one.code is None:
                one.process.send_signal(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
