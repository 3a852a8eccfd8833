import errno
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import (
    DataError,
    DiskSpaceError,
    IntegrityError,
    LockError,
    NonFiniteStateError,
    UsageError,
)
from leadline.core.notes import Note
from leadline.tap.manifest import read_manifest
from leadline.tap.reader import GramReader
from leadline.tap.store import StorePlan, TapStore, planned_layer_bytes
from leadline.tap.triangle import packed_length
from leadline.tap.verify import verify_tap

from .taps import HIDDEN, INNER, TOP_K, ToyRows, flip_byte, layer_files, toy_key, write_tap

SKIPPED = Note(kind="document_skipped", count=1, detail="document 4 is empty")


def open_tap(path, **key):
    return TapStore.open(path, toy_key(**key), ToyRows().plan)


def seal(store, layer, rows=None, **kwargs):
    return store.seal(layer, *(rows or ToyRows()).grams(layer), **kwargs)


def test_tap_holds_the_raw_sums_and_counts_it_was_given(tmp_path):
    tap = GramReader(write_tap(tmp_path / "tap"))
    inputs, chosen, inner = ToyRows().rows(1, slice(None))
    for expert in range(8):
        mine = inner[chosen == expert]
        assert np.allclose(tap.gram(1, "down", expert=expert), mine.T @ mine, atol=1e-6)
        assert tap.rows(1)[expert] == len(mine)
    assert np.allclose(tap.gram(1, "gate_up"), inputs.T @ inputs, atol=1e-5)
    assert tap.rows(1, "gate_up") == 40


def test_seal_leaves_the_arrays_it_was_given_alone(tmp_path):
    rows = ToyRows()
    with open_tap(tmp_path / "tap", num_waves=2) as store:
        store.seal(0, *rows.grams(0, slice(0, 20)), wave=0)
        grams, counts = rows.grams(0, slice(20, 40))
        before = [gram.packed.copy() for gram in grams.values()]
        store.seal(0, grams, counts, wave=1)
    after = [gram.packed for gram in grams.values()]
    assert all((x == y).all() for x, y in zip(before, after, strict=True))
    assert counts["gate_up"] == 20


def test_t35_weights_that_read_the_same_rows_share_one_gram_that_names_them(tmp_path):
    tap = GramReader(write_tap(tmp_path / "tap"))
    (user,) = tap.users(0, "gate_up", expert=5)
    assert user.parameter == "model.layers.0.mlp.experts.gate_up_proj"
    assert user.published == (
        "model.layers.0.mlp.experts.5.gate_proj.weight",
        "model.layers.0.mlp.experts.5.up_proj.weight",
    )
    assert tap.targets(0) == ("down", "gate_up")


def test_t30_replayed_layer_gives_the_same_bytes(tmp_path):
    one, two = (layer_files(write_tap(tmp_path / name)) for name in ("one", "two"))
    assert one == two


def test_t70_fault_in_the_last_layer_leaves_the_layers_before_sealed(tmp_path):
    path = tmp_path / "tap"
    grams, rows = ToyRows().grams(2)
    write_tap(path, stop_after=2)
    with open_tap(path) as store, pytest.raises(NonFiniteStateError):
        store.seal(2, poison(grams, "gate_up", 0, float("nan")), rows)
    assert verify_tap(path, allow_partial=True).layers == 2
    with open_tap(path) as store:
        assert store.sealed == {0, 1}
        seal(store, 2)
        store.finish({"tokens": 40})
    assert layer_files(path) == layer_files(write_tap(tmp_path / "whole"))


def cut_in_half(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [cut_in_half, os.unlink, lambda path: path.write_bytes(b"")])
def test_t71_layer_file_that_is_not_whole_is_made_anew(tmp_path, damage):
    path = write_tap(tmp_path / "tap")
    whole = layer_files(path)
    damage(path / "layer_00001.safetensors")
    with open_tap(path) as store:
        assert (store.sealed, store.complete) == ({0, 2}, False)
        seal(store, 1)
        store.finish({"tokens": 40})
    assert layer_files(path) == whole


