"""What processes that split the layers of a model have and train, as tests see it in them."""

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import scenarios
import sharing
import tiny
import torch
import torch.distributed as dist
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from finetune import distributed
from finetune.config import sections
from finetune.data.batches import IGNORED, document_bounds
from finetune.distributed import Strategy, setup, shared
from finetune.distributed.tensor_parallel import TensorParallel
from finetune.models import adapter, attention, fused, lora_forward, tensor_layers, tensor_plan
from finetune.models.packing_support import why_not_spread
from finetune.models.tensor_plan import Share, Split
from finetune.optim.rounding import local_shard
from finetune.training.loss import next_token_loss_sum, take_losses


def train(config: Any, size: int) -> int:
    """Run the recipe with layers that are split over so many processes; returns the processes that the run had."""
    with mock.patch.dict("os.environ", {"MEGATRON_LM_TP_DEGREE": str(size)}):
        return int(scenarios.train(config)["world_size"])


SFT: dict[str, Any] = {"train__steps": 4, "train__micro_batch_size": 2, "eval__every": 2, "eval__prompts": 3}
MODELS: dict[str, dict[str, Any]] = {
    "wide": {"head_dim": 64, "intermediate_size": 512},
    "untied": {"tie_word_embeddings": False},
    "wide_few": {"head_dim": 64, "intermediate_size": 512, "num_key_value_heads": 2},
    "few_keys": {"num_key_value_heads": 2},
    "biased": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": True},
    "experts": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 8},
}


class Tuned:
    """Trains one of ``MODELS`` with split layers, or on one process; returns the metrics of the run."""

    def __init__(self, ranks: Any, train: Path, held_out: Path, folder: Path) -> None:
        self.ranks, self.folder, self._train, self._held_out = ranks, folder, train, held_out
        self._models = dict[str, Path]()

    def _model(self, name: str) -> Path:
        if name not in self._models:
            folder = tiny.build_model_folder(self.folder / f"model {name}")
            described = json.loads((folder / "config.json").read_text()) | MODELS[name]
            (folder / "config.json").write_text(json.dumps(described))
            self._models[name] = folder
        return self._models[name]

    def __call__(
        self, name: str, processes: int, size: int, precision: str = "no", strategy: str = "tp", **changes: Any
    ) -> list[dict[str, Any]]:
        """Args: ``size``, the processes of each layer."""
        settings = SFT | {"data__eval": [str(self._held_out)]} | changes
        model = self._model(settings.pop("model__path", "untied"))
        config = scenarios.configuration(model, self._train, self.folder / name, **settings)
        known = {"strategy": strategy if processes > 1 else "single", "mixed_precision": precision}
        assert self.ranks(processes).run(train, config, size, **known) == [processes] * processes
        return scenarios.read_metrics(self.folder / name)


def errors_of(name: str, changes: dict[str, Any], adapted: bool, mutation: str = "") -> tuple[int, float, float]:
    """The processes of the group, and how far loss and gradients are from those of a whole model, in float64, as far
    as the model computes in it: norms do not, and neither do experts.

    Args:
        name: of a model's type.
        mutation: what is left out: ``copied`` (the sum of an input's gradient), ``partial`` (that of a weight's).
    """
    _join()
    config = AutoConfig.for_model(name, **SIZES | changes)
    torch.manual_seed(0)
    dtype = torch.float32 if "num_local_experts" in changes else torch.float64
    whole = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for each in whole.parameters():  # biases and norms as well
            each.add_(torch.randn_like(each) * 0.1)
    if adapted:
        section = sections.Adapter(type="lora", rank=4, targets="all-linear")
        adapter.attach(whole, section, base=name, revision=None, dtype=dtype, seed=0)
        with torch.no_grad():
            for each in whole.parameters():
                each.add_(torch.randn_like(each) * 0.1 if each.requires_grad else 0.0)
    loss, wrong = _compared(whole, mutation)
    return dist.get_world_size(), loss, wrong


