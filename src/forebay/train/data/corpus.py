"""Finding the files of a corpus, cutting them into shards, and holding out a part for validation.

Nothing is read here but directories, file sizes, a few bytes at the cuts of large text files and the footers of
Parquet files, so that a corpus of any size is listed in moments.
"""

import dataclasses
import glob
import hashlib
import importlib
import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from forebay.errors import UserError, missing_extra
from forebay.train.data.config import DataConfig

TEXT_SUFFIXES = frozenset(
    {
        *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".tsv"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".jl", ".r"),
        *(".rb", ".sh", ".sql"),
    }
)
JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
PARQUET_SUFFIXES = frozenset({".parquet"})
_READABLE = TEXT_SUFFIXES | JSONL_SUFFIXES | PARQUET_SUFFIXES
_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".lz4"})

SHARD_BYTES = 2**20
_STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TOPICS_MODULE = "pydoc_data.topics"


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """A piece of a corpus that is read in one go.

    Attributes:
        path: the file.
        name: its path relative to the corpus, the same wherever the corpus lies.
        kind: how to read it. A "source" is a text that is left out where it is not UTF-8; a "topic" is one of pydoc's.
        start: first byte; of Parquet the row group.
        stop: past the last byte (of JSON lines: a line belongs to the shard in which it begins); of Parquet the row
            group after.
        size_bytes: about how much there is to read.
        keep: the part of the records to keep, as an interval of their hashes in [0, 1).
    """

    path: Path
    name: str
    kind: Literal["text", "source", "topic", "jsonl", "parquet"]
    start: int
    stop: int
    size_bytes: int
    keep: tuple[float, float] = (0.0, 1.0)

    @property
    def holds_records(self) -> bool:
        """Whether it holds many short documents, rather than (a part of) one."""
        return self.kind in ("jsonl", "parquet")


def train_shards(config: DataConfig) -> tuple[Shard, ...]:
    """The shards to train on, in the order of their names.

    Raises:
        UserError: nothing to read, a file of a kind that cannot be read, an empty file, a validation part outside
            [0, 1).
    """
    return _split(config)[0]


def validation_shards(config: DataConfig) -> tuple[Shard, ...]:
    """The shards to validate on, in the order of their names.

    Raises:
        UserError: as `train_shards`, and where nothing is held out.
    """
    if config.validation_path is not None:
        return tuple(_cut(_find(config.validation_path, config.text_key)))
    shards = _split(config)[1]
    if not shards:
        raise UserError(
            f"no validation text: validation_fraction={config.validation_fraction:g} of {config.path!r} is nothing; "
            "set validation_path, or a larger validation_fraction"
        )
    return shards


def _split(config: DataConfig) -> tuple[tuple[Shard, ...], tuple[Shard, ...]]:
    """Training and validation shards. The second is empty where `validation_path` is set or nothing is held out."""
    fraction = config.validation_fraction
    if not 0 <= fraction < 1:
        raise UserError(f"validation_fraction is {fraction:g}: give a part of the data, at least 0 and below 1")
    files = _find(config.path, config.text_key)
    if config.validation_path is not None or fraction == 0:
        return tuple(_cut(files)), ()
    texts = [shard for shard in files if not shard.holds_records]
    held_out = _held_out(texts, fraction) if len(texts) > 1 else frozenset()
    train, validation = [], []
    for shard in files:
        if shard.holds_records:
            train.append(dataclasses.replace(shard, keep=(fraction, 1.0)))
            validation.append(dataclasses.replace(shard, keep=(0.0, fraction)))
        elif len(texts) == 1:
            cut = _cut_position(shard, round(shard.stop * (1 - fraction)))
            train.append(_range(shard, 0, cut))
            validation.append(_range(shard, cut, shard.stop))
        else:
            (validation if shard in held_out else train).append(shard)
    return tuple(_cut(train)), tuple(_cut(validation))


