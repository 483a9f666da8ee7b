"""A TPU step up to its schedule, in a process that is ended before code is generated.

libtpu writes the scheduled module and its buffer assignment within seconds when it is asked to dump; the code for
it then takes ten times as long and changes neither. What is timed here is therefore not a compile.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LAST = "*after_optimizations_after_buffer_assignment.txt"
DUMP = "FOREBAY_BENCHMARK_DUMP"


@dataclass(frozen=True)
class Scheduled:
    """The text of a scheduled module, the folder with the buffer assignment, and the seconds of CPU it took."""

    hlo: str
    dump: Path
    cpu_s: float


@contextmanager
def scheduled(command: Sequence[str], timeout_s: float = 900) -> Iterator[Scheduled]:
    """Runs `command`, which compiles one step with `xla_dump_to` as `$FOREBAY_BENCHMARK_DUMP`, until its schedule is there.

    Raises:
        RuntimeError: the command ended without one, with the end of what it wrote.
    """
    folder = Path(tempfile.mkdtemp(prefix="forebay-scheduled-"))
    try:
        errors = (folder / "stderr").open("w")
        process = subprocess.Popen(
            command, env=os.environ | {DUMP: str(folder)}, stdout=subprocess.DEVNULL, stderr=errors
        )
        start = time.monotonic()
        try:
            while not (found := _complete(folder)):
                if process.poll() is not None or time.monotonic() - start > timeout_s:
                    raise RuntimeError((folder / "stderr").read_text()[-2000:] or "no schedule in time")
                time.sleep(0.2)
            cpu_s = _cpu_seconds(process.pid)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        yield Scheduled(_as_printed(found.read_text()), folder, cpu_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _complete(folder: Path) -> Path | None:
    """The dumped module of the step, which is the largest, once it is no longer written to."""
    found = max(folder.glob(LAST), key=lambda p: p.stat().st_size, default=None)
    if found is None or found.stat().st_size < 100_000 or time.time() - found.stat().st_mtime < 0.5:
        return None
    return found


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _as_printed(dumped: str) -> str:
    """Dumped text in the form that `as_text()` has: asynchronous operations by their names, tuples' elements apart."""
    from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

    return _hlo.hlo_module_from_text(dumped).to_string()


if __name__ == "__main__":
    sys.exit("a part of run.py and tpu_parts.py")
