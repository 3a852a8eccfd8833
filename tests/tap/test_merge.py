import json
import os
import time
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import DataError, DiskSpaceError, IntegrityError, UsageError
from leadline.core.notes import Note
from leadline.tap import merge
from leadline.tap.merge import merge_taps
from leadline.tap.reader import GramReader
from leadline.tap.verify import verify_tap

from . import taps as toy
from .taps import EXPERTS, ToyRows, flip_byte, layer_files, write_tap

ROWS = ToyRows(tokens=1000, layers=2)


@pytest.fixture(scope="module", autouse=True)
def no_waiting():
    """What these tests are about does not need a disk to be waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def taps_of(folder, cuts, **key):
    """One corpus of ROWS cut into taps of their own corpora, and the tap of the whole."""
    bounds = [0, *cuts, ROWS.tokens]
    parts = [
        write_tap(
            folder / f"part-{number}",
            ROWS,
            part=slice(begin, end),
            corpus_digest=f"{number:064d}",
            documents=1,
            **key,
        )
        for number, (begin, end) in enumerate(pairwise(bounds))
    ]
    return parts, write_tap(folder / "whole", ROWS, documents=len(parts))


def relative_gap(path, other):
    gaps = []
    for layer in GramReader(path).layers:
        for target in GramReader(path).targets(layer):
            left, right = (GramReader(tap).packed(layer, target) for tap in (path, other))
            gaps.append(np.linalg.norm(left - right) / np.linalg.norm(right))
            assert (
                GramReader(path).rows(layer, target) == GramReader(other).rows(layer, target)
            ).all()
    return max(gaps)


@pytest.mark.parametrize("cuts", [(300,), (100,), (1,), (100, 400, 401)])
def test_t32_merged_parts_equal_the_single_run_and_counts_exactly(tmp_path, cuts):
    parts, whole = taps_of(tmp_path, cuts)
    result = merge_taps(parts, tmp_path / "merged")
    assert relative_gap(tmp_path / "merged", whole) <= 1e-6
    assert (result.tokens, result.documents, result.layers) == (1000, len(parts), 2)
    assert verify_tap(tmp_path / "merged").ok


def test_t33_merge_does_not_depend_on_the_order_and_weighs_by_tokens(tmp_path):
    parts, whole = taps_of(tmp_path, (100, 500))
    files = []
    for number, order in enumerate(permutations(parts)):
        merge_taps(order, tmp_path / f"merged-{number}")
        files.append(layer_files(tmp_path / f"merged-{number}"))
    assert all(file == files[0] for file in files)
    assert relative_gap(tmp_path / "merged-0", whole) <= 1e-6


def test_t33_taps_of_other_context_lengths_and_schedules_merge(tmp_path):
    one = write_tap(
        tmp_path / "one", ROWS, part=slice(0, 100), corpus_digest="a", max_document_tokens=50
    )
    two = write_tap(
        tmp_path / "two", ROWS, part=slice(100, 1000), corpus_digest="b", schedule="step"
    )
    merge_taps([one, two], tmp_path / "merged")
    key = GramReader(tmp_path / "merged").key
    assert (key.schedule, key.max_document_tokens, key.tokens) == ("mixed", None, 1000)
    assert key.micro_batch_tokens == 16


def test_t34_three_documents_over_two_rigs_are_all_counted(tmp_path):
    parts, whole = taps_of(tmp_path, (700,))
    merge_taps(parts, tmp_path / "merged")
    assert GramReader(tmp_path / "merged").rows(0).sum() == 2 * 1000
    assert relative_gap(tmp_path / "merged", whole) <= 1e-6


def halves(folder, **key):
    """The experts of one corpus over two rigs."""
    taps = []
    for experts in (range(4), range(4, EXPERTS)):
        rows = ToyRows(experts=experts)
        bounds = {"first_expert": experts.start, "end_expert": experts.stop}
        taps.append(write_tap(folder / f"experts-{experts.start}", rows, **bounds, **key))
    return taps


def test_t76_taps_of_different_experts_are_joined(tmp_path):
    taps = halves(tmp_path)
    files = []
    for number, order in enumerate((taps, taps[::-1])):
        merge_taps(order, tmp_path / f"joined-{number}")
        files.append(layer_files(tmp_path / f"joined-{number}"))
    assert files[0] == files[1]
    whole = layer_files(write_tap(tmp_path / "whole"))
    assert {k: v for k, v in files[0].items() if k != "grams.json"} == {
        k: v for k, v in whole.items() if k != "grams.json"
    }
    assert verify_tap(tmp_path / "joined-0").ok


@pytest.mark.parametrize(("kept", "missing"), [(0, "experts 4 to 7"), (1, "experts 0 to 3")])
def test_t76_one_side_missing_is_named_at_once_and_nothing_is_written(tmp_path, kept, missing):
    half = halves(tmp_path)[kept]
    other = write_tap(tmp_path / "other", corpus_digest="d" * 64)
    started = time.monotonic()
    with pytest.raises(DataError, match=f"{missing} of layer 0, down are in none"):
        merge_taps([half, other], tmp_path / "merged")
    assert time.monotonic() - started < 30
    assert not (tmp_path / "merged").exists()


def test_t76_tap_with_a_layer_missing_is_named(tmp_path):
    taps = halves(tmp_path)
    broken = write_tap(tmp_path / "broken", stop_after=1, corpus_digest="d")
    with pytest.raises(DataError, match=r"broken is not complete: 1 of 3 .* layer 1 is missing"):
        merge_taps([*taps, broken], tmp_path / "merged")


def test_t76_layers_of_one_corpus_over_two_rigs_are_joined_and_a_gap_is_named(tmp_path):
    from leadline.tap.store import StorePlan, TapStore

    from .taps import toy_key

    def tap_of(layers):
        path = tmp_path / f"layers-{layers.start}"
        key = toy_key(first_layer=layers.start, end_layer=layers.stop)
        plan = StorePlan(layer_bytes=dict.fromkeys(layers, 10_000))
        with TapStore.open(path, key, plan) as store:
            for layer in layers:
                store.seal(layer, *ToyRows().grams(layer))
            store.finish({})
        return path

    first, middle, last = (tap_of(layers) for layers in (range(1), range(1, 2), range(2, 3)))
    merge_taps([last, first, middle], tmp_path / "joined")
    assert GramReader(tmp_path / "joined").layers == (0, 1, 2)
    with pytest.raises(DataError, match="layers 1 to 1 are in none of the taps"):
        merge_taps([last, first], tmp_path / "gap")


def test_joined_experts_of_one_corpus_are_added_to_another_corpus(tmp_path, monkeypatch):
    """Chunks that begin in the middle of a triangle and of a rig's share."""
    monkeypatch.setattr(merge, "CHUNK_NUMBERS", 7)
    other = write_tap(tmp_path / "other", ToyRows(seed=1), corpus_digest="d" * 64)
    merge_taps([*halves(tmp_path), other], tmp_path / "pieces")
    merge_taps([write_tap(tmp_path / "whole"), other], tmp_path / "wholes")
    for layer in range(3):
        name = f"layer_{layer:05d}.safetensors"
        assert layer_files(tmp_path / "pieces")[name] == layer_files(tmp_path / "wholes")[name]


