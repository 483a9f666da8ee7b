"""The one exception that means "the input is wrong", and its exit codes.

Whatever a user can get wrong is raised as `UserError` with a message of one line that says what was
passed and what to do about it. The command line prints that line on standard error and exits with
`exit_code`; in Python it is an ordinary `ValueError`.
"""

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_WRONG_NUMBERS = 3
EXIT_DOES_NOT_FIT = 4
EXIT_NOT_HIDDEN = 5
EXIT_INTERRUPTED = 130


class UserError(ValueError):
    """Bad input. The message is one line and ends with what to do."""

    exit_code = EXIT_BAD_INPUT


class WrongNumbersError(UserError):
    """Numbers are wrong, or are known to be with what is installed."""

    exit_code = EXIT_WRONG_NUMBERS


class CompilerFailedError(UserError):
    """The compiler fails on a program that it should compile."""

    exit_code = EXIT_FAILED


class MissingExtraError(UserError, ImportError):
    """A feature needs a package that the light core does not install."""


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for an absent optional package: names the extra that brings it."""
    return MissingExtraError(
        f"{purpose} needs the package {package!r}, which is not installed: "
        f"pip install 'forebay[{extra}]' (or: uv sync --extra {extra})"
    )


def unknown(kind: str, given: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist: lists the names there are, the closest one first.

    `kind` is what the name stands for ("model", "tensor"), `known` the valid names.
    """
    return UserError(f"unknown {kind} {given!r}: {did_you_mean(given, known)}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """`known` as a sentence, ordered by similarity to `given`."""
    names = list(dict.fromkeys(known))
    if not names:
        return "there is none to choose from"
    ranked = sorted(names, key=lambda n: -difflib.SequenceMatcher(None, given.lower(), n.lower()).ratio())
    close = difflib.SequenceMatcher(None, given.lower(), ranked[0].lower()).ratio() >= 0.6
    listing = ", ".join(ranked)
    return f"did you mean {ranked[0]!r}? There are: {listing}" if close else f"there are: {listing}"
