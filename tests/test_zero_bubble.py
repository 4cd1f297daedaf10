"""A pipeline that defers the gradients of weights trains as one process does."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pipelines
import pytest
import scenarios
import sharing
import tiny
from alike import assert_alike, assert_alike_in_16_bits
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble

from finetune.models.pipeline_order import Order, waited_for
from finetune.run.opening import bubble_line

PROVEN = pytest.mark.prove
LAYERS = 8
Action = tuple[str, int, int]
"""F, I (the gradients of inputs) or W (those of weights); the part; and the micro-batch."""


def order_of(rank: int, stages: int, parts: int, micro_batches: int) -> list[Action]:
    """What PyTorch's schedule has a process do."""
    count = stages * parts
    known = {"num_stages": count, "group_size": stages, "group_rank": rank, "submod": None}
    own: Any = [
        SimpleNamespace(stage_index=number, is_first=number == 0, is_last=number == count - 1, **known)
        for number in range(rank, count, stages)
    ]
    schedule = ScheduleInterleavedZeroBubble(own, micro_batches, loss_fn=lambda loss, _: loss)
    found: Any = (each for each in schedule.pipeline_order[rank] if each is not None)
    return [(each.computation_type.value, each.stage_index, each.microbatch_index) for each in found]


def most(actions: list[Action], begins: str, ends: str) -> int:
    """How many passes have begun and not ended, at most; none is left at the end."""
    counts = {begins: 1, ends: -1}
    alive = list(itertools.accumulate(counts.get(kind, 0) for kind, *_ in actions))
    assert alive[-1] == 0
    return max(alive)


def seconds_of(stages: int, parts: int, micro_batches: int, seconds: dict[str, float]) -> float:
    """Of a step in which each process does its actions as soon as it has what they take.

    Args:
        seconds: of an action, by its kind.
    """
    every = {rank: order_of(rank, stages, parts, micro_batches) for rank in range(stages)}
    ended, free, last = dict[Action, float](), dict.fromkeys(every, 0.0), stages * parts - 1
    while any(every.values()):
        for rank, actions in every.items():
            while actions:
                kind, part, number = actions[0]
                before = [("F", part - 1, number)] if kind == "F" else [("F" if kind == "I" else "I", part, number)]
                before += [("I", part + 1, number)] * (kind == "I" and part < last)
                if any(each not in ended for each in before if each[1] >= 0):
                    break
                begins = max(free[rank], *(ended.get(each, 0.0) for each in before))
                free[rank] = ended[actions.pop(0)] = begins + seconds[kind] / parts
    return max(free.values())


SHAPES = [(2, 1), (2, 2), (3, 2), (4, 1), (4, 3)]


@pytest.mark.parametrize(("stages", "parts"), SHAPES)
def test_stages_keep_and_defer_as_many_passes_as_is_said(stages: int, parts: int):
    order = Order(stages, parts, "zero_bubble")
    for given in range(1, 3 * stages + 1):
        computed, short = order.computed(given), order.shortest_alike(given)
        assert given <= computed < given + stages
        for rank, micro_batches in itertools.product(range(stages), (computed, short)):
            actions = order_of(rank, stages, parts, micro_batches)
            assert most(actions, "F", "I") == order.ahead(rank, given)
            assert most(actions, "I", "W") == order.deferred(rank, given)


@pytest.mark.parametrize(("stages", "parts"), SHAPES)
@pytest.mark.parametrize("recomputed", [0.0, 1.0])
def test_stages_are_idle_for_as_long_as_is_said(stages: int, parts: int, recomputed: float):
    order, of_micro_batch = Order(stages, parts, "zero_bubble"), 3 + recomputed
    for micro_batches in (stages, 4 * stages):
        took = seconds_of(stages, parts, micro_batches, {"F": 1.0, "I": 1 + recomputed, "W": 1.0})
        share = order.idle_share(micro_batches, waited_for(1.0, recomputed))
        assert share == pytest.approx(1 - micro_batches * of_micro_batch / took)
        assert share < Order(stages, parts).idle_share(micro_batches)


def test_a_run_says_how_much_less_stages_wait():
    order = Order(4, schedule="zero_bubble")
    assert "each is idle for 27% of it" in bubble_line(Order(4), 8)
    assert "each is idle for 11% of it" in bubble_line(order, 8, waited_for(1.0, 0.0))
    assert "each is idle for 27% of it" in bubble_line(order, 8, waited_for(0.0, 0.0))  # beside an adapter
    assert "5 micro-batches in a step for 4 stages: each is idle for" in bubble_line(order, 5)
    assert "each is idle and computes 1 that trains nothing for" in bubble_line(order, 9)


