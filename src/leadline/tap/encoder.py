"""Text and chats to token ids with the checkpoint's own tokenizer.

- `tokenizer.json` is taken as it is, whatever class the settings beside it name: a class
  may rebuild the pipeline from the vocabulary and give other ids. Without that file,
  `transformers` chooses.
- Text gets the special tokens that the tokenizer puts around text by default, and none
  twice where the text spells them itself.
- A chat is what the checkpoint's template makes of it, with the default start token in
  front unless the template wrote it.
- Never cut, never padded, whatever the tokenizer's files say.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from leadline.core.canonical import sha256_file, sha256_json
from leadline.core.errors import DataError, UsageError
from leadline.tap.documents import Chat, Document

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Any of them is a tokenizer."""
_COMPANIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""They change what it gives."""


class DocumentEncoder:
    """Ids of documents; equal documents give equal ids, however they are grouped."""

    def __init__(self, tokenizer: Any, folder: Path, digest: str) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self._marks: tuple[list[int], list[int]] | None = None
        self.digest = digest
        """Sha256 over the tokenizer's files, template included."""
        self.spelled_marks = 0
        """Documents whose text spelled a special token that is put around text anyway."""

    @classmethod
    def open(cls, folder: Path) -> "DocumentEncoder":
        """The tokenizer in the checkpoint's *folder*.

        Raises:
            UsageError: the folder holds none.
            DataError: it cannot be read.
        """
        present = [name for name in _FILES if (folder / name).is_file()]
        if not present:
            raise UsageError(
                f"the corpus is text and {folder} holds no tokenizer ({', '.join(_FILES[:2])} or "
                "another); put the model's tokenizer files there, or give token ids (.npy, shards)"
            )
        companions = [name for name in _COMPANIONS if (folder / name).is_file()]
        digest = sha256_json(
            {name: sha256_file(folder / name) for name in sorted(present + companions)}
        )
        return cls(_load(folder, present), folder, digest)

    def encode(self, documents: Sequence[Document]) -> list[list[int]]:
        """Ids of each document of text or messages; empty where there is nothing to read.

        Raises:
            DataError: a document that the template or the tokenizer refuses, by its origin.
        """
        texts = [self._text(document) for document in documents]
        bare = self._bare(documents, texts)
        start, end = self._default_marks(texts)
        rows: list[list[int]] = []
        for document, text, ids in zip(documents, texts, bare, strict=True):
            if not text.strip() or not ids:
                rows.append([])
                continue
            has_start = ids[: len(start)] == start
            if isinstance(document.content, Chat):
                rows.append(ids if has_start else start + ids)
                continue
            has_end = ids[len(ids) - len(end) :] == end
            self.spelled_marks += bool(start and has_start) or bool(end and has_end)
            rows.append(([] if has_start else start) + ids + ([] if has_end else end))
        return rows

    def _text(self, document: Document) -> str:
        content = document.content
        if isinstance(content, str):
            return content
        assert isinstance(content, Chat)
        if not content.messages:
            return ""
        try:
            text = self._tokenizer.apply_chat_template(
                content.messages, tools=content.tools, tokenize=False, add_generation_prompt=False
            )
        except Exception as error:  # templates raise whatever their author chose
            raise DataError(
                f"{document.origin} does not go through the chat template of {self._folder} "
                f"({_first_line(error)}); mend the messages, or give their `text`"
            ) from error
        assert isinstance(text, str)
        return text

    def _bare(self, documents: Sequence[Document], texts: list[str]) -> list[list[int]]:
        """Ids without any special token that the text does not spell."""
        try:
            return self._ids(texts, special=False)
        except Exception as error:  # the library raises bare Exception
            if len(texts) == 1:
                raise DataError(
                    f"{documents[0].origin} cannot be tokenised ({_first_line(error)}); "
                    "mend the document or leave it out"
                ) from error
        return [self._bare([d], [t])[0] for d, t in zip(documents, texts, strict=True)]

    def _ids(self, texts: list[str], *, special: bool) -> list[list[int]]:
        encoded = self._tokenizer(
            texts,
            add_special_tokens=special,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def _default_marks(self, texts: list[str]) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind every text."""
        if self._marks is None:
            for text in ("x", *texts):
                bare, full = self._ids([text], special=False)[0], self._ids([text], special=True)[0]
                if bare:
                    self._marks = self._around(bare, full)
                    break
        return self._marks or ([], [])

    def _around(self, bare: list[int], full: list[int]) -> tuple[list[int], list[int]]:
        for begin in range(len(full) - len(bare) + 1):
            if full[begin : begin + len(bare)] == bare:
                return full[:begin], full[begin + len(bare) :]
        raise DataError(
            f"the tokenizer of {self._folder} changes a text's own ids when it adds special "
            "tokens, so none can be added once; give token ids (.npy, shards)"
        )


def _load(folder: Path, present: Sequence[str]) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loader = PreTrainedTokenizerFast if _FILES[0] in present else AutoTokenizer
    try:
        return loader.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # a missing library, a damaged file, a class it does not know
        raise DataError(
            f"the tokenizer in {folder} ({', '.join(present)}) cannot be opened "
            f"({_first_line(error)}); mend its files, or give token ids (.npy, shards)"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
