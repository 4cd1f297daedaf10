"""What a trace says that each process holds is what real processes hold, to the byte."""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path
from typing import Any

import live_bytes
import pytest
import scenarios
import tiny
import yaml
from full_trace import FullTrace, full_trace
from thinning import thinned
from tracing import begun, traced_step

from finetune.distributed.setup import REDUCE_BUCKET_ELEMENTS
from finetune.trace.placement import placement_of
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step

LAUNCHES = [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)]
LAUNCHES += [(f"zero{stage}", processes) for stage in (1, 2, 3) for processes in (2, 4)]
LEFT_TO_PROVE = {("zero1", 4), ("zero2", 2)}
SETTINGS = {
    (strategy, world_size, adapter): Setting(
        strategy, world_size, adapter=adapter, rank=3 if adapter == "lora" else 16, row_tokens=64
    )
    for strategy, world_size in LAUNCHES
    for adapter in ("none", "lora")
}
ROTARY = 2 * 4 * 4
"""Bytes of the frequencies of a head's rotary embeddings, which transformers keeps twice."""
ROUNDING = 512
"""Bytes to whose multiples each block is rounded up in a step."""


def shown(points: Iterable[Any]) -> list[Any]:
    """Parameters of these points, of which some are left to `make prove`."""
    every = list(points)
    left = [each for each in every if each[:2] in LEFT_TO_PROVE]
    return thinned([each for each in every if each not in left], left)


@pytest.fixture(scope="module")
def uneven_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dimensions that neither 2 nor 4 processes divide."""
    return tiny.build_model_folder(tmp_path_factory.mktemp("uneven"), intermediate_size=131)


@pytest.fixture(scope="module", autouse=True)
def traces(uneven_model: Path, request: pytest.FixtureRequest) -> "Iterator[dict[Any, Future[FullTrace]]]":
    """Of the first process, with blocks as long as they are, at the points that are tested."""
    config = json.loads((uneven_model / "config.json").read_text())
    tests = [each for each in request.session.items if each.path == request.path]
    points = {tuple(each.callspec.params.values()) for each in tests if hasattr(each, "callspec")}
    calls = {each: partial(full_trace, config, SETTINGS[each], as_on_gpu=False) for each in SETTINGS if each in points}
    with begun(calls) as found:
        yield found


@pytest.fixture(scope="module")
def step(uneven_model: Path) -> "Iterator[Future[Step]]":
    config = json.loads((uneven_model / "config.json").read_text())
    with begun({"": partial(traced_step, config, SETTINGS["fsdp2", 2, "none"])}) as found:
        yield found[""]


@pytest.fixture(scope="module")
def held(ranks: Any, uneven_model: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What real processes hold at a point."""
    folder = tmp_path_factory.mktemp("held")

    @cache
    def run(strategy: str, world_size: int, adapter: str) -> list[dict[str, Any]]:
        changes = {"adapter__type": adapter} | ({"adapter__rank": 3} if adapter == "lora" else {})
        config = scenarios.configuration(uneven_model, conversations, folder / "run", train__steps=2, **changes)
        everyone = ranks(world_size).run(live_bytes.bytes_held, config, strategy=strategy, mixed_precision="bf16")
        assert len(everyone) == world_size
        recorded = yaml.safe_load((folder / "run" / "run.yaml").read_text())["held_bytes"]
        return [seen | {"recorded": told} for seen, told in zip(everyone, recorded, strict=True)]

    return run


@pytest.mark.parametrize(("strategy", "world_size", "adapter"), shown(SETTINGS), ids=str)
def test_weights_gradients_and_state_of_the_first_process_are_traced_to_the_byte(
    strategy: str, world_size: int, adapter: str, held: Any, traces: "dict[Any, Future[FullTrace]]"
):
    everyone = held(strategy, world_size, adapter)
    real = everyone[0]
    tensors = sum(is_trained for _, _, is_trained in real["tensors"])
    traced = traces[strategy, world_size, adapter].result()
    categories = traced.held.categories
    assert 0 <= categories["optimizer"] - real["state"] <= 4 * tensors + 16  # numbers of steps, and norms
    weights = categories["weights"] - ROTARY
    stage = placement_of(strategy, world_size).zero_stage
    if not stage:
        assert weights == real["parameters"]
        assert traced.phases["step"].categories["gradients"] == real["gradients"] == real["stepped"]
        return
    # an engine makes its masters and gradients beforehand
    weights += categories.get("gathered", 0) + categories.get("gradients", 0) - real["parameters"] - real["stepped"]
    whole = world_size * real["gradients"]
    beside = {
        1: whole,
        2: 0,  # which frees them at the end of a step
        # its bucket; weights of fewer than 100,000 elements stay gathered; whether gradients have overflowed
        3: real["gradients"] + 4 * REDUCE_BUCKET_ELEMENTS + world_size * real["parameters"] + 1,
    }
    assert weights == beside[stage]


@pytest.mark.parametrize(("strategy", "world_size", "adapter"), shown(SETTINGS), ids=str)
def test_what_a_run_records_of_each_process_is_what_that_process_holds(
    strategy: str, world_size: int, adapter: str, held: Any
):
    stage = placement_of(strategy, world_size).zero_stage
    for seen in held(strategy, world_size, adapter):
        told = seen["recorded"]
        steps = 4 * (1 + len(seen["tensors"]))  # numbers of steps, which ``state`` leaves out
        assert 0 <= told["optimizer"] - seen["state"] <= steps
        assert told["masters"] == (seen["stepped"] if stage else 0)
        assert 0 <= seen["parameters"] - told["weights"] <= 64 * world_size  # padding of the buffer they lie in


@pytest.mark.parametrize(("strategy", "world_size"), shown(LAUNCHES), ids=str)
def test_no_process_holds_more_than_the_first_which_is_traced(strategy: str, world_size: int, held: Any):
    first, *others = held(strategy, world_size, "none")
    for name in ("parameters", "gradients", "stepped", "state"):
        assert max(each[name] for each in others) <= first[name]


def test_steps_tell_the_same_but_for_the_rounding_of_the_allocator(held: Any, step: "Future[Step]"):
    real = held("fsdp2", 2, "none")[0]
    setting = SETTINGS["fsdp2", 2, "none"]
    micro_batch = step.result().micro_batch(1, setting.row_tokens)
    moments = [each for each in step.result().moments(micro_batch) if each.phase == "step"]
    found = max(moments, key=lambda moment: moment.bytes).categories
    tensors = len(real["tensors"])
    assert 0 <= found["gradients"] - real["gradients"] <= tensors * ROUNDING
    assert 0 <= found["weights"] - real["parameters"] <= (tensors + 2) * ROUNDING
    assert 0 <= found["optimizer"] - real["state"] <= 3 * tensors * ROUNDING