def test_the_manual_says_how_long_stages_wait():
    lines = (Path(__file__).parent.parent / "docs" / "strategies.md").read_text().splitlines()
    for parts in (1, 2):
        shares = [
            Order(4, parts, schedule).idle_share(8, waited_for(deferred, recomputed))
            for recomputed in (0.0, 1.0)
            for schedule, deferred in (("1f1b", 0.0), ("zero_bubble", 1.0))
        ]
        assert f"| {parts} | " + " | ".join(f"{share:.0%}".replace("%", " %") for share in shares) + " |" in lines


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An embedding that is the head too: of the first stage and the last."""
    return tiny.build_model_folder(tmp_path_factory.mktemp("deep"), layers=LAYERS)


@pytest.fixture(scope="module")
def tuned(
    ranks: Any, deep_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return pipelines.Tuned(ranks, deep_folder, conversations, held_out, tmp_path_factory.mktemp("tuned"))


def deferred(**changes: Any) -> dict[str, Any]:
    return {"train__pipeline_schedule": "zero_bubble"} | changes


LORA: dict[str, Any] = {"adapter__type": "lora", "adapter__rank": 4}
SETTINGS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "two stages": (2, 2, deferred()),
    "four stages of two parts": (4, 4, deferred(train__pipeline_parts=2, train__micro_batch_size=1)),
    "all layers computed again, a micro-batch that trains nothing": (
        *(2, 2),
        deferred(train__global_batch_size=10, train__activation_checkpointing="full"),
    ),
    "replicas, packed, one layer computed again, averages": (
        *(4, 2),
        deferred(data__packing=True, train__activation_checkpointing=1, train__ema_decay=0.5),
    ),
    "lora, two parts": (2, 2, deferred(**LORA, train__pipeline_parts=2)),
    "qlora": (4, 4, deferred(**LORA, quantization__bits=4)),
    "modules without the kernels of this project": (2, 2, deferred(model__kernels="plain")),
    "fewer micro-batches than stages": (4, 4, deferred(train__micro_batch_size=4)),
    "a last step of fewer rows": (2, 2, deferred(train__steps=None, train__epochs=0.25, train__global_batch_size=12)),
}
"""Processes and stages."""
SHOWN = ["all layers computed again, a micro-batch that trains nothing"]


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in SETTINGS if each not in SHOWN)]
)
def test_tuning_its_held_out_loss_and_its_answers_are_those_of_one_process(name: str, tuned: Any):
    processes, stages, changes = SETTINGS[name]
    tuned.assert_alike(processes, stages, **changes)


@pytest.mark.parametrize("weights", ["fp32_master", pytest.param("bf16", marks=PROVEN)])
def test_computing_in_16_bits_trains_as_on_one_process(weights: str, tuned: Any):
    settings: dict[str, Any] = {"precision": "bf16", "train__weights": weights}
    found, expected = tuned("shared", 2, 2, **deferred(**settings)), tuned("alone", 1, 1, **settings)
    assert_alike_in_16_bits(found, expected)


def test_the_last_stage_computes_gradients_of_weights_when_it_would_wait(
    ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path
):
    changes = deferred(train__steps=1, train__micro_batch_size=2)
    config = scenarios.configuration(deep_folder, conversations, tmp_path, **changes)
    first, last = ranks(2).run(pipelines.actions_of, config, strategy="pp")
    each = f"I{7 * LAYERS // 2}"  # of the linear layers of a stage, all of them
    assert first == f"F F {each} W F {each} W F {each} W {each} W"
    assert last == f"F {each} F {each} W F {each} W F {each} W W"


@PROVEN
def test_a_run_goes_on_with_and_without_deferred_gradients_as_one_that_was_not_interrupted(tuned: Any):
    expected = tuned("alone", 1, 1, train__steps=6)
    launches = [(2, 2, "1f1b"), (2, 2, "zero_bubble"), (4, 4, "zero_bubble"), (1, 1, "1f1b")]
    for number, (before, after) in enumerate(itertools.pairwise(launches)):
        kept = {"train__steps": 6, "checkpoint__every": 3, "checkpoint__keep": 5}
        tuned(f"before-{number}", *before[:2], **kept, train__pipeline_schedule=before[2])
        step = tuned.folder / f"before-{number}" / "checkpoints" / "step-00000003"
        resumed = {"train__steps": 6, "checkpoint__resume": str(step), "train__pipeline_schedule": after[2]}
        assert_alike(tuned(f"after-{number}", *after[:2], **resumed), expected[3:])


def test_without_stages_it_is_refused(ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path):
    config = scenarios.configuration(deep_folder, conversations, tmp_path / "run", **deferred()).model_dump()
    for said in ranks(2).run(sharing.refused_by_a_run, "recipes.sft", config, {}, strategy="ddp"):
        assert "train.pipeline_schedule is zero_bubble, but ddp has no stages; set it to 1f1b, or use the" in said
    assert not (tmp_path / "run").exists()
