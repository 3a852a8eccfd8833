"""What becomes of the machine: the rule's three cases, and its record in the evidence."""

from dataclasses import asdict

import pytest

from leadline.cloud.disposition import KEEP_LIMIT_MINUTES, Disposition, LocalProvider


def test_going_on_keeps_the_machine() -> None:
    done = LocalProvider().dispose(None)
    assert (done.provider, done.decision) == ("local", "keep")
    assert "next phase" in done.why


@pytest.mark.parametrize("minutes", [1, 29, KEEP_LIMIT_MINUTES])
def test_short_pause_keeps_any_machine(minutes: int) -> None:
    done = LocalProvider().dispose(minutes)
    assert done.decision == "keep"
    assert done.why == f"a pause of {minutes} min is within 30 min"


@pytest.mark.parametrize("minutes", [KEEP_LIMIT_MINUTES + 1, 600])
def test_long_pause_keeps_a_local_machine_and_says_why(minutes: int) -> None:
    done = LocalProvider().dispose(minutes)
    assert done.decision == "keep"
    assert f"{minutes} min would stop a rented machine" in done.why


def test_disposition_is_plain_values_for_the_evidence() -> None:
    done = Disposition(provider="local", decision="keep", why="because")
    assert asdict(done) == {"provider": "local", "decision": "keep", "why": "because"}
