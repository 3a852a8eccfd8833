"""Where a tap stands, as its callers are told."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TapProgress:
    """After each micro-batch that has crossed a layer."""

    wave: int
    """Wave or step, from 0."""
    num_waves: int
    layer: int
    num_layers: int
    token_layers: int
    """Tokens times layers crossed so far."""
    tokens: int
    """Tokens to compute in all."""
    bytes_read: int
    bytes_to_read: int
    seconds: float


Report = Callable[[TapProgress], None]
