"""The key of a tap: everything that decides the bits of its Grams.

Two taps with equal keys hold the same numbers, so one may go on where the other was
broken off. What a later job does with the Grams (bits, group size) is not in the key,
and neither is what changes no bit (threads, the size of the host pool, the card's name).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from leadline.core.canonical import sha256_json
from leadline.core.errors import DataError

GENERATION = 1
"""Rises whenever the same inputs would give other sums, so that old Grams can be told."""

_OPTIONAL = ("max_document_tokens", "first_expert", "end_expert")


@dataclass(frozen=True, kw_only=True, slots=True)
class TapKey:
    """What was tapped and how; the order of the fields is the order in which they are compared."""

    generation: int = GENERATION
    model_type: str
    model_digest: str
    """Identity of the checkpoint's bytes."""
    tokenizer_digest: str
    """Empty where the corpus came as token ids and no tokenizer was used."""
    max_document_tokens: int | None
    """Length at which documents were cut; None: they were not."""
    documents: int
    tokens: int
    """Tokens that pass the layers and count."""
    corpus_digest: str
    """Over token ids and document boundaries."""
    dtype: str
    targets: str
    """experts, linear or all."""
    gate_up: str
    """pooled: one Gram of the experts' input a layer; expert: one for each expert."""
    first_layer: int
    end_layer: int
    """One past the last layer asked for."""
    first_expert: int | None = None
    """Where each rig taps its own experts of one corpus: its first; None: all experts."""
    end_expert: int | None = None
    schedule: str
    """wave, step, or mixed for a merge of unlike taps."""
    num_waves: int = 1
    micro_batch_tokens: int
    experts_per_group: int = 0
    """Experts computed together, whose share of the output is rounded; 0: all of them."""
    batches_digest: str = ""
    """Over the documents of each micro-batch of each wave; empty where steps say it all."""
    step_tokens: int = 0
    """Width of a step; 0 for a wave."""
    max_num_seqs: int = 0
    kv_tokens: int = 0

    @property
    def document(self) -> dict[str, object]:
        """The key as JSON."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """Sha256 of the key's canonical JSON."""
        return sha256_json(self.document)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first field in which two keys part."""

    field: str
    left: object
    right: object


def first_difference(left: TapKey, right: TapKey, *, besides: frozenset[str]) -> Difference | None:
    """The first field not named in *besides* that differs; None when there is none."""
    for field in fields(TapKey):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if field.name not in besides and ours != theirs:
            return Difference(field=field.name, left=ours, right=theirs)
    return None


def parse_key(document: Mapping[str, object]) -> TapKey:
    """The key that `TapKey.document` wrote.

    Raises:
        DataError: a field is missing, unknown, or of the wrong type.
    """
    known = {field.name: field.type for field in fields(TapKey)}
    strange = sorted(set(known) ^ set(document))
    if strange:
        raise DataError(f"the key's fields differ from this version's: {', '.join(strange)}")
    for name, kind in known.items():
        value = document[name]
        if value is None and name in _OPTIONAL:
            continue
        wanted = str if kind is str else int
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise DataError(f"key field {name} is {value!r}, wanted {wanted.__name__}")
        if isinstance(value, int) and value < 0:
            raise DataError(f"key field {name} is {value}, wanted 0 or more")
    return TapKey(**document)  # type: ignore[arg-type]
