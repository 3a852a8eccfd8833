"""What all tests share: one thread per process, tiny shards of text, the tiny workloads."""

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Before torch loads, and inherited by every probe process.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
from hypothesis import settings

# A submission is judged by the same examples each time; a laptop goes on looking for new ones.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

_WORDS = (
    "lead",
    "line",
    "sounding",
    "fathom",
    "deep",
    "mark",
    "water",
    "hand",
    "cast",
    "depth",
    "by",
)
_DOCUMENTS = 80
_WORDS_EACH = 500


@pytest.fixture(scope="session")
def workloads_dir() -> Path:
    """The folder of `tiny.py`."""
    return Path(__file__).parent / "workloads"


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 257 byte ids, about 190,000 to train on and 30,000 held out."""
    from leadline.data import pack_text

    root = tmp_path_factory.mktemp("tiny")
    chooser = random.Random(0)
    (root / "text").mkdir()
    for number in range(_DOCUMENTS):
        text = " ".join(chooser.choice(_WORDS) for _ in range(_WORDS_EACH))
        (root / "text" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    pack_text(root / "text", root / "shards", tokenizer="bytes", eval_fraction="0.2")
    return root / "shards"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu on a machine without CUDA, saying so."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fsync fails for lack of space: the last moment a full disk can be noticed."""

    def no_space(_handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)


@pytest.fixture(params=["untouched", "older setting", "newer setting", "newer setting of matmul"])
def any_fp32_setting(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a workload's file may have done to fp32 products before it is measured."""
    import torch

    backends: Any = torch.backends
    owners = [backends, backends.cudnn, backends.mkldnn, backends.cuda.matmul]
    owners += [getattr(backends.cudnn, name) for name in ("conv", "rnn")]
    owners += [getattr(backends.mkldnn, name) for name in ("matmul", "conv", "rnn")]
    before = [(owner, owner.fp32_precision) for owner in owners]
    if request.param == "older setting":
        torch.set_float32_matmul_precision("medium")
    elif request.param == "newer setting":
        backends.fp32_precision = "tf32"
    elif request.param == "newer setting of matmul":
        backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = True
    for owner, value in before:
        owner.fp32_precision = value
