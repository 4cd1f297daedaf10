"""Bugs that frameworks have shipped, put into the recipe on purpose, one at a time."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import scenarios
import torch

from finetune import distributed
from finetune.data import batches
from finetune.run import session
from finetune.training import loss, step


def train_with(bug: str, config: Any) -> dict[str, Any]:
    """Run the recipe with a bug on this rank."""
    with BUGS[bug](config):
        return scenarios.train(config)


@contextlib.contextmanager
def mean_of_means(config: Any) -> Iterator[None]:
    """Average each micro-batch over its own tokens, then average the averages."""

    world_size = distributed.Strategy.from_environment().world_size
    batch, micro_batch = config.train.global_batch_size, config.train.micro_batch_size

    def mean(logits: torch.Tensor, next_tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), next_tokens.flatten())

    # the step divides by its number of tokens; an average of averages divides by the number of micro-batches
    original = batches.Batches.step

    def share(work: Any, step: int) -> Any:
        found = original(work, step)
        return dataclasses.replace(found, trained_tokens=sum(place != -1 for place in found.places) / micro_batch)

    assert batch % (micro_batch * world_size) == 0
    with mock.patch.object(loss, "token_loss_sum", mean), mock.patch.object(batches.Batches, "step", share):
        yield


@contextlib.contextmanager
def through_a_data_loader(config: Any, sync_with_dataloader: bool) -> Iterator[None]:
    """Draw micro-batches through Accelerate's data loader, which ends in the middle of every accumulation, and step
    whenever Accelerate says so. The recipe steps once a step, whatever it says."""
    import accelerate.data_loader
    import accelerate.utils

    from recipes import sft

    original = session.micro_batches

    def ending_early(*args: Any, **kwargs: Any) -> Iterator[list[int]]:
        share = original(*args, **kwargs)
        for part in (share[: len(share) // 2], share[len(share) // 2 :]):
            yield from accelerate.data_loader.DataLoaderShard(part, batch_size=None, collate_fn=lambda rows: rows)

    def plugin(num_steps: int, **kwargs: Any) -> Any:
        return accelerate.utils.GradientAccumulationPlugin(
            num_steps=num_steps, sync_with_dataloader=sync_with_dataloader
        )

    norms: list[float] = []

    def backward(accelerator: Any, model: Any, loss_sum: Any, micro_batches: Any, **kwargs: Any) -> list[torch.Tensor]:
        losses = []
        for micro_batch in micro_batches:
            losses += step.backward(accelerator, model, loss_sum, [micro_batch], **kwargs)
            if accelerator.sync_gradients:
                (optimizer,) = accelerator._optimizers
                norms.append(step.step_if_finite(accelerator, model, optimizer, config.train.max_grad_norm))
        return losses

    with (
        mock.patch.object(sft, "backward", backward),
        mock.patch.object(sft, "step_if_finite", mock.Mock(side_effect=lambda *args: norms[-1])),
        mock.patch.object(session, "micro_batches", ending_early),
        mock.patch.object(distributed.setup, "GradientAccumulationPlugin", plugin),
    ):
        yield


@contextlib.contextmanager
def scheduler_stepped_by_every_process(config: Any) -> Iterator[None]:
    from recipes import sft

    original, world_size = sft.learning_rate, distributed.Strategy.from_environment().world_size

    def too_fast(step: int, total_steps: int, train: Any) -> float:
        return original(min(1 + (step - 1) * world_size, total_steps), total_steps, train)

    with mock.patch.object(sft, "learning_rate", too_fast):
        yield


@contextlib.contextmanager
def clipping_left_to_deepspeed(config: Any) -> Iterator[None]:

    original = distributed.setup._configure_deepspeed

    def forgetful(accelerator: Any, *args: Any) -> None:
        original(accelerator, *args)
        accelerator.state.deepspeed_plugin.deepspeed_config["gradient_clipping"] = "auto"  # as Accelerate has it

    with mock.patch.object(distributed.setup, "_configure_deepspeed", forgetful):
        yield


BUGS: dict[str, Any] = {
    "none": lambda config: contextlib.nullcontext(),
    "mean of means": mean_of_means,
    "Accelerate's default sync_with_dataloader": lambda config: through_a_data_loader(config, True),
    "control: the same data loader, our setting": lambda config: through_a_data_loader(config, False),
    "a scheduler stepped once per process": scheduler_stepped_by_every_process,
    "ZeRO's silent clipping": clipping_left_to_deepspeed,
}
