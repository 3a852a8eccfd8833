import pytest

from leadline.core.evidence import Evidence, EvidenceStore
from leadline.core.gate import gate_status, judge, planned_points, requirements

POINTS = ("P1", "P2")
MEMORY = {"device_peak_bytes": 64 << 30, "device_total_bytes": 128 << 30, "percent": "50.00"}
POINT = {"micro_batch": 64, "seq_len": 512, "status": "ok", "tok_s": 120_000}
DATA = {
    "environment": {"device": {"name": "Card"}, "torch": "2.13", "bf16": {"why": "legal: yes"}},
    "pack": {
        "train_tokens": 5_000,
        "files": 3,
        "negative_control": {"file": "train-0.bin", "found": True},
    },
    "twin": {"worst_delta": 0.01234, "worst_step": 77, "tolerance": 0.05},
    "probe.P1": POINT,
    "probe.P2": {**POINT, "status": "oom", "failed_phase": "eval"},
    "choice": {
        "best_cfg": "P1",
        "micro_batch": 64,
        "seq_len": 512,
        "memory": MEMORY,
        "eval": {"batch": 128, "batches": 3},
    },
    "checkpoint": {
        "cadence_steps": 500,
        "measured_bytes": 3 << 30,
        "free_bytes": 100 << 30,
        "needed_bytes": 18 << 30,
    },
    "budget": {"locked_budget_tokens": 2_662_200_000, "total_steps": 81_243},
    "disposition": {"decision": "continue", "provider": "local", "time": "2026-01-02T03:04:05Z"},
}
VALUES = {
    "environment": ["Card", "torch 2.13", "legal: yes"],
    "hash_gate": ["5,000 train tokens in 3 files", "train-0.bin found"],
    "twin_delta": ["0.0123 at step 77, limit 0.05"],
    "tok_s.P1": ["64x512: 120,000 tok/s"],
    "tok_s.P2": ["64x512: out of memory in eval"],
    "best_cfg": ["P1 (64x512)"],
    "peak_vram": ["64.0 GiB of 128.0 GiB (50.00 %)"],
    "eval_batch": ["128 >= 64, 3 batches"],
    "checkpoint": ["every 500 steps", "3.0 GiB", "100.0 GiB free", "18.0 GiB needed"],
    "budget": ["2,662,200,000 tokens", "81,243 steps"],
    "disposition": ["continue (local) at 2026-01-02T03:04:05Z"],
}
LINES = {need.key: need.evidence for need in requirements(POINTS)}


def _found(without=None, **changed):
    made = {name: _evidence(name, data) for name, data in DATA.items() if name != without}
    return {**made, **changed}


def _evidence(name, data, *, green=True, reason=""):
    return Evidence(name=name, green=green, reason=reason, inputs="", time="", sha256="", data=data)


def _line(status, key):
    (line,) = [line for line in status.lines if line.key == key]
    return line


def test_gate_with_every_line_is_green():
    status = judge(POINTS, _found())
    assert status.green
    assert (status.missing, status.red) == ((), ())


def test_gate_lines_are_the_required_ones_in_order():
    assert [line.key for line in judge(POINTS, _found()).lines] == list(VALUES)


@pytest.mark.parametrize("key", VALUES)
def test_gate_line_shows_what_was_found(key):
    line = _line(judge(POINTS, _found()), key)
    assert [text for text in VALUES[key] if text not in line.value] == []


@pytest.mark.parametrize("key", VALUES)
def test_gate_without_the_evidence_of_a_line_is_red_and_lists_it(key):
    status = judge(POINTS, _found(without=LINES[key]))
    assert not status.green
    assert key in status.missing
    assert f"evidence/{LINES[key]}.json" in _line(status, key).reason


