"""Reading machines from TOML: the table that comes with the package, and users' own files.

The structure of the file is the dataclasses'; every key is checked against them, so that a misspelt
one is named with the closest that there is.
"""

import dataclasses
import functools
import math
import os
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from forebay.errors import UserError, did_you_mean, unknown
from forebay.hardware.machine import Hardware
from forebay.units import parse_bytes

HARDWARE_VARIABLE = "FOREBAY_HARDWARE"

_NAMES = frozenset({"title", "platform", "name", "device_name", "topology"})

type Table = dict[str, Any]


def get_hardware(name: str, files: Sequence[str | Path] = ()) -> Hardware:
    """The machine called `name`, from the files given, the user's files or the built-in table.

    Raises:
        UserError: there is no such machine, or a file is malformed.
    """
    machines = list_hardware(files)
    if name not in machines:
        raise unknown("hardware", name, machines)
    return machines[name]


def list_hardware(files: Sequence[str | Path] = ()) -> dict[str, Hardware]:
    """All machines by name: the built-in ones, then those of the user's files, then those of `files`.

    The user's files are `$XDG_CONFIG_HOME/forebay/hardware.toml` (`~/.config` when the variable is not
    set), and the paths in the variable `FOREBAY_HARDWARE`, separated as those in `PATH` are. A later
    file may build on the machines of an earlier one (`base`), and replaces those of the same name.

    Raises:
        UserError: a file cannot be read or is malformed: names the file, the machine and the key.
    """
    machines = dict(_built_in())
    for file in [*_user_files(), *map(Path, files)]:
        machines |= read_machines(file, machines)
    return machines


