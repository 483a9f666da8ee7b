"""What is read from which files, what is held out, and what is said about bad files."""

import json
import os
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.errors import MissingExtraError, UserError
from forebay.train.data import DataConfig, make_train_iterator, make_validation_batches
from forebay.train.data.corpus import SHARD_BYTES, train_shards, validation_shards
from forebay.train.data.reading import documents


def everything(path, **changes):
    """Every document of a corpus in order, nothing held out."""
    config = DataConfig(**{"path": str(path), "validation_fraction": 0.0} | changes)
    return [text for shard in train_shards(config) for text in documents(shard, config.text_key)]


def split(path, fraction):
    config = DataConfig(path=str(path), validation_fraction=fraction)
    train, validation = train_shards(config), validation_shards(config)
    return (
        [text for shard in train for text in documents(shard, "text")],
        [text for shard in validation for text in documents(shard, "text")],
    )


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def refusal(path, **changes):
    """The message with which training on `path` is refused; one line."""
    config = DataConfig(**{"path": str(path), "validation_fraction": 0.0} | changes)
    with pytest.raises(UserError) as caught:
        make_train_iterator(config, batch=1, seq=2)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_directory_is_searched_in_order_and_hidden_files_are_skipped(tmp_path):
    for name in ("b.txt", "a/z.md", "a/deep/er/c.py", ".hidden.txt", ".git/config.txt", "image.png", "Makefile"):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    assert everything(tmp_path) == ["a/deep/er/c.py", "a/z.md", "b.txt"]


def test_globs_and_single_files(tmp_path):
    for name in ("x1.txt", "x2.txt", "y.txt", "deep/x3.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert everything(tmp_path / "x*.txt") == ["x1.txt", "x2.txt"]
    assert everything(tmp_path / "**" / "x*.txt") == ["deep/x3.txt", "x1.txt", "x2.txt"]
    assert everything(tmp_path / "y.txt") == ["y.txt"]


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path):
    (tmp_path / "part[1].txt").write_text("one")
    assert everything(tmp_path / "part[1].txt") == ["one"]


def test_text_is_taken_as_it_is(tmp_path):
    text = "Größe\r\n日本\n\n🙂 no newline at the end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + b"after a byte order mark")
    assert everything(tmp_path) == [text, "after a byte order mark"]


def test_empty_texts_among_others_are_left_out(tmp_path):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "code.py").write_text("x = 1")
    assert everything(tmp_path) == ["x = 1"]


def test_json_lines(tmp_path):
    lines = [
        '\ufeff{"text": "first", "id": 1}\r\n',
        "\n",
        "   \r\n",
        '{"id": 2, "text": "zwei \\u00e4 ä\\n"}\n',
        '{"text": ""}\n',
        '{"text": null}\n',
        '{"text": "last, without a newline"}',
    ]
    (tmp_path / "a.jsonl").write_bytes("".join(lines).encode())
    assert everything(tmp_path) == ["first", "zwei ä ä\n", "last, without a newline"]
    write_lines(tmp_path / "b.json", {"body": "other key"})
    assert everything(tmp_path / "b.json", text_key="body") == ["other key"]


def test_parquet_over_row_groups(tmp_path):
    texts = ["a", "b", None, "", "ç", "d", "e"]
    table = pa.table({"id": range(7), "text": texts})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    assert everything(tmp_path) == ["a", "b", "ç", "d", "e"]
    pq.write_table(pa.table({"text": pa.array(["x", "y", "x"]).dictionary_encode()}), tmp_path / "a.parquet")
    assert everything(tmp_path) == ["x", "y", "x"]