@pytest.mark.parametrize("key", VALUES)
def test_gate_with_one_red_line_is_red_and_keeps_its_value(key):
    name = LINES[key]
    red = _evidence(name, DATA[name], green=False, reason="it does not hold")
    status = judge(POINTS, _found(**{name: red}))
    assert key in status.red
    line = _line(status, key)
    assert line.reason == "it does not hold"
    assert VALUES[key][0] in line.value


@pytest.mark.parametrize("key", VALUES)
def test_gate_with_green_evidence_that_shows_nothing_is_not_green(key):
    status = judge(POINTS, _found(**{LINES[key]: _evidence(LINES[key], {})}))
    assert not status.green
    assert LINES[key] in _line(status, key).reason


@pytest.mark.parametrize("key", VALUES)
def test_gate_with_red_evidence_of_a_reason_alone_is_red_with_it(key):
    name = LINES[key]
    red = _evidence(name, {}, green=False, reason="ended early")
    line = _line(judge(POINTS, _found(**{name: red})), key)
    assert (line.state, line.value, line.reason) == ("red", "", "ended early")


def test_point_that_was_rejected_does_not_read_like_a_good_one():
    data = {**POINT, "status": "rejected", "why": "peak is 85.00 % of the device; clocks fell"}
    line = _line(judge(POINTS, _found(**{"probe.P1": _evidence("probe.P1", data)})), "tok_s.P1")
    assert line.value == "64x512: 120,000 tok/s, not chosen: peak is 85.00 % of the device"


def test_point_that_ran_out_of_memory_is_not_chosen():
    line = _line(judge(POINTS, _found()), "tok_s.P2")
    assert line.value == "64x512: out of memory in eval, not chosen"


def test_choice_that_is_not_the_fastest_measured_says_why():
    data = {**DATA["choice"], "faster": {"P2": "rejected: peak is 85.00 %"}}
    line = _line(judge(POINTS, _found(choice=_evidence("choice", data))), "best_cfg")
    assert line.value == "P1 (64x512); P2 was faster, rejected: peak is 85.00 %"


@pytest.mark.parametrize(
    ("requirements", "told"),
    [
        (None, "packages: not held against a requirements file"),
        ("requirements.lock", "packages: held to requirements.lock"),
    ],
)
def test_environment_line_says_what_the_packages_were_held_against(requirements, told):
    data = {**DATA["environment"], "requirements": requirements}
    line = _line(judge(POINTS, _found(environment=_evidence("environment", data))), "environment")
    assert line.value.endswith(told)


def test_environment_of_an_earlier_version_held_its_packages_against_nothing_known():
    line = _line(judge(POINTS, _found()), "environment")
    assert line.value.endswith("packages: not held against a requirements file")


def test_twin_line_says_how_much_of_the_learning_rate_was_tried():
    rates = {"last_learning_rate": 2.4e-4, "peak_learning_rate": 6e-4}
    data = {**DATA["twin"], **rates}
    line = _line(judge(POINTS, _found(twin=_evidence("twin", data))), "twin_delta")
    assert line.value.endswith("limit 0.05; learning rate up to 0.00024 of 0.0006")


def test_gate_with_a_flip_that_was_not_found_says_so():
    data = {**DATA["pack"], "negative_control": {"file": "a.bin", "found": False}}
    assert (
        "NOT found" in _line(judge(POINTS, _found(pack=_evidence("pack", data))), "hash_gate").value
    )


def test_gate_of_an_empty_run_lists_every_line(tmp_path):
    status = gate_status(tmp_path)
    assert not status.green
    assert set(status.missing) >= {"environment", "tok_s.P1", "tok_s.P2", "tok_s.P3", "budget"}


def test_planned_points_are_those_of_the_last_start(tmp_path):
    store = EvidenceStore(tmp_path)
    for points in (["P1", "P2", "P3"], ["only", "these"]):
        store.ledger.append("gate.started", {"points": points})
    assert planned_points(store) == ("only", "these")


def test_gate_of_a_point_that_was_not_planned_does_not_need_it():
    assert "tok_s.P2" not in [line.key for line in judge(("P1",), _found()).lines]
