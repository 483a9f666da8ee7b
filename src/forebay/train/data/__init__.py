"""Text in, batches of packed sequences out, through Grain.

    files -> shards -> documents -> tokens -> windows of seq + 1 tokens -> batches

A corpus is a list of shards of about 1 MiB (`corpus`), small enough to shuffle and to read ahead, so that a corpus of
any size streams. A shard yields documents (`reading`), a tokenizer turns each into ids framed by its BOS and EOS
(`tokenizers`), the ids are concatenated and cut into windows that overlap by one token (`packing`), and Grain does the
rest: the order of an epoch, reading ahead, shuffling, batching, the state of the iterator (`pipeline`).
"""

from forebay.train.data.config import DataConfig
from forebay.train.data.pipeline import (
    Batch,
    TrainIterator,
    make_train_iterator,
    make_validation_batches,
    unigram_entropy,
)
from forebay.train.data.tokenizers import ByteTokenizer, HFTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "DataConfig",
    "HFTokenizer",
    "Tokenizer",
    "TrainIterator",
    "load_tokenizer",
    "make_train_iterator",
    "make_validation_batches",
    "unigram_entropy",
]