def test_corpus_given_twice_is_refused(tmp_path):
    one, two = write_tap(tmp_path / "one"), write_tap(tmp_path / "two")
    with pytest.raises(UsageError, match=r"one and in .*two, both of the same corpus"):
        merge_taps([one, two], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_experts_that_overlap_are_refused(tmp_path):
    rows = ToyRows(experts=range(3, EXPERTS))
    late = write_tap(tmp_path / "late", rows, first_expert=3, end_expert=EXPERTS)
    with pytest.raises(UsageError, match="expert 3 of layer 0, down is in"):
        merge_taps([halves(tmp_path)[0], late], tmp_path / "merged")


def test_gram_of_all_rows_in_two_taps_is_refused_where_no_experts_are_split(tmp_path):
    """Of linears alone: without experts, nothing tells two halves of a corpus apart."""
    from leadline.tap.store import TapStore

    from .taps import toy_key

    rows = ToyRows(layers=1)
    grams, counts = rows.grams(0)
    for name in ("one", "two"):
        with TapStore.open(tmp_path / name, toy_key(end_layer=1), rows.plan) as store:
            store.seal(0, {"q": grams["gate_up"]}, {"q": counts["gate_up"]})
            store.finish({})
    with pytest.raises(UsageError, match="layer 0, q is in"):
        merge_taps([tmp_path / "one", tmp_path / "two"], tmp_path / "merged")


def test_experts_of_one_corpus_under_other_names_are_refused(tmp_path, monkeypatch):
    first, _ = halves(tmp_path)
    rows = ToyRows(experts=range(4, EXPERTS))
    monkeypatch.setattr(toy, "EXPERT_NAME", "other.{layer}")
    second = write_tap(tmp_path / "second", rows, first_expert=4, end_expert=EXPERTS)
    with pytest.raises(UsageError, match=r"layer 0, .* differs between .*users"):
        merge_taps([first, second], tmp_path / "merged")


def test_corpus_inside_a_merge_is_refused(tmp_path):
    parts, _ = taps_of(tmp_path, (300, 600))
    merge_taps(parts[:2], tmp_path / "merged")
    with pytest.raises(UsageError, match=r"both hold the corpus 000000"):
        merge_taps([tmp_path / "merged", parts[1]], tmp_path / "again")
    merge_taps([tmp_path / "merged", parts[2]], tmp_path / "all")
    assert verify_tap(tmp_path / "all").ok
    assert len(GramReader(tmp_path / "all").manifest.parts) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "other"},
        {"dtype": "bfloat16"},
        {"targets": "all"},
        {"gate_up": "expert"},
        {"generation": 9},
        {"tokenizer_digest": "t"},
    ],
)
def test_taps_of_unlike_models_or_targets_are_refused_naming_the_field(tmp_path, change):
    (field, value), *_ = change.items()
    one = write_tap(tmp_path / "one", tokenizer_digest="s")
    two = write_tap(tmp_path / "two", corpus_digest="d", **{"tokenizer_digest": "s", **change})
    with pytest.raises(UsageError, match=rf"{field} = .* and .*two has {value!r}"):
        merge_taps([one, two], tmp_path / "merged")


