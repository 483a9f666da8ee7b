"""Which arrays a share of the optimizer's state is."""

import hypothesis.strategies as st
from hypothesis import given

from forebay.planner.hosted import LEAST_BYTES, choose_hosted

MIB = 2**20


def test_a_share_is_the_arrays_that_reach_it_with_least_excess():
    sizes = [8 * MIB, 4 * MIB, 2 * MIB, 2 * MIB]
    assert choose_hosted(sizes, 0.0) == [False] * 4
    assert choose_hosted(sizes, 0.5) == [True, False, False, False]  # 8 of 16
    assert choose_hosted(sizes, 0.25) == [False, True, False, False]  # the largest is more than is asked for
    assert choose_hosted(sizes, 0.1) == [False, False, False, True]
    assert choose_hosted(sizes, 0.75) == [True, True, False, False]
    assert choose_hosted(sizes, 1.0) == [True] * 4


def test_small_arrays_stay_on_the_device():
    assert choose_hosted([LEAST_BYTES, LEAST_BYTES - 1], 1.0) == [True, False]


@given(st.lists(st.integers(MIB, 64 * MIB), min_size=1, max_size=12), st.floats(0, 1))
def test_at_least_the_share_is_moved_and_dropping_any_array_would_be_too_little(sizes, fraction):
    hosted = choose_hosted(sizes, fraction)
    moved = sum(s for s, h in zip(sizes, hosted, strict=True) if h)
    wanted = round(fraction * sum(sizes))
    assert moved >= wanted
    assert all(moved - s < wanted for s, h in zip(sizes, hosted, strict=True) if h)
