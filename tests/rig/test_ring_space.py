"""The ring's arithmetic against a model that only knows which bytes are in use."""

from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.rig.ring_space import Region, RingSpace

CAPACITY = 100

steps = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(1, CAPACITY)),
        st.tuples(st.just("release"), st.integers(0, 50)),
    ),
    max_size=80,
)


def _bytes_of(regions: list[Region]) -> list[int]:
    return [byte for r in regions for byte in range(r.offset, r.offset + r.num_bytes)]


@given(steps=steps)
@settings(max_examples=200, deadline=None)
def test_regions_in_any_order_of_release_never_overlap(steps: list[tuple[str, int]]) -> None:
    space, held = RingSpace(CAPACITY), list[Region]()
    for step, number in steps:
        if step == "release" and held:
            space.release(held.pop(number % len(held)))
        elif step == "place" and (region := space.place(number)) is not None:
            held.append(region)
        used = _bytes_of(held)
        assert len(set(used)) == len(used)
        assert all(0 <= byte < CAPACITY for byte in used)


@given(steps=steps, num_bytes=st.integers(1, CAPACITY))
@settings(max_examples=100, deadline=None)
def test_place_with_everything_released_always_fits(
    steps: list[tuple[str, int]], num_bytes: int
) -> None:
    space = RingSpace(CAPACITY)
    held = [r for step, n in steps if step == "place" and (r := space.place(n)) is not None]
    for region in reversed(held):
        space.release(region)
    assert space.used_bytes == 0
    assert space.place(num_bytes) is not None


@given(sizes=st.lists(st.integers(1, CAPACITY // 2), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_place_of_half_the_ring_at_most_waits_for_one_older_region(sizes: list[int]) -> None:
    space, previous = RingSpace(CAPACITY), None
    for size in sizes:
        region = space.place(size)
        if region is None:
            assert previous is not None
            space.release(previous)
            region = space.place(size)
        elif previous is not None:
            space.release(previous)
        assert region is not None
        previous = region


def test_place_beyond_the_ring_is_none() -> None:
    assert RingSpace(CAPACITY).place(CAPACITY + 1) is None


def test_space_behind_an_older_region_is_not_reused_before_it() -> None:
    space = RingSpace(CAPACITY)
    first, second = space.place(50), space.place(50)
    assert first is not None
    assert second is not None
    space.release(second)
    assert space.used_bytes == 100
    assert space.place(10) is None
    space.release(first)
    assert space.place(100) is not None
