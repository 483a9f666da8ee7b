"""What must be the same in all processes of a run, whoever starts them."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from forebay.errors import UserError

_TEXT_BYTES = 2048


def is_first() -> bool:
    return jax.process_index() == 0


def together(act: Callable[[], None]) -> None:
    """Runs `act` in every process; where it is refused in any, all raise the refusal of the first of these.

    For what looks at a machine's own files, and for what must be over everywhere before any process goes on.

    Raises:
        UserError: of any process.
    """
    if jax.process_count() == 1:
        act()
        return
    from jax.experimental import multihost_utils

    refusal: UserError | None = None
    try:
        act()
    except UserError as error:
        refusal = error
    text = _encoded("" if refusal is None else f"{refusal.exit_code}:{refusal}")
    for number, other in enumerate(multihost_utils.process_allgather(text)):
        code, _, message = _decoded(other).partition(":")
        if message:
            if refusal is not None and number == jax.process_index():
                raise refusal
            error = UserError(message)
            error.exit_code = int(code)  # pyright: ignore[reportAttributeAccessIssue]
            raise error


def from_first(make: Callable[[], str]) -> str:
    """A text that the first process makes, in all of them.

    Raises:
        UserError: the first process's.
    """
    if jax.process_count() == 1:
        return make()
    from jax.experimental import multihost_utils

    made = [""]

    def act() -> None:
        if is_first():
            made[0] = make()

    together(act)
    content = made[0].encode()
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    padded = np.zeros(length, np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8).tobytes().decode()


def _encoded(text: str) -> np.ndarray:
    content = text.encode()[:_TEXT_BYTES]
    return np.pad(np.frombuffer(content, np.uint8), (0, _TEXT_BYTES - len(content)))


def _decoded(content: Any) -> str:
    return np.asarray(content, np.uint8).tobytes().rstrip(b"\0").decode(errors="ignore")
