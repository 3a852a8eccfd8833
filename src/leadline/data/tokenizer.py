"""The three ways from text to ids: byte-level BPE trained here, a given file, raw bytes.

- One end-of-text token follows every document.
- Text is always encoded as text: a document that spells a special token gets
  the ids of its letters, never the token's own id.
- `tokenizer_json` is a file the `tokenizers` library loads, for all three kinds.
- The same text gives the same tokenizer, byte for byte.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from leadline.core.canonical import sha256_bytes
from leadline.core.errors import DataError, UsageError
from leadline.data.corpus import Document

END_OF_TEXT = "<|endoftext|>"
DEFAULT_BPE_VOCAB_SIZE = 8192
MIN_BPE_VOCAB_SIZE = 257  # 256 byte symbols and the end-of-text token
MAX_VOCAB_SIZE = 2**31  # ids must survive frameworks that index with int32

Ids = NDArray[np.uint32]


class Encoder(Protocol):
    """What turns documents into ids."""

    @property
    def tokenizer_json(self) -> bytes:
        """A tokenizer.json that gives the same ids."""

    @property
    def vocab_size(self) -> int:
        """Largest id plus one."""

    @property
    def end_of_text(self) -> int:
        """Id that closes a document."""

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """Ids of each document, without the closing one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSpec:
    """Which tokenizer was asked for; `path` is set for kind `given` alone."""

    kind: str
    vocab_size: int | None = None
    """Size to train a BPE to; for the other kinds None, or the size expected of them."""
    path: Path | None = None
    end_of_text: str = END_OF_TEXT
    """Spelling of the closing token; only a given file may use another than the default."""


def parse_spec(
    name: str, vocab_size: int | None = None, end_of_text: str | None = None
) -> TokenizerSpec:
    """Read `bpe`, `bytes` or the path of a tokenizer.json.

    Raises:
        UsageError: a vocabulary size that the kind cannot have, or no such file.
    """
    if name not in ("bpe", "bytes"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(
                f"no tokenizer {name!r}; give bpe, bytes or a tokenizer.json that exists"
            )
        return TokenizerSpec(
            kind="given", vocab_size=vocab_size, path=path, end_of_text=end_of_text or END_OF_TEXT
        )
    if end_of_text not in (None, END_OF_TEXT):
        raise UsageError(
            f"the {name} tokenizer closes documents with {END_OF_TEXT}, not {end_of_text!r}; "
            "leave the option out"
        )
    if name == "bytes":
        return TokenizerSpec(kind="bytes", vocab_size=vocab_size)
    size = DEFAULT_BPE_VOCAB_SIZE if vocab_size is None else vocab_size
    if not MIN_BPE_VOCAB_SIZE <= size <= MAX_VOCAB_SIZE:
        raise UsageError(
            f"a byte-level BPE vocabulary of {size} cannot be trained; "
            f"give {MIN_BPE_VOCAB_SIZE} to {MAX_VOCAB_SIZE}"
        )
    return TokenizerSpec(kind="bpe", vocab_size=size)


class LibraryEncoder:
    """Ids from a tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer_json: bytes, end_of_text: str, name: str) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{name} is not a tokenizer.json ({error}); give a file saved by tokenizers"
            ) from error
        # A saved file may cut or fill documents, or let them spell special tokens.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if end_of_text not in vocabulary:
            raise DataError(
                f"{name} has no token {end_of_text!r} to close a document; "
                "name one it has with --end-of-text"
            )
        self._name = name
        self.tokenizer_json = tokenizer_json
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[end_of_text]

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """Ids of each document, without the closing one.

        Raises:
            DataError: the tokenizer fails, or gives no id, or the closing id, for a document.
        """
        texts = [document.text for document in documents]
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{self._name} cannot encode {documents[0].path} or a document after it ({error}); "
                "use a tokenizer that covers all of Unicode, such as a byte-level one"
            ) from error
        batch = [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]
        for document, ids in zip(documents, batch, strict=True):
            if not ids.size:
                raise DataError(
                    f"{self._name} gives no token for {document.path}; "
                    "use a tokenizer that covers its alphabet, such as a byte-level one"
                )
            if (ids == self.end_of_text).any():
                raise DataError(
                    f"{document.path} encodes to the end-of-text id {self.end_of_text} inside "
                    "the document; use a tokenizer that marks this token as special"
                )
        return batch


class BytesEncoder:
    """Ids that are the bytes themselves; 256 closes a document."""

    vocab_size = 257
    end_of_text = 256

    def __init__(self) -> None:
        self.tokenizer_json = _bytes_tokenizer_json()

    def encode(self, documents: Sequence[Document]) -> list[Ids]:
        """Ids of each document, without the closing one."""
        return [np.frombuffer(item.utf8, dtype=np.uint8).astype(np.uint32) for item in documents]


def make_encoder(spec: TokenizerSpec, training_texts: Iterable[str]) -> Encoder:
    """Build the encoder *spec* asks for; *training_texts* is read for kind `bpe` alone.

    Raises:
        DataError: the given file is unreadable, not a tokenizer, or lacks the closing token.
        UsageError: the vocabulary size asked for is not the one the file has.
    """
    encoder: Encoder
    if spec.kind == "bpe":
        assert spec.vocab_size is not None
        return LibraryEncoder(_train_bpe(training_texts, spec.vocab_size), END_OF_TEXT, "the BPE")
    if spec.kind == "bytes":
        encoder = BytesEncoder()
    else:
        encoder = LibraryEncoder(given_bytes(spec), spec.end_of_text, str(spec.path))
    if spec.vocab_size not in (None, encoder.vocab_size):
        raise UsageError(
            f"vocabulary of {spec.vocab_size} asked for, but this tokenizer has "
            f"{encoder.vocab_size}; leave --vocab-size out"
        )
    return encoder


def given_bytes(spec: TokenizerSpec) -> bytes:
    """Bytes of the given tokenizer.json."""
    assert spec.path is not None
    try:
        return spec.path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {spec.path}: {error.strerror}; make it readable") from error


def spec_request(spec: TokenizerSpec) -> dict[str, int | str]:
    """The spec as the manifest records it: enough to tell two requests apart."""
    request: dict[str, int | str] = {"tokenizer": spec.kind, "end_of_text": spec.end_of_text}
    if spec.kind == "bpe" and spec.vocab_size is not None:
        request["vocab_size"] = spec.vocab_size
    if spec.kind == "given":
        request["tokenizer_sha256"] = sha256_bytes(given_bytes(spec))
    return request


def _train_bpe(texts: Iterable[str], vocab_size: int) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str()).encode("utf-8")


def _bytes_tokenizer_json() -> bytes:
    """A BPE without merges whose ids are the byte values."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    value = json.loads(tokenizer.to_str())
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
