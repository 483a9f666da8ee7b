"""Packing, order, resuming and sharing between processes."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from forebay.errors import UserError
from forebay.train.data import (
    ByteTokenizer,
    DataConfig,
    make_train_iterator,
    make_validation_batches,
    unigram_entropy,
)

BOS, EOS = 256, 257


def config_for(path, **changes):
    return DataConfig(**{"path": str(path), "validation_fraction": 0.0, "shuffle": False} | changes)


def stream_of(*texts):
    """The token stream of documents, written out independently of the pipeline."""
    return [token for text in texts for token in (BOS, *text.encode(), EOS)]


@pytest.fixture
def three_files(tmp_path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("c")
    (tmp_path / "c.txt").write_text("defghij")
    return tmp_path


@pytest.fixture
def many_files(tmp_path):
    """40 documents of 1 to 40 letters, each letter's document distinct: 20 * 41 letters and 80 BOS and EOS."""
    rng = np.random.default_rng(0)
    for i in range(40):
        letters = rng.integers(97, 123, size=i + 1).astype(np.uint8).tobytes().decode()
        (tmp_path / f"{i:02}.txt").write_text(letters)
    return tmp_path


def test_windows_of_a_tiny_corpus_by_hand(three_files):
    # the stream, with | where a window of 4 inputs begins:  B a b E | B c E B | d e f g | h i j E | B a b E | ...
    batches = make_train_iterator(config_for(three_files), batch=2, seq=4)
    first, second = next(batches), next(batches)
    assert first["inputs"].tolist() == [[BOS, 97, 98, EOS], [BOS, 99, EOS, BOS]]
    assert first["targets"].tolist() == [[97, 98, EOS, BOS], [99, EOS, BOS, 100]]
    assert second["inputs"].tolist() == [[100, 101, 102, 103], [104, 105, 106, EOS]]
    assert second["targets"].tolist() == [[101, 102, 103, 104], [105, 106, EOS, BOS]]
    assert next(batches)["inputs"][0].tolist() == [BOS, 97, 98, EOS], "the second epoch follows the first"
    assert first["inputs"].dtype == first["targets"].dtype == np.int32
    assert first.keys() == {"inputs", "targets"}


@pytest.mark.parametrize("seq", [1, 3, 7, 16, 100, 500])
def test_no_token_is_lost_or_repeated_over_epochs(many_files, seq):
    stream = stream_of(*(file.read_text() for file in sorted(many_files.iterdir())))
    assert len(stream) == 20 * 41 + 80
    batches = make_train_iterator(config_for(many_files), batch=1, seq=seq)
    taken = [next(batches) for _ in range(2 * len(stream) // seq)]
    inputs = np.concatenate([batch["inputs"][0] for batch in taken])
    targets = np.concatenate([batch["targets"][0] for batch in taken])
    endless = np.array(stream * 3)
    np.testing.assert_array_equal(inputs, endless[: len(inputs)])
    np.testing.assert_array_equal(targets, endless[1 : len(targets) + 1])


def test_a_shuffled_epoch_has_every_document_once_in_another_order_each_time(tmp_path):
    # documents and windows of the same four tokens, so that a window is a document; 30 documents, batches of 10
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"{i:02}")
    batches = make_train_iterator(config_for(tmp_path, shuffle=True), batch=10, seq=4)
    epochs = []
    for _ in range(3):
        rows = np.concatenate([next(batches)["inputs"] for _ in range(3)])
        epochs.append([bytes(row[1:3].astype(np.uint8)).decode() for row in rows])
    in_order = [f"{i:02}" for i in range(30)]
    assert all(sorted(epoch) == in_order for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, in_order]}) == 4


def test_sequences_of_one_long_document_are_shuffled_too(tmp_path):
    (tmp_path / "long.txt").write_bytes(bytes(range(32, 127)) * 10)
    ordered = next(make_train_iterator(config_for(tmp_path), batch=95, seq=10))["inputs"]
    shuffled = next(make_train_iterator(config_for(tmp_path, shuffle=True), batch=95, seq=10))["inputs"]
    assert ordered.tolist() != shuffled.tolist()
    assert sorted(ordered.tolist()) == sorted(shuffled.tolist())


