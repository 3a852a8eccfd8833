"""The page: what it says of each kind of run, and what it never does."""

import copy
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leadline.cli.app import main
from leadline.core.evidence import EvidenceStore
from leadline.report import build_report

VOID = {"meta", "link", "br", "wbr", "img"}


class _Outline(HTMLParser):
    """Checks nesting, gathers text and every address the page could ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "src", "srcset", "data", "action", "xlink:href", "poster"):
                self.addresses.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def _outline(path: Path) -> _Outline:
    outline = _Outline()
    outline.feed(path.read_text(encoding="utf-8"))
    assert outline.open == []
    return outline


def _text(path: Path) -> str:
    return re.sub(r"\s+", " ", " ".join(_outline(path).text))


@pytest.mark.parametrize("name", ["green", "red-twin", "oom", "partial"])
def test_report_of_each_sample_is_well_formed_and_asks_for_nothing(make_run, name: str) -> None:
    path = build_report(make_run(name).path)
    outline = _outline(path)
    assert {word for word in outline.addresses if not word.startswith("#")} == {"data:,"}
    assert {word[1:] for word in outline.addresses if word.startswith("#")} <= set(outline.ids)
    assert len(outline.ids) == len(set(outline.ids))
    drawings = re.findall(r"<svg.*?</svg>", path.read_text(encoding="utf-8"), re.DOTALL)
    assert all(ElementTree.fromstring(drawing) is not None for drawing in drawings)


def test_report_of_a_green_run_says_what_is_locked(make_run) -> None:
    text = _text(build_report(make_run("green").path))
    assert "Gate green" in text
    assert "10,604,430,000 tokens are locked: 323,621 steps of P2 (64 \u00d7 512)." in text
    assert "chain verified" in text
    assert "139.7" in text or "140M parameters" in text


def test_report_of_a_red_twin_names_the_accused_module_first(make_run) -> None:
    path = build_report(make_run("red-twin").path)
    text = _text(path).replace(". ", ".")
    assert "Gate red" in text
    assert text.index("blocks.3.attention.debate_gate.softmax") < text.index("blocks.7.norm")
    assert "bf16 loss at step 144 is not finite" in text


def test_report_of_an_oom_sweep_gives_each_points_reason(make_run) -> None:
    text = _text(build_report(make_run("oom").path))
    assert "out of memory in training: 31.3 GiB asked for one tensor" in text
    assert "84.6 % of device memory, below 80 % is wanted" in text


def test_report_of_a_partial_run_names_the_command_for_what_is_missing(make_run) -> None:
    text = _text(build_report(make_run("partial").path))
    assert "lines missing" in text
    assert "Not measured yet: P2, P3. leadline gate run continues with P2." in text


def test_report_of_complete_evidence_without_a_lock_is_not_called_green(make_run) -> None:
    run = make_run("green")
    (run.path / "config.lock.json").unlink()
    ledger = run.path / "ledger.jsonl"
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    text = _text(build_report(run.path))
    assert "Evidence complete, not locked yet" in text
    assert "Gate green" not in text


def test_report_of_a_broken_ledger_is_red_whatever_the_evidence_says(make_run) -> None:
    run = make_run("green")
    ledger = run.path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b'"verdict":"green"', b'"verdict":"greem"', 1))
    text = _text(build_report(run.path))
    assert "Gate red" in text
    assert "chain broken" in text


def test_report_of_hostile_names_shows_them_and_runs_nothing(make_run) -> None:
    run = make_run("partial")
    hostile = "<script>alert('x')</script><img src=//evil.test/x>"
    (run.path / "gate.toml").write_text(f'[workload]\nname = "{hostile}"\n')
    run.record("environment", {"device": {"name": hostile}, "torch": hostile})
    run.record("twin", {"problems": [hostile, "see `" + hostile + "`"]}, reason=hostile)
    run.store.ledger.append("note", {"text": hostile})
    path = build_report(run.path)
    outline = _outline(path)
    assert "<script" not in path.read_text(encoding="utf-8")
    assert not any("evil" in word for word in outline.addresses)
    assert "".join(outline.text).count("<script>alert('x')</script>") >= 5


def test_report_of_missing_numbers_prints_dashes(make_run) -> None:
    run = make_run("partial")
    run.record("twin", {"worst_delta": None, "fp32": {"losses": [None, None]}}, reason="lost")
    text = _text(build_report(run.path))
    assert re.search(r"Worst \|delta\| - ", text)
    assert not re.search(r"\b(nan|inf|None)\b", text)


def test_report_of_one_run_has_the_same_bytes_each_time(make_run) -> None:
    run = make_run("green")
    first = build_report(run.path).read_bytes()
    assert build_report(run.path).read_bytes() == first


def test_report_of_a_folder_whose_name_is_not_utf8_is_written(make_run, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"run-\xff")
    make_run("partial").path.rename(odd)
    assert "run-?" in _text(build_report(odd))


def test_report_that_cannot_be_made_leaves_the_earlier_one(make_run, monkeypatch) -> None:
    run = make_run("green")
    path = build_report(run.path)
    before = path.read_bytes()

    def fail(*_: object) -> str:
        raise RuntimeError("planted")

    monkeypatch.setattr("leadline.report.build.render", fail)
    with pytest.raises(RuntimeError, match="planted"):
        build_report(run.path)
    assert path.read_bytes() == before


def test_report_cuts_a_long_ledger_and_says_how_many_lines_are_left_out(
    make_run, monkeypatch
) -> None:
    monkeypatch.setattr("leadline.report.provenance.MAX_LEDGER_ROWS", 3)
    text = _text(build_report(make_run("green").path))
    assert "The oldest 9 are left out here" in text


_ODD = st.sampled_from(
    [
        None,
        True,
        "",
        "x\x00<b>",
        -1,
        0,
        1e308,
        -1e-308,
        2**80,
        [],
        {},
        [None],
        [[1]],
        {"a": 1},
    ]
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value; of a long list the first two and the last."""
    found = [path]
    if isinstance(value, dict):
        found += [place for key in value for place in _paths(value[key], (*path, key))]
    if isinstance(value, list):
        for index in sorted({0, 1, len(value) - 1} & set(range(len(value)))):
            found += _paths(value[index], (*path, index))
    return found


@given(draw=st.data())
@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_report_of_damaged_values_is_written_all_the_same(
    sample_data: dict[str, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    draw: st.DataObject,
) -> None:
    name = draw.draw(st.sampled_from(sorted(sample_data)))
    data = {"data": copy.deepcopy(sample_data[name])}
    *way, last = ("data", *draw.draw(st.sampled_from(_paths(sample_data[name]))))
    place: Any = data
    for key in way:
        place = place[key]
    place[last] = draw.draw(_ODD)
    run_dir = tmp_path_factory.mktemp("run")
    EvidenceStore(run_dir).record(name, green=True, reason="", inputs="", data=data["data"])
    assert _outline(build_report(run_dir)).ids


def test_report_command_prints_the_path_and_exits_zero(make_run, capsys) -> None:
    run = make_run("partial")
    with pytest.raises(SystemExit) as end:
        main(["report", str(run.path), "--json"])
    assert end.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["report"] == str(run.path / "report.html")
    assert Path(printed["report"]).stat().st_size == printed["bytes"]


def test_report_command_on_no_run_exits_two_with_one_sentence(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path / "nothing")])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
