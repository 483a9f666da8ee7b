"""HTML from Python in which text is escaped by construction: only `Markup` goes in as it is."""

import html
import json
import re
from collections.abc import Mapping
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


_EMPTY = ("br", "col", "input", "meta")


def el(tag: str, *children: Any, **attributes: Any) -> Markup:
    """An element. Children that are `Markup` go in as they are, others as escaped text, None not at all.

    Attributes: `class_` is class, `data_row` is data-row; None and False leave one out, True has no value.
    """
    text = "".join(f" {_attribute(k, v)}" for k, v in attributes.items() if v is not None and v is not False)
    if tag in _EMPTY:
        return Markup(f"<{tag}{text}>")
    return Markup(f"<{tag}{text}>{join(*children)}</{tag}>")


def join(*children: Any) -> Markup:
    """Children one after another, escaped as in `el`."""
    return Markup("".join(c if isinstance(c, Markup) else html.escape(str(c)) for c in children if c is not None))


def _attribute(name: str, value: Any) -> str:
    name = name.rstrip("_").replace("_", "-")
    return name if value is True else f'{name}="{html.escape(str(value))}"'


def script_json(data: Any) -> Markup:
    """`data` as JSON that a script element can hold: no `</script>` and no `<!--` can appear in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def fill(template: str, parts: Mapping[str, str]) -> str:
    """`template` with each `{{name}}` replaced once; what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
