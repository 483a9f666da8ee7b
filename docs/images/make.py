"""Makes the pictures of the README from what the commands print.

.venv/bin/python docs/images/make.py
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def terminal(command: list[str], title: str, file: str, width: int) -> None:
    """What `forebay COMMAND` prints on a terminal of `width` columns."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from rich.console import Console

    from forebay.cli.main import main
    from forebay.report import console, memory

    recorder = Console(width=width, record=True, force_terminal=True, file=io.StringIO())
    quiet = Console(file=io.StringIO())
    console.make_console = memory.make_console = lambda *, stderr=False: quiet if stderr else recorder
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(command)
    recorder.save_svg(str(HERE / file), title=title)


def full_size() -> list[str]:
    """Llama 3.1 405B on 128 GB200."""
    return [
        "--model",
        "llama3.1-405b",
        "--hardware",
        "gb200",
        "--devices",
        "128",
        "--mesh",
        "fsdp=128",
        "--batch",
        "128",
        "--seq",
        "8192",
    ]


def demo_loss() -> None:
    """The loss curve of `make demo`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        forebay = str(Path(sys.executable).parent / "forebay")
        subprocess.run([forebay, "train", "--config", "configs/demo.yaml", "--run_dir", str(run)], check=True)
        shutil.copy(run / "loss.png", HERE / "demo-loss.png")


def report() -> None:
    """The report of the planned step: light, dark at the largest wait, and on a phone."""
    sys.path.insert(0, str(HERE.parents[1] / "tests" / "report"))
    from chromium import Chromium

    from forebay.cli.main import main

    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        file = Path(folder) / "report.html"
        plan = str(Path(folder) / "plan.json")
        main(["plan", *full_size(), "--output", plan])
        main(["timeline", *full_size(), "--plan", plan, "--html", str(file)])
        photograph(browser, file)


def photograph(browser: Any, file: Path) -> None:
    """A report's pictures, from `browser` (tests/report/chromium.py)."""
    largest = "for (const act of ['largest', 'out', 'out']) document.querySelector(`[data-do=${act}]`).click()"
    browser.open(file, height=1000)
    browser.screenshot(HERE / "report-light.webp", quality=80)
    browser.open(file, dark=True, height=1000)
    browser.evaluate(largest)
    browser.settle()
    left, top, width = browser.evaluate(
        "(({left, top, width}) => [left, top, width])(document.getElementById('lanes').getBoundingClientRect())"
    )
    browser.mouse("Moved", left + width / 2, top + 50)
    browser.screenshot(HERE / "report-dark.webp", quality=80)
    browser.open(file, width=390, height=844, mobile=True)
    browser.evaluate(f"{largest}; document.getElementById('timeline').scrollIntoView()")
    browser.settle()
    browser.screenshot(HERE / "report-phone.webp", quality=80)


if __name__ == "__main__":
    compile_command = ["compile", *full_size(), "--placement", "decoder_layer_input=host"]
    terminal(compile_command, "forebay compile", "compile-405b.svg", 112)
    terminal(["plan", *full_size()], "forebay plan", "plan-405b.svg", 124)
    report()
    demo_loss()
