"""What the planner says that each process holds is what real processes hold, to the byte."""

import math
from pathlib import Path
from typing import Any

import live_bytes
import pytest
import scenarios
import tiny
import torch

from finetune.planner.shards import row_shard_elements
from finetune.planner.zero import zero_bytes
from finetune.trace.placement import placement_of


@pytest.fixture(scope="module")
def uneven_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dimensions that neither 2 nor 4 processes divide."""
    return tiny.build_model_folder(tmp_path_factory.mktemp("uneven"), intermediate_size=131)


def expected(strategy: str, world_size: int, rank: int, tensors: list[Any]) -> dict[str, int]:
    """Bytes by the planner's formulas, for AdamW with fp32 masters, computing in bf16."""
    placement = placement_of(strategy, world_size)
    trained = [(is_norm, shape) for is_norm, shape, is_trained in tensors if is_trained]
    frozen = [shape for _, shape, is_trained in tensors if not is_trained]
    if placement.framework == "zero":
        groups = [[math.prod(shape) for is_norm, shape in trained if is_norm == norms] for norms in (False, True)]
        sizes = [math.prod(shape) for shape in frozen]
        terms = zero_bytes(stage=placement.zero_stage, processes=world_size, trained=groups, frozen=sizes)
        share = terms.masters
        return {
            "parameters": terms.weights,
            "stepped": share,
            "gradients": share,
            "state": terms.optimizer_state,
        }
    shards = placement.weight_shards

    def held(shapes: list[Any]) -> int:
        return sum(row_shard_elements(shape, shards, rank % shards) for shape in shapes)

    share = 4 * held([shape for _, shape in trained])
    return {"parameters": share + 2 * held(frozen), "stepped": share, "gradients": share, "state": 2 * share}


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize(
    ("strategy", "world_size"),
    [("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4)]
    + [(f"zero{stage}", processes) for stage in (1, 2, 3) for processes in (2, 4)],
    ids=str,
)
def test_parameters_gradients_and_state_of_every_rank_are_predicted_to_the_byte(
    strategy: str, world_size: int, adapter: str, ranks: Any, uneven_model: Path, conversations: Path, tmp_path: Path
):
    changes = {"adapter__type": adapter} | ({"adapter__rank": 3} if adapter == "lora" else {})
    config = scenarios.configuration(uneven_model, conversations, tmp_path / "run", train__steps=2, **changes)
    everyone = ranks(world_size).run(live_bytes.bytes_held, config, strategy=strategy, mixed_precision="bf16")
    assert len(everyone) == world_size
    for rank, found in enumerate(everyone):
        tensors = found.pop("tensors")
        assert {is_trained for *_, is_trained in tensors} == ({True, False} if adapter == "lora" else {True})
        assert found == expected(strategy, world_size, rank, tensors)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 129])
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 7])
def test_shards_by_rows_are_the_chunks_of_torch(rows: int, shards: int):
    chunks = [chunk.numel() for chunk in torch.empty(rows, 3).chunk(shards)]
    chunks += [0] * (shards - len(chunks))
    assert [row_shard_elements((rows, 3), shards, rank) for rank in range(shards)] == chunks
