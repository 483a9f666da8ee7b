"""Tokenizers: bytes by default, any Hugging Face `tokenizer.json` by path."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from forebay.errors import UserError, missing_extra

# Where nothing says which special token begins or ends a text, the first of these that the vocabulary has: the names
# used by the Llama, Gemma, DeepSeek, Qwen, GPT-2 and Mistral families.
_BOS_NAMES = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<s>", "<|startoftext|>")  # noqa: RUF001
_EOS_NAMES = ("<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>", "<|endoftext|>")  # noqa: RUF001


class Tokenizer(Protocol):
    """Text to ids and back. Thread-safe: several threads encode at once.

    A document is framed as `[bos_id] + encode(text) + [eos_id]`; at least one of the two is not None.
    """

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The id that begins a document, None where the vocabulary has none."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, None where the vocabulary has none."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [tokens], without BOS and EOS."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, special tokens left out."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte (0 to 255), then BOS (256) and EOS (257): 258 ids."""

    vocab_size = 258
    bos_id = 256
    eos_id = 257

    def encode(self, text: str | bytes) -> np.ndarray:
        """The bytes of `text`, int32 [bytes]; a string is encoded as UTF-8."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; bytes that are not UTF-8 (a sample may end inside a character) become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Sequence[int] | np.ndarray) -> bytes:
        """The bytes of `ids`, exactly those that were encoded. Ids above 255 stand for no byte and are left out."""
        array = np.asarray(ids, np.int64)
        return array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes()


class HFTokenizer:
    """A Hugging Face `tokenizer.json`.

    Which tokens are BOS and EOS is not part of that file: they are taken from `bos_token` and `eos_token` of a
    `tokenizer_config.json` beside it, and failing that from the usual names (`<|begin_of_text|>`, `<s>`, ...,
    `<|end_of_text|>`, `</s>`, `<|endoftext|>`, ...). Text that spells a special token is encoded as plain text, so
    that a corpus cannot end its own documents.

    Raises:
        UserError: the file is missing or is no tokenizer, or it has neither a BOS nor an EOS.
        MissingExtraError: the package `tokenizers` is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise missing_extra("tokenizers", "train", "reading a tokenizer.json") from error
        path = Path(path).expanduser()
        if not path.is_file():
            raise UserError(f"no tokenizer at {str(path)!r}: give the path of a tokenizer.json, or 'bytes'")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself, whatever is wrong with the file
            reason = " ".join(str(error).split())
            raise UserError(f"{str(path)!r} is no Hugging Face tokenizer.json ({reason}): give another file") from error
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        named = _special_tokens(path.with_name("tokenizer_config.json"))
        self.bos_id = _first_id(vocabulary, named.get("bos_token"), _BOS_NAMES)
        self.eos_id = _first_id(vocabulary, named.get("eos_token"), _EOS_NAMES)
        if self.bos_id is None and self.eos_id is None:
            raise UserError(
                f"the vocabulary of {str(path)!r} has no token that begins or ends a document: "
                "name one as bos_token or eos_token in a tokenizer_config.json beside it"
            )

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [tokens], without BOS and EOS."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, special tokens left out."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` stands for: `bytes`, or the path of a `tokenizer.json` (or of the directory with it).

    Raises:
        UserError: there is no such file, or it is no tokenizer.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    return HFTokenizer(path / "tokenizer.json" if path.is_dir() else path)


def _special_tokens(path: Path) -> dict[str, str]:
    """`bos_token` and `eos_token` of a tokenizer_config.json; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {str(path)!r} ({error}): repair or remove it") from error
    tokens = {}
    for name in ("bos_token", "eos_token"):
        entry = entries.get(name) if isinstance(entries, dict) else None
        content = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _first_id(vocabulary: dict[str, int], named: str | None, usual: Sequence[str]) -> int | None:
    """The id of the token called `named`, or else of the first of the `usual` names that the vocabulary has."""
    if named is not None and named not in vocabulary:
        raise UserError(f"tokenizer_config.json names {named!r}, which tokenizer.json does not have: correct either")
    return next((vocabulary[name] for name in (named, *usual) if name in vocabulary), None)
