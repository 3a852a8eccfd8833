"""What becomes of the machine: the rule's cases on a machine leadline cannot stop."""

import pytest

from leadline.cloud.disposition import KEEP_LIMIT_MINUTES, LocalProvider

WORDS = [None, True, False]


@pytest.mark.parametrize("rented", WORDS)
def test_going_on_keeps_the_machine(rented: bool | None) -> None:
    done = LocalProvider(rented).dispose(None)
    assert (done.provider, done.decision, done.problem) == ("local", "keep", "")
    assert "next phase" in done.why


@pytest.mark.parametrize("rented", WORDS)
@pytest.mark.parametrize("minutes", [1, 29, KEEP_LIMIT_MINUTES])
def test_short_pause_keeps_any_machine(minutes: int, rented: bool | None) -> None:
    done = LocalProvider(rented).dispose(minutes)
    assert (done.decision, done.problem) == ("keep", "")
    assert done.why == f"a pause of {minutes} min is within 30 min"


@pytest.mark.parametrize("minutes", [KEEP_LIMIT_MINUTES + 1, 600])
def test_long_pause_keeps_a_machine_that_is_said_not_to_be_rented(minutes: int) -> None:
    done = LocalProvider(False).dispose(minutes)
    assert (done.decision, done.problem) == ("keep", "")
    assert "rented = false" in done.why


@pytest.mark.parametrize("rented", [None, True])
@pytest.mark.parametrize("minutes", [KEEP_LIMIT_MINUTES + 1, 600])
def test_long_pause_of_a_machine_that_may_be_rented_is_a_problem(
    minutes: int, rented: bool | None
) -> None:
    done = LocalProvider(rented).dispose(minutes)
    assert done.decision == "stop"
    assert f"a pause of {minutes} min" in done.problem
    assert "stop or delete it at its provider, or say rented = false" in done.problem
