"""From a shard to its documents, and what is wrong with a file where something is."""

import json
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from forebay.errors import UserError
from forebay.train.data.corpus import Shard, topic_text

_BOM = b"\xef\xbb\xbf"


def documents(shard: Shard, text_key: str) -> Iterator[str]:
    """The texts of a shard, in order, as they are in the file (line ends included); empty and absent ones left out.

    Raises:
        UserError: the file cannot be read, is not UTF-8, or has a line that is not a JSON object with a text under
            `text_key`; the message names the file and the line.
    """
    try:
        for text in _texts(shard, text_key):
            if text and _kept(text, shard.keep):
                yield text
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"cannot read {str(shard.path)!r}: {reason}; correct the path or its permissions") from error


def _texts(shard: Shard, text_key: str) -> Iterator[str]:
    match shard.kind:
        case "topic":
            yield topic_text(shard)
        case "text" | "source":
            yield _text(shard)
        case "jsonl":
            yield from _json_lines(shard, text_key)
        case "parquet":
            yield from _rows(shard, text_key)


def _kept(text: str, keep: tuple[float, float]) -> bool:
    """Whether a record falls into the interval `keep`: by its text alone, so that duplicates fall on one side."""
    if keep == (0.0, 1.0):
        return True
    low, high = keep
    return low <= zlib.crc32(text.encode()) / 2**32 < high


def _text(shard: Shard) -> str:
    with shard.path.open("rb") as file:
        file.seek(shard.start)
        data = file.read(shard.stop - shard.start)
    start = len(_BOM) if shard.start == 0 and data.startswith(_BOM) else 0
    try:
        return data[start:].decode()
    except UnicodeDecodeError as error:
        if shard.kind == "source":
            return ""
        raise _not_utf8(shard, shard.start + start + error.start, data[start + error.start]) from error


def _json_lines(shard: Shard, text_key: str) -> Iterator[str]:
    with shard.path.open("rb") as file:
        position = _first_line(file, shard.start)
        while position < shard.stop and (line := file.readline()):
            content = line.removeprefix(_BOM) if position == 0 else line
            if content.strip():
                text = _json_text(shard, content, text_key, position + len(line) - len(content))
                if text is not None:
                    yield text
            position += len(line)


def _first_line(file: BinaryIO, start: int) -> int:
    """Moves to the first line that begins at `start` or after it; returns where that is."""
    if start == 0:
        return 0
    file.seek(start - 1)
    return start - 1 + len(file.readline())


def _json_text(shard: Shard, line: bytes, text_key: str, position: int) -> str | None:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(shard, position + error.start, line[error.start]) from error
    except (ValueError, RecursionError) as error:
        located = isinstance(error, json.JSONDecodeError)
        reason = f"{error.msg} at column {error.colno}" if located else str(error)
        raise UserError(
            f"{_place(shard, position)} is not JSON ({reason}): write one JSON object per line, or remove the line"
        ) from error
    if not isinstance(record, dict):
        raise UserError(
            f"{_place(shard, position)} holds {_json_type(record)}, not an object: write one JSON object per line"
        )
    if text_key not in record:
        raise UserError(
            f"{_place(shard, position)} has no key {text_key!r}: set text_key to one of "
            f"{', '.join(record) or '(the object is empty)'}"
        )
    text = record[text_key]
    if text is not None and not isinstance(text, str):
        raise UserError(
            f"{_place(shard, position)} holds {_json_type(text)} under {text_key!r}, not a text: "
            f"set text_key to the key of a text, of {', '.join(record)}"
        )
    if text is not None and not _is_unicode(text):
        raise UserError(
            f"{_place(shard, position)} has half a character under {text_key!r} (an unpaired \\ud800 to \\udfff): "
            "correct or remove the line"
        )
    return text


def _json_type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case list():
            return "an array"
        case dict():
            return "an object"
        case _:
            return "a string"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _rows(shard: Shard, text_key: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(shard.path) as parquet:
            for rows in parquet.iter_batches(batch_size=1024, row_groups=[shard.start], columns=[text_key]):
                for text in rows.column(0).to_pylist():
                    if text is not None:
                        yield text
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"row group {shard.start} of {str(shard.path)!r} cannot be read ({reason}): fetch the file again"
        ) from error


def _not_utf8(shard: Shard, position: int, byte: int) -> UserError:
    return UserError(
        f"{_place(shard, position)} is not UTF-8 (byte 0x{byte:02x} at offset {position}): "
        "convert the file to UTF-8, or leave it out"
    )


def _place(shard: Shard, position: int) -> str:
    """`line N of 'file'`, for the byte at `position`."""
    lines = 0
    with shard.path.open("rb") as file:
        while position > 0 and (block := file.read(min(position, 2**20))):
            lines += block.count(b"\n")
            position -= len(block)
    return f"line {lines + 1} of {str(shard.path)!r}"
