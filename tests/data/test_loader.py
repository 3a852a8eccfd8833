"""Batches: what a sample is, resuming, repeats, and independence from everything but the seed."""

import multiprocessing
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadline.core.errors import DataError, UsageError
from leadline.data.loader import Batch, State, TokenLoader
from leadline.data.manifest import load_manifest

MakeShards = Callable[..., Path]
FORK = multiprocessing.get_context("fork")


def _hashes(loader: TokenLoader, count: int) -> list[str]:
    return [batch.sha256 for batch in islice(loader, count)]


def _samples(loader: TokenLoader, count: int) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in islice(loader, count) for row in batch.inputs.tolist()]


@pytest.fixture
def small_root(counting_shards: MakeShards) -> Path:
    """Three shards of 41 ids: 123 ids, 24 windows of 5."""
    return counting_shards(shards=3, tokens=41)


def test_epoch_covers_every_window_once(small_root: Path) -> None:
    loader = TokenLoader(small_root, batch_size=4, seq_len=5, seed=1)
    samples = _samples(loader, 6)
    ids = [token for n in range(3) for token in (*range(1 + 40 * n, 41 + 40 * n), 0)]
    assert sorted(samples) == sorted(tuple(ids[at : at + 5]) for at in range(0, 120, 5))


def test_targets_are_the_inputs_moved_by_one(small_root: Path) -> None:
    batch = next(TokenLoader(small_root, batch_size=24, seq_len=5, seed=1))
    assert (batch.inputs.shape, batch.targets.shape) == ((24, 5), (24, 5))
    assert (batch.inputs.dtype, batch.targets.dtype) == (np.int64, np.int64)
    rows = dict(zip(map(tuple, batch.inputs.tolist()), batch.targets.tolist(), strict=True))
    assert rows[1, 2, 3, 4, 5] == [2, 3, 4, 5, 6]
    assert rows[36, 37, 38, 39, 40] == [37, 38, 39, 40, 0]


def test_batch_arrays_are_writable_and_contiguous(small_root: Path) -> None:
    batch = next(TokenLoader(small_root, batch_size=4, seq_len=5, seed=1))
    for array in (batch.inputs, batch.targets):
        assert array.flags.writeable
        assert array.flags.c_contiguous


def test_batch_hash_sees_every_id() -> None:
    ids = np.arange(6).reshape(2, 3)
    changed = ids.copy()
    changed[1, 2] += 1
    first = Batch(inputs=ids, targets=ids, epoch=1, position=0)
    others = [
        Batch(inputs=changed, targets=ids, epoch=1, position=0),
        Batch(inputs=ids, targets=changed, epoch=1, position=0),
    ]
    assert first.sha256 not in {other.sha256 for other in others}
    assert first.sha256 == Batch(inputs=ids, targets=ids, epoch=2, position=9).sha256
    assert first.tokens == 6


def test_counts_are_windows_times_length(small_root: Path) -> None:
    loader = TokenLoader(small_root, batch_size=4, seq_len=5, seed=1)
    assert (loader.num_windows, loader.tokens_available) == (24, 120)
    assert (loader.num_batches_left, loader.epoch, loader.position) == (6, 1, 0)
    assert loader.manifest_sha256 == load_manifest(small_root).sha256
    assert loader.vocab_size == 124


def test_batch_knows_its_place(small_root: Path) -> None:
    loader = TokenLoader(small_root, batch_size=10, seq_len=5, seed=1, repeat=True)
    places = [(batch.epoch, batch.position) for batch in islice(loader, 6)]
    assert places == [(1, 0), (1, 10), (1, 20), (2, 30), (2, 40), (3, 50)]


def test_g26_killed_run_reads_on_where_it_was(counting_shards: MakeShards) -> None:
    """8 shards x 100 batches, killed at batch 250, resumed to 400."""
    root = counting_shards(shards=8, tokens=401)  # 801 windows of 4: 800 batches of 1
    options = {"batch_size": 1, "seq_len": 4, "seed": 3}
    unbroken = _hashes(TokenLoader(root, **options), 400)
    first = TokenLoader(root, **options)
    before = _hashes(first, 250)
    after = _hashes(TokenLoader(root, **options, state=first.state()), 150)
    assert before + after == unbroken
    assert len(set(unbroken)) == 400


