"""The console that everything is printed to."""

from rich.console import Console

PLAIN_WIDTH = 120
"""Columns where the output is not a terminal: wide enough that no table wraps."""


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """`quiet` prints nothing: that of a process whose output would be another's again."""
    console = Console(stderr=stderr, quiet=quiet)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH, quiet=quiet)
