"""`gate.toml`: what the gate is asked, checked before anything runs.

Decimals are read exactly (`0.85` is 85/100), unknown keys are refused with the nearest
known one, and every value has one meaning. docs/gate.md shows the whole file.
"""

import difflib
import math
import tomllib
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from leadline.core.budget import exact_decimal
from leadline.core.errors import UsageError
from leadline.train.settings import settings_from

MAX_INTEGER = 2**53 - 1
"""The largest whole number that ledger and lock can hold (RFC 8785)."""
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
NotNegative = Annotated[Decimal, Field(ge=0)]
NotEmpty = Annotated[str, Field(min_length=1)]
MIN_POINTS = 3
DEFAULT_SECONDS = 60.0
MAX_WINDOW_HOURS = 87_600
"""Ten years: more is a slip of the keyboard."""


class _Table(BaseModel):
    """A table of the file: frozen, and strict about names and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DataTable(_Table):
    """`[data]`: exactly one of text, shards and pack."""

    text: NotEmpty | None = None
    """A folder or .jsonl of text, or `stdlib`; packed into the run directory."""
    shards: NotEmpty | None = None
    """A folder made by `leadline data pack`."""
    pack: NotEmpty | None = None
    """A tarball made by `leadline pack build`; verified, then unpacked into the run directory."""
    tokenizer: str = "bpe"
    vocab_size: Positive | None = None
    """For text: size of the tokenizer to train, at most the model's vocabulary."""
    eval_fraction: Decimal = Decimal("0.02")
    max_bytes: Positive | None = None
    """For text: stop after this much, at a whole document."""
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Times the run may read the corpus; more makes re-seen data a decision, not an accident."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("text", "shards", "pack") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"[data] needs exactly one of text, shards and pack, got {given or 'none'}"
            )
        return self


class TwinTable(_Table):
    """`[twin]`."""

    steps: Positive = 200
    micro_batch: Positive = 8
    seq_len: Positive = 512
    tolerance: Annotated[Decimal, Field(ge=0, le=1_000)] = Decimal("0.05")
    settle_steps: Annotated[int, Field(ge=0)] = 20

    @model_validator(mode="after")
    def _judged_steps(self) -> Self:
        if self.steps <= self.settle_steps:
            raise ValueError(
                f"[twin] has {self.steps} steps and settles for {self.settle_steps}: "
                "nothing is left to judge"
            )
        return self


class PointTable(_Table):
    """`[[sweep.points]]`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
    micro_batch: Positive
    seq_len: Positive
    eval_batch: Positive | None = None
    """Defaults to the micro-batch; smaller is refused."""

    @model_validator(mode="after")
    def _eval_covers_train(self) -> Self:
        if self.eval_batch is not None and self.eval_batch < self.micro_batch:
            raise ValueError(
                f"[[sweep.points]] {self.name} has eval_batch {self.eval_batch} below micro_batch "
                f"{self.micro_batch}; a run evaluates at least as wide as it trains"
            )
        return self


DEFAULT_POINTS = (
    PointTable(name="P1", micro_batch=16, seq_len=512),
    PointTable(name="P2", micro_batch=64, seq_len=512),
    PointTable(name="P3", micro_batch=32, seq_len=1024),
)


class SweepTable(_Table):
    """`[sweep]`: seconds or steps for each point, not both."""

    seconds: Annotated[Decimal, Field(gt=0)] | None = None
    steps: Annotated[int, Field(ge=2)] | None = None
    warmup_steps: Positive = 10
    memory_limit_percent: Annotated[int, Field(ge=1, le=100)] = 80
    steady_percent: NotNegative = Decimal(3)
    eval_batches: Annotated[int, Field(ge=3)] = 3
    """Evaluated at each point; from three on, growing memory shows."""
    points: Annotated[tuple[PointTable, ...], Field(strict=False)] = DEFAULT_POINTS

    @property
    def window_seconds(self) -> float | None:
        """Seconds each point is timed for; None when it is timed by steps."""
        if self.steps is not None:
            return None
        return DEFAULT_SECONDS if self.seconds is None else float(self.seconds)

    @model_validator(mode="after")
    def _three_points_one_span(self) -> Self:
        if self.seconds is not None and self.steps is not None:
            raise ValueError("[sweep] takes seconds or steps, not both")
        names = [point.name for point in self.points]
        if len(names) < MIN_POINTS:
            raise ValueError(
                f"[sweep] has {len(names)} points; at least {MIN_POINTS} are needed, because one "
                "point is an opinion and three are a shape"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"[sweep] has two points of one name: {names}")
        return self


class BudgetTable(_Table):
    """`[budget]`."""

    window_hours: Annotated[Decimal, Field(le=MAX_WINDOW_HOURS)]
    reserve_hours: Decimal = Decimal("0.75")
    utilisation: Decimal = Decimal("0.85")

    @model_validator(mode="after")
    def _something_to_train_in(self) -> Self:
        # Told here, not after the sweep was paid for.
        for name in ("window_hours", "reserve_hours", "utilisation"):
            try:
                exact_decimal(name, getattr(self, name))
            except UsageError as error:
                raise ValueError(f"[budget] {error}") from error
        if self.reserve_hours < 0 or self.window_hours <= self.reserve_hours:
            raise ValueError(
                f"[budget] window_hours {self.window_hours} is not above reserve_hours "
                f"{self.reserve_hours}, or that is negative: nothing is left to train in"
            )
        if not 0 < self.utilisation <= 1:
            raise ValueError(
                f"[budget] utilisation is {self.utilisation}; wanted above 0 and at most 1"
            )
        return self


class CheckpointTable(_Table):
    """`[checkpoint]`."""

    every_steps: Positive = 500
    every_seconds: Positive = 600
    eval_batches: Positive = 8
    """Held-out batches evaluated every `every_steps` steps of the run."""
    dir: str | None = None
    """Where checkpoints go; defaults to the run directory."""


class DispositionTable(_Table):
    """`[disposition]`: what happens to the machine after the gate; there is no default."""

    next: Literal["continue", "pause"]
    pause_minutes: Positive | None = None
    rented: bool | None = None
    """Whether somebody is billed for this machine; left out, a long pause takes it for rented."""

    @model_validator(mode="after")
    def _pause_has_length(self) -> Self:
        if (self.next == "pause") != (self.pause_minutes is not None):
            raise ValueError("[disposition] needs pause_minutes with next = 'pause', and only then")
        return self


class EnvironmentTable(_Table):
    """`[environment]`."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    requirements: str | None = None
    """A pinned requirements file; an installed package of another version turns the gate red."""


