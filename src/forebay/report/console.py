"""The console that everything is printed to."""

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns where the output is not a terminal: wide enough that no table wraps."""


def make_console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)
