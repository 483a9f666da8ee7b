"""From a configuration to batches."""

import dataclasses
import hashlib
import itertools
import json
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.errors import UserError, missing_extra
from forebay.train.data.config import DataConfig
from forebay.train.data.corpus import Shard, train_shards, validation_shards
from forebay.train.data.reading import documents
from forebay.train.data.tokenizers import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import grain

type Batch = dict[str, np.ndarray]
"""`inputs` and `targets`, int32 [rows, seq]; the targets are the inputs one token later."""

# Sequences are shuffled among this many tokens (or an epoch, where that is less): those of some sixty ordinary files.
_SHUFFLE_TOKENS = 2**20
_READ_THREADS = 4
_SHARDS_AHEAD = 16
_BATCHES_AHEAD = 2
# Data up to this size is read once before training, so that a bad line is found before the first step.
_CHECKED_BYTES = 2**27


class TrainIterator(Iterator[Batch]):
    """Endless training batches, with a position that can be stored and taken up again.

    The position counts in sequences of the whole stream, so that it can be taken up with another number of processes
    and another batch size.
    """

    def __init__(self, batches: "grain.DatasetIterator[Batch]", fingerprint: str) -> None:
        self._fingerprint = fingerprint
        # Grain's iterator is closed and let go with this one or when the interpreter exits, whichever is first: left to
        # the interpreter, its clean-up comes after that of the modules it uses, and prints a traceback.
        self._open = [batches]
        self._close = weakref.finalize(self, _close, self._open)

    def __next__(self) -> Batch:
        if not self._open:
            raise StopIteration
        return next(self._open[0])

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch that was returned; goes through JSON unchanged."""
        return {"data": self._fingerprint, "position": self._open[0].get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position from `get_state`; the next batch is the one that would have come next there.

        Raises:
            UserError: it is the position in other data, or under another tokenizer, sequence length, seed or shuffling.
        """
        if not isinstance(state, dict) or state.keys() != {"data", "position"}:
            raise UserError("this is not a stored data position: resume from another checkpoint")
        if state["data"] != self._fingerprint:
            raise UserError(
                "the stored data position belongs to other data (files, tokenizer, seq, seed or shuffle differ): "
                "resume with the configuration of the run, or start a new one"
            )
        self._open[0].set_state(state["position"])

    def close(self) -> None:
        """Ends the threads that read ahead; there are no batches after it."""
        self._close()


def _close(iterators: "list[grain.DatasetIterator[Batch]]") -> None:
    iterators.pop().close()


def make_train_iterator(
    config: DataConfig, *, batch: int, seq: int, process_index: int = 0, process_count: int = 1
) -> TrainIterator:
    """Endless batches of packed sequences: epoch after epoch, each in a new order, a function of `config` alone.

    Documents are framed by BOS and EOS and concatenated, across epochs too, and the stream is cut into sequences;
    with `config.shuffle` the order of the shards changes each epoch and sequences are shuffled among about a million
    tokens. Every process reads the whole stream and keeps its rows, the contiguous block `process_index` of
    `process_count` of each batch: put together in the order of the processes, they are the batches of one process.

    Args:
        config: the data.
        batch: sequences per step, over all processes.
        seq: tokens per sequence.
        process_index: which process this is.
        process_count: how many there are; divides `batch`.

    Returns:
        An iterator of `inputs` and `targets`, int32 [batch / process_count, seq].

    Raises:
        UserError: bad input, in `config` or in a file. Data up to 128 MiB is read before the first batch, so that a
            bad line is found here; what is wrong with larger data is raised when it is reached.
        MissingExtraError: Grain, or what a file or tokenizer needs, is not installed.
    """
    rows = _rows(batch, seq, process_index, process_count)
    if not 0 <= config.seed < 2**31:
        raise UserError(f"the data seed is {config.seed}: give a number from 0 to {2**31 - 1}")
    grain, packing = _import_grain()
    tokenizer = load_tokenizer(config.tokenizer)
    shards = train_shards(config)
    tokens = _Tokens(tokenizer, config.text_key)
    shuffle_tokens = _check(shards, tokens, config, seq)

    items = grain.MapDataset.source(shards)
    if config.shuffle:
        items = items.shuffle(seed=config.seed)
    windows = packing.token_windows(items.repeat(), tokens, seq, threads=_READ_THREADS, ahead=_SHARDS_AHEAD)
    if config.shuffle:
        windows = grain.experimental.WindowShuffleIterDataset(
            windows, window_size=max(1, shuffle_tokens // seq), seed=config.seed
        )
    batches = windows.batch(batch, drop_remainder=True).map(lambda windows: _as_batch(windows[rows]))
    batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=_BATCHES_AHEAD)
    return TrainIterator(batches.__iter__(), _fingerprint(config, shards, tokenizer, seq))


