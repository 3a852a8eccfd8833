"""What verifying a pack or a tree found."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leadline.pack.control import ControlResult
from leadline.pack.tokens import TokenFacts


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """Everything found, good and bad."""

    source: Path
    problems: tuple[str, ...]
    tarball_sha256: str | None
    """None for a tree."""
    manifest_sha256: str
    files: int
    bytes: int
    """Sum of the files' sizes, as the manifest records them."""
    tokens: tuple[TokenFacts, ...]
    """One for each folder of token shards, recomputed from the shards."""
    negative_control: ControlResult | None
    """None when problems were found before it could be run."""
    free_bytes: int
    """On the disk of the files, or of the folder they are unpacked to."""
    needed_bytes: int
    """What unpacking wants free: twice the pack."""
    unpacked_to: Path | None = None

    @property
    def ok(self) -> bool:
        """True when nothing is wrong and the checker was seen to fail."""
        return not self.problems and self.negative_control is not None

    @property
    def document(self) -> dict[str, Any]:
        """Everything as JSON holds it."""
        return {
            "ok": self.ok,
            "source": str(self.source),
            "problems": list(self.problems),
            "tarball_sha256": self.tarball_sha256,
            "manifest_sha256": self.manifest_sha256,
            "files": self.files,
            "bytes": self.bytes,
            "train_tokens": self.train_tokens,
            "eval_tokens": self.eval_tokens,
            "tokens": [facts.document for facts in self.tokens],
            "negative_control": asdict(self.negative_control) if self.negative_control else None,
            "free_bytes": self.free_bytes,
            "needed_bytes": self.needed_bytes,
            "unpacked_to": str(self.unpacked_to) if self.unpacked_to else None,
        }

    @property
    def train_tokens(self) -> int:
        """Training tokens of all shard folders together."""
        return sum(facts.train_tokens for facts in self.tokens)

    @property
    def eval_tokens(self) -> int:
        """Held-out tokens of all shard folders together."""
        return sum(facts.eval_tokens for facts in self.tokens)