def errors_of_models(
    kinds: list[type] | None = None, context: int = 1, mutation: str = ""
) -> tuple[int, dict[str, float]]:
    """The processes of the group, and the larger error of ``errors_of`` of each kind of model that they may split, in
    fp32.

    Args:
        kinds: of configurations; None for all that transformers knows.
        context: processes that share rows; the others split layers.
        mutation: as for ``errors_of``, or as for ``sharing.errors_of_models``.
    """
    from test_attention import small_model

    _join()
    attention.register()
    found = dict[str, float]()
    for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING:
        model = small_model(kind)
        if model is None or any(tensor_plan.why_not(model, dist.get_world_size() // context, bits=None)):
            continue
        if context > 1 and why_not_spread(model.config, dtype=torch.float32, capability=None):
            continue
        with torch.no_grad():
            for each in model.parameters():
                each.add_(torch.randn_like(each) * 0.1)
        try:
            found[kind.__name__] = max(_compared(model, mutation, context))
        except Exception as error:
            raise AssertionError(kind.__name__) from error
    return dist.get_world_size(), found


def gradients_beside_the_loss() -> tuple[int, bool, list[float] | None]:
    """The processes of the group; whether a trained weight that none of them uses has a gradient; and that of a weight
    which the first one alone uses."""
    _join()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    model.unused, model.used_once = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    take_losses(model)
    strategy = Strategy("tp", dist.get_rank(), dist.get_world_size(), 1, "no", True, tensor=dist.get_world_size())
    tensor = TensorParallel(model, strategy, torch.device("cpu"))

    def loss_sum(model: Any, micro_batch: Any) -> torch.Tensor:
        found = next_token_loss_sum(model, micro_batch)
        return found + 2 * model.used_once.sum() if dist.get_rank() == 0 else found

    rows = torch.arange(12)[None]
    tensor.backward(model, loss_sum, [(rows.roll(-1, 1), {"input_ids": rows})], lambda loss: loss)
    once = model.used_once.grad
    return dist.get_world_size(), model.unused.grad is not None, None if once is None else once.tolist()


def _compared(whole: Any, mutation: str, context: int = 1) -> tuple[float, float]:
    if context > 1:
        whole.set_attn_implementation("packed")
    part, vocabulary = copy.deepcopy(whole), whole.config.get_text_config().vocab_size
    for model in (whole, part):
        fused.fuse(model)
        lora_forward.write_once(model)
        take_losses(model)
    name, size, cpu = "tp" if context == 1 else "cp_tp", dist.get_world_size(), torch.device("cpu")
    strategy = Strategy(name, dist.get_rank(), size, 1, "no", True, context, tensor=size // context)
    with _mutated(mutation), sharing.mutated(mutation):
        tensor = TensorParallel(part, strategy, cpu)
        tensor.settle(part, dict(part.named_parameters()))
        rows = torch.randint(0, vocabulary, (1, 24), generator=torch.Generator().manual_seed(1))
        inputs = {"input_ids": rows, **(document_bounds([13, 9, 2], cpu) if context > 1 else {})}
        micro_batch = (rows.roll(-1, 1).masked_fill(rows % 3 == 0, IGNORED), inputs)
        expected = next_token_loss_sum(whole, micro_batch)
        expected.backward()
        own_batch = shared(lambda places, device: micro_batch, strategy)(None, cpu)
        (found, *_) = tensor.backward(part, next_token_loss_sum, [own_batch], lambda loss: loss)
    summed = [found, *(each.grad for each in part.parameters() if each.grad is not None)] if context > 1 else []
    for each in summed:  # as the sharding of parts does
        dist.all_reduce(each, group=tensor.groups.replicas.group)
    own = {n: p.grad.view(-1) for n, p in part.named_parameters() if p.grad is not None}
    gradients = {n: tensor.held[n].joined(g, g.numel() // tensor.held[n].stretch) for n, g in own.items()}
    wrong = max(
        float((gradients[n] - p.grad.view(-1)).abs().max() / p.grad.abs().max().clamp(min=1e-6))
        for n, p in whole.named_parameters()
        if p.grad is not None
    )
    assert set(gradients) == {n for n, p in whole.named_parameters() if p.grad is not None}
    loss = float(found - expected.detach()) if tensor.counts else 0.0
    return abs(loss), wrong


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "tie_word_embeddings": True,
}


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


@contextmanager
def _mutated(mutation: str) -> Iterator[None]:
    if mutation == "copied":
        own_only = staticmethod(lambda ctx, of_x: (of_x, None))
        with mock.patch.object(tensor_layers._Copied, "backward", own_only):
            yield
    elif mutation == "partial":
        shares_of = tensor_plan.shares_of

        def equal(model: Any, size: int) -> dict[str, Share]:
            return {name: each._replace(is_partial=False) for name, each in shares_of(model, size).items()}

        with mock.patch.object(tensor_plan, "shares_of", equal):
            yield
    else:
        yield


def held_in(config: Any, size: int) -> dict[str, Any]:
    """Run the recipe; returns shapes of its parameters, bytes of all, and a digest of those that are whole."""
    from recipes import sft

    found: dict[str, Any] = {}
    prepare, kept = distributed.prepare, list[Any]()

    def watched(accelerator: Any, launch: Any, *args: Any, **kwargs: Any) -> Any:
        model, optimizer = prepare(accelerator, launch, *args, **kwargs)
        sharding = distributed.sharding_of(launch, model, optimizer)
        shapes = {name: tuple(local_shard(each).shape) for name, each in model.named_parameters()}
        found.update(world_size=launch.world_size, shapes=shapes, bytes=sharding.record())
        kept.append(model)
        return model, optimizer

    asked = mock.patch.dict("os.environ", {"MEGATRON_LM_TP_DEGREE": str(size)})
    with asked, mock.patch.object(distributed, "prepare", watched):
        sft.main(config)
    whole = [local_shard(each) for name, each in kept[0].named_parameters() if "norm" in name]
    digest = hashlib.sha256()
    for each in whole:
        digest.update(each.detach().float().numpy().tobytes())
    return found | {"whole": digest.hexdigest()}


def held_too_much(config: Any) -> str:
    """Run the recipe with a layer that is not split though the plan says so; returns what the run says."""
    take = Split.take
    with mock.patch.object(Split, "take", lambda self, whole, part: whole if self.dim else take(self, whole, part)):
        try:
            scenarios.train(config)
        except Exception as error:  # of any type, for its words
            return str(error)
    return ""


def not_sharded(config: Any) -> str:
    """Run the recipe with parts that nobody shards; returns what the run says."""
    with mock.patch.object(setup, "shard_part", lambda model, optimizer, holders, settle, **_: settle(_named(model))):
        try:
            scenarios.train(config)
        except Exception as error:  # of any type, for its words
            return str(error)
    return ""


def _named(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters())