def test_t71_layer_file_without_its_entry_is_no_seal(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=1)
    whole = layer_files(write_tap(tmp_path / "whole"))
    (path / "layer_00001.safetensors").write_bytes(whole["layer_00001.safetensors"])
    with open_tap(path) as store:
        assert store.sealed == {0}
        assert not (path / "layer_00001.safetensors").exists()
    assert layer_files(write_tap(path)) == whole


def test_t71_empty_folder_is_a_tap_to_begin(tmp_path):
    with open_tap(tmp_path) as store:
        assert store.sealed == frozenset()


def test_t71_temporary_files_of_a_killed_tap_are_removed(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=1)
    (path / ".layer_00001.safetensors.x1_2.tmp").write_bytes(b"half")
    (path / ".grams.json.abc.tmp").write_bytes(b"half")
    with open_tap(path):
        assert not list(path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("corpus_digest", "other"),
        ("max_document_tokens", 512),
        ("model_digest", "other"),
        ("first_layer", 1),
        ("end_layer", 2),
        ("dtype", "bfloat16"),
        ("gate_up", "expert"),
        ("targets", "all"),
        ("micro_batch_tokens", 8),
        ("schedule", "step"),
        ("generation", 2),
    ],
)
def test_t73_tap_of_another_key_is_refused_naming_the_field(tmp_path, field, value):
    path = write_tap(tmp_path / "tap", stop_after=1)
    before = layer_files(path)
    old = getattr(toy_key(), field)
    with pytest.raises(UsageError, match=rf"{field} = {old!r}, this one has {value!r}"):
        open_tap(path, **{field: value})
    assert layer_files(path) == before


def test_t73_another_plan_of_layers_is_refused(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=1)
    with pytest.raises(UsageError, match=r"layers \[0, 1, 2\], this one has \[0, 2\]"):
        TapStore.open(path, toy_key(), StorePlan(layer_bytes={0: 9, 2: 9}))


def test_complete_tap_opened_again_is_complete_and_untouched(tmp_path):
    path = write_tap(tmp_path / "tap")
    before = layer_files(path)
    with open_tap(path) as store:
        assert store.complete
        assert seal(store, 1) is False
    assert layer_files(path) == before


def test_second_tap_into_a_folder_is_refused_naming_the_first(tmp_path):
    with open_tap(tmp_path / "tap"), pytest.raises(LockError, match=f"process {os.getpid()} on"):
        open_tap(tmp_path / "tap")
    open_tap(tmp_path / "tap").close()


def test_second_tap_is_refused_though_the_first_left_no_name(tmp_path):
    with open_tap(tmp_path / "tap") as store:
        assert store.folder == tmp_path / "tap"
        (store.folder / ".tap.pid").unlink()
        with pytest.raises(LockError, match="written by another process"):
            open_tap(tmp_path / "tap")


def test_folder_whose_holder_cannot_be_noted_is_let_go(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)
        with pytest.raises(DiskSpaceError, match=r"full while writing .*\.tap\.pid"):
            open_tap(tmp_path / "tap")
    open_tap(tmp_path / "tap").close()


def test_refused_open_lets_the_folder_go(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=1)
    with pytest.raises(UsageError):
        open_tap(path, dtype="bfloat16")
    open_tap(path).close()


