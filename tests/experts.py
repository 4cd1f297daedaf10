"""What the processes of a group make of experts that they share, and how far it is from what one has of all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import scenarios
import torch
import torch.distributed as dist
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from finetune.distributed import Strategy
from finetune.distributed.expert_parallel import ExpertParallel
from finetune.models import expert_layers
from finetune.models.expert_layers import experts_of

CPU = torch.device("cpu")


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def _strategy() -> Strategy:
    rank, size = dist.get_rank(), dist.get_world_size()
    return Strategy("ep", rank, size, replicas=1, mixed_precision="no", rehearsal=True, experts=size)


def _with_gradients(
    model: Any, ids: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * weight).sum().backward()
    return logits.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def errors_of_models(kinds: list[type] | None = None) -> tuple[int, dict[str, float]]:
    """The size of the group; and of each kind of model whose experts can be shared, how far the logits of this
    process's row, and the gradients of its experts by the rows of all, are from what one process has, relative to the
    largest.

    Args:
        kinds: of configurations; None for all that transformers knows.
    """
    from test_attention import small_model

    _join()
    size, rank, found = dist.get_world_size(), dist.get_rank(), dict[str, float]()
    for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING:
        model = small_model(kind)
        if model is None or not experts_of(model) or experts_of(model) % size:
            continue
        rows = [torch.arange(3 + row, 20 + 2 * row)[None] for row in range(size)]  # of unequal length
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(*row.shape, model.config.get_text_config().vocab_size, generator=draw) for row in rows]
        every = [_with_gradients(model, *each) for each in zip(rows, weights, strict=True)]
        expected = {name: sum(of_row.get(name, torch.zeros(())) for _, of_row in every) for name in every[0][1]}
        shared = ExpertParallel(model, _strategy(), CPU)
        shared.settle(model, dict(model.named_parameters()))
        logits, gradients = _with_gradients(model, rows[rank], weights[rank])
        compared = {"logits": (logits, every[rank][0])}
        names = [name for name, held in shared.held.items() if held.is_split]
        compared |= {name: (gradients[name], expected[name].chunk(size)[rank]) for name in names}
        found[kind.__name__] = max(
            float((one - other).abs().max() / other.abs().max()) for one, other in compared.values()
        )
    return size, found


def errors_where_one_has_no_tokens(implementation: str) -> tuple[int, dict[str, float]]:
    """As ``errors_of_models``, of a layer of experts by itself; all tokens choose experts of the first process."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    _join()
    size, rank = dist.get_world_size(), dist.get_rank()
    config = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=2 * size)
    config._experts_implementation = implementation  # as from_pretrained sets it
    torch.manual_seed(0)
    layer: Any = MixtralExperts(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    hidden_ND = torch.randn(5, 8, requires_grad=True)
    chosen_NK = torch.tensor([[0, 1], [1, 0], [0, 1], [0, 1], [1, 0]])
    weights_NK = torch.rand(5, 2, requires_grad=True)
    inputs = [hidden_ND, weights_NK]
    whole = layer(hidden_ND, chosen_NK, weights_NK)
    expected = [whole.detach(), *torch.autograd.grad(whole.square().sum(), inputs)]
    for parameter in layer.parameters():
        parameter.data = parameter.data.chunk(size)[rank].clone()
    expert_layers.exchange_tokens(layer, dist.group.WORLD)
    found = layer(hidden_ND, chosen_NK, weights_NK)
    every = [found.detach(), *torch.autograd.grad(found.square().sum(), inputs)]
    names = ("output", "hidden states", "weights")
    return size, {
        name: float((one - other).abs().max()) for name, one, other in zip(names, every, expected, strict=True)
    }


@contextmanager
def _experts_added_up_over_all(config: Any) -> Iterator[None]:
    """The gradients of experts added up over all processes, as of what every process has."""
    backward = ExpertParallel.backward

    def over_all(*args: Any, **known: Any) -> list[torch.Tensor]:
        with mock.patch.object(ExpertParallel, "_owners", return_value=None):
            return backward(*args, **known)

    with mock.patch.object(ExpertParallel, "backward", over_all):
        yield


@contextmanager
def _experts_counted_once_a_share(config: Any) -> Iterator[None]:
    """The gradient norm of each process's own experts."""
    reduce = dist.all_reduce

    def own(tensor: torch.Tensor, *args: Any, **known: Any) -> Any:
        return None if tensor.ndim == 0 and known.get("group") is not None else reduce(tensor, *args, **known)

    with mock.patch.object(dist, "all_reduce", own):
        yield


def shared_by(size: int, config: Any) -> dict[str, Any]:
    """Run the recipe with experts that so many processes share."""
    with mock.patch.dict("os.environ", {"MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": str(size)}):
        return scenarios.train(config)


BUGS: dict[str, Any] = {
    "experts added up over all": _experts_added_up_over_all,
    "norms of own experts": _experts_counted_once_a_share,
}


def train_with(bug: str, config: Any) -> dict[str, Any]:
    """Run the recipe with a bug on this process."""
    with BUGS[bug](config):
        return scenarios.train(config)
