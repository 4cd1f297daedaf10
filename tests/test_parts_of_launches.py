"""However a launch divides a model, its processes agree on their groups, and nothing of the model is left out."""

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.compat.fake_tensors import FakeStore
from finetune.config.strategy_names import has_stages, splits_layers
from finetune.distributed.model_parts import take_part
from finetune.distributed.strategy import Strategy
from finetune.models.pipeline_order import Order
from finetune.models.pipeline_stages import stages_of

LAUNCHES = {
    "three stages": ("pp", 3, 1, Order(3)),
    "four stages, two replicas": ("pp", 8, 1, Order(4)),
    "eight for each layer": ("tp", 8, 8, Order(1)),
    "two for each layer, three stages": ("tp_pp", 6, 2, Order(3)),
    "four for each layer, two stages": ("tp_pp", 8, 4, Order(2)),
    "two replicas of three stages": ("tp_pp", 12, 2, Order(3)),
    "two parts of each stage": ("tp_pp", 12, 2, Order(3, parts=2)),
    "deferred gradients": ("tp_pp", 24, 4, Order(3, schedule="zero_bubble")),
}
"""Strategy, processes, how many of them for each layer, and the order of stages."""


@pytest.mark.parametrize("name", LAUNCHES)
def test_processes_make_the_same_groups_hold_their_shares_and_count_each_gradient_once(name: str):
    """Six layers, with fewer key heads than processes of a layer, and an embedding that is the head too."""
    strategy, processes, tensor, order = LAUNCHES[name]
    assert (splits_layers(strategy), has_stages(strategy)) == (tensor > 1, order.stages > 1)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", num_hidden_layers=6, vocab_size=512, tie_word_embeddings=True, **sizes)
    whole = AutoModelForCausalLM.from_config(config)
    names = {id(each): name for name, each in whole.named_parameters()}
    parts = stages_of(whole, order.stages * order.parts)
    of_stages = [
        {names[id(each)] for part in parts[stage :: order.stages] for module in part for each in module.parameters()}
        for stage in range(order.stages)
    ]

    def told(found: list[set[str]], own: set[str], group: object) -> None:
        assert own == of_stages[launch.stage]
        found[:] = of_stages

    made: list[list[tuple[int, ...]]] = []
    counted: Counter[int] = Counter()
    new_group = dist.new_group
    for rank in range(processes):
        launch = Strategy(strategy, rank, processes, 1, "no", True, tensor=tensor, stages=order.stages)
        model = AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append([])
        dist.init_process_group("fake", rank=rank, world_size=processes, store=FakeStore())
        try:
            with (
                mock.patch.object(dist, "new_group", lambda ranks: made[-1].append(tuple(ranks)) or new_group(ranks)),
                mock.patch.object(dist, "all_gather_object", told),
            ):
                part = take_part(model, optimizer, launch, torch.device("cpu"), torch.float32, order)
                assert part is not None
                part.settle(model, dict(model.named_parameters()))
        finally:
            dist.destroy_process_group()
        _, share, held = part.bytes_of_shares(model)
        assert held == share
        for each, parameter in model.named_parameters():
            if each in part.held and not parameter.is_meta and part._counts_gradient(each):
                counted[launch.data_share["rank"]] += parameter.numel()
    assert all(groups == made[0] for groups in made)
    assert len({*made[0]}) == len(made[0])
    elements = sum(each.numel() for each in whole.parameters())
    assert counted == dict.fromkeys(range(processes // tensor // order.stages), elements)