def test_tap_of_token_ids_merges_with_one_of_text(tmp_path):
    one = write_tap(tmp_path / "one", tokenizer_digest="")
    two = write_tap(tmp_path / "two", corpus_digest="d", tokenizer_digest="t")
    merge_taps([one, two], tmp_path / "merged")
    assert GramReader(tmp_path / "merged").key.tokenizer_digest == "t"


def test_taps_of_other_layers_or_grams_are_refused(tmp_path):
    one = write_tap(tmp_path / "one", ToyRows(layers=2))
    two = write_tap(tmp_path / "two", ToyRows(layers=3), corpus_digest="d")
    with pytest.raises(DataError, match=r"layer 2 .* is in .*two and missing from .*one"):
        merge_taps([one, two], tmp_path / "merged")
    three = write_tap(tmp_path / "three", ToyRows(layers=2, linear=True), corpus_digest="e")
    with pytest.raises(UsageError, match=r"layer 0, self_attn\.q_proj differs"):
        merge_taps([one, three], tmp_path / "merged")


@pytest.mark.parametrize("taps", [0, 1])
def test_fewer_than_two_taps_are_refused(tmp_path, taps):
    with pytest.raises(UsageError, match=f"got {taps} taps"):
        merge_taps([write_tap(tmp_path / "one")] * taps, tmp_path / "merged")


def test_damaged_tap_is_not_sealed_anew(tmp_path):
    one = write_tap(tmp_path / "one")
    two = write_tap(tmp_path / "two", corpus_digest="d")
    flip_byte(two / "layer_00001.safetensors", -1)
    with pytest.raises(IntegrityError, match=r"two/layer_00001.*sha256 differs"):
        merge_taps([one, two], tmp_path / "merged")
    assert GramReader(tmp_path / "merged", allow_partial=True).layers == (0,)


def test_merge_broken_off_goes_on_to_the_same_files(tmp_path, monkeypatch):
    parts, _ = taps_of(tmp_path, (300,))
    merge_taps(parts, tmp_path / "whole-merge")

    def stop_after_first(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_taps(parts, tmp_path / "merged", on_progress=stop_after_first)
    assert GramReader(tmp_path / "merged", allow_partial=True).layers == (0,)
    merge_taps(parts[::-1], tmp_path / "merged")
    assert layer_files(tmp_path / "merged") == layer_files(tmp_path / "whole-merge")


def test_merge_into_one_of_its_taps_or_another_folder_is_refused(tmp_path):
    parts, whole = taps_of(tmp_path, (300,))
    before = layer_files(parts[0])
    for out in (parts[0], whole):
        with pytest.raises(UsageError, match=r"holds a tap with"):
            merge_taps(parts, out)
    assert layer_files(parts[0]) == before


def test_merge_on_a_full_disk_leaves_no_folder(tmp_path, monkeypatch):
    parts, _ = taps_of(tmp_path, (300,))
    monkeypatch.setattr("leadline.tap.store.disk_free_bytes", lambda path: 1000)
    with pytest.raises(DiskSpaceError, match="1000 bytes"):
        merge_taps(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_notes_of_all_taps_are_kept_with_their_corpus(tmp_path):
    note = Note(kind="document_skipped", count=2, detail="document 4 is empty")
    paths = [
        write_tap(tmp_path / digest, corpus_digest=digest * 64, notes=(note,)) for digest in "ab"
    ]
    merge_taps(paths, tmp_path / "merged")
    document = json.loads((tmp_path / "merged" / "grams.json").read_bytes())
    assert [(n["layer"], n["detail"]) for n in document["notes"]] == [
        (layer, f"corpus {digest * 12}: document 4 is empty")
        for layer in range(3)
        for digest in "ab"
    ]
    assert sum(n["count"] for n in document["notes"]) == 12


@given(cuts=st.lists(st.integers(1, 59), min_size=1, max_size=4, unique=True), seed=st.integers(0))
@settings(max_examples=10, deadline=None)
def test_merge_of_any_cut_in_any_order_is_one_file(tmp_path_factory, cuts, seed):
    folder, rows = tmp_path_factory.mktemp("cut"), ToyRows(tokens=60, layers=1, seed=seed % 999)
    bounds = [0, *sorted(cuts), 60]
    parts = [
        write_tap(folder / str(n), rows, part=slice(*pair), corpus_digest=f"{n}")
        for n, pair in enumerate(pairwise(bounds))
    ]
    order = np.random.default_rng(seed % 999).permutation(len(parts))
    merge_taps(parts, folder / "a")
    merge_taps([parts[n] for n in order], folder / "b")
    assert layer_files(folder / "a") == layer_files(folder / "b")
    assert relative_gap(folder / "a", write_tap(folder / "whole", rows)) <= 1e-6