def test_a_document_spans_as_many_sequences_as_it_needs(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "long.txt").write_text(text)
    rows = next(make_train_iterator(config_for(tmp_path), batch=10, seq=100))["inputs"]
    assert ByteTokenizer().decode(rows.ravel()) == text[:999]


def test_the_stream_depends_on_the_seed_and_on_nothing_else(many_files):
    def rows(seed):
        batches = make_train_iterator(config_for(many_files, shuffle=True, seed=seed), batch=4, seq=8)
        return np.concatenate([next(batches)["inputs"] for _ in range(20)]).tolist()

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 7, 28, 60])
def test_resuming_continues_with_the_exact_next_batch(many_files, shuffle, steps):
    # an epoch is 900 tokens, 28 batches of 4 sequences of 8: 60 steps end in the third
    config = config_for(many_files, shuffle=shuffle)
    batches = make_train_iterator(config, batch=4, seq=8)
    for _ in range(steps):
        next(batches)
    stored = json.dumps(batches.get_state())
    expected = [next(batches) for _ in range(40)]

    resumed = make_train_iterator(config, batch=4, seq=8)
    next(resumed)  # an iterator that has already begun can be moved too
    resumed.set_state(json.loads(stored))
    assert resumed.get_state() == json.loads(stored)
    for batch in expected:
        np.testing.assert_equal(next(resumed), batch)


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_rows_of_all_processes_are_the_batches_of_one(many_files, shuffle):
    config = config_for(many_files, shuffle=shuffle)
    alone = make_train_iterator(config, batch=6, seq=8)
    shares = [make_train_iterator(config, batch=6, seq=8, process_index=i, process_count=3) for i in range(3)]
    for _ in range(50):
        parts = [next(share) for share in shares]
        assert all(part["inputs"].shape == (2, 8) for part in parts)
        whole = next(alone)
        for name in ("inputs", "targets"):
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_a_position_can_be_taken_up_with_another_number_of_processes(many_files):
    config = config_for(many_files, shuffle=True)
    alone = make_train_iterator(config, batch=4, seq=8)
    for _ in range(5):
        next(alone)
    half = make_train_iterator(config, batch=4, seq=8, process_index=1, process_count=2)
    half.set_state(alone.get_state())
    np.testing.assert_array_equal(next(half)["inputs"], next(alone)["inputs"][2:])


@pytest.mark.parametrize("change", [{"seed": 3}, {"shuffle": False}, {"validation_fraction": 0.3}])
def test_a_position_in_other_data_is_refused(many_files, change):
    config = config_for(many_files, shuffle=True)
    state = make_train_iterator(config, batch=2, seq=8).get_state()
    other = make_train_iterator(config_for(many_files, **{"shuffle": True} | change), batch=2, seq=8)
    with pytest.raises(UserError, match=r"belongs to other data .* resume with the configuration of the run"):
        other.set_state(state)


def test_a_position_in_another_file_set_or_of_another_kind_is_refused(many_files):
    config = config_for(many_files)
    state = make_train_iterator(config, batch=2, seq=8).get_state()
    (many_files / "new.txt").write_text("one more")
    iterator = make_train_iterator(config, batch=2, seq=8)
    with pytest.raises(UserError, match="belongs to other data"):
        iterator.set_state(state)
    with pytest.raises(UserError, match="not a stored data position"):
        iterator.set_state({"step": 3})