@pytest.mark.parametrize("name", ["notes.txt", "layer_1.safetensors", "model.safetensors", ".x"])
def test_folder_with_a_file_of_others_is_refused_and_kept(tmp_path, name):
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(UsageError, match=rf"{name}.*no tap made"):
        open_tap(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_layer_files_without_their_manifest_are_refused_and_kept(tmp_path):
    path = write_tap(tmp_path / "tap")
    (path / "grams.json").unlink()
    with pytest.raises(UsageError, match=r"without their grams\.json"):
        open_tap(path)
    assert (path / "layer_00000.safetensors").exists()


def test_work_folder_and_marker_are_nobodys_business(tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "residuals.bin").write_bytes(b"x")
    (tmp_path / "tap.marker").write_text("pid=1\n")
    write_tap(tmp_path)
    assert (tmp_path / "work" / "residuals.bin").read_bytes() == b"x"
    assert verify_tap(tmp_path).ok


def test_out_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"mine")
    with pytest.raises(UsageError, match="is a file"):
        open_tap(tmp_path / "f")


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(b""), lambda p: flip_byte(p, 40)])
def test_damaged_manifest_is_refused_and_no_layer_is_lost(tmp_path, damage):
    path = write_tap(tmp_path / "tap")
    damage(path / "grams.json")
    with pytest.raises(IntegrityError, match=r"grams\.json"):
        open_tap(path)
    assert len(list(path.glob("layer_*"))) == 3


def test_t30_manifest_of_another_version_is_refused(tmp_path):
    path = write_tap(tmp_path / "tap")
    text = (path / "grams.json").read_text()
    (path / "grams.json").write_text(text.replace('"version":1}', '"version":2}'))
    with pytest.raises(DataError, match="version 2, this program reads 1"):
        open_tap(path)


def test_t92_plan_that_does_not_fit_is_refused_before_a_folder_is_made(tmp_path):
    plan = StorePlan(layer_bytes={0: 1 << 60, 1: 1 << 60, 2: 1 << 60})
    with pytest.raises(DiskSpaceError, match=rf"\(\d+ bytes\) free and the tap needs .*{3 << 60}"):
        TapStore.open(tmp_path / "tap", toy_key(), plan)
    assert list(tmp_path.iterdir()) == []


def test_t92_only_the_layers_that_are_missing_count_against_the_disk(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=2)
    huge = StorePlan(layer_bytes={0: 1 << 60, 1: 1 << 60, 2: 1000})
    TapStore.open(path, toy_key(), huge).close()
    with pytest.raises(DiskSpaceError, match="rest of the tap"):
        TapStore.open(path, toy_key(), StorePlan(layer_bytes={0: 1, 1: 1, 2: 1 << 60}))


def poison(grams, name, place, value):
    packed = grams[name].packed.copy()
    packed[place] = value
    return {**grams, name: replace(grams[name], packed=packed)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_t09_gram_that_cannot_be_a_sum_of_squares_is_not_sealed(tmp_path, value):
    grams, rows = ToyRows().grams(0)
    bad = poison(grams, "down", (5, INNER), value)  # row 1 begins there, at its diagonal
    with open_tap(tmp_path / "tap") as store:
        with pytest.raises(NonFiniteStateError, match=r"layer 0, down, expert 5 .*feature 1"):
            store.seal(0, bad, rows)
        assert store.sealed == frozenset()
    assert not list((tmp_path / "tap").glob("*layer*"))


def test_t09_bad_single_gram_is_named_without_an_expert(tmp_path):
    grams, rows = ToyRows().grams(0)
    with open_tap(tmp_path / "tap") as store, pytest.raises(NonFiniteStateError) as caught:
        store.seal(0, poison(grams, "gate_up", 0, float("nan")), rows)
    assert "layer 0, gate_up has nan" in str(caught.value)


@pytest.mark.parametrize("name", ["gate_up", "down"])
@pytest.mark.parametrize("change", [-1, 1])
def test_t24_rows_that_are_not_tokens_times_top_k_stop_the_tap(tmp_path, name, change):
    grams, rows = ToyRows().grams(1)
    rows[name] = rows[name].copy()
    rows[name][...] += change * (np.arange(rows[name].size).reshape(rows[name].shape) == 0)
    wanted = 40 * (TOP_K if name == "down" else 1)
    with (
        open_tap(tmp_path / "tap") as store,
        pytest.raises(IntegrityError, match=rf"layer 1, {name} .* {wanted + change} .*{wanted} "),
    ):
        store.seal(1, grams, rows)


def test_rows_of_a_gram_without_a_rule_are_taken_as_they_come(tmp_path):
    grams, rows = ToyRows().grams(0)
    free = {name: replace(gram, rows_per_token=None) for name, gram in grams.items()}
    with open_tap(tmp_path / "tap") as store:
        store.seal(0, free, {**rows, "gate_up": np.int64(7)})
        assert store.sealed == {0}


def test_row_count_below_zero_is_refused(tmp_path):
    grams, rows = ToyRows().grams(0)
    counts = rows["down"].copy()
    counts[:2] += [-100, 100]
    with open_tap(tmp_path / "tap") as store, pytest.raises(IntegrityError, match="below zero"):
        store.seal(0, grams, {**rows, "down": counts})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda grams, rows: rows.pop("down"),
        lambda grams, rows: rows.update(down=rows["down"][1:]),
        lambda grams, rows: rows.update(gate_up=np.array([40])),
        lambda grams, rows: grams.update(down=replace(grams["down"], num_features=5)),
        lambda grams, rows: grams.update(
            down=replace(grams["down"], packed=grams["down"].packed.astype(np.float64))
        ),
    ],
)
def test_grams_and_rows_of_unlike_shapes_are_refused(tmp_path, spoil):
    grams, rows = ToyRows().grams(0)
    spoil(grams, rows)
    with open_tap(tmp_path / "tap") as store, pytest.raises(ValueError, match="layer 0"):
        store.seal(0, grams, rows)