class GateConfig(_Table):
    """The whole file."""

    workload: dict[str, Any]
    data: DataTable
    budget: BudgetTable
    disposition: DispositionTable | None = None
    """Missing is allowed and leaves the gate red: letting go of the machine is part of it."""
    environment: EnvironmentTable = EnvironmentTable()
    twin: TwinTable = TwinTable()
    sweep: SweepTable = SweepTable()
    checkpoint: CheckpointTable = CheckpointTable()
    optimizer: dict[str, Any] = {}
    seed: Annotated[int, Field(ge=0, le=MAX_INTEGER)] = 0


def load_config(path: Path) -> tuple[GateConfig, bytes]:
    """Read and check a gate.toml; returns it with the bytes it was read from.

    Raises:
        UsageError: unreadable, not TOML, or a key that is missing, unknown or out of range.
    """
    try:
        content = path.read_bytes()
        table = tomllib.loads(content.decode("utf-8"), parse_float=Decimal)
    except OSError as error:
        raise UsageError(f"configuration {path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"configuration {path} is not TOML: {error}") from error
    try:
        config = GateConfig.model_validate(_decimals(table))
    except ValidationError as error:
        raise UsageError(f"{path.name}: {_sentence(error)}") from error
    _refuse_non_finite(config.workload, "[workload]")
    settings_from(config.optimizer)
    return config, content


_PLAIN_DIGITS = 30
_DECIMAL_KEYS = frozenset(
    {
        "window_hours",
        "reserve_hours",
        "utilisation",
        "tolerance",
        "steady_percent",
        "eval_fraction",
        "seconds",
    }
)


def _decimals(value: Any, key: str = "") -> Any:
    """Let whole numbers and strings stand where a decimal is wanted: `window_hours = 8`."""
    if isinstance(value, Mapping):
        return {name: _decimals(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_decimals(item) for item in value]
    if key in _DECIMAL_KEYS and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            value = Decimal(value)
        except InvalidOperation:
            return value  # the table's own check names the key
    if isinstance(value, Decimal):
        return _plain_decimal(value)
    return value


def _plain_decimal(value: Decimal) -> Decimal:
    """The same number without an exponent, as every later reader writes it: 1E+1 is 10."""
    if not value.is_finite() or abs(value.adjusted()) > _PLAIN_DIGITS:
        return value  # the table's own check names the key
    return Decimal(format(value, "f"))


def _refuse_non_finite(value: Any, where: str) -> None:
    """NaN and numbers that no float holds cannot be asked of a model."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            _refuse_non_finite(item, f"{where}.{name}")
    elif isinstance(value, list):
        for item in value:
            _refuse_non_finite(item, where)
    elif isinstance(value, Decimal) and not math.isfinite(float(value)):
        raise UsageError(f"{where} is {value}; a finite number is wanted")


def _sentence(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "the file"
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {where}{_nearest(item['loc'])}")
        elif item["type"] == "missing":
            parts.append(f"key {where} is missing")
        elif item["type"] == "value_error":
            parts.append(str(item["ctx"]["error"]))
        else:
            parts.append(f"key {where} is {item['input']!r}: {item['msg'].lower()}")
    return "; ".join(parts)


def _nearest(location: tuple[int | str, ...]) -> str:
    tables: dict[str, type[BaseModel]] = {
        "data": DataTable,
        "twin": TwinTable,
        "sweep": SweepTable,
        "budget": BudgetTable,
        "checkpoint": CheckpointTable,
        "disposition": DispositionTable,
        "environment": EnvironmentTable,
    }
    table = tables.get(str(location[0]), GateConfig) if len(location) > 1 else GateConfig
    known = [*table.model_fields, *PointTable.model_fields]
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
