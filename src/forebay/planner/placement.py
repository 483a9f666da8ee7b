"""What a placement is, how one is written on a command line, and MaxText's presets by name."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from forebay.errors import UserError, unknown

Where = Literal["device", "host", "recompute"]
WHERES: tuple[Where, ...] = get_args(Where)

EVERYTHING = "*"
"""As a tensor's name: every residual that has no placement of its own, named or not."""

ALWAYS_KEPT = frozenset({"moe_routing_maps"})
"""Choices: kept on the device wherever they are not placed. Made again with other roundings they could differ, and
rows that were kept would not go with rows that are made again. They are small."""


class _FrozenDict(dict[str, Where]):
    """A dictionary that cannot be changed, and so can be hashed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a placement cannot be changed: make another with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the activations of layers `[first, past_last)` of one stack go.

    `tensors` maps the name of an activation to `device`, `host` or `recompute`; a name that is not
    in it is recomputed, unless it is one of `ALWAYS_KEPT`. `{"*": "device"}` keeps all that differentiation would keep without any
    checkpointing.
    """

    stack: str
    layers: tuple[int, int]
    tensors: Mapping[str, Where]

    def __post_init__(self):
        first, past_last = self.layers
        if not 0 <= first < past_last:
            raise UserError(f"placement of {self.stack!r}: layers {first}:{past_last} is not a range first:past_last")
        for name, where in self.tensors.items():
            if where not in WHERES:
                raise unknown(f"placement of {name!r}", str(where), WHERES)
            if name in ALWAYS_KEPT and where == "recompute":
                raise UserError(
                    f"'{name}=recompute' is not possible: made again, it could be another one; place it on device or host"
                )
            if name == EVERYTHING and where != "device":
                raise UserError(
                    f"'*={where}' is not possible: only '*=device', which keeps every residual on the device"
                )
            if EVERYTHING in self.tensors and where == "recompute":
                raise UserError(
                    f"'{name}=recompute' does nothing beside '*=device', which keeps everything: drop one of them"
                )
        object.__setattr__(self, "tensors", _FrozenDict(self.tensors))

    @property
    def on_device(self) -> "Placement":
        """The same, with what goes to the host kept on the device."""
        kept: Mapping[str, Where] = {n: "device" if w == "host" else w for n, w in self.tensors.items()}
        return dataclasses.replace(self, tensors=kept)

    @property
    def in_loop(self) -> "Placement":
        """What there is of it in a loop over layers: a loop of one is none to the compiler, and moves nothing."""
        return self if self.layers[1] - self.layers[0] > 1 else self.on_device

    def names(self, where: Where) -> tuple[str, ...]:
        return tuple(n for n, w in self.tensors.items() if w == where)


_QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
_MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1")


def _all(where: Where, *names: str) -> Mapping[str, Where]:
    return dict.fromkeys(names, where)


