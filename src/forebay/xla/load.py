"""Reading a scheduled module from a file or a dump directory, and saying what is wrong with one that is none."""

from collections.abc import Iterator
from pathlib import Path

from forebay.errors import UserError
from forebay.xla.hlo import Module, parse_module

_HOW = "save one with forebay compile --save-hlo, or dump with --xla_dump_to=DIR --xla_dump_hlo_as_text"
_BODIES = ("body", "condition", "calls", "to_apply")


def load_module(path: str | Path) -> Module:
    """The scheduled module in a file of HLO text, or the largest one in a dump directory.

    Raises:
        UserError: no such file; no HLO text in it (empty, binary, something else); cut off; not scheduled.
    """
    path = Path(path)
    if path.is_dir():
        return _largest(path)
    return module_of(_read(path), str(path))


def module_of(text: str, source: str = "the text") -> Module:
    """The scheduled module of HLO text; `source` is how errors call it.

    Raises:
        UserError: as `load_module`.
    """
    start = text.lstrip()
    if not start:
        raise UserError(f"{source} is empty: {_HOW}")
    if not start.startswith("HloModule"):
        kind = "StableHLO or MLIR" if start.startswith(("module", "#", "func.")) else "no HLO text"
        raise UserError(f"{source} is {kind}, which begins with 'HloModule': {_HOW}")
    module = parse_module(start)
    if not module.computations:
        raise UserError(f"{source} has no computations, so it was cut off or is none: {_HOW}")
    if not module.entry or module.root(module.entry) is None or start.rstrip()[-1] != "}":
        raise UserError(f"{source} ends in the middle of a computation, so it was cut off: {_HOW}")
    if missing := next(_missing(module), None):
        raise UserError(f"{source} calls the computation {missing!r} and does not have it, so it was cut: {_HOW}")
    if not module.scheduled:
        raise UserError(
            f"{source} is not scheduled (its first line has no is_scheduled=true), so it does not say what runs when: "
            f"take the module after optimizations; {_HOW}"
        )
    return module


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the HLO file {str(path)!r}: {error.strerror}") from None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"{str(path)!r} is binary (an HloProto?), not HLO text: {_HOW}")
    return text


def _largest(directory: Path) -> Module:
    """Of a dump, the largest module that is scheduled: helper modules of a step are small."""
    files = sorted(
        (f for f in directory.glob("*.txt") if _begins_with_module(f)), key=lambda f: f.stat().st_size, reverse=True
    ) + sorted(directory.glob("*.hlo"), key=lambda f: f.stat().st_size, reverse=True)
    scheduled = [f for f in files if "is_scheduled=true" in _first_line(f)]
    if not files:
        raise UserError(f"there is no HLO text in the directory {str(directory)!r}: {_HOW}")
    if not scheduled:
        raise UserError(f"none of the {len(files)} modules in {str(directory)!r} is scheduled: {_HOW}")
    return module_of(_read(scheduled[0]), str(scheduled[0]))


def _begins_with_module(file: Path) -> bool:
    return _first_line(file).startswith("HloModule")


def _first_line(file: Path) -> str:
    with file.open(errors="replace") as lines:
        return lines.readline(1 << 20)


def _missing(module: Module) -> Iterator[str]:
    for i in module.instructions():
        if i.opcode in ("while", "fusion", "call", "async-start"):
            for attribute in _BODIES:
                if (name := i.called(attribute)) and name not in module.computations:
                    yield name
