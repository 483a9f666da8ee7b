"""From a dataclass to a command line, a YAML file and back, by jsonargparse.

Every verb has one frozen dataclass of arguments. `--help` shows each field with its default and its
docstring; `--config FILE` reads a YAML file of the same keys; a flag wins over the file.
"""

import dataclasses
import itertools
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from forebay.errors import UserError, unknown


def parse[T](
    config_class: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    also: Sequence[type] = (),
    positional: str | None = None,
) -> T:
    """`argv` as a `config_class`.

    A flag may have dashes for underscores, and one of type bool may stand alone. A first argument that
    is no flag is the field `positional`.

    Files given by `--config` are read first, in order; flags override them. Keys of a file that belong
    to one of `also` (other verbs' dataclasses) and not to `config_class` are passed over, so that a
    training configuration can be given to `forebay compile`.

    Raises:
        UserError: anything that does not parse, naming the closest key or flag.
    """
    parser = jsonargparse.ArgumentParser(prog=prog, description=description, exit_on_error=False)
    parser.add_class_arguments(config_class)
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file of these keys; flags override it; may be repeated"
    )
    arguments, files = _split_config_flags([_with_underscores(a) for a in argv])
    if positional is not None and arguments and not arguments[0].startswith("-"):
        arguments.insert(0, f"--{positional}")
    arguments = _complete_switches(arguments, config_class)
    _check_flags(arguments, config_class)
    values: dict[str, Any] = {}
    for file in files:
        content = read_yaml(file)
        _check_keys(content, (config_class, *also), file)
        values = _merge(values, {k: v for k, v in content.items() if k in _fields(config_class)})
    try:
        namespace = parser.get_defaults()
        if values:
            namespace = parser.parse_object(values, namespace=namespace)
        namespace = parser.parse_args(arguments, namespace=namespace)
        namespace.pop("config", None)
        instantiated = parser.instantiate(namespace)
    except UserError:
        raise
    except (jsonargparse.ArgumentError, TypeError, ValueError) as error:
        raise UserError(_one_line(error, prog)) from None
    return config_class(**{k: instantiated[k] for k in _fields(config_class)})


def check_file(flag: str, path: str) -> None:
    """Raises `UserError` where `path`, of the flag `flag`, is no file that can be written: before anything takes time."""
    file = Path(path).resolve()
    if file.is_dir():
        raise UserError(f"{flag}={path!r} is a directory: give the path of a file")
    if not file.parent.is_dir():
        raise UserError(f"{flag}={path!r}: its directory does not exist: make it first")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UserError(f"{flag}={path!r} cannot be written: choose another place")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file's mapping.

    Raises:
        UserError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"cannot read the configuration file {str(path)!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise UserError(f"the configuration file {str(path)!r} is not YAML{where}: correct it") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(
            f"the configuration file {str(path)!r} holds a {type(content).__name__}: write key: value lines"
        )
    return content


def _with_underscores(argument: str) -> str:
    """`--save-hlo=a-b` as `--save_hlo=a-b`."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _split_config_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    rest, files = [], []
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--config":
            file = next(arguments, None)
            if file is None:
                raise UserError("--config needs a file: give the path of a YAML file")
            files.append(file)
        elif argument.startswith("--config="):
            files.append(argument.removeprefix("--config="))
        else:
            rest.append(argument)
    return rest, files


def _complete_switches(arguments: Sequence[str], config_class: type) -> list[str]:
    """`--json` as `--json true`."""
    switches = {f"--{name}" for name, kind in _fields(config_class).items() if kind is bool}
    completed = []
    for argument, following in itertools.zip_longest(arguments, arguments[1:]):
        completed.append(argument)
        if argument in switches and str(following).lower() not in ("true", "false"):
            completed.append("true")
    return completed


def _fields(config_class: type) -> dict[str, Any]:
    return typing.get_type_hints(config_class)


def _all_keys(config_class: type, prefix: str = "") -> list[str]:
    keys = []
    for name, kind in _fields(config_class).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(kind):
            keys += _all_keys(typing.cast(type, kind), f"{prefix}{name}.")
    return keys


def _check_flags(arguments: Sequence[str], config_class: type) -> None:
    known = _all_keys(config_class)
    open_ended = [k for k in known if "dict" in str(_fields(config_class).get(k, ""))]
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            key = argument[2:].split("=")[0]
            if key not in known and key != "help" and not any(key.startswith(f"{k}.") for k in open_ended):
                raise unknown("flag", f"--{key}", [f"--{k}" for k in known])


def _check_keys(content: Mapping[str, Any], classes: Sequence[type], file: str, prefix: str = "") -> None:
    known: dict[str, Any] = {}
    for c in classes:
        known.update(_fields(c))
    for key, value in content.items():
        if key not in known:
            raise unknown(f"key in {file!r},", f"{prefix}{key}", [f"{prefix}{k}" for k in known])
        if isinstance(value, dict) and dataclasses.is_dataclass(known[key]):
            _check_keys(value, [typing.cast(type, known[key])], file, f"{prefix}{key}.")


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _one_line(error: Exception, prog: str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines else type(error).__name__
    return f"{text.rstrip('.')}: see {prog} --help"
