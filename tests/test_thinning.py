"""What `make test` runs of a proven matrix: every value and every test once at least, in few points."""

from collections import Counter
from typing import Any

import thinning
from hypothesis import given
from hypothesis import strategies as st

POINTS = st.lists(
    st.tuples(
        st.sampled_from(["test_a", "test_b"]),
        st.fixed_dictionaries({"launch": st.tuples(st.sampled_from("stu"), st.integers(1, 3)), "x": st.integers(3, 5)}),
    ),
    max_size=12,
)


@given(POINTS)
def test_every_value_and_every_test_is_held_by_few_points(points: list[Any]):
    def held(places: set[int]) -> set[str]:
        return {each for place in places for each in (points[place][0], *thinning.values_of(points[place][1]))}

    kept = thinning.kept(points)
    assert held(kept) == held(set(range(len(points))))
    assert len(kept) <= len(held(kept))


def test_two_of_four_points_hold_both_strategies_and_both_optimizers():
    optimizers = ("sgd", "adamw")
    points = [("test_a", {"point": (name, each)}) for name in ("ddp", "fsdp2") for each in optimizers]
    assert thinning.kept(points) == {0, 3}


def test_a_launch_is_its_strategy_and_its_processes():
    pairs = [
        ("test_a", {"before": ("ddp", 2), "after": ("tp", 4)}),
        ("test_a", {"before": ("tp", 2), "after": ("ddp", 4)}),
    ]
    assert thinning.kept(pairs) == {0}
    assert sorted(thinning.values_of(pairs[0][1])) == ["'ddp'", "'tp'", "2", "4"]


def test_what_has_no_parameters_stays():
    assert thinning.kept([("test_a", {}), ("test_b", {}), ("test_c", {"n": 1})]) == {0, 1, 2}
    assert thinning.kept([]) == set()


@given(POINTS, POINTS)
def test_every_shared_value_is_held_by_one_of_two_files_and_all_others_by_each(one: list[Any], other: list[Any]):
    uses = {repr(name): 0 for name in "stu"}
    known, held = Counter[str](), []
    for points in (one, other):
        kept = thinning.kept(points, uses)
        known.update(value for place in kept for value in thinning.values_of(points[place][1]) if value in uses)
        held.append({each for place in kept for each in (points[place][0], *thinning.values_of(points[place][1]))})
        every = {each for test, parameters in points for each in (test, *thinning.values_of(parameters))}
        assert held[-1] >= every - uses.keys()
        assert set().union(*held) >= every
    assert uses == dict.fromkeys(uses, 0) | known


def test_a_shared_value_is_held_by_a_point_of_one_file_and_the_others_take_the_rarest():
    uses = {repr(name): 0 for name in ("ddp", "tp", "pp")}
    one = [("test_a", {"strategy": name}) for name in ("ddp", "tp")]
    assert thinning.kept(one, uses) == {0, 1}
    other = [("test_b", {"strategy": name, "optimizer": "sgd"}) for name in ("ddp", "tp", "pp")]
    assert thinning.kept(other, uses) == {2}
    another = [("test_c", {"strategy": name, "bits": bits}) for bits in (4, 8) for name in ("ddp", "tp", "pp")]
    assert thinning.kept(another, uses) == {0, 4}
    assert uses == {"'ddp'": 2, "'tp'": 2, "'pp'": 1}
