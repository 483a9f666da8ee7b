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


if __name__ == "__main__":
    compile_command = ["compile", *full_size(), "--placement", "decoder_layer_input=host"]
    terminal(compile_command, "forebay compile", "compile-405b.svg", 112)
    terminal(["plan", *full_size()], "forebay plan", "plan-405b.svg", 124)
    demo_loss()