def test_g27_stop_in_the_middle_of_epoch_2_changes_nothing(small_root: Path) -> None:
    options = {"batch_size": 5, "seq_len": 5, "seed": 8, "repeat": True}
    unbroken = _hashes(TokenLoader(small_root, **options), 15)  # 24 windows: 3.1 epochs
    first = TokenLoader(small_root, **options)
    before = _hashes(first, 7)
    assert first.state()["epoch"] == 2
    assert before + _hashes(TokenLoader(small_root, **options, state=first.state()), 8) == unbroken


def test_g27_epochs_have_orders_of_their_own(small_root: Path) -> None:
    loader = TokenLoader(small_root, batch_size=24, seq_len=5, seed=8, repeat=True)
    epochs = [_samples(loader, 1) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({frozenset(epoch) for epoch in epochs}) == 1


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sizes=st.lists(st.integers(1, 24), min_size=1, max_size=8), seed=st.integers(0, 5))
def test_g27_batch_size_may_change_on_resume_without_moving_a_sample(
    small_root: Path, sizes: list[int], seed: int
) -> None:
    state: State | None = None
    samples: list[tuple[int, ...]] = []
    for size in sizes:
        loader = TokenLoader(
            small_root, batch_size=size, seq_len=5, seed=seed, repeat=True, state=state
        )
        samples += _samples(loader, 1)
        state = loader.state()
    one_by_one = TokenLoader(small_root, batch_size=1, seq_len=5, seed=seed, repeat=True)
    assert samples == _samples(one_by_one, len(samples))


def test_g27_global_random_state_is_neither_read_nor_moved(small_root: Path) -> None:
    options = {"batch_size": 4, "seq_len": 5, "seed": 2}
    random.seed(1)
    np.random.seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist())
    first = _hashes(TokenLoader(small_root, **options), 6)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.seed(99)
    np.random.seed(99)
    assert _hashes(TokenLoader(small_root, **options), 6) == first


def test_g28_seed_alone_decides_the_table_of_batches(small_root: Path) -> None:
    def table(seed: int) -> tuple[str, ...]:
        loader = TokenLoader(small_root, batch_size=4, seq_len=5, seed=seed, repeat=True)
        return tuple(_hashes(loader, 12))

    assert table(0) == table(0)
    assert len({table(seed) for seed in range(8)}) == 8
    assert len(set(table(0))) == 12


def _send_hashes(root: Path, connection: object) -> None:
    loader = TokenLoader(root, batch_size=4, seq_len=5, seed=6)
    connection.send(_hashes(loader, 6))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forking with threads, Python 3.12
def test_g28_forked_copies_read_the_same_order(small_root: Path) -> None:
    expected = _hashes(TokenLoader(small_root, batch_size=4, seq_len=5, seed=6), 6)
    for _ in range(2):
        np.random.random(3)
        receiver, sender = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_send_hashes, args=(small_root, sender))
        child.start()
        assert receiver.recv() == expected
        child.join()
        receiver.close()
        sender.close()
        child.close()


def test_g35_budget_beyond_the_split_is_red_before_the_run(counting_shards: MakeShards) -> None:
    root = counting_shards(shards=2, tokens=300)
    loader = TokenLoader(root, batch_size=1, seq_len=1, seed=0)
    with pytest.raises(DataError, match=r"holds 600 tokens.* 599 < 1024 wanted"):
        loader.require(1024)
    loader.require(599)


def test_g35_budget_counts_what_was_already_consumed(counting_shards: MakeShards) -> None:
    loader = TokenLoader(counting_shards(shards=2, tokens=300), batch_size=2, seq_len=8, seed=0)
    loader.require(592)
    next(loader)
    with pytest.raises(DataError, match="576 < 592"):
        loader.require(592)


def test_g35_without_repeats_the_end_is_an_error_not_a_hang(counting_shards: MakeShards) -> None:
    root = counting_shards(shards=2, tokens=300)
    loader = TokenLoader(root, batch_size=10, seq_len=8, seed=0)
    assert len(_hashes(loader, 7)) == 7
    with pytest.raises(DataError, match="4 samples are left of 74 in the train split, 10 wanted"):
        next(loader)
    assert loader.position == 70


