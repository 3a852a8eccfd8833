from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import UsageError
from leadline.rig.batching import MicroBatch, micro_batches, waves

LENGTHS = st.lists(st.integers(1, 300), max_size=60)
MAX_TOKENS = st.integers(1, 1000)
PADDING = st.integers(0, 99)
PROPERTY = settings(max_examples=60, deadline=None)


def fewest_ranges(costs: list[int], room: int) -> int:
    """Fewest consecutive ranges of *costs* that sum to at most *room* each, by dynamic program."""
    best = [0]
    for end in range(1, len(costs) + 1):
        begins = (begin for begin in range(end) if sum(costs[begin:end]) <= room)
        best.append(1 + min(best[begin] for begin in begins))
    return best[-1]


@PROPERTY
@given(lengths=LENGTHS, max_tokens=MAX_TOKENS, percent=PADDING)
def test_micro_batches_hold_every_document_once_with_its_length(lengths, max_tokens, percent):
    batches = micro_batches(lengths, max_tokens=max_tokens, max_padding_percent=percent)
    held = [pair for batch in batches for pair in zip(batch.documents, batch.lengths, strict=True)]
    assert sorted(held) == list(enumerate(lengths))


@PROPERTY
@given(lengths=LENGTHS, max_tokens=MAX_TOKENS, percent=PADDING)
def test_micro_batches_pass_no_limit_unless_for_a_single_document(lengths, max_tokens, percent):
    for batch in micro_batches(lengths, max_tokens=max_tokens, max_padding_percent=percent):
        assert batch.length == max(batch.lengths)
        assert batch.tokens <= max_tokens or len(batch.documents) == 1
        assert 100 * batch.padding_tokens <= percent * batch.tokens


@PROPERTY
@given(lengths=LENGTHS, max_tokens=MAX_TOKENS)
def test_micro_batches_run_from_the_longest_document_to_the_shortest(lengths, max_tokens):
    batches = micro_batches(lengths, max_tokens=max_tokens)
    flat = [length for batch in batches for length in batch.lengths]
    assert flat == sorted(lengths, reverse=True)


@PROPERTY
@given(lengths=LENGTHS, max_tokens=MAX_TOKENS, percent=PADDING)
def test_micro_batches_leave_no_batch_that_its_neighbour_could_have_held(
    lengths, max_tokens, percent
):
    batches = micro_batches(lengths, max_tokens=max_tokens, max_padding_percent=percent)
    for left, right in pairwise(batches):
        positions = left.length * (len(left.documents) + 1)
        padding = positions - sum(left.lengths) - right.length
        assert positions > max_tokens or 100 * padding > percent * positions


def test_micro_batches_of_equal_lengths_keep_the_order_of_the_corpus():
    batches = micro_batches([4, 4, 4, 4, 4], max_tokens=8)
    assert [batch.documents for batch in batches] == [(0, 1), (2, 3), (4,)]


@pytest.mark.parametrize(("max_tokens", "batches"), [(2047, 2), (2048, 1), (2049, 1)])
def test_micro_batches_fill_the_limit_exactly(max_tokens, batches):
    assert len(micro_batches([1024, 1024], max_tokens=max_tokens)) == batches


@pytest.mark.parametrize(("shorter", "batches"), [(80, 1), (79, 2)])
def test_micro_batches_pad_up_to_the_share_given_and_no_further(shorter, batches):
    found = micro_batches([100, shorter], max_tokens=1000, max_padding_percent=10)
    assert len(found) == batches


def test_micro_batches_give_a_document_over_the_limit_a_batch_of_its_own():
    found = micro_batches([100_000, 5, 5], max_tokens=10)
    assert [batch.documents for batch in found] == [(0,), (1, 2)]


def test_micro_batches_of_no_document_are_none():
    assert micro_batches([], max_tokens=8) == []


@pytest.mark.parametrize("lengths", [[3, 0, 2], [3, -1]])
def test_micro_batches_of_an_empty_document_are_refused_by_number(lengths):
    with pytest.raises(UsageError, match="document 2 of"):
        micro_batches(lengths, max_tokens=8)


@pytest.mark.parametrize(
    "options", [{"max_tokens": 0}, {"max_tokens": 1, "max_padding_percent": 100}]
)
def test_micro_batches_refuse_a_limit_that_cannot_be(options):
    with pytest.raises(UsageError, match="give"):
        micro_batches([1], **options)


@PROPERTY
@given(lengths=LENGTHS, max_tokens=MAX_TOKENS, room=st.integers(300, 3000))
def test_waves_are_ranges_of_the_batches_and_as_few_as_ranges_can_be(lengths, max_tokens, room):
    batches = micro_batches(lengths, max_tokens=min(max_tokens, room))
    cut = waves(batches, room)
    assert [batch for wave in cut for batch in wave] == batches
    assert all(sum(batch.tokens for batch in wave) <= room for wave in cut)
    assert len(cut) == fewest_ranges([batch.tokens for batch in batches], room)


def test_waves_refuse_a_document_longer_than_the_room_by_number_and_length():
    batches = micro_batches([7, 3000, 7], max_tokens=64)
    with pytest.raises(UsageError, match=r"document 2 of 3,000 tokens .* 2,999 tokens"):
        waves(batches, 2999)


def test_waves_refuse_a_batch_wider_than_the_room_by_its_padded_tokens():
    batch = MicroBatch(documents=(0, 1), length=10, lengths=(10, 9))
    with pytest.raises(UsageError, match=r"\(20 with padding\) .* --micro-batch-tokens"):
        waves([batch], 19)
