"""Bytes and Hugging Face tokenizers."""

import json
import sys

import numpy as np
import pytest
import tokenizers

from forebay.errors import MissingExtraError, UserError
from forebay.train.data import ByteTokenizer, DataConfig, HFTokenizer, load_tokenizer, make_train_iterator

WORDS = {"<unk>": 0, "to": 1, "be": 2, "or": 3, "not": 4}


def save_tokenizer(directory, *special, config=None):
    """A word-level tokenizer.json with `special` tokens after the words, and a tokenizer_config.json."""
    model = tokenizers.models.WordLevel(WORDS, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory / "tokenizer.json")


def test_bytes_are_lossless():
    tokenizer = ByteTokenizer()
    everything = bytes(range(256)) * 2
    assert tokenizer.encode(everything).tolist() == list(everything)
    assert tokenizer.decode_bytes(tokenizer.encode(everything)) == everything
    text = "naïve 日本語 🙂\r\n\0"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.encode(text).dtype == np.int32


def test_byte_specials_follow_the_bytes_and_stand_for_no_text():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)
    assert tokenizer.decode([256, 104, 105, 257]) == "hi"
    assert tokenizer.decode([104, 0xC3]) == "h\N{REPLACEMENT CHARACTER}", "a sample may end inside a character"


def test_hf_words_and_specials(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, "<s>", "</s>"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (7, 5, 6)
    # the truncation and padding stored in the file are for inference on single texts, and must not cut documents
    assert tokenizer.encode("to be or not to be").tolist() == [1, 2, 3, 4, 1, 2]
    assert tokenizer.encode("to be").dtype == np.int32
    assert tokenizer.decode(np.array([5, 1, 2, 6])) == "to be"
    assert load_tokenizer(str(tmp_path)).encode("or").tolist() == [3], "the directory stands for its tokenizer.json"


def test_hf_text_cannot_spell_a_special_token(tmp_path):
    tokenizer = HFTokenizer(save_tokenizer(tmp_path, "<s>", "</s>"))
    assert not {5, 6} & set(tokenizer.encode("to </s> be <s>").tolist())


def test_hf_config_beside_the_file_wins_over_the_usual_names(tmp_path):
    config = {"bos_token": {"content": "[start]"}, "eos_token": "[stop]"}
    tokenizer = HFTokenizer(save_tokenizer(tmp_path, "<s>", "</s>", "[start]", "[stop]", config=config))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (7, 8)


def test_documents_are_framed_by_what_the_vocabulary_has(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("to be")
    (data / "b.txt").write_text("or")

    def stream(*special, config=None):
        spec = save_tokenizer(tmp_path, *special, config=config)
        setup = DataConfig(path=str(data), validation_fraction=0, tokenizer=spec, shuffle=False)
        return next(make_train_iterator(setup, batch=1, seq=4))["inputs"][0].tolist()

    assert stream("<s>", "</s>") == [5, 1, 2, 6]
    assert stream("</s>") == [1, 2, 5, 3]
    assert stream("<s>") == [5, 1, 2, 5]
    both = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    assert stream("<|endoftext|>", config=both) == [1, 2, 5, 3], "one separator, not two"


def test_hf_bad_input(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer at .*absent.json.*: give the path"):
        load_tokenizer(str(tmp_path / "absent.json"))
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(UserError, match=r"broken.json' is no Hugging Face tokenizer.json") as caught:
        load_tokenizer(str(broken))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no token that begins or ends a document: name one as bos_token"):
        load_tokenizer(save_tokenizer(tmp_path))
    with pytest.raises(UserError, match=r"names '\[gone\]', which tokenizer.json does not have"):
        load_tokenizer(save_tokenizer(tmp_path, "</s>", config={"eos_token": "[gone]"}))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*tokenizer_config.json"):
        load_tokenizer(str(tmp_path))


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        MissingExtraError, match=r"'tokenizers', which is not installed: pip install 'forebay\[train\]'"
    ):
        load_tokenizer(str(tmp_path / "tokenizer.json"))
