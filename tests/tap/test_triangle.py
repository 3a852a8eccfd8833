import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leadline.core.errors import UsageError
from leadline.tap.triangle import diagonal_positions, pack, packed_length, unpack


def symmetric(features: int, seed: int, *lead: int) -> np.ndarray:
    half = np.random.default_rng(seed).standard_normal((*lead, features, features))
    return (half + np.swapaxes(half, -1, -2)).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(features=st.integers(0, 150), seed=st.integers(0, 2**32))
def test_unpack_of_pack_is_the_same_matrix_bit_for_bit(features, seed):
    full = symmetric(features, seed)
    packed = pack(full)
    assert packed.shape == (packed_length(features),)
    assert unpack(packed, features).tobytes() == full.tobytes()


@settings(max_examples=40, deadline=None)
@given(features=st.integers(1, 130), seed=st.integers(0, 2**32))
def test_pack_of_unpack_is_the_same_triangle_and_the_matrix_is_symmetric(features, seed):
    packed = np.random.default_rng(seed).standard_normal(packed_length(features))
    full = unpack(packed, features)
    assert (full == full.T).all()
    assert pack(full).tobytes() == packed.tobytes()


@given(features=st.integers(1, 70), experts=st.integers(0, 3), seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_pack_of_many_equals_pack_of_each(features, experts, seed):
    full = symmetric(features, seed, experts)
    packed = pack(full)
    assert packed.shape == (experts, packed_length(features))
    assert all((packed[index] == pack(full[index])).all() for index in range(experts))
    assert (unpack(packed, features) == full).all()


def test_pack_goes_row_by_row_from_the_diagonal():
    full = np.array([[1, 2, 3], [2, 4, 5], [3, 5, 6]], np.float32)
    assert pack(full).tolist() == [1, 2, 3, 4, 5, 6]
    assert pack(full).tolist() == full[np.triu_indices(3)].tolist()


@pytest.mark.parametrize("features", [0, 1, 2, 3, 64, 65, 129])
def test_diagonal_positions_are_those_of_the_diagonal(features):
    full = symmetric(features, 1)
    assert (pack(full)[diagonal_positions(features)] == np.diag(full)).all()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 3, 2)])
def test_pack_of_no_square_is_refused(shape):
    with pytest.raises(UsageError, match="not square"):
        pack(np.zeros(shape))


@pytest.mark.parametrize("length", [0, 5, 7])
def test_unpack_of_a_wrong_length_is_refused_with_the_right_one(length):
    with pytest.raises(UsageError, match="3 features, which has 6 numbers"):
        unpack(np.zeros(length), 3)
