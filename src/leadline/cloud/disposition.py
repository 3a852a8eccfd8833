"""What becomes of the machine when a phase ends: the decision, and who carries it out.

The rule (seed, "Instance disposition"): going on keeps the machine; a pause of more
than 30 minutes stops it, or deletes it where stopped machines are billed. Without a provider
to ask, leadline neither knows whether its machine is rented nor can let it go.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

Decision = Literal["keep", "stop", "delete"]
KEEP_LIMIT_MINUTES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Disposition:
    """A decision, carried out unless `problem` says what stands in its way."""

    provider: str
    decision: Decision
    why: str
    problem: str = ""


class Provider(Protocol):
    """Where a machine comes from and how it is let go."""

    name: str

    def dispose(self, pause_minutes: int | None) -> Disposition:
        """Keep, stop or delete for a pause of that length; None means the work goes on."""


class LocalProvider:
    """The machine leadline runs on: its owner may pay by the hour, and it is not ours to stop."""

    name = "local"

    def __init__(self, rented: bool | None) -> None:
        self._rented = rented
        """What the owner says of it; None is no word."""

    def dispose(self, pause_minutes: int | None) -> Disposition:
        """Keep the machine where that costs nothing or little; else say what must be done."""
        if pause_minutes is None:
            return self._keep("the next phase follows on this machine")
        if pause_minutes <= KEEP_LIMIT_MINUTES:
            return self._keep(f"a pause of {pause_minutes} min is within {KEEP_LIMIT_MINUTES} min")
        if self._rented is False:
            return self._keep(f"a pause of {pause_minutes} min costs nothing here: rented = false")
        return Disposition(
            provider=self.name,
            decision="stop",
            why=f"a pause of {pause_minutes} min is beyond {KEEP_LIMIT_MINUTES} min",
            problem=(
                f"a pause of {pause_minutes} min stops a rented machine and leadline cannot stop "
                "this machine: stop or delete it at its provider, or say rented = false"
            ),
        )

    def _keep(self, why: str) -> Disposition:
        return Disposition(provider=self.name, decision="keep", why=why)
