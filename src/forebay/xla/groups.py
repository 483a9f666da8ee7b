"""Which devices a collective joins, from the forms in which XLA writes its groups."""

import dataclasses
import functools
import itertools
import math
import re

import numpy as np

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclasses.dataclass(frozen=True)
class Groups:
    """The devices of each group, or the pairs of a permute (`is_pairs`), as numbers in the module's order."""

    members: tuple[tuple[int, ...], ...]
    is_pairs: bool = False

    @property
    def size(self) -> int:
        """Devices in the largest group."""
        return max(map(len, self.members), default=1)

    def crosses(self, domain: int) -> bool:
        """Whether any group reaches beyond `domain` neighbouring devices, which a fast network joins."""
        return any(len({d // domain for d in group}) > 1 for group in self.members)

    def together(self, domain: int) -> int:
        """The fewest devices that a group has in one of the domains that it reaches."""
        return min(
            (n for group in self.members for n in _counts(tuple(d // domain for d in group)).values()), default=1
        )


def groups_of(attributes: str, devices: int) -> Groups | None:
    """The groups in the text of a collective's attributes; without any, one of all `devices`.

    None for a form that is not known here.
    """
    if pairs := _PAIRS.search(attributes):
        return Groups(_lists(pairs[1]), is_pairs=True)
    if "replica_groups=" not in attributes or "replica_groups={}" in attributes:
        return Groups((tuple(range(devices)),))
    start = attributes.index("replica_groups=")
    return _parse(attributes[start : start + 20000].partition(", metadata=")[0])


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Groups | None:
    if listed := _LISTED.match(text):
        return Groups(_lists(listed[1]))
    if iota := _IOTA.match(text):
        shape, order = _numbers(iota[1]), _numbers(iota[2])
        devices = np.arange(math.prod(order)).reshape(order)
        if iota[3]:
            devices = devices.transpose(_numbers(iota[3]))
        return Groups(tuple(map(tuple, devices.reshape(shape).tolist())))
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh[1], mesh[2])
    return None


def _mesh_groups(axes: str, chosen: str) -> Groups | None:
    """`mesh['a'=2,'b'=4] {'b'}`: the devices that differ in `b` alone. Of an axis a part can be chosen: `'b':(1)2`."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen)
    if not sizes or any(name not in sizes for name, _, _ in parts):
        return None
    # every axis in up to three: what is left of the chosen part, it, and what is right of it
    shape: list[int] = []
    taken: list[int] = []
    for name, size in sizes.items():
        mine = sorted((int(before or 1), int(part or size)) for n, before, part in parts if n == name)
        position = 1
        for before, part in mine:
            shape += [before // position, part]
            taken.append(len(shape) - 1)
            position = before * part
        shape.append(size // position)
    left = [d for d in range(len(shape)) if d not in taken]
    devices = np.arange(math.prod(shape)).reshape(shape).transpose([*left, *taken])
    return Groups(tuple(map(tuple, devices.reshape(-1, math.prod(shape[d] for d in taken)).tolist())))


@functools.lru_cache(maxsize=4096)
def _counts(domains: tuple[int, ...]) -> dict[int, int]:
    return {domain: len(list(same)) for domain, same in itertools.groupby(sorted(domains))}


def _lists(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_numbers(group) for group in re.findall(r"\{([\d,]*)\}", text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)
