import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from leadline.core.errors import DataError, IntegrityError, UsageError
from leadline.core.notes import Note
from leadline.tap import GramReader
from leadline.tap.triangle import unpack

from .taps import EXPERTS, HIDDEN, INNER, ToyRows, flip_byte, toy_key, write_tap

DOCS = Path(__file__).resolve().parents[2] / "docs" / "grams.md"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    note = Note(kind="expert_without_rows", count=1, detail="6")
    return write_tap(tmp_path_factory.mktemp("reader") / "tap", notes=(note,))


def test_gram_is_float32_symmetric_and_the_stored_triangle(path):
    gram = GramReader(path).gram(0, "down", expert=7)
    assert (gram.dtype, gram.shape) == (np.float32, (INNER, INNER))
    assert (gram == gram.T).all()
    assert (gram == unpack(ToyRows().grams(0)[0]["down"].packed[7], INNER)).all()


def test_gram_is_a_fresh_array_each_time(path):
    tap = GramReader(path)
    tap.gram(0, "gate_up")[:] = 0
    assert tap.gram(0, "gate_up").any()


def test_packed_holds_all_experts(path):
    packed = GramReader(path).packed(2, "down")
    assert (packed == ToyRows().grams(2)[0]["down"].packed).all()


def test_rows_without_a_target_are_those_of_the_experts(path):
    rows = GramReader(path).rows(1)
    assert (rows.dtype, rows.shape) == (np.int64, (EXPERTS,))
    assert (rows == ToyRows().grams(1)[1]["down"]).all()
    assert GramReader(path).rows(1, "gate_up").shape == ()


def test_reader_tells_layers_targets_key_and_notes(path):
    tap = GramReader(str(path))
    assert (tap.layers, tap.targets(2)) == ((0, 1, 2), ("down", "gate_up"))
    assert tap.key == toy_key()
    assert [note.kind for note in tap.notes] == ["expert_without_rows"] * 3
    assert tap.facts(0, "gate_up").num_features == HIDDEN


def test_grams_of_one_expert_each_for_gate_up(tmp_path):
    """`--gate-up-gram expert`: the same name, two axes."""
    from leadline.tap.store import TapStore

    rows = ToyRows(layers=1)
    grams, counts = rows.grams(0)
    each = {"gate_up": grams["down"], "down": grams["down"]}
    with TapStore.open(tmp_path, toy_key(gate_up="expert"), rows.plan) as store:
        store.seal(0, each, dict.fromkeys(each, counts["down"]))
        store.finish({})
    tap = GramReader(tmp_path)
    assert (tap.gram(0, "gate_up", expert=3) == tap.gram(0, "down", expert=3)).all()
    with pytest.raises(UsageError, match="experts 0 to 7"):
        tap.gram(0, "gate_up")


def test_several_experts_modules_of_a_layer_go_by_their_prefix(tmp_path):
    from leadline.tap.store import TapStore

    rows = ToyRows(layers=1)
    grams, counts = rows.grams(0)
    with TapStore.open(tmp_path, toy_key(), rows.plan) as store:
        store.seal(0, {"mlp.a/down": grams["down"]}, {"mlp.a/down": counts["down"]})
        store.finish({})
    tap = GramReader(tmp_path)
    assert tap.rows(0, "mlp.a/down").sum() == 80
    with pytest.raises(UsageError, match=r"no Gram 'down'; it has mlp\.a/down"):
        tap.rows(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tap: tap.gram(3, "down", expert=0), "no layer 3: it was not tapped"),
        (lambda tap: tap.gram(0, "up"), "no Gram 'up'; it has down, gate_up"),
        (lambda tap: tap.gram(0, "down"), "experts 0 to 7, wanted one of them and not None"),
        (lambda tap: tap.gram(0, "down", expert=8), "wanted one of them and not 8"),
        (lambda tap: tap.gram(0, "down", expert=-1), "wanted one of them and not -1"),
        (lambda tap: tap.gram(0, "gate_up", expert=0), "one Gram for all experts"),
        (lambda tap: tap.rows(0, "q_proj"), "no Gram 'q_proj'"),
    ],
)
def test_reader_asked_for_what_is_not_there_says_what_is(path, call, message):
    with pytest.raises(UsageError, match=message):
        call(GramReader(path))


def test_tap_that_is_not_complete_is_refused_unless_asked_for(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=1)
    with pytest.raises(DataError, match=r"1 of 3 layers are sealed and layer 1 is missing"):
        GramReader(path)
    tap = GramReader(path, allow_partial=True)
    assert tap.layers == (0,)
    with pytest.raises(UsageError, match="it is not sealed yet"):
        tap.gram(1, "gate_up")


def test_tap_without_its_end_is_refused(tmp_path):
    path = write_tap(tmp_path / "tap", stop_after=3)
    with pytest.raises(DataError, match="its end is missing"):
        GramReader(path)


def test_folder_that_is_no_tap_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no grams\.json"):
        GramReader(tmp_path)
    with pytest.raises(DataError, match=r"holds no grams\.json"):
        GramReader(tmp_path / "nowhere")


def test_layer_file_that_is_gone_or_cut_is_named(tmp_path):
    path = write_tap(tmp_path / "tap")
    file = path / "layer_00001.safetensors"
    tap = GramReader(path)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"layer_00001\.safetensors has \d+ bytes, sealed"):
        tap.gram(1, "gate_up")
    file.unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        tap.gram(1, "gate_up")


def test_reader_that_may_not_read_says_so(tmp_path, monkeypatch):
    path = write_tap(tmp_path / "tap")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(Exception, match="make it readable to you"):
        GramReader(path)


def test_verify_of_a_good_tap_reports_and_of_a_bad_one_raises(tmp_path):
    path = write_tap(tmp_path / "tap")
    assert GramReader(path).verify().grams == 3 * (EXPERTS + 1)
    flip_byte(path / "layer_00002.safetensors", -1)
    with pytest.raises(IntegrityError, match=r"layer_00002.*sha256 differs"):
        GramReader(path).verify()


def test_reader_keeps_no_file_open(path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    tap = GramReader(path)
    for layer in tap.layers:
        tap.gram(layer, "gate_up")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    tap.close()


def test_reader_loads_no_torch():
    code = "import sys, leadline.tap as t; t.GramReader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tap_package_alone_loads_no_numpy_and_has_no_other_names():
    code = "import sys, leadline.tap; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    import leadline.tap

    with pytest.raises(AttributeError, match="nothing"):
        leadline.tap.nothing  # noqa: B018


def test_example_of_the_documentation_runs(path, monkeypatch, capsys):
    blocks = DOCS.read_text(encoding="utf-8").split("```python\n")
    example = blocks[1].split("```")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 6
    monkeypatch.chdir(path.parent)
    exec(compile(example, str(DOCS), "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 3 * EXPERTS
