"""XLA's flags, checked before XLA reads them: a name it does not know ends the process.

jax's own library parses `XLA_FLAGS` when the first client is made, and so do the CUDA plugin and libtpu
when they are loaded, each with its own list. `LIBTPU_INIT_ARGS` is read by libtpu alone. The names a build
knows are strings in its library, which is searched for them without being loaded.

What is not checked: values. `--xla_gpu_autotune_level=high` still ends the process, with XLA's own message.
"""

import dataclasses
import difflib
import functools
import importlib.util
import mmap
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from forebay.errors import UserError, unknown

type Parser = Literal["cpu", "cuda", "tpu"]

_SURELY_MEANT = 0.9
"""The likeness above which a name is taken for a misspelt one without searching libtpu's 600 MB for it."""

_WHITESPACE = " \t\r\n"
_FLAG = re.compile(r"""(?P<name>-[-_A-Za-z0-9]*)(?P<value>="(?:[^"\\]|\\.)*"?|='[^']*'?|[^ \t\r\n]*)""", re.DOTALL)
_NAMES = re.compile(rb"xla_[A-Za-z0-9_]+(?=\x00)")

_LIBRARIES: dict[Parser, tuple[tuple[str, str], ...]] = {
    "cpu": (("jaxlib", "libjax_common.so"),),
    "cuda": (("jax_plugins.xla_cuda13", "xla_cuda_plugin.so"), ("jax_plugins.xla_cuda12", "xla_cuda_plugin.so")),
    "tpu": (("libtpu", "libtpu.so"),),
}
_TITLES: dict[Parser, str] = {"cpu": "this jaxlib", "cuda": "the installed CUDA plugin", "tpu": "the installed libtpu"}
_PLATFORMS: dict[str, Parser] = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}


def check_xla_flags(platforms: Collection[str] = (), environ: Mapping[str, str] | None = None) -> None:
    """Checks the names in `XLA_FLAGS`, and for TPUs those in `LIBTPU_INIT_ARGS`; does not import jax.

    Args:
        platforms: the platforms that will be used besides those that `JAX_PLATFORMS` names: "cuda", "tpu".
        environ: the environment, `os.environ` when not given.

    Raises:
        UserError: a name that a library which will parse it does not know (with the closest that it
            knows), a word that is not a flag (XLA would ignore what follows), or a file that is not there.
    """
    environ = os.environ if environ is None else environ
    wanted = [*platforms, *environ.get("JAX_PLATFORMS", "").replace(" ", "").split(",")]
    plugins: list[Parser] = [_PLATFORMS[p] for p in wanted if p in _PLATFORMS]
    if text := _flags_text("XLA_FLAGS", environ):
        check_flag_text(text, ["cpu", *plugins])
    if "tpu" in plugins and (text := environ.get("LIBTPU_INIT_ARGS", "")):
        _check_libtpu_arguments(text)


def check_flag_text(text: str, parsers: Collection[Parser] = ("cpu",), variable: str = "XLA_FLAGS") -> None:
    """Checks a string of flags as `XLA_FLAGS` holds them against each library of `parsers` that is installed.

    Raises:
        UserError: as `check_xla_flags`.
    """
    flags, rest = tokenise(text)
    if rest:
        raise UserError(
            f"{variable}: XLA stops reading at {rest.split()[0]!r}, which is not a flag: "
            "write each flag as --name=value, without spaces around the '='"
        )
    for parser in parsers:
        library = _library(parser)
        strange = [flag for flag in flags if library and not (flag.startswith("--") and library.knows(flag[2:]))]
        if library and strange:
            raise UserError(f"{variable}: {_TITLES[parser]} does not know {_described(strange, library)}")


def known_flags(platform: str) -> frozenset[str]:
    """The names, with their leading `xla_`, that the library of a platform ("cpu", "cuda", "tpu") holds.

    A superset: other strings of the library that look like a flag are among them, but no flag is missing.
    Empty where the library is not installed.

    Raises:
        UserError: there is no such platform.
    """
    parser: Parser = "cpu" if platform == "cpu" else _PLATFORMS.get(platform) or _no_platform(platform)
    library = _library(parser)
    return library.names if library else frozenset()


def knows_flag(platform: str, name: str) -> bool:
    """Whether the library of a platform has a flag, named without dashes; true where it is not installed.

    Raises:
        UserError: there is no such platform.
    """
    library = _library("cpu" if platform == "cpu" else _PLATFORMS.get(platform) or _no_platform(platform))
    return library is None or library.knows(name)


def _no_platform(platform: str) -> Parser:
    raise unknown("platform", platform, _LIBRARIES)


def tokenise(text: str) -> tuple[list[str], str]:
    """The flags' names, dashes included, and what XLA would leave unread.

    XLA reads words separated by blanks, each `--name`, `--name=value` or `--name="quoted value"`, until
    the first that does not begin with a dash, and ignores the rest (`xla/parse_flags_from_env.cc`).
    """
    flags, rest = _parsed(text)
    return [name for name, _ in flags], rest


