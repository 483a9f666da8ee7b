"""The console that everything is printed to."""

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns where the output is not a terminal: wide enough that no table wraps."""


def make_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PLAIN_WIDTH)
