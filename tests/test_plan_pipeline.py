"""Layers dealt to pipeline stages: the best of all partitions, nothing lost, and the time that a schedule takes."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import InputError
from finetune.planner.pipeline_schedule import (
    Part,
    Stage,
    bubble_share,
    imbalance,
    micro_batches_held,
    partition,
    pipeline_seconds,
    stages,
)

LAYER = Part(parameters=10, state_bytes=180.0, held_bytes=7.0, once_bytes=1.0, seconds=1.0)
EMBEDDING = Part(parameters=19, state_bytes=342.0, held_bytes=0.0, once_bytes=0.0, seconds=0.0)
HEAD = Part(parameters=20, state_bytes=360.0, held_bytes=0.0, once_bytes=11.0, seconds=1.9)


def every_partition(layers: int, chunks: int) -> list[list[int]]:
    cuts = combinations(range(1, layers), chunks - 1)
    return [[b - a for a, b in zip((0, *cut), (*cut, layers))] for cut in cuts]


@st.composite
def costs(draw: st.DrawFn) -> tuple[int, list[list[float]]]:
    layers = draw(st.integers(1, 10))
    chunks = draw(st.integers(1, min(layers, 5)))
    cost = st.one_of(st.integers(0, 30).map(float), st.just(float("inf")))
    return layers, draw(st.lists(st.lists(cost, min_size=layers, max_size=layers), min_size=chunks, max_size=chunks))


@given(given=costs())
@settings(max_examples=300, deadline=None)
def test_partition_costs_as_little_as_the_best_of_all_partitions(given: tuple[int, list[list[float]]]):
    layers, table = given
    worst = [max(row[n - 1] for row, n in zip(table, counts)) for counts in every_partition(layers, len(table))]
    found = partition(layers, table)
    if min(worst) == float("inf"):
        assert found == []
    else:
        assert sum(found) == layers
        assert min(found) >= 1
        assert max(row[n - 1] for row, n in zip(table, found)) == min(worst)


@given(
    layers=st.integers(1, 24),
    pipeline=st.integers(1, 8),
    virtual_stages=st.integers(1, 3),
    micro_batches=st.integers(1, 40),
    balance=st.sampled_from(["time", "parameters", "memory"]),
)
@settings(max_examples=200, deadline=None)
def test_no_layer_and_no_parameter_is_lost(layers, pipeline, virtual_stages, micro_batches, balance):
    if layers < pipeline * virtual_stages:
        with pytest.raises(InputError, match="take fewer stages"):
            stages(
                layers,
                pipeline,
                layer=LAYER,
                embedding=EMBEDDING,
                head=HEAD,
                micro_batches=1,
                virtual_stages=virtual_stages,
            )
        return
    split = stages(
        layers,
        pipeline,
        layer=LAYER,
        embedding=EMBEDDING,
        head=HEAD,
        micro_batches=micro_batches,
        virtual_stages=virtual_stages,
        balance=balance,
    )
    assert [stage.index for stage in split] == list(range(pipeline))
    assert sum(stage.layers for stage in split) == layers
    assert sum(stage.parameters for stage in split) == layers * 10 + 19 + 20
    assert sum(stage.state_bytes for stage in split) == layers * 180 + 342 + 360
    assert sum(stage.seconds for stage in split) == pytest.approx(layers + 1.9)


def test_forty_layers_with_a_head_worth_two_are_level_on_six_stages_and_not_on_eight():
    def level(pipeline: int, head: Part) -> float:
        split = stages(40, pipeline, layer=LAYER, embedding=EMBEDDING, head=head, micro_batches=64)
        return imbalance(split)

    assert level(6, HEAD) < 1.01 < 1.1 < level(8, HEAD)
    without = replace(HEAD, seconds=0.0)
    assert level(8, without) == 1 < level(6, without)  # whoever forgets the head takes eight


def test_memory_limit_moves_layers_away_from_the_stage_that_holds_most():
    def layers(limit: float) -> list[int]:
        split = stages(40, 6, layer=LAYER, embedding=EMBEDDING, head=HEAD, micro_batches=64, memory_limit_bytes=limit)
        assert all(stage.total_bytes <= limit for stage in split)
        return [stage.layers for stage in split]

    free = layers(float("inf"))
    assert free == [7, 7, 7, 7, 7, 5]
    most = 7 * 180 + 342 + 6 * 7 * 7 + 1
    assert layers(most) == free
    assert layers(most - 1)[0] == 6
    assert layers(1000.0) == []


@pytest.mark.parametrize(("pipeline", "virtual_stages"), [(2, 1), (6, 1), (4, 2), (8, 5)])
def test_first_stage_holds_what_the_papers_say(pipeline: int, virtual_stages: int):
    held = micro_batches_held(0, pipeline=pipeline, micro_batches=1000, virtual_stages=virtual_stages)
    extra = 1 + (pipeline - 1) / (pipeline * virtual_stages) if virtual_stages > 1 else 1  # arXiv:2205.05198
    assert held == pytest.approx(pipeline * extra)
    assert micro_batches_held(pipeline - 1, pipeline=pipeline, micro_batches=1000) == 1
    assert micro_batches_held(0, pipeline=pipeline, micro_batches=1) == 1


def one_forward_one_backward(forward: list[float], micro_batches: int) -> float:
    """Seconds of the schedule by playing it, a backward pass taking twice its forward pass."""
    p = len(forward)
    orders = []
    for i in range(p):
        ahead = min(p - i - 1, micro_batches)
        steady = [(kind, n + shift) for n in range(micro_batches - ahead) for kind, shift in (("f", ahead), ("b", 0))]
        tail = [("b", n) for n in range(micro_batches - ahead, micro_batches)]
        orders.append([("f", n) for n in range(ahead)] + steady + tail)
    ends: dict[tuple[int, str, int], float] = {}
    clocks, places = [0.0] * p, [0] * p
    while any(place < len(order) for place, order in zip(places, orders)):
        for i in range(p):
            if places[i] == len(orders[i]):
                continue
            kind, n = orders[i][places[i]]
            if kind == "f":
                needs = (i - 1, "f", n) if i else None
            else:
                needs = (i + 1, "b", n) if i < p - 1 else (i, "f", n)
            if needs is None or needs in ends:
                start = max(clocks[i], ends[needs] if needs else 0.0)
                clocks[i] = ends[i, kind, n] = start + forward[i] * (1 if kind == "f" else 2)
                places[i] += 1
    return max(clocks)


def of_seconds(seconds: list[float]) -> tuple[Stage, ...]:
    return tuple(Stage(i, 1, 1, 1.0, 0.0, 0.0, 0.0, s) for i, s in enumerate(seconds))


@given(pipeline=st.integers(1, 8), micro_batches=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_balanced_stages_take_as_long_as_the_schedule_played_through(pipeline: int, micro_batches: int):
    played = one_forward_one_backward([1.0] * pipeline, micro_batches)
    assert pipeline_seconds(of_seconds([3.0] * pipeline), micro_batches=micro_batches) == pytest.approx(played)
    share = bubble_share(pipeline=pipeline, micro_batches=micro_batches)
    assert share == pytest.approx(1 - 3 * micro_batches / played)


@given(forward=st.lists(st.floats(1.0, 2.0), min_size=1, max_size=8), rounds=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_unequal_stages_never_take_longer_than_said_and_hardly_less(forward: list[float], rounds: int):
    micro_batches = rounds * len(forward)
    played = one_forward_one_backward(forward, micro_batches)
    said = pipeline_seconds(of_seconds([3 * f for f in forward]), micro_batches=micro_batches)
    assert played <= said * (1 + 1e-9)
    assert said - played <= (len(forward) - 1) * max(forward) + 1e-9 * said  # sums of floats


def test_virtual_stages_divide_the_bubble():
    split = of_seconds([3.0] * 4)
    assert pipeline_seconds(split, micro_batches=8) == 33
    assert pipeline_seconds(split, micro_batches=8, virtual_stages=3) == 27
    assert bubble_share(pipeline=4, micro_batches=8, virtual_stages=3) == pytest.approx(3 / 27)
