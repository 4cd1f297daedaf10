"""The micro-batches of an optimizer step on their way through a pipeline, several of them at a time."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from finetune.data.batches import IGNORED
from finetune.distributed.pipeline import PassedOn, Pipeline

LossSum = Callable[[torch.nn.Module, Any], torch.Tensor]


def backward(
    pipeline: Pipeline,
    model: Any,
    loss_sum: LossSum,
    micro_batches: Iterable[Any],
    scale: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Forward and backward passes of all micro-batches, in the order 1F1B: a stage computes as few of them ahead as
    keep the next ones busy, and then one forward and one backward pass in turn (arXiv:1806.03377). Collective.

    Args:
        scale: a loss to what gradients are of. They are added up over micro-batches and replicas.

    Returns:
        The losses, in the last stage; zeros in the others.
    """
    every = _of_one_length(list(micro_batches))
    runner, places = _Runner(pipeline, model, loss_sum, every), torch.arange(len(every))
    hidden = torch.empty(runner.shape, dtype=pipeline.dtype, device="meta", requires_grad=True)
    stage = PipelineStage(
        *(runner, pipeline.stage, pipeline.stages, pipeline.device),
        input_args=places[:1] if pipeline.is_first else hidden,
        output_args=torch.empty(1, requires_grad=True) if pipeline.is_last else hidden,
        group=pipeline.line,
    )
    kind = Schedule1F1B if len(every) >= pipeline.stages else ScheduleGPipe  # the same order, of so few
    schedule = kind(stage, len(every), loss_fn=lambda loss, _: scale(loss.sum()), scale_grads=False)
    given, target = (places,) if pipeline.is_first else (), places if pipeline.is_last else None
    pipeline.is_scheduled = True
    try:
        schedule.step(*given, target=target, place=places, return_outputs=False)
    finally:
        pipeline.is_scheduled = False
    _reduce(pipeline, model)
    return runner.losses


class _Runner(torch.nn.Module):
    """What a schedule calls with each micro-batch."""

    def __init__(self, pipeline: Pipeline, model: Any, loss_sum: LossSum, every: list[Any]) -> None:
        super().__init__()
        self.model, self._asked = model, (pipeline, loss_sum, every)
        self.losses = [torch.zeros((), device=pipeline.device) for _ in every]
        self.shape = torch.Size((*_next_tokens_of(every[0]).shape, model.config.get_text_config().hidden_size))
        """Of what stages hand on."""

    def forward(self, given: torch.Tensor, *, place: torch.Tensor) -> torch.Tensor:
        """The loss, of shape (1,), in the last stage; what the next one takes in the others."""
        (pipeline, loss_sum, every), number = self._asked, int(place)
        pipeline.received = None if pipeline.is_first else given
        try:
            loss = loss_sum(self.model, every[number])
        except PassedOn as passed:
            hidden = passed.hidden_BTD
        else:
            self.losses[number] = loss.detach()
            return loss.view(1)
        if hidden.shape != self.shape:
            raise RuntimeError(
                f"{type(self.model).__name__} hands on {tuple(hidden.shape)} from layer to layer, where a pipeline "
                f"takes {tuple(self.shape)}; use the strategy file fsdp2, and please report this."
            )
        # of a stage in which nothing is trained a graph is asked for all the same
        return hidden if hidden.requires_grad else hidden.requires_grad_()


def _reduce(pipeline: Pipeline, model: torch.nn.Module) -> None:
    """Add up the gradients of embeddings that are the head's too, and then those of replicas."""
    own = {name: each for name, each in model.named_parameters() if each.requires_grad}
    if pipeline.is_first or pipeline.is_last:
        for name in pipeline.shared:
            dist.all_reduce(_gradient_of(own[name]), group=pipeline.ends)
    if dist.get_world_size(pipeline.replicas) > 1:
        gradients = map(_gradient_of, own.values())
        for work in [dist.all_reduce(each, group=pipeline.replicas, async_op=True) for each in gradients]:
            work.wait()


def _gradient_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:  # of experts that no token of this process has passed, for example
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _next_tokens_of(micro_batch: Any) -> torch.Tensor:
    found: torch.Tensor = micro_batch[0] if isinstance(micro_batch, tuple) else micro_batch.next_tokens
    return found


def _of_one_length(micro_batches: list[Any]) -> list[Any]:
    """With a document that is not trained at the end of the shorter ones: hidden states that are handed on must be of
    one shape."""
    most = max(_next_tokens_of(each).shape[1] for each in micro_batches)
    return [_filled_up(each, most - _next_tokens_of(each).shape[1]) for each in micro_batches]


def _filled_up(micro_batch: Any, missing: int) -> Any:
    if not missing:
        return micro_batch
    is_pair = isinstance(micro_batch, tuple)
    next_tokens, inputs = micro_batch if is_pair else (micro_batch.next_tokens, micro_batch.inputs)

    def fill(row_BT: torch.Tensor, *, filler: int = 0) -> torch.Tensor:
        return F.pad(row_BT, (0, missing), value=filler)

    inputs = inputs | {"input_ids": fill(inputs["input_ids"])}
    if "cu_seq_lens_q" in inputs:
        bounds = torch.cat([inputs["cu_seq_lens_q"], inputs["cu_seq_lens_q"][-1:] + missing])
        more, longest = torch.arange(missing, device=bounds.device), max(inputs["max_length_q"], missing)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        inputs["position_ids"] = torch.cat([inputs["position_ids"], more[None]], 1)
    next_tokens = fill(next_tokens, filler=IGNORED)
    return (next_tokens, inputs) if is_pair else micro_batch.shared(fill, next_tokens, inputs, counts=True)
