"""Seeded, resumable batches of token windows.

- A sample is a window of L + 1 ids; windows lie L apart over the whole split, so
  every id but the last few is an input once an epoch.
- The order of samples depends on the seed, the epoch and the shards alone. It is
  one endless row of epochs, and a batch is the next B of it: the batch size
  may change at any moment, and no sample is lost or seen twice.
- The whole state is the number of samples consumed. No worker processes, no
  global random state.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from leadline.core.errors import DataError, UsageError
from leadline.data.manifest import SplitName
from leadline.data.order import WindowOrder
from leadline.data.reader import open_split

State = dict[str, int | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Inputs and the ids that follow them, int64 [B, L] each."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    epoch: int
    """Epoch of the first sample, from 1."""
    position: int
    """Samples consumed before this batch since the start of epoch 1."""

    @property
    def sha256(self) -> str:
        """Sha256 of the ids, inputs then targets; computed on every call."""
        digest = hashlib.sha256(self.inputs.astype("<i8", copy=False).tobytes())
        digest.update(self.targets.astype("<i8", copy=False).tobytes())
        return digest.hexdigest()

    @property
    def tokens(self) -> int:
        """Ids trained on: B x L."""
        return int(self.inputs.size)


class TokenLoader(Iterator[Batch]):
    """Iterator over the batches of one split; `state()` and `state=` resume it anywhere."""

    def __init__(
        self,
        root: Path,
        *,
        split: SplitName = "train",
        batch_size: int,
        seq_len: int,
        seed: int,
        repeat: bool = False,
        state: Mapping[str, int | str] | None = None,
    ) -> None:
        """Open *split* of the shards at *root*.

        Raises:
            UsageError: a batch size, length or seed that cannot be.
            DataError: unusable shards, fewer windows than one batch, or a state of other data,
                seed or length.
        """
        if batch_size < 1 or seq_len < 1 or seed < 0:
            raise UsageError(
                f"batch size {batch_size}, sequence length {seq_len} and seed {seed} were given; "
                "the first two start at 1, the seed at 0"
            )
        self._split = open_split(Path(root), split)
        self._split_name = split
        self._batch_size = batch_size
        self._seq_len = seq_len
        self._seed = seed
        self._repeat = repeat
        self._manifest_sha256 = self._split.manifest.sha256
        self._num_windows = (self._split.num_tokens - 1) // seq_len
        if self._num_windows < batch_size:
            raise DataError(
                f"the {split} split at {root} has {self._num_windows} windows of {seq_len} tokens, "
                f"fewer than one batch of {batch_size}; add text or shorten the batch"
            )
        self._position = 0 if state is None else self._position_in(state)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next B samples.

        Raises:
            DataError: fewer than B samples are left and *repeat* is off, or an id lies outside
                the vocabulary.
        """
        if not self._repeat and self._position + self._batch_size > self._num_windows:
            raise DataError(
                f"{self._num_windows - self._position} samples are left of {self._num_windows} in "
                f"the {self._split_name} split, {self._batch_size} wanted; train fewer steps or "
                "allow repeats"
            )
        windows = self._windows_at(self._position, self._batch_size)
        starts = windows.astype(np.int64) * self._seq_len
        ids = self._split.windows(starts, self._seq_len + 1)
        batch = Batch(
            inputs=ids[:, :-1].copy(),
            targets=ids[:, 1:].copy(),
            epoch=self.epoch,
            position=self._position,
        )
        self._position += self._batch_size
        return batch

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 1."""
        return self._position // self._num_windows + 1

    @property
    def position(self) -> int:
        """Samples consumed since the start of epoch 1."""
        return self._position

    @property
    def num_windows(self) -> int:
        """Samples in an epoch."""
        return self._num_windows

    @property
    def num_batches_left(self) -> int:
        """Whole batches left in this epoch."""
        return (self._num_windows * self.epoch - self._position) // self._batch_size

    @property
    def tokens_available(self) -> int:
        """Ids that one epoch trains on: windows x L."""
        return self._num_windows * self._seq_len

    @property
    def vocab_size(self) -> int:
        """Smallest vocabulary the model needs."""
        return self._split.manifest.vocab_size

    @property
    def manifest_sha256(self) -> str:
        """Identity of the shards."""
        return self._manifest_sha256

    def require(self, tokens: int) -> None:
        """Refuse, before a run, a budget that the samples left cannot feed.

        Raises:
            DataError: *repeat* is off and fewer than *tokens* are left.
        """
        left = self.tokens_available - self._position * self._seq_len
        if not self._repeat and left < tokens:
            raise DataError(
                f"the {self._split_name} split holds {self._split.num_tokens} tokens, {left} of "
                f"them left in whole windows of {self._seq_len}, and {left} < {tokens} wanted; "
                "add text, lower the budget or allow repeats"
            )

    def state(self) -> State:
        """All that a resume needs: integers and strings."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "seed": self._seed,
            "seq_len": self._seq_len,
            "split": self._split_name,
            "manifest_sha256": self._manifest_sha256,
        }

    def _position_in(self, state: Mapping[str, int | str]) -> int:
        position = state.get("position")
        if type(position) is not int or position < 0:
            raise DataError(f"the loader state has the position {position!r}; a count is wanted")
        self._position = position
        wanted = self.state()
        differences = [
            f"{key} {state.get(key, 'missing')!r} saved, {wanted[key]!r} now"
            for key in wanted
            if state.get(key) != wanted[key]
        ]
        if differences:
            raise DataError(
                f"the loader state belongs to another run ({'; '.join(differences)}); "
                "resume with the shards, seed and length it was saved with"
            )
        return position

    def _windows_at(self, position: int, count: int) -> NDArray[np.uint64]:
        """Window numbers of *count* samples from *position* on, across epochs."""
        parts = []
        while count:
            epoch, first = divmod(position, self._num_windows)
            taken = min(count, self._num_windows - first)
            order = WindowOrder(self._num_windows, seed=self._seed, epoch=epoch + 1)
            parts.append(order.at(np.arange(first, first + taken, dtype=np.uint64)))
            position, count = position + taken, count - taken
        return np.concatenate(parts)
