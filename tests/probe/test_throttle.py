"""Reasons for slowed clocks, read from a stand-in for the driver's library."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from leadline.probe import throttle
from leadline.probe.throttle import CudaThrottle, NoThrottle, watch

POWER_CAP = pynvml.nvmlClocksEventReasonSwPowerCap
THERMAL = pynvml.nvmlClocksEventReasonSwThermalSlowdown
BRAKE = pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown
REASONS = [
    (pynvml.nvmlClocksEventReasonHwSlowdown, "hardware slowdown"),
    (THERMAL, "software thermal slowdown"),
    (pynvml.nvmlClocksEventReasonHwThermalSlowdown, "hardware thermal slowdown"),
    (BRAKE, "power brake"),
]


@pytest.fixture
def card(monkeypatch):
    """A card whose `bits` and `now` the test sets."""
    state = SimpleNamespace(bits=0, now=100.0, reads=0, uuid=None)

    def read(handle):
        state.reads += 1
        return state.bits

    def by_uuid(uuid):
        state.uuid = uuid
        return "handle"

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", by_uuid)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", read)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}")
    )
    monkeypatch.setattr(throttle.time, "monotonic", lambda: state.now)
    return state


def _sample(watcher, card, *bits):
    for reading in bits:
        card.bits = reading
        card.now += 2
        watcher.sample()


@pytest.mark.parametrize(("bit", "words"), REASONS)
def test_throttle_reason_in_force_is_kept(card, bit, words):
    watcher = CudaThrottle(0)
    _sample(watcher, card, 0, bit, 0)
    assert watcher.reasons == (words,)


def test_throttle_reasons_together_are_all_kept_once(card):
    watcher = CudaThrottle(0)
    _sample(watcher, card, THERMAL | BRAKE, THERMAL, BRAKE)
    assert watcher.reasons == ("power brake", "software thermal slowdown")


@pytest.mark.parametrize("bit", [0, POWER_CAP, pynvml.nvmlClocksEventReasonGpuIdle])
def test_throttle_by_power_cap_or_idleness_is_the_normal_state(card, bit):
    watcher = CudaThrottle(0)
    _sample(watcher, card, bit)
    assert watcher.reasons == ()


def test_throttle_by_power_cap_is_noted(card):
    watcher = CudaThrottle(0)
    _sample(watcher, card, POWER_CAP, 0)
    assert watcher.notes == ("power limit of the card",)


def test_throttle_during_the_warm_up_does_not_count(card):
    watcher = CudaThrottle(0)
    _sample(watcher, card, THERMAL | POWER_CAP)
    watcher.restart()
    _sample(watcher, card, 0)
    assert (watcher.reasons, watcher.notes) == ((), ())


def test_throttle_that_can_no_longer_be_read_is_noted_once(card, monkeypatch):
    watcher = CudaThrottle(0)

    def refuse(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", refuse)
    _sample(watcher, card, 0, 0, 0)
    assert len(watcher.notes) == 1
    assert "cannot be read" in watcher.notes[0]


def test_watch_without_the_drivers_library_notes_it_and_goes_on(card, monkeypatch):
    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    watcher = watch(torch.device("cuda", 0))
    watcher.sample()
    assert watcher.reasons == ()
    assert "cannot be read" in watcher.notes[0]


def test_throttle_is_read_once_a_second_at_most(card):
    watcher = CudaThrottle(0)
    for _ in range(50):
        card.now += 0.1
        watcher.sample()
    assert 4 <= card.reads <= 6


def test_throttle_asks_the_card_that_torch_uses(card):
    CudaThrottle(3)
    assert card.uuid == "GPU-uuid-3"


def test_throttle_of_an_older_library_goes_by_the_old_names(card, monkeypatch):
    for name in list(vars(pynvml)):
        if name.startswith("nvmlClocksEventReason"):
            monkeypatch.delattr(pynvml, name)
    watcher = CudaThrottle(0)
    _sample(watcher, card, THERMAL)
    assert watcher.reasons == ("software thermal slowdown",)


def test_watch_of_a_cpu_reports_nothing():
    watcher = watch(torch.device("cpu"))
    watcher.sample()
    assert isinstance(watcher, NoThrottle)
    assert watcher.reasons == ()
