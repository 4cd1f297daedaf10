"""The points that are not left to `make prove` at first hold every pair of settings."""

from typing import Any

from covering import covered, covering_array, pairs_of
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.compatibility import cells, refusal

POINTS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.booleans()), min_size=1, unique=True)


@given(POINTS)
def test_every_pair_of_values_that_occurs_is_kept(points: list[tuple[Any, ...]]):
    kept = covering_array(points)
    assert set(kept) <= set(points)
    assert set().union(*map(pairs_of, kept)) == set().union(*map(pairs_of, points))


def test_few_points_are_kept_of_a_full_matrix():
    points = [tuple(cell) for cell in cells() if refusal(cell) is None]
    assert len(covering_array(points)) < len(points) / 4


def test_points_that_are_left_out_are_marked_and_not_lost():
    points = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    parameters = covered(points)
    assert [parameter.values[0] for parameter in parameters] == points
    unmarked = {parameter.values[0] for parameter in parameters if not parameter.marks}
    assert unmarked == set(covering_array(points))
    assert 9 <= len(unmarked) < 27