# MaxText's `remat_policy` values (maxtext 0.2.5, layers/nnx_decoders.py) by the tensors they name.
PRESETS: Mapping[str, Mapping[str, Where]] = {
    "none": {EVERYTHING: "device"},
    "full": {},
    "minimal": _all("device", *_QKV, "out_proj", *_MLP_IN, "mlpwo"),
    "minimal_flash": _all("device", *_QKV, "out_proj", *_MLP_IN, "mlpwo", "context"),  # its older name of the next
    "minimal_with_context": _all("device", *_QKV, "out_proj", *_MLP_IN, "mlpwo", "context"),
    "save_dot_with_context_except_mlp": _all("device", *_QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": _all("device", *_QKV, "out_proj", "mlpwo"),
    "save_dot_except_mlp": _all("device", *_QKV, "out_proj"),
    "save_qkv_proj": _all("device", *_QKV),
    "save_out_proj": _all("device", "out_proj"),
    "qkv_proj_offloaded": _all("host", "query_proj", "key_proj", "value_proj", "kv_proj"),
    "minimal_offloaded": _all("host", *_QKV, "out_proj", *_MLP_IN, "mlpwo"),
}


def parse_placement(
    text: str, stacks: Mapping[str, int], carried: Mapping[str, Iterable[str]]
) -> tuple[Placement, ...]:
    """A command line's placement.

    The grammar, in words: parts separated by `;`, each `[stack:]item,item,...[@first:past_last]`, an
    item being a preset's name or `tensor=device|host|recompute`. Items are read left to right and a
    `tensor=` item overrides a preset. Without a stack a part holds for all stacks that carry the
    tensor; without a range, for all layers. `full` is where everything starts.

    Examples: `minimal_offloaded`; `decoder_layer_input=host`; `full,context=device`;
    `minimal_offloaded@0:28;minimal@28:32`; `moe_layers:moe_mlpwi_0=host`.

    Args:
        text: the placement.
        stacks: the model's stacks and their numbers of layers.
        carried: for each stack, the names that its activations carry.

    Raises:
        UserError: an unknown preset, stack or tensor (closest name first); a tensor given two
            placements; ranges that overlap, leave a gap or exceed the stack.
    """
    by_stack: dict[str, list[Placement]] = {stack: [] for stack in stacks}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        stack_names, items, layers = _split_part(part, stacks)
        explicit = _explicit_items(items, part)
        presets = [item for item in items if "=" not in item]
        if len(presets) > 1:
            raise UserError(
                f"placement {part!r} names the presets {' and '.join(presets)}: name one, and tensor=... for the rest"
            )
        known = {name for stack in stack_names for name in carried[stack]}
        for name in explicit:
            if name not in known and name != EVERYTHING:
                raise unknown(f"tensor (no activation of {', '.join(stack_names)} carries it)", name, sorted(known))
        for stack in stack_names:
            tensors: dict[str, Where] = {}
            for item in items:
                if "=" not in item:
                    preset = PRESETS[item]
                    tensors.update({n: w for n, w in preset.items() if n in carried[stack] or n == EVERYTHING})
            tensors.update({n: w for n, w in explicit.items() if n in carried[stack] or n == EVERYTHING})
            by_stack[stack].append(Placement(stack, layers or (0, stacks[stack]), tensors))
    placements = []
    for stack, parts in by_stack.items():
        placements += parts or [Placement(stack, (0, stacks[stack]), {})]
    return check_cover(placements, stacks)


def check_cover(placements: Iterable[Placement], stacks: Mapping[str, int]) -> tuple[Placement, ...]:
    """`placements` in order of layers, each layer of each stack covered once.

    Raises:
        UserError: an unknown stack, a gap, an overlap, or a layer that the stack does not have.
    """
    ordered = []
    placements = list(placements)
    for placement in placements:
        if placement.stack not in stacks:
            raise unknown("layer stack", placement.stack, stacks)
    for stack, length in stacks.items():
        ranges = sorted((p for p in placements if p.stack == stack), key=lambda p: p.layers)
        reached = 0
        for p in ranges:
            first, past_last = p.layers
            if past_last > length:
                raise UserError(f"placement of {stack!r} names layers {first}:{past_last}, and it has {length} layers")
            if first < reached:
                raise UserError(
                    f"two placements for layer {first} of {stack!r}: give each layer one range, and separate the tensors of "
                    f"one range by commas"
                )
            if first > reached:
                raise UserError(
                    f"no placement for layers {reached}:{first} of {stack!r}: add a range for them (@{reached}:{first})"
                )
            reached = past_last
        if reached < length:
            raise UserError(
                f"no placement for layers {reached}:{length} of {stack!r}: add a range for them (@{reached}:{length})"
            )
        ordered += ranges
    return tuple(ordered)


def _split_part(part: str, stacks: Mapping[str, int]) -> tuple[list[str], list[str], tuple[int, int] | None]:
    body, at, span = part.partition("@")
    layers = None
    if at:
        match = re.fullmatch(r"\s*(\d+):(\d+)\s*", span)
        if not match:
            raise UserError(f"placement {part!r}: write a range of layers as @first:past_last, for example @0:28")
        layers = (int(match[1]), int(match[2]))
    stack, colon, items = body.rpartition(":")
    if colon and stack.strip() not in stacks:
        raise unknown("layer stack", stack.strip(), stacks)
    if layers is not None and not colon and len(stacks) > 1:
        raise UserError(
            f"placement {part!r}: say which stack the range is of ({', '.join(stacks)}), as in {next(iter(stacks))}:..."
        )
    item_list = [i.strip() for i in items.split(",") if i.strip()]
    if not item_list:
        raise UserError(
            f"placement {part!r} is empty: give a preset ({', '.join(PRESETS)}) or tensor=device|host|recompute"
        )
    return [stack.strip()] if colon else list(stacks), item_list, layers


def _explicit_items(items: list[str], part: str) -> dict[str, Where]:
    explicit: dict[str, Where] = {}
    for item in items:
        name, equals, where = (s.strip() for s in item.partition("="))
        if not equals:
            if item not in PRESETS:
                raise unknown("placement preset", item, PRESETS)
            continue
        if where not in WHERES:
            raise unknown(f"placement of {name!r}", where, WHERES)
        if name in explicit:
            raise UserError(
                f"placement {part!r} places {name!r} twice ({explicit[name]} and {where}): keep one of them"
            )
        explicit[name] = where  # type: ignore[assignment]
    return explicit