def test_large_files_are_cut_without_losing_or_breaking_anything(tmp_path):
    line = "ein Zeichen: ä\n"
    text = line * (3 * SHARD_BYTES // len(line.encode()))
    (tmp_path / "lines.txt").write_text(text)
    (tmp_path / "one_line.txt").write_text("日本語" * (SHARD_BYTES // 3))
    records = [{"text": f"{i} " + "x" * (i % 5000)} for i in range(2400)]  # 2.9 MB
    write_lines(tmp_path / "records.jsonl", *records)

    pieces = everything(tmp_path / "lines.txt")
    assert 3 <= len(pieces) <= 4 and "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces), "cut at the end of a line"
    pieces = everything(tmp_path / "one_line.txt")
    assert len(pieces) == 3 and "".join(pieces) == "日本語" * (SHARD_BYTES // 3), "cut between characters"
    config = DataConfig(path=str(tmp_path / "records.jsonl"), validation_fraction=0)
    assert len(train_shards(config)) == 3
    assert everything(tmp_path / "records.jsonl") == [record["text"] for record in records]


def test_a_record_longer_than_a_shard_is_read_once(tmp_path):
    texts = ["a" * 10, "b" * (3 * SHARD_BYTES), "c" * 10]
    write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    assert everything(tmp_path) == texts


@pytest.mark.parametrize(("count", "fraction", "held_out"), [(2, 0.05, 1), (2, 0.99, 1), (40, 0.05, 2), (40, 0.5, 20)])
def test_of_several_texts_whole_files_are_held_out(tmp_path, count, fraction, held_out):
    for i in range(count):
        (tmp_path / f"{i}.txt").write_text(f"document {i}")
    train, validation = split(tmp_path, fraction)
    assert len(validation) == held_out
    assert sorted(train + validation) == sorted(f"document {i}" for i in range(count))
    assert split(tmp_path, fraction) == (train, validation)


def test_all_pieces_of_a_large_file_are_on_one_side(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"{i}\n" * SHARD_BYTES)
    train, validation = split(tmp_path, 0.3)
    assert {text[0] for text in train}.isdisjoint(text[0] for text in validation)
    assert sum(map(len, train + validation)) == 6 * 2 * SHARD_BYTES


def test_of_a_single_text_the_end_is_held_out(tmp_path):
    lines = [f"line {i:03}\n" for i in range(100)]  # 9 bytes each; 90 % end at byte 810, and the line after at 819
    (tmp_path / "a.txt").write_text("".join(lines))
    train, validation = split(tmp_path / "a.txt", 0.1)
    assert train == ["".join(lines[:91])]
    assert validation == ["".join(lines[91:])]


def test_of_records_single_ones_are_held_out_duplicates_together(tmp_path):
    texts = [f"record {i}" for i in range(2000)]
    write_lines(tmp_path / "a.jsonl", *({"text": text} for text in texts + texts[:500]))
    train, validation = split(tmp_path, 0.2)
    assert sorted(train + validation) == sorted(texts + texts[:500])
    assert set(train).isdisjoint(validation)
    # 400 expected of 2000 distinct ones; five standard deviations are 5 sqrt(2000 * 0.2 * 0.8) = 89
    assert abs(len(set(validation)) - 400) < 89
    pq.write_table(pa.table({"text": texts + texts[:500]}), tmp_path / "a.parquet")
    assert split(tmp_path / "a.parquet", 0.2) == (train, validation), "by the text, whatever the file"


def test_texts_and_records_are_held_out_side_by_side(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789\n" * 10)
    write_lines(tmp_path / "b.jsonl", *({"text": f"record {i}"} for i in range(500)))
    train, validation = split(tmp_path, 0.2)
    assert (train[0], validation[0]) == ("0123456789\n" * 9, "0123456789\n"), "cut after the line in which 80 % fall"
    assert sorted(train[1:] + validation[1:]) == sorted(f"record {i}" for i in range(500))
    assert len(validation) > 50


def test_what_is_held_out_does_not_depend_on_where_the_data_lies_or_on_the_seed(tmp_path):
    for root in ("here", "there"):
        (tmp_path / root).mkdir()
        for i in range(20):
            (tmp_path / root / f"{i}.txt").write_text(str(i))
    assert split(tmp_path / "here", 0.2) == split(tmp_path / "there", 0.2)
    config = DataConfig(path=str(tmp_path / "here"))
    reseeded = DataConfig(path=str(tmp_path / "here"), seed=7)
    assert validation_shards(config) == validation_shards(reseeded)


def test_a_validation_path_holds_nothing_out_of_the_training_data(tmp_path):
    for name in ("train", "held"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.txt").write_text(f"{name} {i}")
    config = DataConfig(path=str(tmp_path / "train"), validation_path=str(tmp_path / "held"))
    assert len(train_shards(config)) == len(validation_shards(config)) == 3


def test_the_standard_library():
    config = DataConfig()
    train, validation = train_shards(config), validation_shards(config)
    names = [shard.name for shard in (*train, *validation)]
    assert {"argparse.py", "json/decoder.py", "pydoc_data.topics/assert"} <= set(names)
    assert not any("site-packages" in name or name == "pydoc_data/topics.py" for name in names)
    assert {shard.name for shard in train}.isdisjoint(shard.name for shard in validation)
    assert list(train) == sorted(train, key=lambda shard: (shard.name, shard.start))
    size = sum(shard.size_bytes for shard in (*train, *validation))
    assert size > 8e6, "tens of MB with the library's tests, ten without"
    (decoder,) = [shard for shard in (*train, *validation) if shard.name == "json/decoder.py"]
    source = Path(sysconfig.get_path("stdlib"), "json", "decoder.py").read_bytes().decode()
    assert list(documents(decoder, "text")) == [source]


def test_the_standard_library_trains_and_validates_as_it_is():
    batches = make_train_iterator(DataConfig(), batch=4, seq=128)
    assert next(batches)["inputs"].shape == (4, 128)
    assert len(make_validation_batches(DataConfig(), batch=4, seq=128, max_batches=3)) == 3


# Bad input


def test_nothing_there(tmp_path):
    assert refusal(tmp_path / "absent").startswith(f"no data at '{tmp_path}/absent': give a file, a directory, a glob")
    assert refusal("") == "no data at '': give a file, a directory, a glob, or 'stdlib'"
    assert refusal(tmp_path / "*.txt").startswith(f"no file matches '{tmp_path}/*.txt': check the pattern")
    assert "(found: no file)" in refusal(tmp_path)
    for name in ("a.png", "b.png", "LICENSE"):
        (tmp_path / name).touch()
    assert "(found: 2 .png, 1 without extension)" in refusal(tmp_path)


def test_unknown_extension_and_compressed_files(tmp_path):
    for name in ("a.bin", "b.jsonl.gz", "c.txt"):
        (tmp_path / name).write_text("x")
    message = refusal(tmp_path / "a.bin")
    assert "a.bin' from its extension '.bin'" in message and ".txt" in message and ".parquet" in message
    for path in (tmp_path, tmp_path / "b.jsonl.gz", tmp_path / "*.gz"):
        assert refusal(path).endswith("b.jsonl.gz' is compressed, which is not read: decompress it first")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_an_empty_file_is_named(tmp_path, name):
    (tmp_path / name).touch()
    assert f"the data file '{tmp_path / name}' is empty" in refusal(tmp_path / name)
    assert f"the data file '{tmp_path / name}' is empty" in refusal(tmp_path)


def test_an_empty_file_of_records_is_an_error_among_others(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"text": "text"})
    (tmp_path / "b.jsonl").touch()
    assert f"the data file '{tmp_path}/b.jsonl' is empty: fetch it again or remove it" in refusal(tmp_path)


def test_records_without_text(tmp_path):
    write_lines(tmp_path / "a.jsonl", {"text": ""}, {"text": None})
    assert "there is no text to train on" in refusal(tmp_path)
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "a.parquet' has no rows" in refusal(tmp_path / "a.parquet")


def test_a_file_that_cannot_be_opened(tmp_path):
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    assert refusal(tmp_path).startswith(f"cannot read '{tmp_path}/a.txt': No such file or directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.txt").chmod(0)
    assert refusal(tmp_path).startswith(f"cannot read '{tmp_path}/a.txt': Permission denied")


def test_a_file_that_disappears_while_training(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    (shard,) = train_shards(DataConfig(path=str(tmp_path), validation_fraction=0))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match=r"cannot read '.*a.txt': No such file"):
        list(documents(shard, "text"))


def test_bytes_that_are_not_utf8_are_located(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"first\nsecond \xff third\n")
    assert refusal(tmp_path).startswith(f"line 2 of '{tmp_path}/a.txt' is not UTF-8 (byte 0xff at offset 13)")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfab\n\xe9")
    assert refusal(tmp_path).startswith(f"line 2 of '{tmp_path}/a.txt' is not UTF-8 (byte 0xe9 at offset 6)")
    lines = b"line\n" * SHARD_BYTES  # 5 MiB: the bad byte is in the last shard
    (tmp_path / "a.txt").write_bytes(lines + b"\x80")
    message = refusal(tmp_path)
    assert message.startswith(f"line {SHARD_BYTES + 1} of ") and f"offset {5 * SHARD_BYTES})" in message
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "good"}\n{"text": "b\xffd"}\n')
    assert refusal(tmp_path).startswith(f"line 2 of '{tmp_path}/b.jsonl' is not UTF-8 (byte 0xff at offset 28)")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'text': 1}", "is not JSON (Expecting property name enclosed in double quotes at column 2)"),
        ('{"text": "a"} {"text": "b"}', "is not JSON (Extra data at column 15)"),
        ('["a"]', "holds an array, not an object"),
        ('"a"', "holds a string, not an object"),
        ("17", "holds a number, not an object"),
        ("null", "holds null, not an object"),
        ('{"body": "a", "id": 1}', "has no key 'text': set text_key to one of body, id"),
        ("{}", "has no key 'text': set text_key to one of (the object is empty)"),
        ('{"text": [1]}', "holds an array under 'text', not a text"),
        ('{"text": true}', "holds a boolean under 'text', not a text"),
        ('{"text": {"a": 1}}', "holds an object under 'text', not a text"),
        ('{"text": "\\ud800"}', "has half a character under 'text'"),
        ("[" * 10**5, "is not JSON ("),
    ],
)
def test_bad_json_lines_are_located(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n')
    assert refusal(tmp_path).startswith(f"line 3 of '{tmp_path}/a.jsonl' {said}")


def test_a_bad_line_is_found_before_the_first_batch_however_late_it_comes(tmp_path):
    write_lines(tmp_path / "a.jsonl", *({"text": "x" * 1000} for _ in range(4000)), {"txt": "y"})
    assert refusal(tmp_path).startswith(f"line 4001 of '{tmp_path}/a.jsonl' has no key 'text'")


def test_bad_parquet(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), file)
    assert refusal(file).endswith("has no column 'text': set text_key to one of body, n")
    assert "the column 'n' of" in refusal(file, text_key="n") and "holds int64, not text" in refusal(file, text_key="n")
    file.write_bytes(b"PAR1 this is something else")
    assert f"'{file}' is not a Parquet file (" in refusal(file)
    pq.write_table(pa.table({"text": [f"{i} some text" for i in range(1000)]}), file, compression="snappy")
    damaged = bytearray(file.read_bytes())
    damaged[10:2000] = bytes(1990)
    file.write_bytes(damaged)
    assert refusal(file).startswith(f"row group 0 of '{file}' cannot be read (")


def test_nothing_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("one line")
    for fraction in (0.0, 0.0001):
        config = DataConfig(path=str(tmp_path), validation_fraction=fraction)
        with pytest.raises(UserError, match=rf"no validation text: validation_fraction={fraction:g} of .* is nothing"):
            make_validation_batches(config, batch=1, seq=1, max_batches=1)
    write_lines(tmp_path / "a.txt.jsonl", {"text": "a single record"})
    config = DataConfig(path=str(tmp_path / "a.txt.jsonl"), validation_fraction=1e-6)
    with pytest.raises(UserError, match="the validation text has 0 tokens"):
        make_validation_batches(config, batch=1, seq=1, max_batches=1)


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "a.parquet"), ("grain", "a.txt")])
def test_missing_packages_name_the_extra(tmp_path, monkeypatch, package, name):
    (tmp_path / name).write_text("text")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "forebay.train.data.packing", raising=False)
    with pytest.raises(
        MissingExtraError, match=rf"'{package}', which is not installed: pip install 'forebay\[train\]'"
    ):
        make_train_iterator(DataConfig(path=str(tmp_path), validation_fraction=0), batch=1, seq=2)
