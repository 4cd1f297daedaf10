"""What the stages of a pipeline have and hand on, as tests see it in their processes."""

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import scenarios
import torch
from alike import assert_trains_alike
from transformers import LlamaModel

from finetune import distributed
from finetune.distributed import pipeline_step
from finetune.models import deferred_gradients
from finetune.optim.rounding import local_shard


def held_in(config: Any, stages: int) -> dict[str, Any]:
    """Run a recipe; returns which parameters this process has, which are trained, and how many bytes all take."""
    from recipes import sft

    found: dict[str, Any] = {}
    prepare = distributed.prepare

    def watched(accelerator: Any, launch: Any, *args: Any, **kwargs: Any) -> Any:
        model, optimizer = prepare(accelerator, launch, *args, **kwargs)
        everything = dict(model.named_parameters(remove_duplicate=False))
        stepped = {id(each) for group in optimizer.param_groups for each in group["params"]}
        found.update(
            stage=launch.stage,
            held=sorted(name for name, each in everything.items() if each.device.type != "meta"),
            stepped=sorted(name for name, each in everything.items() if id(each) in stepped),
            bytes=distributed.sharding_of(launch, model, optimizer).record(),
        )
        return model, optimizer

    stages_asked = mock.patch.dict("os.environ", {"MEGATRON_LM_PP_DEGREE": str(stages)})
    with stages_asked, mock.patch.object(distributed, "prepare", watched):
        sft.main(config)
    return found


def train(config: Any, stages: int) -> int:
    """Run the recipe; returns the processes that the run had."""
    with mock.patch.dict("os.environ", {"MEGATRON_LM_PP_DEGREE": str(stages)}):
        return int(scenarios.train(config)["world_size"])


IN_ONE = {"train__pipeline_parts": 1, "train__pipeline_schedule": "1f1b"}
SFT: dict[str, Any] = {"train__steps": 4, "train__micro_batch_size": 2, "eval__every": 2, "eval__prompts": 3}


class Tuned:
    """Trains a model in a pipeline, or with one stage on one process; returns the metrics of the run."""

    def __init__(
        self, ranks: Any, model: Path, train: Path, held_out: Path, folder: Path, strategy: str = "pp"
    ) -> None:
        self.ranks, self.folder, self.strategy = ranks, folder, strategy
        self._model, self._train, self._settings = model, train, SFT | {"data__eval": [str(held_out)]}

    def __call__(
        self, name: str, processes: int, stages: int, precision: str = "no", **changes: Any
    ) -> list[dict[str, Any]]:
        changes = self._settings | changes | (IN_ONE if stages == 1 else {})
        config = scenarios.configuration(self._model, self._train, self.folder / name, **changes)
        if stages == 1:
            self.ranks(1).run(scenarios.train, config, strategy="single", mixed_precision=precision)
        else:
            asked = train, config, stages
            found = self.ranks(processes).run(*asked, strategy=self.strategy, mixed_precision=precision)
            assert found == [processes] * processes
        return scenarios.read_metrics(self.folder / name)

    def assert_alike(self, processes: int, stages: int, **changes: Any) -> None:
        """That losses, held-out losses and answers are those of one process."""
        assert_trains_alike(self, processes, stages, changes)


def train_a_model_that_adds_embeddings_at_the_end(config: Any) -> str:
    """Run the recipe with a model that a pipeline cannot compute; returns what the run says."""
    forward = LlamaModel.forward

    def added(self: Any, input_ids: Any = None, **inputs: Any) -> Any:
        found = forward(self, input_ids, **inputs)
        found.last_hidden_state = found.last_hidden_state + self.embed_tokens(input_ids)
        return found

    with mock.patch.object(LlamaModel, "forward", added):
        try:
            scenarios.train(config)
        except Exception as error:  # of any type, for its words
            return str(error)
    return ""


def lengths_computed(config: Any) -> list[list[int]]:
    """Run the recipe; returns the positions of the micro-batches of each step, as the model gets them."""
    found: list[list[int]] = []
    backward = pipeline_step.backward

    def watched(pipeline: Any, model: Any, loss_sum: Any, *args: Any) -> Any:
        found.append([])

        def seen(model: Any, micro_batch: Any) -> torch.Tensor:
            found[-1].append(micro_batch[0].shape[1])
            return loss_sum(model, micro_batch)  # type: ignore[no-any-return]

        return backward(pipeline, model, seen, *args)

    with mock.patch.object(pipeline_step, "backward", watched):
        scenarios.train(config)
    return found


def passes_of(config: Any) -> list[tuple[int, int]]:
    """Run the recipe; returns the part and the micro-batch of each forward pass of the last step."""
    found: list[tuple[int, int]] = []
    forward, backward = pipeline_step._Runner.forward, pipeline_step.backward

    def seen(self: Any, given: Any, *, place: torch.Tensor) -> torch.Tensor:
        found.append((self.part, int(place)))
        return forward(self, given, place=place)

    def anew(*args: Any) -> Any:
        found.clear()
        return backward(*args)

    watched = mock.patch.object(pipeline_step, "backward", anew)
    with watched, mock.patch.object(pipeline_step._Runner, "forward", seen):
        scenarios.train(config)
    return found


def actions_of(config: Any) -> str:
    """Run the recipe; returns what this process did in the last step: F for each forward pass of a part, I for each
    backward pass, with how many gradients of weights it has deferred, and W for when those are computed."""
    found: list[str] = []
    forward, backward = pipeline_step._Runner.forward, pipeline_step.backward
    take = deferred_gradients.DeferredGradients.take

    def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
        found.append("F")
        return forward(*args, **kwargs)

    def taken(self: Any) -> Any:
        later: Any = take(self)
        (products,) = later.args
        found.append(f"I{len(products)}")

        def compute() -> None:
            found.append("W")
            later()

        return compute

    def anew(*args: Any) -> Any:
        found.clear()
        return backward(*args)

    with (
        mock.patch.object(pipeline_step, "backward", anew),
        mock.patch.object(pipeline_step._Runner, "forward", seen),
        mock.patch.object(deferred_gradients.DeferredGradients, "take", taken),
    ):
        scenarios.train(config)
    return " ".join(found)


def embedding_of(config: Any) -> str:
    """Run the recipe; returns what this process has of the embedding at the end, as a digest."""
    from recipes import sft

    prepare, prepared = distributed.prepare, list[Any]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        model, optimizer = prepare(*args, **kwargs)
        prepared.append(model)
        return model, optimizer

    with mock.patch.object(distributed, "prepare", watched):
        sft.main(config)
    held = local_shard(prepared[0].get_input_embeddings().weight.detach())
    return hashlib.sha256(held.float().numpy().tobytes()).hexdigest()
