"""Which arrays of a training state live in host memory, for a share of its bytes."""

from collections.abc import Sequence

LEAST_BYTES = 2**20
"""Arrays that take less on a device stay there: thousands of small copies cost more than their bytes."""


def choose_hosted(sizes: Sequence[int], fraction: float, least_bytes: int = LEAST_BYTES) -> list[bool]:
    """Which arrays to keep in host memory so that they are at least `fraction` of all bytes, and as few more as possible.

    The same fraction gives the same arrays. Arrays of less than `least_bytes` stay on the device, so that
    with 1.0 nearly everything moves.

    Args:
        sizes: bytes of each array on one device.
        fraction: 0 to 1.
    """
    movable = [i for i, size in enumerate(sizes) if size >= least_bytes]
    wanted = min(round(fraction * sum(sizes)), sum(sizes[i] for i in movable))
    chosen: set[int] = set()
    left = sorted(movable, key=lambda i: (-sizes[i], i))
    missing = wanted
    while missing > 0 and left:
        after = sum(sizes[i] for i in left[1:])
        # the largest is skipped where those after it suffice and it is more than is missing
        if not (sizes[left[0]] > missing and after >= missing):
            chosen.add(left[0])
            missing -= sizes[left[0]]
        left = left[1:]
    return [i in chosen for i in range(len(sizes))]