def test_g35_with_repeats_epoch_2_begins_and_is_counted(counting_shards: MakeShards) -> None:
    root = counting_shards(shards=2, tokens=300)
    loader = TokenLoader(root, batch_size=10, seq_len=8, seed=0, repeat=True)
    loader.require(1024)
    batches = list(islice(loader, 13))
    assert sum(batch.tokens for batch in batches) == 1040
    assert [batch.epoch for batch in batches] == [1] * 8 + [2] * 5


def test_g37_id_beyond_the_vocabulary_stops_the_batch(make_shards: MakeShards) -> None:
    root = make_shards([list(range(1, 41))], vocab_size=50_257)
    ids = np.fromfile(root / "train" / "shard-00000.bin", dtype="<u2")
    ids[17] = 50_300
    ids.tofile(root / "train" / "shard-00000.bin")
    loader = TokenLoader(root, batch_size=10, seq_len=4, seed=0)
    with pytest.raises(DataError, match=r"shard-00000\.bin holds the id 50300 at token 17"):
        next(loader)


def test_split_smaller_than_one_batch_is_refused_with_both_numbers(small_root: Path) -> None:
    with pytest.raises(DataError, match="has 24 windows of 5 tokens, fewer than one batch of 25"):
        TokenLoader(small_root, batch_size=25, seq_len=5, seed=0, repeat=True)


def test_window_longer_than_the_split_is_refused(small_root: Path) -> None:
    with pytest.raises(DataError, match="has 0 windows of 123 tokens"):
        TokenLoader(small_root, batch_size=1, seq_len=123, seed=0)


def test_eval_split_has_batches_of_its_own(small_root: Path) -> None:
    batch = next(TokenLoader(small_root, split="eval", batch_size=1, seq_len=9, seed=0))
    assert batch.inputs.tolist() == [[9, 8, 7, 6, 5, 4, 3, 2, 1]]
    assert batch.targets.tolist() == [[8, 7, 6, 5, 4, 3, 2, 1, 0]]


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"seq_len": 0}, {"seed": -1}, {"batch_size": -3}],
)
def test_number_that_cannot_be_is_refused(small_root: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="start"):
        TokenLoader(small_root, **{"batch_size": 1, "seq_len": 5, "seed": 0, **options})


def test_state_holds_integers_and_strings_alone(small_root: Path) -> None:
    loader = TokenLoader(small_root, batch_size=4, seq_len=5, seed=1)
    next(loader)
    assert loader.state() == {
        "epoch": 1,
        "position": 4,
        "seed": 1,
        "seq_len": 5,
        "split": "train",
        "manifest_sha256": load_manifest(small_root).sha256,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 2}, "seed 2 saved, 1 now"),
        ({"seq_len": 6}, "seq_len 6 saved, 5 now"),
        ({"split": "eval"}, "split 'eval' saved, 'train' now"),
        ({"manifest_sha256": "0"}, "manifest_sha256 '0' saved, '[0-9a-f]{64}' now"),
        ({"epoch": 2}, "epoch 2 saved, 1 now"),
        ({"seed": 2, "seq_len": 6}, "seed 2 saved, 1 now; seq_len 6 saved, 5 now"),
        ({"position": -1}, "position -1"),
        ({"position": "4"}, "position '4'"),
        ({"position": True}, "position True"),
    ],
)
def test_state_of_another_run_is_refused_with_every_difference(
    small_root: Path, change: dict[str, int | str], words: str
) -> None:
    options = {"batch_size": 4, "seq_len": 5, "seed": 1}
    state = TokenLoader(small_root, **options).state() | change
    with pytest.raises(DataError, match=words):
        TokenLoader(small_root, **options, state=state)


def test_state_of_other_shards_is_refused(small_root: Path, counting_shards: MakeShards) -> None:
    other = counting_shards(shards=3, tokens=42, name="other")
    state = TokenLoader(small_root, batch_size=4, seq_len=5, seed=1).state()
    with pytest.raises(DataError, match="manifest_sha256"):
        TokenLoader(other, batch_size=4, seq_len=5, seed=1, state=state)


@pytest.mark.parametrize("key", ["epoch", "position", "seed", "seq_len", "manifest_sha256"])
def test_state_that_lacks_a_key_is_refused(small_root: Path, key: str) -> None:
    options = {"batch_size": 4, "seq_len": 5, "seed": 1}
    state = TokenLoader(small_root, **options).state()
    del state[key]
    with pytest.raises(DataError, match=f"{key}.*(None|'missing')"):
        TokenLoader(small_root, **options, state=state)