def _held_out(texts: Sequence[Shard], fraction: float) -> frozenset[Shard]:
    """The texts to validate on: some, and not all, of at least two.

    The first in the order of a hash of their names, rather than those whose hash is below a threshold, which might be
    none of a few files.
    """
    count = min(max(1, round(fraction * len(texts))), len(texts) - 1)
    ranked = sorted(texts, key=lambda shard: hashlib.sha256(shard.name.encode()).digest())
    return frozenset(ranked[:count])


def _find(path: str, text_key: str) -> list[Shard]:
    """Every file of the corpus as one shard, sorted by name, texts without a byte left out."""
    if path == "stdlib":
        return _stdlib()
    files = [shard for file, name in _files(path) for shard in _whole(file, name, text_key)]
    if all(shard.size_bytes == 0 for shard in files):
        first = files[0].path
        more = f" and so are the {len(files) - 1} others" if len(files) > 1 else ""
        raise UserError(f"the data file {str(first)!r} is empty{more}: give a file with text in it")
    return [shard for shard in files if shard.size_bytes]


def _files(path: str) -> list[tuple[Path, str]]:
    """The files that `path` stands for, with their names within it, sorted by name.

    In a directory or for a glob, hidden files are skipped; in a directory, so are files that are not text by their
    extension, but compressed data is an error.
    """
    given = Path(path).expanduser()
    if path and given.is_dir():
        found = list(_walk(given))
        wanted = [file for file in found if file.suffix.lower() in _READABLE or _is_compressed_data(file)]
        if not wanted:
            there = ", ".join(f"{n} {suffix or 'without extension'}" for suffix, n in _suffixes(found).most_common(5))
            raise UserError(
                f"no text in the directory {path!r} (found: {there or 'no file'}): "
                "give one with .txt, .jsonl, .parquet or source files"
            )
        root = given
    elif path and given.exists():
        wanted, root = [given], given.parent
    elif glob.has_magic(path):
        matches = (Path(match) for match in {*glob.glob(str(given), recursive=True)})
        wanted = [match for match in matches if match.is_file()]
        if not wanted:
            raise UserError(f"no file matches {path!r}: check the pattern (quoted, ** for any depth)")
        root = Path(os.path.commonpath([str(file.parent) for file in wanted]))
    else:
        raise UserError(f"no data at {path!r}: give a file, a directory, a glob, or 'stdlib'")
    for file in wanted:
        _check_suffix(file)
    return sorted(((file, file.relative_to(root).as_posix()) for file in wanted), key=lambda item: item[1])