def test_validation_batches_are_the_stream_in_order_without_a_remainder(three_files):
    config = config_for(three_files, validation_path=str(three_files))
    # 4 + 3 + 9 = 16 tokens hold 3 whole sequences of 4 and their next tokens: one batch of 2
    (batch,) = make_validation_batches(config, batch=2, seq=4, max_batches=10)
    assert batch["inputs"].tolist() == [[BOS, 97, 98, EOS], [BOS, 99, EOS, BOS]]
    assert batch["targets"].tolist() == [[97, 98, EOS, BOS], [99, EOS, BOS, 100]]
    halves = [
        make_validation_batches(config, batch=2, seq=4, max_batches=10, process_index=i, process_count=2)
        for i in range(2)
    ]
    assert [half[0]["inputs"].tolist() for half in halves] == [[[BOS, 97, 98, EOS]], [[BOS, 99, EOS, BOS]]]
    assert len(make_validation_batches(config, batch=1, seq=4, max_batches=2)) == 2


def test_unigram_entropy_by_hand():
    # shares 1/2, 1/4, 1/4: H = 1/2 ln 2 + 2 * 1/4 ln 4 = 1.5 ln 2
    halves = [{"targets": np.array([[5, 5, 9]])}, {"targets": np.array([[5, 5, 9, 257, 257]])}]
    assert unigram_entropy(halves) == pytest.approx(1.5 * math.log(2))
    assert unigram_entropy([{"targets": np.full((2, 3), 7)}]) == 0
    assert unigram_entropy([{"targets": np.arange(256)}]) == pytest.approx(math.log(256))
    with pytest.raises(UserError, match="no tokens"):
        unigram_entropy([])


def test_closing_ends_the_iterator(three_files):
    batches = make_train_iterator(config_for(three_files), batch=1, seq=4)
    next(batches)
    batches.close()
    batches.close()
    assert list(batches) == []


def test_a_program_that_leaves_the_iterator_open_ends_silently(three_files):
    program = (
        "from forebay.train.data import *\n"
        f"batches = make_train_iterator(DataConfig(path={str(three_files)!r}), batch=1, seq=2)\n"
        "next(batches)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"batch": 3, "process_count": 2},
            "a batch of 3 sequences does not divide over 2 processes: use a multiple of 2",
        ),
        ({"batch": 0}, "batch is 0"),
        ({"seq": 0}, "seq is 0"),
        ({"process_count": 0}, "process_count is 0"),
        ({"process_index": 2, "process_count": 2}, "process 2 of 2: processes count from 0 to 1"),
    ],
)
def test_sizes_that_cannot_be(three_files, arguments, message):
    sizes = {"batch": 4, "seq": 4} | arguments
    with pytest.raises(UserError, match=message):
        make_train_iterator(config_for(three_files), **sizes)
    with pytest.raises(UserError, match=message):
        make_validation_batches(config_for(three_files), max_batches=1, **sizes)


def test_other_settings_that_cannot_be(three_files):
    with pytest.raises(UserError, match="seed is -1"):
        make_train_iterator(config_for(three_files, seed=-1), batch=1, seq=4)
    with pytest.raises(UserError, match="validation_fraction is 1"):
        make_train_iterator(config_for(three_files, validation_fraction=1.0), batch=1, seq=4)
    with pytest.raises(UserError, match="on 0 batches"):
        make_validation_batches(config_for(three_files), batch=1, seq=4, max_batches=0)


def test_a_sequence_longer_than_the_data_says_both_numbers(three_files):
    # 16 tokens hold a sequence of 15 and its last target, not one of 16
    next(make_train_iterator(config_for(three_files), batch=2, seq=15))
    with pytest.raises(
        UserError, match=r"a sequence is longer than the data: seq=16 needs 17 tokens .* has 16 to train"
    ):
        make_train_iterator(config_for(three_files), batch=2, seq=16)


def test_validation_text_smaller_than_a_batch_says_both_numbers(three_files):
    config = config_for(three_files, validation_path=str(three_files / "c.txt"))
    with pytest.raises(
        UserError, match=r"has 9 tokens, and one batch of 3 sequences of 4 takes 13: use a smaller batch"
    ):
        make_validation_batches(config, batch=3, seq=4, max_batches=1)
