"""What to train on, as a dataclass: the command line comes from it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The text to train on and how it becomes tokens.

    Attributes:
        path: a file, a directory (searched recursively, hidden files skipped) or a glob of text (.txt, .md, .py, ...),
            JSON lines (.jsonl, .ndjson, .json) or Parquet; stdlib is the source and the documentation of the Python
            standard library that runs the program.
        validation_path: text to validate on, given like path; unset, a part of path is held out.
        validation_fraction: the part of path held out when validation_path is unset; 0 holds out nothing. Of several
            text files whole files are held out, of a single one its end, of JSON lines and Parquet single records.
            Which ones depends on the data alone, not on seed.
        text_key: the key of a JSON line, or the column of a Parquet file, that holds the text.
        tokenizer: bytes, or the path of a Hugging Face tokenizer.json.
        shuffle: read the files in a new order each epoch, and shuffle sequences within a window; otherwise everything
            comes in the order of the sorted file names.
        seed: seed of the shuffling.
    """

    path: str = "stdlib"
    validation_path: str | None = None
    validation_fraction: float = 0.05
    text_key: str = "text"
    tokenizer: str = "bytes"
    shuffle: bool = True
    seed: int = 0
