"""What becomes of the machine when a phase ends: the decision, and who carries it out.

The rule (seed, "Instance disposition"): going on keeps the machine; a pause of more
than 30 minutes stops it, or deletes it where stopped machines are billed.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

Decision = Literal["keep", "stop", "delete"]
KEEP_LIMIT_MINUTES = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Disposition:
    """A decision that has been carried out."""

    provider: str
    decision: Decision
    why: str


class Provider(Protocol):
    """Where a machine comes from and how it is let go."""

    name: str

    def dispose(self, pause_minutes: int | None) -> Disposition:
        """Keep, stop or delete for a pause of that length; None means the work goes on."""


class LocalProvider:
    """The machine leadline runs on: not billed by the hour, and not ours to switch off."""

    name = "local"

    def dispose(self, pause_minutes: int | None) -> Disposition:
        """Keep the machine, and say why that costs nothing."""
        if pause_minutes is None:
            why = "the next phase follows on this machine"
        elif pause_minutes <= KEEP_LIMIT_MINUTES:
            why = f"a pause of {pause_minutes} min is within {KEEP_LIMIT_MINUTES} min"
        else:
            why = (
                f"a pause of {pause_minutes} min would stop a rented machine; "
                "a local one is billed by nobody"
            )
        return Disposition(provider=self.name, decision="keep", why=why)