def read_machines(file: str | Path, known: Mapping[str, Hardware] | None = None) -> dict[str, Hardware]:
    """The machines of one TOML file; `base` may name one of the file or of `known`.

    Raises:
        UserError: the file cannot be read, is not TOML, or says something that is not a machine.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the hardware file {str(path)!r}: {error.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"the hardware file {str(path)!r} is not text: write TOML in UTF-8") from None
    return _parse(text, str(path), _built_in() if known is None else known)


@functools.cache
def _built_in() -> dict[str, Hardware]:
    text = resources.files("forebay.hardware").joinpath("machines.toml").read_text(encoding="utf-8")
    return _parse(text, "machines.toml", {})


def _user_files() -> list[Path]:
    files = [Path(p).expanduser() for p in os.environ.get(HARDWARE_VARIABLE, "").split(os.pathsep) if p]
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "forebay" / "hardware.toml"
    return [config, *files] if config.is_file() else files


def _parse(text: str, file: str, known: Mapping[str, Hardware]) -> dict[str, Hardware]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"the hardware file {file!r} is not TOML: {error}") from None
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{file}: {name!r} is not a table: a machine is a section that begins with [{name}]")
    return {name: _machine(name, _resolved(name, tables, file, known, ()), file) for name in tables}


def _resolved(name: str, tables: Table, file: str, known: Mapping[str, Hardware], above: tuple[str, ...]) -> Table:
    """The table of one machine with those of its bases under it."""
    own = dict(tables[name])
    sources = own.pop("sources", {})
    _check_sources(sources, f"{file}: {name}")
    base = own.pop("base", None)
    if base is None:
        return {**own, "sources": _own_sources(own, sources, file)}
    if not isinstance(base, str):
        raise UserError(f"{file}: {name}: base must be the name of a machine, not {base!r}")
    if base in above or (base == name and base not in known):
        raise UserError(f"{file}: {name}: base {base!r} leads back to itself: name another machine")
    if base in tables and base != name:
        under = _resolved(base, tables, file, known, (*above, name))
    elif base in known:
        under = _without_nones(dataclasses.asdict(known[base]))
        under.pop("name")
    else:
        raise UserError(f"{file}: {name}: unknown base {base!r}: {did_you_mean(base, [*tables, *known])}")
    inherited = under.pop("sources")
    overridden = _figures(own)
    kept = {path: text for path, text in inherited.items() if path not in overridden}
    return {**_merged(under, own), "sources": kept | _own_sources(own, sources, file)}


def _own_sources(own: Table, sources: Table, file: str) -> Table:
    """A source for every figure that a file gives: what it says, else that it is from this file."""
    given = {}
    for path in _figures(own):
        table = path
        while table and table not in sources:
            table = table.rpartition(".")[0]
        if not table:
            given[path] = f"given in {file}"
    return given | sources


def _figures(table: Table, prefix: str = "") -> list[str]:
    """The dotted paths of what is a figure, not a name."""
    paths = []
    for key, value in table.items():
        if isinstance(value, dict):
            paths += _figures(value, f"{prefix}{key}.")
        elif key not in _NAMES:
            paths.append(prefix + key)
    return paths


def _merged(under: Table, over: Table) -> Table:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _without_nones(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nones(item) for key, item in value.items() if item is not None}
    return value


def _check_sources(sources: Any, where: str) -> None:
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        raise UserError(f'{where}: sources must be a table of texts, such as "host_link" = "our measurement"')


def _machine(name: str, table: Table, file: str) -> Hardware:
    where = f"{file}: {name}"
    if "name" in table:
        raise UserError(f"{where}: name is the section's own, {name!r}: leave the key out")
    machine: Hardware = _read(Hardware, {**table, "name": name}, where, "")
    if machine.platform == "cpu":
        raise UserError(f'{where}: platform is \'cpu\', which describes itself: give "cuda" or "tpu"')
    if getattr(machine, machine.platform) is None:
        table_name = f"[{name}.{machine.platform}]"
        raise UserError(f"{where}: a machine of platform {machine.platform!r} needs a table {table_name}")
    other = "tpu" if machine.platform == "cuda" else "cuda"
    if getattr(machine, other) is not None:
        raise UserError(f"{where}: a machine of platform {machine.platform!r} has no {other} table: leave it out")
    if "bf16" not in machine.flops_per_s:
        raise UserError(f"{where}: flops_per_s needs bf16, the dense bfloat16 peak")
    if machine.tpu is not None and machine.tpu.dimensions not in (2, 3):
        raise UserError(f"{where}: tpu.dimensions is {machine.tpu.dimensions}: a torus has 2 or 3")
    if machine.tpu is not None and len(machine.tpu.max_shape) != machine.tpu.dimensions:
        shape = list(machine.tpu.max_shape)
        raise UserError(f"{where}: tpu.max_shape is {shape}: write {machine.tpu.dimensions} numbers (tpu.dimensions)")
    return machine


def _read(kind: Any, value: Any, where: str, path: str) -> Any:
    """`value` as a `kind`, which is a dataclass or the type of one of its fields."""
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, where, path)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _read(next(a for a in arguments if a is not type(None)), value, where, path)
    if origin is typing.Literal:
        if value not in arguments:
            raise UserError(f"{where}: {path} is {value!r}: write one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple) or (arguments[-1] is not Ellipsis and len(value) != len(arguments)):
            size = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
            raise UserError(f"{where}: {path} is {value!r}: write a list of {size}whole numbers")
        return tuple(_read(int, item, where, path) for item in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise UserError(f"{where}: {path} is {value!r}: write a table")
        return {key: _read(arguments[1], item, where, f"{path}.{key}") for key, item in value.items()}
    return _read_scalar(kind, value, where, path)


def _read_dataclass(kind: type, value: Any, where: str, path: str) -> Any:
    prefix = f"{path}." if path else ""
    if not isinstance(value, dict):
        raise UserError(f"{where}: {path} is {value!r}: write a table")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in fields:
            known = [name for name in fields if name != "name" or kind is not Hardware] + ["base"] * (kind is Hardware)
            raise UserError(f"{where}: unknown key {prefix + key!r}: {did_you_mean(key, known)}")
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and key not in value:
            advice = 'give it, or start from a known machine with base = "..."'
            raise UserError(f"{where}: {prefix}{key} is missing: {advice}")
    return kind(**{key: _read(hints[key], item, where, prefix + key) for key, item in value.items()})


def _read_scalar(kind: type, value: Any, where: str, path: str) -> Any:
    if kind is int and path.endswith("_bytes") and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except UserError as error:
            raise UserError(f"{where}: {path}: {error}") from None
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}[kind]
        raise UserError(f"{where}: {path} is {value!r}: write {wanted}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        least_is_zero = path == "cuda.compute_capability"  # 10.0 is a version, not an amount
        if not math.isfinite(value) or value < 0 or (value == 0 and not least_is_zero):
            raise UserError(f"{where}: {path} is {value!r}: write a number above 0")
    return value
