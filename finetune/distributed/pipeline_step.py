"""The micro-batches of an optimizer step on their way through a pipeline, several of them at a time."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from finetune.data.batches import IGNORED
from finetune.distributed.pipeline import PassedOn, Pipeline
from finetune.errors import InputError

LossSum = Callable[[torch.nn.Module, Any], torch.Tensor]


def backward(
    pipeline: Pipeline,
    model: Any,
    loss_sum: LossSum,
    micro_batches: Iterable[Any],
    scale: Callable[[torch.Tensor], torch.Tensor],
) -> list[torch.Tensor]:
    """Forward and backward passes of all micro-batches, in the order of ``models.pipeline_order``. Collective.

    Args:
        scale: a loss to what gradients are of. They are added up over micro-batches.

    Returns:
        The losses, in the last stage; zeros in the others.
    """
    given = _of_one_length(list(micro_batches))
    computed = pipeline.order.computed(len(given))
    every = given + given[-1:] * (computed - len(given))
    losses = [torch.zeros((), device=pipeline.device) for _ in every]
    places = torch.arange(computed)

    def learnt(loss: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return scale(loss.sum()) * float(place < len(given))

    parts = [_Runner(pipeline, model, loss_sum, every, losses, part) for part in pipeline.parts]
    schedule = _schedule_of(pipeline, [each.stage() for each in parts], computed, learnt)
    target = places if pipeline.is_last else None
    try:
        with pipeline.with_copies(), pipeline.deferred.collected() if pipeline.deferred else nullcontext():
            schedule.step(*[places] * pipeline.is_first, target=target, place=places, return_outputs=False)
    except RuntimeError as error:  # a schedule wraps whatever is raised in a stage
        raise _cause_of(error) from error
    return losses[: len(given)]


def _schedule_of(pipeline: Pipeline, parts: list[Any], micro_batches: int, loss: Any) -> Any:
    how = {"loss_fn": loss, "scale_grads": False}
    if pipeline.order.zero_bubble:
        return ScheduleInterleavedZeroBubble(parts, micro_batches, **how)
    if len(parts) > 1:
        return ScheduleInterleaved1F1B(parts, micro_batches, **how)
    kind = Schedule1F1B if micro_batches >= pipeline.stages else ScheduleGPipe  # the same order, of so few
    return kind(parts[0], micro_batches, **how)


def shortest_alike(
    pipeline: Pipeline, model: Any, micro_batch: Any, micro_batches: int
) -> tuple[list[Any], torch.Tensor]:
    """The shortest step that takes the memory of one of so many micro-batches like this one, and what takes the rest.

    As many are computed as are on their way at a time. For the others there are buffers, of hidden states and of their
    gradients, which a schedule makes for all micro-batches before the first.
    """
    at_once = pipeline.order.shortest_alike(micro_batches)
    shape = *_next_tokens_of(micro_batch).shape, model.config.get_text_config().hidden_size
    count = 2 * len(pipeline.parts) * (pipeline.order.computed(micro_batches) - at_once)
    return [micro_batch] * at_once, torch.empty(count, *shape, dtype=pipeline.dtype, device=pipeline.device)


def _cause_of(error: BaseException) -> BaseException:
    """What was raised in a stage, where it is ours to tell or says that memory has run out; else the error itself."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, InputError | torch.OutOfMemoryError):
        found = found.__cause__
    return found or error


class _Runner(torch.nn.Module):
    """What a schedule calls with each micro-batch: the forward pass of a part of the layers."""

    def __init__(
        self,
        pipeline: Pipeline,
        model: Any,
        loss_sum: LossSum,
        every: list[Any],
        losses: list[torch.Tensor],
        part: int,
    ) -> None:
        super().__init__()
        self.model, self.part, self._asked = model, part, (pipeline, loss_sum, every, losses)

    def stage(self) -> PipelineStage:
        """The part as PyTorch knows it: a stage, of which a process may have several."""
        pipeline, _, every, _ = self._asked
        parts = pipeline.stages * len(pipeline.parts)
        shape = *_next_tokens_of(every[0]).shape, self.model.config.get_text_config().hidden_size
        hidden = torch.empty(shape, dtype=pipeline.dtype, device="meta", requires_grad=True)
        return PipelineStage(
            *(self, self.part, parts, pipeline.device),
            input_args=torch.arange(1) if self.part == 0 else hidden,
            output_args=torch.empty(1, requires_grad=True) if self.part == parts - 1 else hidden,
            group=pipeline.line,
            dw_builder=pipeline.deferred.take if pipeline.deferred else None,
        )

    def forward(self, given: torch.Tensor, *, place: torch.Tensor) -> torch.Tensor:
        """The loss, of shape (1,), in the last part; what the next one takes in the others."""
        (pipeline, loss_sum, every, losses), number = self._asked, int(place)
        try:
            with pipeline.running_part(self.part, given):
                loss = loss_sum(self.model, every[number])
        except PassedOn as passed:
            # of a part in which nothing is trained a graph is asked for all the same
            return passed.hidden_BTD if passed.hidden_BTD.requires_grad else passed.hidden_BTD.requires_grad_()
        losses[number] = loss.detach()
        return loss.view(1)


def _next_tokens_of(micro_batch: Any) -> torch.Tensor:
    found: torch.Tensor = micro_batch[0] if isinstance(micro_batch, tuple) else micro_batch.next_tokens
    return found


def _of_one_length(micro_batches: list[Any]) -> list[Any]:
    """With documents that are not trained at the end of the shorter ones: hidden states that are handed on must be of
    one shape. They are no longer than the longest that is there, which attention is told of."""
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
        bounds, longest = inputs["cu_seq_lens_q"], inputs["max_length_q"]
        positions = torch.arange(missing, device=bounds.device) % longest
        inputs["position_ids"] = torch.cat([inputs["position_ids"], positions[None]], 1)
        starts = range(longest, missing, longest)
        ends = torch.tensor([*starts, missing], dtype=bounds.dtype, device=bounds.device)
        inputs["cu_seq_lens_q"] = inputs["cu_seq_lens_k"] = torch.cat([bounds, bounds[-1:] + ends])
    next_tokens = fill(next_tokens, filler=IGNORED)
    return (next_tokens, inputs) if is_pair else micro_batch.shared(fill, next_tokens, inputs, counts=True)
