"""What a person asks of a tap."""

from dataclasses import dataclass
from pathlib import Path

from leadline.core.errors import UsageError

DTYPES = ("bfloat16", "float32")
SCHEDULES = ("wave", "step")
TARGETS = ("experts", "linear", "all", "none")
GATE_UP = ("pooled", "expert")
PLACEMENTS = ("disk", "ram")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions:
    """Everything `leadline tap record` takes; None: chosen by the plan."""

    checkpoint: Path
    corpus: Path
    out: Path
    schedule: str = "wave"
    dtype: str = "bfloat16"
    targets: str = "experts"
    """`none` runs the layers and taps nothing: the yardstick of the tap's own cost."""
    gate_up: str = "pooled"
    device: str = "auto"
    vram_mib: int | None = None
    host_pool_mib: int | None = None
    ngram_placement: str = "disk"
    micro_batch_tokens: int | None = None
    max_document_tokens: int | None = None
    max_num_batched_tokens: int = 8_192
    max_num_seqs: int = 16
    kv_tokens: int | None = None
    threads: int = 8
    text_field: str | None = None

    def __post_init__(self) -> None:
        """Refuse values that no schedule takes."""
        for name, value, known in (
            ("--dtype", self.dtype, DTYPES),
            ("--schedule", self.schedule, SCHEDULES),
            ("--targets", self.targets, TARGETS),
            ("--gate-up-gram", self.gate_up, GATE_UP),
            ("--ngram-placement", self.ngram_placement, PLACEMENTS),
        ):
            if value not in known:
                raise UsageError(f"{name} {value} is unknown; known: {', '.join(known)}")
        for name, number in (
            ("--vram-mib", self.vram_mib),
            ("--host-pool-mib", self.host_pool_mib),
            ("--micro-batch-tokens", self.micro_batch_tokens),
            ("--max-document-tokens", self.max_document_tokens),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--max-num-seqs", self.max_num_seqs),
            ("--kv-tokens", self.kv_tokens),
            ("--threads", self.threads),
        ):
            if number is not None and number < 1:
                raise UsageError(f"{name} {number} cannot be; give 1 or more")
