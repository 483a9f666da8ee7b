"""Concatenating token arrays and cutting the stream into windows that overlap by one token, as a Grain dataset.

Grain's own concat-then-split packing cuts into disjoint pieces, which would leave the first token of every piece
without a prediction, and its state does not survive JSON.
"""

from collections.abc import Callable
from typing import Any

import grain
import numpy as np


class WindowDataset(grain.IterDataset[np.ndarray]):
    """Windows of `seq + 1` tokens, int32 [seq + 1], of the concatenation of the parent's arrays, int32 [any length].

    Window i holds the tokens i * seq to (i + 1) * seq of the stream, both included: each token but the first is
    predicted once. Tokens at the end that fill no window are dropped; a parent that repeats has no end.
    """

    def __init__(self, parent: grain.IterDataset[np.ndarray], seq: int) -> None:
        super().__init__(parent)
        self._seq = seq

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return _WindowIterator(self._parent.__iter__(), self._seq)


class _WindowIterator(grain.DatasetIterator[np.ndarray]):
    """The state is a position in the stream: the parent's state before the array in which the next window begins,
    and the offset in that array. A window begins with the last token of the one before, so that is always the array
    that was read last."""

    def __init__(self, parent: grain.DatasetIterator[np.ndarray], seq: int) -> None:
        super().__init__(parent)
        self._seq = seq
        self._array_state: dict[str, Any] = parent.get_state()
        self._array: np.ndarray | None = None
        self._offset = 0

    def __next__(self) -> np.ndarray:
        if self._array is None:
            self._read()
        assert self._array is not None
        pieces = [self._array[self._offset :]]
        missing = self._seq + 1 - len(pieces[0])
        while missing > 0:
            pieces.append(self._read())
            missing -= len(pieces[-1])
        end = len(pieces[-1]) + min(missing, 0)
        pieces[-1] = pieces[-1][:end]
        self._offset = (self._offset if len(pieces) == 1 else 0) + end - 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _read(self) -> np.ndarray:
        state = self._parent.get_state()
        array = next(self._parent)
        self._array_state, self._array = state, array
        return array

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._array_state, "offset": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._array_state, self._array, self._offset = state["parent"], None, state["offset"]


def token_windows(
    items: grain.MapDataset[Any], tokens: Callable[[Any], np.ndarray], seq: int, *, threads: int, ahead: int
) -> grain.IterDataset[np.ndarray]:
    """Windows of `seq + 1` tokens over `tokens(item)` for each item, `ahead` of which are computed by `threads`."""
    arrays = items.map(tokens).to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))
    return WindowDataset(arrays, seq)
