import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import UsageError
from leadline.rig.scheduler import Chunk, Scheduler, predicted_steps

PROPERTY = settings(max_examples=150, deadline=None)


@st.composite
def cases(draw):
    """Documents and limits, the KV pool often barely above the longest document."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=12))
    limits = {
        "max_num_batched_tokens": draw(st.integers(1, 50)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "kv_tokens_total": max(lengths) + draw(st.integers(0, 60)),
        "max_chunk": draw(st.none() | st.integers(1, 20)),
    }
    return lengths, limits


def steps_of(lengths, limits):
    """Every step with the documents preempted before it, and the scheduler afterwards."""
    scheduler = Scheduler(lengths, **limits)
    steps = []
    while chunks := scheduler.next_step():
        steps.append((chunks, scheduler.preempted, scheduler.kv_tokens_used))
        # The oldest document takes at least one token of each step.
        assert len(steps) <= sum(lengths)
    return steps, scheduler


def without_a_pool(lengths, *, max_num_batched_tokens, max_num_seqs, max_chunk):
    """The schedule where memory never matters: the first unfinished documents share each step."""
    done = [0] * len(lengths)
    while unfinished := [d for d, length in enumerate(lengths) if done[d] < length]:
        room, step = max_num_batched_tokens, []
        for document in unfinished[:max_num_seqs]:
            size = min(lengths[document] - done[document], room, max_chunk or room)
            if size:
                step.append((document, done[document], done[document] + size))
            done[document] += size
            room -= size
        yield step


@PROPERTY
@given(case=cases())
def test_steps_count_every_token_of_every_document_once(case):
    lengths, limits = case
    counted = [[] for _ in lengths]
    for chunks, _, _ in steps_of(lengths, limits)[0]:
        for chunk in chunks:
            assert chunk.begin <= chunk.recomputed_until <= chunk.end
            counted[chunk.document] += range(chunk.recomputed_until, chunk.end)
    assert counted == [list(range(length)) for length in lengths]


@PROPERTY
@given(case=cases())
def test_steps_compute_a_document_in_order_and_anew_after_a_preemption(case):
    lengths, limits = case
    in_pool = [0] * len(lengths)
    for chunks, preempted, _ in steps_of(lengths, limits)[0]:
        for document in preempted:
            assert 0 < in_pool[document] < lengths[document]
            in_pool[document] = 0
        for chunk in chunks:
            assert chunk.begin == in_pool[chunk.document] < chunk.end
            in_pool[chunk.document] = chunk.end
    assert in_pool == lengths


@PROPERTY
@given(case=cases())
def test_steps_keep_to_the_budgets_of_tokens_seats_chunks_and_pool(case):
    lengths, limits = case
    held = {}
    for chunks, preempted, used in steps_of(lengths, limits)[0]:
        held = {d: end for d, end in held.items() if end < lengths[d] and d not in preempted}
        held |= {chunk.document: chunk.end for chunk in chunks}
        sizes = [chunk.end - chunk.begin for chunk in chunks]
        assert len(held) <= limits["max_num_seqs"]
        assert sum(sizes) <= limits["max_num_batched_tokens"]
        assert max(sizes) <= (limits["max_chunk"] or limits["max_num_batched_tokens"])
        assert sum(held.values()) == used <= limits["kv_tokens_total"]
        assert len({chunk.document for chunk in chunks}) == len(chunks)


@PROPERTY
@given(case=cases())
def test_steps_where_the_pool_holds_everything_are_those_without_a_pool(case):
    lengths, limits = case
    steps, scheduler = steps_of(lengths, {**limits, "kv_tokens_total": sum(lengths)})
    found = [[(c.document, c.begin, c.end) for c in chunks] for chunks, _, _ in steps]
    del limits["kv_tokens_total"]
    assert found == list(without_a_pool(lengths, **limits))
    assert (scheduler.preemptions, scheduler.recomputed_tokens) == (0, 0)


@PROPERTY
@given(case=cases())
def test_predicted_steps_are_what_happens(case):
    lengths, limits = case
    steps, scheduler = steps_of(lengths, limits)
    forecast = predicted_steps(lengths, **limits)
    assert forecast.steps == scheduler.steps == len(steps)
    assert forecast.preemptions == sum(len(preempted) for _, preempted, _ in steps)
    again = sum(c.recomputed_until - c.begin for chunks, _, _ in steps for c in chunks)
    assert forecast.recomputed_tokens == scheduler.recomputed_tokens == again


@PROPERTY
@given(case=cases())
def test_scheduler_that_is_done_holds_nothing_and_stays_done(case):
    scheduler = steps_of(*case)[1]
    assert scheduler.next_step() == []
    assert (scheduler.waiting, scheduler.running, scheduler.kv_tokens_used) == (0, 0, 0)
    assert scheduler.steps == predicted_steps(case[0], **case[1]).steps


def test_t89_two_prompts_in_a_pool_of_one_and_a_half_count_each_token_once():
    limits = {
        "max_num_batched_tokens": 128,
        "max_num_seqs": 2,
        "kv_tokens_total": 600,
        "max_chunk": 64,
    }
    steps, scheduler = steps_of([400, 400], limits)
    counted = sum(c.end - c.recomputed_until for chunks, _, _ in steps for c in chunks)
    computed = sum(c.end - c.begin for chunks, _, _ in steps for c in chunks)
    assert counted == 800
    assert scheduler.preemptions > 0
    assert scheduler.recomputed_tokens == computed - 800 > 0


def test_next_step_preempts_the_document_admitted_last_and_tells_its_rows_apart():
    scheduler = Scheduler(
        [8, 8, 8], max_num_batched_tokens=9, max_num_seqs=3, kv_tokens_total=16, max_chunk=3
    )
    first, second = scheduler.next_step(), scheduler.next_step()
    assert [c.document for c in first + second] == [0, 1, 2, 0, 1]
    assert scheduler.preempted == ()
    assert scheduler.next_step() == [
        Chunk(document=0, begin=6, end=8, recomputed_until=6),
        Chunk(document=1, begin=6, end=8, recomputed_until=6),
    ]
    assert (scheduler.preempted, scheduler.waiting) == ((2,), 1)
    assert scheduler.next_step() == [Chunk(document=2, begin=0, end=3, recomputed_until=3)]
    assert scheduler.recomputed_tokens == 3


def test_next_step_lets_the_younger_document_wait_for_the_elder():
    scheduler = Scheduler(
        [8, 8], max_num_batched_tokens=6, max_num_seqs=2, kv_tokens_total=10, max_chunk=4
    )
    scheduler.next_step()
    assert [(c.document, c.end) for c in scheduler.next_step()] == [(0, 8)]
    assert scheduler.preempted == ()
    assert [(c.document, c.begin) for c in scheduler.next_step()] == [(1, 2)]


def test_next_step_admits_nobody_while_a_running_document_waits_for_room():
    scheduler = Scheduler(
        [8, 8, 1], max_num_batched_tokens=6, max_num_seqs=3, kv_tokens_total=11, max_chunk=4
    )
    scheduler.next_step()
    assert [c.document for c in scheduler.next_step()] == [0]
    assert (scheduler.running, scheduler.waiting, scheduler.kv_tokens_used) == (2, 1, 10)


def test_next_step_admits_nobody_past_a_head_of_the_queue_that_does_not_fit():
    scheduler = Scheduler([6, 6, 1], max_num_batched_tokens=20, max_num_seqs=3, kv_tokens_total=8)
    assert [c.document for c in scheduler.next_step()] == [0]
    assert (scheduler.running, scheduler.waiting, scheduler.kv_tokens_used) == (1, 2, 6)


@pytest.mark.parametrize(("width", "steps"), [(399, 3), (400, 2), (401, 2), (800, 1)])
def test_next_step_cuts_documents_at_the_width_of_the_step(width, steps):
    found = predicted_steps(
        [400, 400], max_num_batched_tokens=width, max_num_seqs=8, kv_tokens_total=800
    )
    assert found.steps == steps


def test_scheduler_of_no_document_is_done():
    assert (
        predicted_steps([], max_num_batched_tokens=1, max_num_seqs=1, kv_tokens_total=1).steps == 0
    )


def test_scheduler_refuses_a_document_longer_than_the_pool_by_number_and_length():
    with pytest.raises(UsageError, match=r"document 2 of 3 has 1,001 tokens.* holds 1,000"):
        Scheduler([1000, 1001, 1], max_num_batched_tokens=8, max_num_seqs=1, kv_tokens_total=1000)


@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "max_num_seqs", "max_chunk"])
def test_scheduler_refuses_a_limit_below_one(limit):
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 1, "kv_tokens_total": 8, limit: 0}
    with pytest.raises(UsageError, match="is 0"):
        Scheduler([1], **limits)


def test_scheduler_refuses_an_empty_document():
    with pytest.raises(UsageError, match="document 1 of 2 has 0 tokens"):
        Scheduler([0, 1], max_num_batched_tokens=8, max_num_seqs=1, kv_tokens_total=8)
