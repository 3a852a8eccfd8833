"""Rows from disk against the plain table, pages counted, and ids that cannot be."""

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from leadline.core.errors import DataError, IntegrityError, LeadlineError, UsageError
from leadline.rig.direct_file import PAGE_BYTES
from leadline.rig.row_reader import BLOCK_BYTES, RowPart, RowReader

ROW_BYTES = 320
HEADS = (997, 1009, 1013)


@dataclass(repr=False)
class Table:
    """A table in parts of files, and whole in memory."""

    parts: list[RowPart]
    rows: NDArray[np.uint8]


def make_table(folder: Path, row_bytes: int, counts: list[int], begins: list[int]) -> Table:
    """Parts in two files in turn, each from some odd byte of its own."""
    files: list[bytearray] = [bytearray(), bytearray()]
    parts, rows = [], []
    for number, (count, begin) in enumerate(zip(counts, begins, strict=True)):
        file = files[number % 2]
        file += os.urandom(begin)
        part = os.urandom(count * row_bytes)
        path = folder / f"table{number % 2}.bin"
        parts.append(RowPart(path=path, begin=len(file), num_rows=count))
        file += part
        rows.append(np.frombuffer(part, dtype=np.uint8).reshape(count, row_bytes))
    for number, file in enumerate(files):
        (folder / f"table{number}.bin").write_bytes(file)
    return Table(parts=parts, rows=np.concatenate(rows))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    """As large as three heads of different size, in four uneven parts."""
    folder = tmp_path_factory.mktemp("rows")
    counts = [1000, 1, 1500, sum(HEADS) - 2501]
    return make_table(folder, ROW_BYTES, counts, [77, 4095, 0, 8192])


def head_ids(num_triples: int, seed: int = 0) -> NDArray[np.int64]:
    """Ids as a model makes them: one of each head, the head's offset added once."""
    chance = np.random.default_rng(seed)
    offsets = np.concatenate(([0], np.cumsum(HEADS)[:-1]))
    ids = np.stack([chance.integers(0, size, num_triples) for size in HEADS], axis=1)
    return (ids + offsets).reshape(-1)


@pytest.mark.parametrize("direct", [True, False])
def test_t65_rows_of_ten_thousand_triples_equal_the_plain_table(table: Table, direct: bool) -> None:
    ids = head_ids(10_000)
    with RowReader(table.parts, row_bytes=ROW_BYTES, direct=direct) as reader:
        assert np.array_equal(reader.gather(ids), table.rows[ids])
        assert reader.stats.direct == direct


@pytest.mark.parametrize("extra", [1, 2, 1000])
def test_t65_part_that_reaches_over_its_file_is_refused(table: Table, extra: int) -> None:
    last = table.parts[-1]
    longer = RowPart(path=last.path, begin=last.begin, num_rows=last.num_rows + extra)
    with pytest.raises(IntegrityError, match=rf"{longer.num_rows:,} rows of 320 .*table1\.bin"):
        RowReader([*table.parts[:-1], longer], row_bytes=ROW_BYTES)


@pytest.mark.parametrize("wrong", [-1, -(2**40), sum(HEADS), sum(HEADS) + 5, 2**40])
def test_t65_id_outside_the_table_is_refused_with_its_place(table: Table, wrong: int) -> None:
    ids = head_ids(10)
    ids[17] = wrong
    with (
        RowReader(table.parts, row_bytes=ROW_BYTES) as reader,
        pytest.raises(DataError, match=rf"row id {wrong:,} at place 17 .* of 3,019 rows"),
    ):
        reader.gather(ids)


def test_t65_first_and_last_row_of_every_part_are_its_own(table: Table) -> None:
    bounds = np.cumsum([part.num_rows for part in table.parts])
    ids = np.concatenate(([0], bounds - 1, bounds[:-1]))
    with RowReader(table.parts, row_bytes=ROW_BYTES) as reader:
        assert np.array_equal(reader.gather(ids), table.rows[ids])


