"""Continuous batching of prefills: which pieces of which documents make up each step.

Numbers only; keys and values belong to who runs the steps. The rules:

- Running documents go first, in the order in which they were admitted; then waiting ones
  come in, first come first served, while tokens, seats and the KV pool allow.
- A document keeps its keys and values between its chunks and gives them back behind the
  step that took its last token.
- When a chunk does not fit the pool, the document admitted last gives up its keys and
  values, goes back to the front of the queue and will be computed again. One admitted
  earlier never yields to one admitted later, which waits instead: so the oldest document
  gets on in every step, and the schedule ends.
- Nobody is admitted in a step that preempted, or while a running document waits for room.
- Each token counts once: what is computed again is told apart in the chunk.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from leadline.core.errors import UsageError
from leadline.rig.batching import refuse_empty_documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of a document in one step."""

    document: int
    """Its place in the corpus."""
    begin: int
    """First position; the positions before it are in the KV pool."""
    end: int
    """One past the last position."""
    recomputed_until: int
    """Rows of positions *begin* up to here counted before a preemption and not again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForecast:
    """What a schedule will come to."""

    steps: int
    preemptions: int
    recomputed_tokens: int


class Scheduler:
    """Gives out the steps of one corpus, one at a time."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        kv_tokens_total: int,
        max_chunk: int | None = None,
    ) -> None:
        """Queue documents of *lengths* tokens; *max_chunk* bounds one document's share of a step.

        Raises:
            UsageError: a limit below 1, an empty document, or one longer than the KV pool.
        """
        _refuse_limits(max_num_batched_tokens, max_num_seqs, max_chunk)
        refuse_empty_documents(lengths)
        _refuse_long_documents(lengths, kv_tokens_total)
        self._lengths = lengths
        self._step_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._kv_tokens_total = kv_tokens_total
        self._chunk_tokens = min(max_chunk or max_num_batched_tokens, max_num_batched_tokens)
        self._waiting = deque(range(len(lengths)))
        self._running: list[int] = []
        self._in_pool = [0] * len(lengths)
        self._counted = [0] * len(lengths)
        self.kv_tokens_used = 0
        """Of the pool, with the chunks of the step given out last."""
        self.steps = 0
        """Given out so far."""
        self.preemptions = 0
        self.recomputed_tokens = 0
        """Tokens in chunks given out that had been computed before."""
        self.preempted: tuple[int, ...] = ()
        """Documents whose keys and values must be dropped before the step given out last."""

    @property
    def waiting(self) -> int:
        """Documents in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Documents admitted and not done, or done by the step given out last."""
        return len(self._running)

    def next_step(self) -> list[Chunk]:
        """The chunks of the next step, at most one a document; empty when all is done."""
        self._release_finished()
        self.preempted = ()
        chunks = self._continue_running()
        if not self.preempted and len(chunks) == len(self._running):
            room = self._step_tokens - sum(chunk.end - chunk.begin for chunk in chunks)
            chunks += self._admit_waiting(room)
        self.steps += bool(chunks)
        return chunks

    def _release_finished(self) -> None:
        left = []
        for document in self._running:
            if self._in_pool[document] == self._lengths[document]:
                self.kv_tokens_used -= self._in_pool[document]
            else:
                left.append(document)
        self._running = left

    def _continue_running(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        room = self._step_tokens
        while room and len(chunks) < len(self._running):
            document = self._running[len(chunks)]
            size = self._chunk_size(document, room)
            while size > self._free and self._running[-1] != document:
                self._preempt_last()
            if size > self._free:
                break
            chunks.append(self._take(document, size))
            room -= size
        return chunks

    def _admit_waiting(self, room: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while room and self._waiting and len(self._running) < self._max_num_seqs:
            document = self._waiting[0]
            size = self._chunk_size(document, room)
            if size > self._free:
                break
            self._running.append(self._waiting.popleft())
            chunks.append(self._take(document, size))
            room -= size
        return chunks

    @property
    def _free(self) -> int:
        return self._kv_tokens_total - self.kv_tokens_used

    def _chunk_size(self, document: int, room: int) -> int:
        return min(self._lengths[document] - self._in_pool[document], room, self._chunk_tokens)

    def _take(self, document: int, size: int) -> Chunk:
        begin = self._in_pool[document]
        end = begin + size
        recomputed_until = min(max(self._counted[document], begin), end)
        self._in_pool[document] = end
        self._counted[document] = max(self._counted[document], end)
        self.kv_tokens_used += size
        self.recomputed_tokens += recomputed_until - begin
        return Chunk(document=document, begin=begin, end=end, recomputed_until=recomputed_until)

    def _preempt_last(self) -> None:
        document = self._running.pop()
        self.kv_tokens_used -= self._in_pool[document]
        self._in_pool[document] = 0
        self._waiting.appendleft(document)
        self.preemptions += 1
        self.preempted += (document,)


def predicted_steps(
    lengths: Sequence[int],
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    kv_tokens_total: int,
    max_chunk: int | None = None,
) -> StepForecast:
    """What the scheduler will do with these documents: exact, for it is run dry.

    Raises:
        UsageError: as `Scheduler`.
    """
    scheduler = Scheduler(
        lengths,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        kv_tokens_total=kv_tokens_total,
        max_chunk=max_chunk,
    )
    while scheduler.next_step():
        pass
    return StepForecast(
        steps=scheduler.steps,
        preemptions=scheduler.preemptions,
        recomputed_tokens=scheduler.recomputed_tokens,
    )


def _refuse_limits(max_num_batched_tokens: int, max_num_seqs: int, max_chunk: int | None) -> None:
    for flag, value in (
        ("--max-num-batched-tokens", max_num_batched_tokens),
        ("--max-num-seqs", max_num_seqs),
        ("max_chunk", 1 if max_chunk is None else max_chunk),
    ):
        if value < 1:
            raise UsageError(f"{flag} is {value}, so no step holds a token; give 1 or more")


def _refuse_long_documents(lengths: Sequence[int], kv_tokens_total: int) -> None:
    for document, length in enumerate(lengths):
        if length > kv_tokens_total:
            raise UsageError(
                f"document {document + 1} of {len(lengths)} has {length:,} tokens, and the KV pool "
                f"holds {kv_tokens_total:,}; raise --kv-tokens to {length} or more, or cut "
                "documents with --max-document-tokens"
            )
