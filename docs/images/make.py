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


def compile_table() -> None:
    """`forebay compile` of Llama 3.1 405B on 128 GB200, as a terminal shows it."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    from rich.console import Console

    from forebay.cli import compile as verb
    from forebay.report import memory

    console = Console(width=112, record=True, force_terminal=True, file=io.StringIO())
    printed = memory.print_compiled
    verb_config = verb.CompileConfig(
        model="llama3.1-405b", hardware="gb200", devices=128, mesh="fsdp=128", batch=128, seq=8192,
        placement="decoder_layer_input=host",
    )  # fmt: skip
    memory.print_compiled = lambda report: printed(report, console)
    with contextlib.redirect_stdout(io.StringIO()):
        verb.run(verb_config)
    console.save_svg(str(HERE / "compile-405b.svg"), title="forebay compile")


def demo_loss() -> None:
    """The loss curve of `make demo`."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        forebay = str(Path(sys.executable).parent / "forebay")
        subprocess.run([forebay, "train", "--config", "configs/demo.yaml", "--run_dir", str(run)], check=True)
        shutil.copy(run / "loss.png", HERE / "demo-loss.png")


if __name__ == "__main__":
    compile_table()
    demo_loss()