def test_layer_that_is_not_planned_is_refused(tmp_path):
    with open_tap(tmp_path / "tap") as store, pytest.raises(UsageError, match="layer 3"):
        store.seal(3, *ToyRows(layers=4).grams(3))


def test_finish_with_a_layer_missing_names_it(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=1)
    with open_tap(path) as store, pytest.raises(UsageError, match=r"layer 1 is not sealed \(2 of"):
        store.finish({})
    assert not read_manifest(path).complete


def test_finish_turns_floats_into_decimal_strings(tmp_path):
    path = tmp_path / "tap"
    with open_tap(path) as store:
        for layer in range(3):
            seal(store, layer)
        store.finish({"seconds": 1.25, "tokens": 40, "tap_dir": "x", "deep": {"of": [0.5, True]}})
    assert read_manifest(path).result == {
        "seconds": "1.25",
        "tokens": 40,
        "tap_dir": "x",
        "deep": {"of": ["0.5", True]},
    }


def test_notes_are_kept_once_with_their_layer_and_leave_with_it(tmp_path):
    path, plan = tmp_path / "tap", replace(ToyRows().plan, notes=(SKIPPED,))
    starved = Note(kind="expert_without_rows", count=1, detail="layer 1: 6")
    for _ in range(2):
        with TapStore.open(path, toy_key(), plan) as store:
            seal(store, 1, notes=[starved])
            store.add_notes([SKIPPED])
    assert [(n.layer, n.note) for n in read_manifest(path).notes] == [(None, SKIPPED), (1, starved)]
    (path / "layer_00001.safetensors").unlink()
    with TapStore.open(path, toy_key(), plan) as store:
        assert [(n.layer, n.note) for n in store.manifest.notes] == [(None, SKIPPED)]


def test_manifest_shows_least_middle_and_most_rows_of_the_experts(tmp_path):
    path = write_tap(tmp_path / "tap")
    rows = np.sort(ToyRows().grams(2)[1]["down"])
    entry = read_manifest(path).entry(2)
    assert entry is not None
    down = entry.rows["down"]
    assert (down.total, down.min, down.median, down.max) == (80, rows[0], rows[3], rows[7])
    assert down.without_rows == (rows == 0).sum()


