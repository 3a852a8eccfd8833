"""A trained `transformers` model as others publish theirs: BF16 weights and its tokenizer.

The folder is whole or absent: it is written beside its place, synced and renamed.
`transformers` itself writes the weights, in the names that its architecture is published in.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from leadline.core.atomic import explained_os_errors, fsync_folder, write_bytes
from leadline.core.errors import LeadlineError, UsageError
from leadline.data.manifest import TOKENIZER_NAME, load_manifest


def publish_model(model: nn.Module, shards: Path, folder: Path) -> int:
    """Write *model*, which becomes BF16, with the tokenizer of *shards*; bytes of all files.

    Raises:
        UsageError: *model* is none of `transformers`.
        LeadlineError: *folder* exists or may not be written.
        DiskSpaceError: the disk is full; nothing is left behind.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"a {type(model).__name__} cannot be saved as a Hugging Face checkpoint; "
            "use a workload of kind 'transformers'"
        )
    if folder.exists():
        raise LeadlineError(f"checkpoint {folder} exists; a finished checkpoint is never replaced")
    temporary = folder.with_name(f".{folder.name}.tmp")
    with explained_os_errors(folder):
        shutil.rmtree(temporary, ignore_errors=True)  # a killed write left it
        try:
            _write(model, shards, temporary)
            size = _sync(temporary)
            temporary.replace(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync_folder(folder.parent)
    return size


def _write(model: Any, shards: Path, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import logging

    facts = load_manifest(shards).tokenizer
    content = (shards / TOKENIZER_NAME).read_bytes()
    tokenizer = Tokenizer.from_str(content.decode("utf-8"))
    end_of_text = tokenizer.id_to_token(facts.end_of_text)
    model.config.eos_token_id = facts.end_of_text
    model.generation_config.eos_token_id = facts.end_of_text
    model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    # The class is named in the settings: the one that goes with the architecture would build
    # a pipeline of its own from the vocabulary and give other ids.
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_text,
        model_max_length=model.config.max_position_embeddings,
    ).save_pretrained(folder)
    write_bytes(folder / TOKENIZER_NAME, content)


def _sync(folder: Path) -> int:
    size = 0
    for path in sorted(folder.iterdir()):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        size += path.stat().st_size
    fsync_folder(folder)
    return size
