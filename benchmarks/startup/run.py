"""Start-up: time of `import forebay`, of the command line's help, and to the first training step.

    .venv/bin/python benchmarks/startup/run.py

Each figure is the median of five processes (three for training), printed with the import of jax alone
beside it. Results go to `results.md` beside this file.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent


def seconds(command: list[str], times: int = 5) -> float:
    values = []
    for _ in range(times + 1):  # the first fills the file cache
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        values.append(time.perf_counter() - start)
    return statistics.median(values[1:])


def first_step() -> float:
    forebay = str(Path(sys.executable).parent / "forebay")
    values = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            start = time.perf_counter()
            command = [forebay, "train", "--run_dir", str(run), "--steps", "2", "--optimizer.warmup_steps", "1"]
            command += ["--sample_tokens", "0", "--validate_every", "0", "--dtype", "float32"]
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
            total = time.perf_counter() - start
            steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            assert len(steps) == 2
            values.append(total)
    return statistics.median(values)


def main() -> None:
    python = [sys.executable, "-c"]
    nothing = seconds([*python, "pass"])
    rows = {
        "`import forebay`, all of its public surface": seconds(
            [*python, "import jax, forebay; [getattr(forebay, n) for n in forebay.__all__]"]
        ),
        "`import jax` alone": seconds([*python, "import jax"]),
        "`import forebay`, nothing used": seconds([*python, "import forebay"]),
        "`forebay --help`": seconds([str(Path(sys.executable).parent / "forebay"), "--help"]),
        "`forebay train`, llama-tiny, two steps, start to exit": first_step(),
    }
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}, jax {metadata.version('jax')}"
    table = [
        "# Start-up", "", f"{machine}. Command: `.venv/bin/python benchmarks/startup/run.py`.",
        f"An empty Python process takes {nothing:.2f} s, which is in every row.", "", "| | s |", "|---|---|",
        *(f"| {name} | {value:.2f} |" for name, value in rows.items()), "",
    ]  # fmt: skip
    (HERE / "results.md").write_text("\n".join(table))
    print("\n".join(table))


if __name__ == "__main__":
    main()