@pytest.mark.parametrize("num_rows", [0, 1, 7, 8192, 8193, 100_000])
def test_t69_any_number_of_rows_comes_in_one_call(table: Table, num_rows: int) -> None:
    ids = head_ids(-(-num_rows // 3))[:num_rows]
    with RowReader(table.parts, row_bytes=ROW_BYTES) as reader:
        got = reader.gather(ids)
    assert got.shape == (num_rows, ROW_BYTES)
    assert np.array_equal(got, table.rows[ids])


@given(
    row_bytes=st.sampled_from([1, 3, 160, 4095, 4096, 4097, 9000]),
    counts=st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
    begins=st.lists(st.integers(0, 9000), min_size=5, max_size=5),
    threads=st.integers(1, 5),
    max_gap=st.sampled_from([0, 5000, 10**6]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_rows_of_any_table_equal_the_plain_table(
    tmp_path_factory: pytest.TempPathFactory,
    row_bytes: int,
    counts: list[int],
    begins: list[int],
    threads: int,
    max_gap: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("any", numbered=True)
    table = make_table(folder, row_bytes, counts, begins[: len(counts)])
    ids = np.array(
        data.draw(st.lists(st.integers(0, sum(counts) - 1), max_size=80)), dtype=np.int64
    )
    with RowReader(table.parts, row_bytes=row_bytes, threads=threads, max_gap=max_gap) as reader:
        assert reader.num_rows == sum(counts)
        assert np.array_equal(reader.gather(ids), table.rows[ids])


@pytest.mark.parametrize("max_gap", [0, 10**7])
def test_table_of_many_blocks_is_read_whole(tmp_path: Path, max_gap: int) -> None:
    num_rows = 3 * BLOCK_BYTES // 999
    table = make_table(tmp_path, 999, [num_rows], [13])
    ids = np.random.default_rng(1).permutation(num_rows)
    with RowReader(table.parts, row_bytes=999, max_gap=max_gap) as reader:
        assert np.array_equal(reader.gather(ids), table.rows[ids])
        # Blocks share at most a page each.
        assert reader.stats.bytes_from_disk <= num_rows * 999 + 5 * PAGE_BYTES


def test_row_asked_for_often_is_read_once(table: Table) -> None:
    with RowReader(table.parts, row_bytes=ROW_BYTES) as reader:
        reader.gather(np.zeros(5000, dtype=np.int64))
        assert reader.stats.rows_asked == 5000
        assert reader.stats.bytes_read == ROW_BYTES
        assert reader.stats.bytes_from_disk == PAGE_BYTES


def test_only_the_pages_of_the_rows_are_read(tmp_path: Path) -> None:
    table = make_table(tmp_path, 4096, [100], [0])
    with RowReader(table.parts, row_bytes=4096) as reader:
        reader.gather(np.array([3, 50, 51, 99]))
        assert reader.stats.bytes_from_disk == 4 * 4096


def test_gap_between_rows_is_read_over_when_allowed(tmp_path: Path) -> None:
    table = make_table(tmp_path, 4096, [100], [0])
    ids = np.array([0, 2, 5])
    with RowReader(table.parts, row_bytes=4096, max_gap=4096) as reader:
        assert np.array_equal(reader.gather(ids), table.rows[ids])
        assert reader.stats.bytes_from_disk == (3 + 1) * 4096


@pytest.mark.parametrize(
    "ids", [np.zeros((2, 2), dtype=np.int64), np.zeros(3), np.zeros(3, dtype=bool)]
)
def test_ids_of_other_shape_or_type_are_refused(table: Table, ids: NDArray[np.int64]) -> None:
    with (
        RowReader(table.parts, row_bytes=ROW_BYTES) as reader,
        pytest.raises(UsageError, match="give integers"),
    ):
        reader.gather(ids)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "uint64"])
def test_ids_of_other_integers_are_taken(table: Table, dtype: str) -> None:
    ids = np.array([200, 3, 3], dtype=dtype)
    with RowReader(table.parts, row_bytes=ROW_BYTES) as reader:
        assert np.array_equal(reader.gather(ids), table.rows[ids])


def test_t43_table_cut_meanwhile_names_file_expected_and_found(tmp_path: Path) -> None:
    table = make_table(tmp_path, 4096, [10], [0])
    with RowReader(table.parts, row_bytes=4096) as reader:
        os.truncate(table.parts[0].path, 4096 * 6)
        assert np.array_equal(reader.gather(np.array([5])), table.rows[5:6])
        with pytest.raises(IntegrityError, match=r"table0\.bin ends at byte 24,576 .* to 32,768"):
            reader.gather(np.array([5, 7]))
        assert np.array_equal(reader.gather(np.array([0])), table.rows[:1])


def test_table_in_an_absent_file_is_refused(tmp_path: Path) -> None:
    part = RowPart(path=tmp_path / "gone.bin", begin=0, num_rows=1)
    with pytest.raises(LeadlineError, match=r"gone\.bin: No such file"):
        RowReader([part], row_bytes=8)


@pytest.mark.parametrize(
    ("begin", "num_rows", "row_bytes", "threads"),
    [(-1, 1, 8, 1), (0, -1, 8, 1), (0, 1, 0, 1), (0, 1, 8, 0)],
)
def test_sizes_that_cannot_be_are_refused(
    table: Table, begin: int, num_rows: int, row_bytes: int, threads: int
) -> None:
    part = RowPart(path=table.parts[0].path, begin=begin, num_rows=num_rows)
    with pytest.raises(UsageError, match="cannot be"):
        RowReader([part], row_bytes=row_bytes, threads=threads)


def test_closed_reader_leaves_no_descriptor(table: Table) -> None:
    def open_files() -> set[str]:
        return {str(path) for path in Path("/proc/self/fd").iterdir()}

    before = open_files()
    with RowReader(table.parts, row_bytes=ROW_BYTES) as reader:
        reader.gather(head_ids(100))
    assert open_files() == before
