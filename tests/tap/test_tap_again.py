"""A second command into a tap's folder: it goes on only with the very same tap."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from leadline.core.errors import LockError, UsageError

from .conftest import Checkpoints
from .families import random_documents
from .processes import CommandServer
from .scenes import SCENES, build_small_model
from .tapping import file_hashes, record
from .toy import copy_checkpoint, edit_tensor, tensor_names

FLAGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "vram_mib": 64,
    "host_pool_mib": 4,
    "micro_batch_tokens": 40,
}
DOCUMENTS = random_documents((40, *[9] * 6))


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """A tap that is there already."""

    checkpoint: Path
    path: Path

    def again(
        self, documents: Any = DOCUMENTS, checkpoint: Path | None = None, **flags: Any
    ) -> dict[str, Any]:
        """The command once more, with changes."""
        return record(checkpoint or self.checkpoint, documents, self.path, **{**FLAGS, **flags})


@pytest.fixture(scope="module")
def made(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Made:
    made = Made(
        checkpoint=build_small_model(checkpoints),
        path=tmp_path_factory.mktemp("made") / "tap",
    )
    made.again()
    return made


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "corpus": ({"documents": [*DOCUMENTS[:6], DOCUMENTS[6][::-1]]}, "corpus_digest"),
    "order of the corpus": ({"documents": DOCUMENTS[::-1]}, "corpus_digest"),
    "longer corpus": ({"documents": [*DOCUMENTS, [1]]}, "documents"),
    "other boundaries": ({"documents": [DOCUMENTS[0] + DOCUMENTS[1], *DOCUMENTS[2:]]}, "documents"),
    "length limit that cuts": ({"max_document_tokens": 39}, "max_document_tokens"),
    "length limit that cuts nothing": ({"max_document_tokens": 400}, "max_document_tokens"),
    "dtype": ({"dtype": "float32"}, "dtype"),
    "targets": ({"targets": "all"}, "targets"),
    "gate_up": ({"gate_up_gram": "expert"}, "gate_up"),
    "schedule": ({"schedule": "step"}, "schedule"),
    "wider micro-batches": ({"micro_batch_tokens": 64}, "micro_batch_tokens"),
    "micro-batches of others": ({"micro_batch_tokens": 30}, "batches_digest"),
    "groups of experts": ({"vram_mib": 1, "host_pool_mib": 1}, "experts_per_group"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_t73_tap_that_would_differ_in_a_bit_is_refused_naming_the_field(
    made: Made, other: str
) -> None:
    changes, field = OTHERS[other]
    before = file_hashes(made.path)
    with pytest.raises(UsageError, match=rf"holds a tap with {field} = .*another --out"):
        made.again(**changes)
    assert file_hashes(made.path) == before


def train_more(path: Path) -> None:
    """Change every weight a little."""
    for name in tensor_names(path):
        edit_tensor(path, name, lambda weight: weight * (1 + 2**-7))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "weights": train_more,
    "configuration": lambda path: _set(path / "config.json", rms_norm_eps=1e-5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_t73_other_revision_of_the_model_is_refused(
    made: Made, tmp_path: Path, change: str
) -> None:
    revised = copy_checkpoint(made.checkpoint, tmp_path / "revised")
    CHANGES[change](revised)
    with pytest.raises(UsageError, match="holds a tap with model_digest"):
        made.again(checkpoint=revised)


def test_t73_other_tokenizer_of_the_same_ids_is_refused(made: Made, tmp_path: Path) -> None:
    revised = copy_checkpoint(made.checkpoint, tmp_path / "revised")
    file = revised / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")), indent=1))
    with pytest.raises(UsageError, match="holds a tap with tokenizer_digest"):
        made.again(checkpoint=revised)


@pytest.mark.parametrize(
    "flags", [{"threads": 1}, {"host_pool_mib": 9}, {"vram_mib": 99}, {"ngram_placement": "ram"}]
)
def test_t73_what_changes_no_bit_is_no_other_tap(made: Made, flags: dict[str, Any]) -> None:
    assert made.again(**flags)["tap_dir"] == str(made.path.resolve())


def test_t73_checkpoint_that_moved_is_the_same(made: Made, tmp_path: Path) -> None:
    assert made.again(checkpoint=copy_checkpoint(made.checkpoint, tmp_path / "moved"))


@pytest.mark.slow
def test_second_tap_into_a_folder_is_refused_naming_the_first(
    server: CommandServer, made: Made, tmp_path: Path
) -> None:
    arguments = SCENES["small corpus"].arguments(made.checkpoint, tmp_path / "tap")
    first = server.start(arguments, fault=("seal_slowly", {"seconds": 0.3}))
    first.wait_for(tmp_path / "tap" / "grams.json")
    documents = random_documents([64] * SCENES["small corpus"].documents)
    with pytest.raises(LockError, match=rf"process {first.pid} on .*another --out"):
        record(made.checkpoint, documents, tmp_path / "tap", **FLAGS)
    assert first.wait().code == 0


def _set(file: Path, **fields: Any) -> None:
    document = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**document, **fields}), encoding="utf-8")