@pytest.mark.parametrize("num_waves", [2, 3])
def test_waves_add_up_to_the_tap_of_one_wave(tmp_path, num_waves):
    path, rows = tmp_path / "waves", ToyRows()
    parts = [slice(wave, None, num_waves) for wave in range(num_waves)]
    for wave, part in enumerate(parts):
        with TapStore.open(path, toy_key(num_waves=num_waves), rows.plan) as store:
            for layer in range(3):
                assert store.waves_sealed(layer) == wave
                assert store.seal(layer, *rows.grams(layer, part), wave=wave)
            assert len(list(path.glob("layer_*"))) == 3
            assert store.sealed == ({0, 1, 2} if wave == num_waves - 1 else frozenset())
    with TapStore.open(path, toy_key(num_waves=num_waves), rows.plan) as store:
        store.finish({})
    whole = GramReader(write_tap(tmp_path / "whole"))
    for layer in range(3):
        assert (GramReader(path).rows(layer) == whole.rows(layer)).all()
        gap = GramReader(path).packed(layer, "down") - whole.packed(layer, "down")
        assert abs(gap).max() <= 1e-5
    assert verify_tap(path).ok


def test_wave_that_a_layer_holds_is_not_added_again(tmp_path):
    path = tmp_path / "tap"
    with open_tap(path, num_waves=2) as store:
        assert seal(store, 0, wave=0)
        before = layer_files(path)
        assert not seal(store, 0, wave=0)
        assert layer_files(path) == before


def test_wave_out_of_turn_is_refused(tmp_path):
    with open_tap(tmp_path / "tap", num_waves=3) as store:
        with pytest.raises(UsageError, match=r"wave 1 \(from 0\) of layer 0 .*holds 0 of 3"):
            seal(store, 0, wave=1)
        with pytest.raises(UsageError, match=r"wave 3 \(from 0\)"):
            seal(store, 0, wave=3)


def test_wave_without_its_number_is_the_next_until_the_layer_is_full(tmp_path):
    rows = ToyRows()
    with open_tap(tmp_path / "tap", num_waves=2) as store:
        assert store.seal(0, *rows.grams(0, slice(0, 20)))
        assert store.seal(0, *rows.grams(0, slice(20, 40)))
        assert not store.seal(0, *rows.grams(0, slice(20, 40)))
        assert store.sealed == {0}


def test_wave_counted_twice_is_found_by_its_rows(tmp_path):
    rows = ToyRows()
    with open_tap(tmp_path / "tap", num_waves=2) as store:
        store.seal(0, *rows.grams(0, slice(0, 30)))
        with pytest.raises(IntegrityError, match="counted 60 rows, wanted 40"):
            store.seal(0, *rows.grams(0, slice(0, 30)))


def test_wave_that_lost_rows_is_found_when_the_last_is_added(tmp_path):
    rows = ToyRows()
    with open_tap(tmp_path / "tap", num_waves=2) as store:
        store.seal(0, *rows.grams(0, slice(0, 20)), wave=0)
        with pytest.raises(IntegrityError, match="counted 39 rows, wanted 40"):
            store.seal(0, *rows.grams(0, slice(21, 40)), wave=1)
        assert store.waves_sealed(0) == 1


def test_wave_with_other_grams_than_the_first_is_refused(tmp_path):
    with open_tap(tmp_path / "tap", num_waves=2) as store:
        seal(store, 0, wave=0)
        with pytest.raises(Exception, match="other Grams in wave 2"):
            seal(store, 0, ToyRows(linear=True), wave=1)


@given(features=st.lists(st.integers(0, 40), min_size=1, max_size=4), experts=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_planned_bytes_are_the_numbers_and_a_fixed_allowance(features, experts):
    shapes = {f"t{index}": (width, experts) for index, width in enumerate(features)}
    exact = sum(experts * (4 * packed_length(width) + 8) for width in features)
    assert planned_layer_bytes(shapes) == exact + (256 << 10)


def test_planned_bytes_are_never_below_the_file(tmp_path):
    path = write_tap(tmp_path / "tap", ToyRows(linear=True))
    shapes = {"gate_up": (HIDDEN, None), "down": (INNER, 8), "q": (HIDDEN, None)}
    assert (path / "layer_00000.safetensors").stat().st_size <= planned_layer_bytes(shapes)