def flag_values(platform: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What the environment sets for a platform's compiler, by name without dashes: the last value of each, without quotes;
    "true" for a flag that stands alone."""
    texts = [_flags_text("XLA_FLAGS", environ), *([environ.get("LIBTPU_INIT_ARGS", "")] if platform == "tpu" else [])]
    flags = [flag for text in texts for flag in _parsed(text)[0]]
    return {name.lstrip("-"): value.removeprefix("=").strip("\"'") or "true" for name, value in flags}


def _parsed(text: str) -> tuple[list[tuple[str, str]], str]:
    """The flags as `tokenise` reads them, each a name and a value as it is written, and what XLA would leave unread."""
    flags: list[tuple[str, str]] = []
    rest = text.lstrip(_WHITESPACE)
    while rest.startswith("-"):
        match = _FLAG.match(rest)
        assert match is not None, "every text that begins with a dash matches"
        flags.append((match["name"], match["value"]))
        rest = rest[match.end() :].lstrip(_WHITESPACE)
    return flags, rest


def _flags_text(variable: str, environ: Mapping[str, str]) -> str:
    """A variable's flags: its value, or the content of the file that it names."""
    value = environ.get(variable, "")
    if not value or value.lstrip(_WHITESPACE).startswith("-"):
        return value
    try:
        return Path(value).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"{variable}={value!r} does not begin with '--', so XLA takes it for a file of flags, "
            f"and cannot read it ({error.strerror}): write --name=value or an existing file"
        ) from None


def _check_libtpu_arguments(text: str) -> None:
    """Checks the `xla_` names only: libtpu has flags of other kinds, whose strings are not told apart."""
    library = _library("tpu")
    if library is None:
        return
    names = [re.sub(r"^-{1,2}(no(?=xla_))?", "", word.partition("=")[0]) for word in text.split() if word[0] == "-"]
    strange = [f"--{name}" for name in names if name.startswith("xla_") and not library.knows(name)]
    if strange:
        told = _described(strange, library, elsewhere=False)
        raise UserError(f"LIBTPU_INIT_ARGS: {_TITLES['tpu']} does not know {told}")


def _described(strange: list[str], library: "_Library", elsewhere: bool = True) -> str:
    return "; ".join(f"{flag!r}: {_advice(flag, library, elsewhere)}" for flag in dict.fromkeys(strange))


def _advice(flag: str, library: "_Library", elsewhere: bool) -> str:
    """What to write instead. `elsewhere`: whether the flag may be meant for libtpu."""
    name = flag.lstrip("-")
    negated = name.removeprefix("no")
    if library.knows(name):
        return f"write two dashes, '--{name}'"
    if negated != name and library.knows(negated):
        return f"write '--{negated}=false'"
    candidates = sorted(library.standalone)
    wanted = name.replace("-", "_").lower()
    closest = [] if elsewhere and name.startswith("xla_tpu_") else difflib.get_close_matches(wanted, candidates, n=1)
    if closest and difflib.SequenceMatcher(None, wanted, closest[0]).ratio() > _SURELY_MEANT:
        return f"did you mean '--{closest[0]}'?"
    tpu = _library("tpu")
    if elsewhere and (name.startswith("xla_tpu_") or (tpu and tpu is not library and tpu.knows(name))):
        return "flags of the TPU compiler go into LIBTPU_INIT_ARGS"
    return f"did you mean '--{closest[0]}'?" if closest else "no flag is named like it, remove it"


@functools.cache
def _library(parser: Parser) -> "_Library | None":
    for package, file in _LIBRARIES[parser]:
        if "." in package and importlib.util.find_spec(package.partition(".")[0]) is None:
            continue
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(folder) / file).is_file():
                return _Library(path)
    return None


@dataclasses.dataclass(frozen=True)
class _Library:
    """The flag names in a shared library: NUL-terminated strings.

    A name may share its bytes with the end of a longer string (linkers merge them), so `knows` does not
    ask what is in front of it; `standalone` does, which makes for better suggestions.
    """

    path: Path

    def knows(self, name: str) -> bool:
        # any short word ends some string, so only names of the usual form get the benefit of the doubt
        before = b"" if name.startswith("xla_") else b"\0"
        return bool(name) and self._bytes.find(before + name.encode("ascii", "replace") + b"\0") >= 0

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(match.group().decode() for match in _NAMES.finditer(self._bytes))

    @functools.cached_property
    def standalone(self) -> frozenset[str]:
        content = self._bytes
        found = (m.group().decode() for m in _NAMES.finditer(content) if content[m.start() - 1] == 0)
        return frozenset(found)

    @functools.cached_property
    def _bytes(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