def _walk(directory: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below `directory`; hidden ones, and those in hidden directories or in those called `left_out`, are not
    among them."""

    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read the directory {error.filename!r}: {error.strerror}") from error

    for parent, directories, names in os.walk(directory, onerror=refuse):
        directories[:] = [name for name in directories if not name.startswith(".") and name not in left_out]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _suffixes(files: Iterable[Path]) -> Counter[str]:
    return Counter(file.suffix.lower() for file in files)


def _is_compressed_data(file: Path) -> bool:
    return file.suffix.lower() in _COMPRESSED and Path(file.stem).suffix.lower() in _READABLE


def _check_suffix(file: Path) -> None:
    suffix = file.suffix.lower()
    if suffix in _COMPRESSED:
        raise UserError(f"{str(file)!r} is compressed, which is not read: decompress it first")
    if suffix not in _READABLE:
        raise UserError(
            f"cannot tell how to read {str(file)!r} from its extension {suffix!r}: "
            f"text is {' '.join(sorted(TEXT_SUFFIXES))}, JSON lines {' '.join(sorted(JSONL_SUFFIXES))}, "
            "and .parquet; rename it to .txt if it is text"
        )


def _whole(file: Path, name: str, text_key: str) -> list[Shard]:
    """The file as one shard, or as one per row group."""
    suffix = file.suffix.lower()
    try:
        size = file.stat().st_size
        file.open("rb").close()
    except OSError as error:
        raise UserError(f"cannot read {str(file)!r}: {error.strerror}; correct the path or its permissions") from error
    if suffix in TEXT_SUFFIXES:
        return [Shard(file, name, "text", 0, size, size)]
    # an empty text among others is ordinary (an __init__.py); an empty file of records is a download that failed
    if size == 0:
        raise UserError(f"the data file {str(file)!r} is empty: fetch it again or remove it")
    if suffix in JSONL_SUFFIXES:
        return [Shard(file, name, "jsonl", 0, size, size)]
    return _row_groups(file, name, text_key)


def _row_groups(file: Path, name: str, text_key: str) -> list[Shard]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise missing_extra("pyarrow", "train", "reading Parquet") from error
    try:
        with pq.ParquetFile(file) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{str(file)!r} is not a Parquet file ({reason}): fetch it again or remove it") from error
    if text_key not in schema.names:
        raise UserError(
            f"the Parquet file {str(file)!r} has no column {text_key!r}: "
            f"set text_key to one of {', '.join(schema.names)}"
        )
    column = schema.field(text_key).type
    value = column.value_type if pa.types.is_dictionary(column) else column
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        raise UserError(
            f"the column {text_key!r} of {str(file)!r} holds {column}, not text: "
            f"set text_key to a column of strings, of {', '.join(schema.names)}"
        )
    if metadata.num_rows == 0:
        raise UserError(f"the data file {str(file)!r} has no rows: fetch it again or remove it")
    groups = range(metadata.num_row_groups)
    return [Shard(file, name, "parquet", i, i + 1, metadata.row_group(i).total_byte_size) for i in groups]


def _stdlib() -> list[Shard]:
    """The standard library's source files (with its tests, half of the text) and pydoc's topics."""
    root = Path(sysconfig.get_path("stdlib"))
    topics = importlib.import_module(_TOPICS_MODULE)
    topics_file = Path(*_TOPICS_MODULE.split(".")).with_suffix(".py")
    found = (file.relative_to(root) for file in _walk(root, _STDLIB_LEFT_OUT) if file.suffix == ".py")
    sources = [file for file in found if file != topics_file]
    if not sources:
        raise UserError(f"no source files of the standard library in {str(root)!r}: set path to text of your own")
    shards = []
    for file in sources:
        size = (root / file).stat().st_size
        shards.append(Shard(root / file, file.as_posix(), "source", 0, size, size))
    for topic, text in topics.topics.items():
        shards.append(Shard(root / topics_file, f"{_TOPICS_MODULE}/{topic}", "topic", 0, len(text), len(text)))
    return sorted((shard for shard in shards if shard.size_bytes), key=lambda shard: shard.name)


def topic_text(shard: Shard) -> str:
    """The text of a shard of kind "topic"."""
    topics: dict[str, str] = importlib.import_module(_TOPICS_MODULE).topics
    return topics[shard.name.removeprefix(f"{_TOPICS_MODULE}/")]


def _cut(shards: Iterable[Shard]) -> Iterator[Shard]:
    """Shards of at most about `SHARD_BYTES`, empty ones left out. A text that is cut becomes several documents."""
    for shard in shards:
        if shard.stop <= shard.start:
            continue
        if shard.kind in ("parquet", "topic") or shard.size_bytes <= SHARD_BYTES:
            yield shard
            continue
        wanted: Sequence[int] = range(shard.start + SHARD_BYTES, shard.stop, SHARD_BYTES)
        if not shard.holds_records:
            wanted = [_cut_position(shard, position) for position in wanted]
        edges = [shard.start, *wanted, shard.stop]
        yield from (_range(shard, a, b) for a, b in itertools.pairwise(edges) if a < b)


def _range(shard: Shard, start: int, stop: int) -> Shard:
    return dataclasses.replace(shard, start=start, stop=stop, size_bytes=stop - start)


def _cut_position(shard: Shard, wanted: int) -> int:
    """Where to cut a text near the byte `wanted`: after its line, or between two characters where the line is long."""
    try:
        with shard.path.open("rb") as file:
            file.seek(wanted)
            following = file.read(4096)
    except OSError as error:
        raise UserError(f"cannot read {str(shard.path)!r}: {error.strerror}; correct its permissions") from error
    newline = following.find(b"\n")
    if newline >= 0:
        return min(wanted + newline + 1, shard.stop)
    continuation = next((i for i, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))
    return min(wanted + continuation, shard.stop)
