"""`forebay VERB ...`: finds the verb's module, parses its arguments, runs it, turns errors into exit codes."""

import glob
import importlib
import os
import sys
from collections.abc import Sequence

from forebay.errors import EXIT_OK, UserError, unknown

VERBS = {
    "plan": "find the fastest placement that fits the memory of a machine, and prove it with the compiler",
    "train": "train a language model on the devices there are",
    "compile": "compile a training step for machines that are not there, and say what its memory holds",
    "timeline": "simulate a compiled step: when everything in it runs, and what it waits for",
    "hardware": "the machines forebay knows, each figure with its source",
}

_DEVICELESS = ("compile", "plan", "timeline")
"""Verbs that never use a device."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    0: done and it fits; 2: bad input; 3: wrong numbers found; 4: compiled and does not fit.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(argv)
    except UserError as error:
        print(f"forebay: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        print("forebay: interrupted", file=sys.stderr)
        return 130


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return EXIT_OK
    if argv[0] in ("-V", "--version"):
        from importlib import metadata

        print(f"forebay {metadata.version('forebay')}")
        return EXIT_OK
    verb = argv[0]
    if verb not in VERBS:
        raise unknown("verb", verb, VERBS)

    _choose_platform(verb)
    from forebay.xla.flags import check_xla_flags

    check_xla_flags()
    from forebay.cli.parse import parse

    module = importlib.import_module(f"forebay.cli.{verb}")
    subverbs = getattr(module, "SUBVERBS", {})
    for n, argument in enumerate(argv[1:], start=1):
        if argument in subverbs and (n == 1 or argument.startswith("--")):
            return subverbs[argument]([*argv[1:n], *argv[n + 1 :]])
    short = getattr(module, "SHORT", {})
    config = parse(
        module.Config,
        [short.get(a, a) for a in argv[1:]],
        prog=f"forebay {verb}",
        description=VERBS[verb],
        also=getattr(module, "ALSO", ()),
        positional=getattr(module, "POSITIONAL", None),
    )
    return module.run(config)


def _choose_platform(verb: str) -> None:
    """Keeps jax from looking for accelerators that are not wanted or not there.

    Compiling needs no device and should not take one's memory. A compiler that is installed for machines
    that are not there (extra `aot`) would otherwise complain at length that they are not.
    """
    if verb in _DEVICELESS or (
        "JAX_PLATFORMS" not in os.environ
        and not any(
            glob.glob(pattern)
            for pattern in ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/dxg", "/dev/kfd")
        )
    ):
        os.environ["JAX_PLATFORMS"] = "cpu"
    if verb in _DEVICELESS:  # what the compiler warns of is in the report
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def _usage() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {text}" for verb, text in VERBS.items())
    return f"usage: forebay VERB [--flag value ...] [--config FILE]\n\n{verbs}\n\nforebay VERB --help lists a verb's flags."


if __name__ == "__main__":
    sys.exit(main())
