import json

import pytest

from leadline.core.errors import ProbeError
from leadline.probe.request import (
    EnvironmentRequest,
    PointRequest,
    Subject,
    TwinRequest,
    kind_of,
    read_request,
    write_request,
)

SUBJECT = Subject(
    workload={"kind": "python", "object": "tiny.py:clean", "args": {"depth": 2}},
    base_dir="here",
    shards="shards",
    device="cpu",
    seed=7,
    optimizer={"learning_rate": 1e-3},
)
POINT = PointRequest(
    subject=SUBJECT,
    name="P1",
    micro_batch=16,
    seq_len=512,
    eval_batch=16,
    eval_batches=3,
    warmup_steps=10,
    steps=None,
    seconds=60.0,
    memory_limit_percent=80,
    steady_percent="3",
    checkpoint_dir="out",
)
TWIN = TwinRequest(
    subject=SUBJECT, steps=200, micro_batch=2, seq_len=512, tolerance=0.05, settle_steps=20
)
REQUESTS = {
    "point": POINT,
    "twin": TWIN,
    "environment": EnvironmentRequest(device="auto", requirements=None),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_request_written_is_read_back_equal(tmp_path, kind):
    write_request(tmp_path / "request.json", REQUESTS[kind])
    assert read_request(tmp_path / "request.json") == REQUESTS[kind]


@pytest.mark.parametrize("kind", REQUESTS)
def test_request_is_named_by_its_kind(kind):
    assert kind_of(REQUESTS[kind]) == kind


def _point_with(**changes):
    from dataclasses import asdict

    return json.dumps({"kind": "point", **asdict(POINT), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"text"',
        "1",
        "{}",
        '{"kind": "sweep"}',
        '{"kind": ["point"]}',
        '{"kind": "twin", "steps": 1}',
        '{"kind": "environment", "device": "cpu"}',
        _point_with(another=1),
        _point_with(subject={"seed": 1}),
        _point_with(subject=3),
    ],
)
def test_request_that_is_none_is_refused_by_its_path(tmp_path, text):
    path = tmp_path / "request.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProbeError, match=r"request\.json is not a probe request"):
        read_request(path)


def test_request_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ProbeError, match="is not a probe request"):
        read_request(tmp_path / "gone.json")