def make_validation_batches(
    config: DataConfig, *, batch: int, seq: int, max_batches: int, process_index: int = 0, process_count: int = 1
) -> list[Batch]:
    """The first `max_batches` whole batches of the validation text, in a fixed order; fewer where it has fewer.

    Args:
        config: the data.
        batch: sequences per batch, over all processes.
        seq: tokens per sequence.
        max_batches: how many at most; at least 1.
        process_index: which process this is.
        process_count: how many there are; divides `batch`.

    Returns:
        Batches of `inputs` and `targets`, int32 [batch / process_count, seq].

    Raises:
        UserError: bad input, in `config` or in a file; no validation text; less than one batch of it.
        MissingExtraError: Grain, or what a file or tokenizer needs, is not installed.
    """
    rows = _rows(batch, seq, process_index, process_count)
    if max_batches < 1:
        raise UserError(f"validating on {max_batches} batches: give at least 1")
    grain, packing = _import_grain()
    tokenizer = load_tokenizer(config.tokenizer)
    shards = validation_shards(config)
    tokens = _Tokens(tokenizer, config.text_key)
    # read in this thread: it is over soon, and reading ahead would tokenise shards that are not needed
    windows = packing.token_windows(grain.MapDataset.source(shards), tokens, seq, threads=0, ahead=0)
    batches = windows.batch(batch, drop_remainder=True).map(lambda windows: _as_batch(windows[rows]))
    taken = list(itertools.islice(batches, max_batches))
    if not taken:
        count = sum(len(tokens(shard)) for shard in shards)
        raise UserError(
            f"the validation text has {count:,} tokens, and one batch of {batch} sequences of {seq} takes "
            f"{batch * seq + 1:,}: use a smaller batch or seq, a larger validation_fraction, or set validation_path"
        )
    return taken


def unigram_entropy(batches: Iterable[Batch]) -> float:
    """The entropy of the distribution of single tokens among the targets of `batches`, in nats per token.

    H = -sum_i p_i ln(p_i), with p_i the share of token i (Shannon, 1948, section 6). No model that predicts every
    token from the frequencies alone, even those of these very batches, has a lower loss. With the byte-level tokenizer
    a token is a byte, or the BOS or EOS of a document.

    Raises:
        UserError: there is no token.
    """
    counts = np.zeros(0, np.int64)
    for batch in batches:
        seen = np.bincount(batch["targets"].ravel())
        counts = np.pad(counts, (0, max(0, len(seen) - len(counts))))
        counts[: len(seen)] += seen
    if not counts.sum():
        raise UserError("the entropy of no tokens: give at least one batch")
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """The tokens of a shard: its documents, each framed by BOS and EOS, one after another, int32 [tokens]."""

    tokenizer: Tokenizer
    text_key: str

    def __call__(self, shard: Shard) -> np.ndarray:
        begin, end = self._frame()
        pieces = [
            piece for text in documents(shard, self.text_key) for piece in (begin, self.tokenizer.encode(text), end)
        ]
        return np.concatenate([np.zeros(0, np.int32), *pieces], dtype=np.int32)

    def _frame(self) -> tuple[np.ndarray, np.ndarray]:
        """What goes before and after a document. One token that is both (GPT-2's) separates documents once."""
        bos, eos = self.tokenizer.bos_id, self.tokenizer.eos_id
        begin = [] if bos is None or bos == eos else [bos]
        return np.asarray(begin, np.int32), np.asarray([] if eos is None else [eos], np.int32)


def _as_batch(windows: np.ndarray) -> Batch:
    """Windows, int32 [rows, seq + 1], as inputs and targets."""
    return {"inputs": np.ascontiguousarray(windows[:, :-1]), "targets": np.ascontiguousarray(windows[:, 1:])}


def _rows(batch: int, seq: int, process_index: int, process_count: int) -> slice:
    """The rows of a batch that belong to a process."""
    for name, value in (("batch", batch), ("seq", seq), ("process_count", process_count)):
        if value < 1:
            raise UserError(f"{name} is {value}: give at least 1")
    if not 0 <= process_index < process_count:
        raise UserError(f"process {process_index} of {process_count}: processes count from 0 to {process_count - 1}")
    if batch % process_count:
        raise UserError(
            f"a batch of {batch} sequences does not divide over {process_count} processes: "
            f"use a multiple of {process_count}"
        )
    rows = batch // process_count
    return slice(process_index * rows, (process_index + 1) * rows)


def _check(shards: Sequence[Shard], tokens: _Tokens, config: DataConfig, seq: int) -> int:
    """Reads the data, or the first 128 MiB of it, and tokenises the beginning.

    Returns how many tokens to shuffle among: `_SHUFFLE_TOKENS`, or those of an epoch where it has fewer.
    """
    count = size = 0
    for shard in shards:
        if count <= max(seq, _SHUFFLE_TOKENS):
            count += len(tokens(shard))
        elif size >= _CHECKED_BYTES:
            break
        else:
            for _ in documents(shard, config.text_key):
                pass
        size += shard.size_bytes
    if count == 0:
        raise UserError(
            f"there is no text to train on in {config.path!r}: give data with text in it, or hold out less of it"
        )
    if count <= seq:
        raise UserError(
            f"a sequence is longer than the data: seq={seq:,} needs {seq + 1:,} tokens and {config.path!r} has "
            f"{count:,} to train on; use a smaller seq or more data"
        )
    return min(count, _SHUFFLE_TOKENS)


def _fingerprint(config: DataConfig, shards: Sequence[Shard], tokenizer: Tokenizer, seq: int) -> str:
    """A digest of all that the stream of sequences depends on, short of the contents of the files."""
    content = [
        [[shard.name, shard.kind, shard.start, shard.stop, shard.keep] for shard in shards],
        [tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id],
        [config.text_key, config.shuffle, config.seed, seq],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _import_grain() -> tuple[Any, Any]:
    """Grain and the datasets built on it: imported late, because only training needs them."""
    try:
        import grain

        from forebay.train.data import packing
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "grain", "train", "reading training data") from error
    return grain, packing
