"""Pipeline parallelism: each process has some layers, and passes on hidden states, and their gradients back.

The processes of a stage follow one another: of four processes in two stages, ranks 0 and 1 have the first. They are
replicas, and compute different rows; or they have parts of its layers, and compute the same. So gradients are added up
within a machine, and hidden states, which are far fewer bytes, go between machines. They are whole, and go to the
process with the same place in the next stage.

A stage is the whole model's object, in which modules of other stages pass on what they get: names, configuration and
the model's own forward stay as they are. Every stage calls the loss; in all but the last the model ends it, with what
the next stage takes. The loss must call the model once.

A stage may have several parts of the layers: of 2 stages with 2 parts each, the first has the parts 0 and 2, the second
1 and 3. In training a forward pass is one of a part, in which the other parts of the stage pass on too; elsewhere all
parts compute in one pass, which hands hidden states to the other stages and takes them back between its parts.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutputWithPast

from finetune.distributed.part_groups import Groups
from finetune.distributed.strategy import Strategy
from finetune.errors import InputError
from finetune.models.deferred_gradients import DeferredGradients
from finetune.models.pipeline_order import Order
from finetune.models.pipeline_stages import stages_of
from finetune.models.recomputation import layers_of
from finetune.optim.rounding import local_shard

OF_HEAD = ("loss_of_scores", "logits_to_keep")
"""Arguments of a model's forward that its decoder does not take."""
Call = Callable[..., Any]


class PassedOn(BaseException):
    """Ends a loss, with the hidden states that the next stage takes. No ``except Exception`` of a loss stops it."""

    def __init__(self, hidden_BTD: torch.Tensor) -> None:
        self.hidden_BTD = hidden_BTD


class Pipeline:
    """This process's stage of a model, which from here on has the weights of this stage alone. Collective.

    Args:
        model: whole, with its adapter, not prepared yet.
        groups: of this process.
        dtype: in which the model computes.
        order: of its stages, in which micro-batches pass them.
        deferred: gradients of weights that a schedule computes later.
    """

    def __init__(
        self,
        model: Any,
        strategy: Strategy,
        groups: Groups,
        device: torch.device,
        dtype: torch.dtype,
        order: Order,
        deferred: DeferredGradients | None,
    ) -> None:
        self.stage, self.stages, self.device, self.dtype = strategy.stage, strategy.stages, device, dtype
        self.order, self.deferred = order, deferred
        self.parts = range(strategy.stage, strategy.stages * order.parts, strategy.stages)
        """Of the layers, by their numbers in the model."""
        self.is_first, self.is_last = self.stage == 0, self.stage == self.stages - 1
        (self.line_ranks, self.line), self.ends = groups.line, groups.ends.group
        """The processes of all stages between which hidden states go, in the order of these; the first and the last."""
        self.with_copies: Callable[[], AbstractContextManager[None]] = nullcontext
        """Within it several passes share their copies of weights in 16 bits, where there are some."""
        self.running: int | None = None
        """The part that a forward pass of a schedule computes, which hands on what it makes; None: all of the stage."""
        self.received: torch.Tensor | None = None
        """What that part takes in the place of embeddings."""
        self._answers = False
        """Whether a forward pass is one for answers."""
        self._shape: tuple[int, ...] = ()
        """Of the hidden states of a forward pass."""
        every = {name: each.requires_grad for name, each in model.named_parameters()}
        self._leave_own(model)
        own = {name for name, each in model.named_parameters() if each.device.type != "meta"}
        held: list[Any] = [None] * self.stages
        dist.all_gather_object(held, own, group=self.line)
        self.owners = {name: min(stage for stage, names in enumerate(held) if name in names) for name in every}
        """The stage that counts each parameter: the first that has it."""
        self.shared = [name for name in every if every[name] and name in held[0] and name in held[-1]]
        """Embeddings that are the head's weights too."""
        self.shells = {name: each for name, each in model.named_parameters() if every.get(name) and name not in own}
        """Of trained parameters of other stages. A head without its embedding has lost its tie, and is none."""

    def _leave_own(self, model: Any) -> None:
        """Make the modules of other stages pass on what they get, and free their weights."""
        every = stages_of(model, self.stages * len(self.parts))
        self.modules = [module for number in self.parts for module in every[number]]
        """Those of this stage that have weights."""
        places = {layer: place for place, layer in enumerate(layers_of(model))}
        self.layers = len(places.keys() & {*self.modules})
        self.caches = all(hasattr(layer, "self_attn") for layer in places)
        """Whether answers may keep the keys and values of earlier positions: other layers keep other things."""
        own = {part for module in self.modules for part in module.modules()}
        kept = self.own_parameters()
        embedding = model.get_input_embeddings()
        nothing = partial(_nothing, model.config.get_text_config(), self.dtype)
        for number, modules in enumerate(every):
            for module in modules:
                if number in self.parts:
                    other = nothing if module is embedding else _same
                    module.forward = partial(self._in_turn, number, module.forward, other)
                    continue
                # what enters a part comes out of the last layer before it, whatever was done to the embeddings
                enters = number + 1 if module is modules[-1] and number + 1 in self.parts else None
                leaves = module is modules[0] and number - 1 in self.parts
                module.forward = partial(self._pass_on, enters=enters, leaves=leaves, place=places.get(module))
                for part in (each for each in module.modules() if each not in own):
                    _free(part, kept)
        if not self.is_first:
            embedding.forward = nothing
        whole, base, last = model.forward, model.base_model, layers_of(model)[-1]

        def forward(**inputs: Any) -> Any:
            self._shape = *inputs["input_ids"].shape, model.config.get_text_config().hidden_size
            if self._has_scores:
                return self._last_scores(model, whole(**inputs)) if self._answers else whole(**inputs)
            left = list[torch.Tensor]()  # the layers: what has no weights runs after them in every stage
            hook = last.register_forward_hook(lambda _, __, found: left.append(found))
            try:
                base(**{key: value for key, value in inputs.items() if key not in OF_HEAD})
            finally:
                hook.remove()
            (hidden,) = left
            return self._last_scores(model, None, rows=len(hidden)) if self._answers else self._checked(hidden)

        forward.__signature__ = inspect.signature(whole)  # type: ignore[attr-defined]  # generate looks for names in it
        model.forward = forward

    @property
    def _has_scores(self) -> bool:
        """Whether a forward pass comes to the end of the whole model."""
        return self.is_last if self.running is None else self.running == self.parts[-1] and self.is_last

    def _end_loss(self, model: torch.nn.Module, _: Any, found: Any) -> None:
        if not (self._answers or self._has_scores):
            raise PassedOn(found)

    def _checked(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states, which are what the next stage waits for."""
        if (*hidden.shape, hidden.dtype) != (*self._shape, self.dtype):
            raise InputError(
                f"The model hands on {tuple(hidden.shape)} of {hidden.dtype} from layer to layer, where a pipeline "
                f"takes {self._shape} of {self.dtype}; use the strategy file fsdp2."
            )
        return hidden.contiguous()

    def _last_scores(self, model: Any, found: Any, *, rows: int = 0) -> CausalLMOutputWithPast:
        """Scores after the last position of each row, of shape (rows, 1, vocabulary), in every stage."""
        if found is not None:
            scores = found.logits[:, -1:].float().contiguous()
        else:
            shape = rows, 1, model.config.get_text_config().vocab_size
            scores = torch.empty(shape, dtype=torch.float32, device=self.device)
        dist.broadcast(scores, self.line_ranks[-1], group=self.line)
        return CausalLMOutputWithPast(logits=scores)

    @contextmanager
    def running_part(self, number: int, received: torch.Tensor) -> Iterator[None]:
        """Within it a forward pass is one of a part alone, in a schedule.

        Args:
            received: what the part takes, of the one before; not read by the first.
        """
        self.running, self.received = number, received if number else None
        try:
            yield
        finally:
            self.running = self.received = None

    def _in_turn(self, number: int, own: Call, other: Call, *args: Any, **kwargs: Any) -> Any:
        """The forward of a module of this stage, which another takes the place of while another part computes. (Layers
        that are computed again are so between the forward passes of parts.)"""
        return (own if self.running in (None, number) else other)(*args, **kwargs)

    def _pass_on(
        self,
        hidden_BTD: torch.Tensor,
        *_: Any,
        enters: int | None,
        leaves: bool,
        place: int | None,
        past_key_values: Any = None,
        **__: Any,
    ) -> torch.Tensor:
        """The forward of a module of another stage; for the last one before a part of this stage, what enters it.

        Args:
            enters: the number of that part.
            leaves: whether it is the first one after a part of this stage.
        """
        if past_key_values is not None and place is not None:  # which asks its layers how many positions there are
            filler = hidden_BTD.new_zeros(len(hidden_BTD), 1, hidden_BTD.shape[1], 1)
            past_key_values.update(filler, filler, place)
        if self.running is None:
            if leaves:
                dist.send(self._checked(hidden_BTD), self._neighbour(1), group=self.line)
            if enters is not None:
                hidden_BTD = torch.empty(self._shape, dtype=self.dtype, device=self.device)
                dist.recv(hidden_BTD, self._neighbour(-1), group=self.line)
            return hidden_BTD
        if enters != self.running:
            return hidden_BTD
        received, self.received = self.received, None
        if received is None:
            raise InputError(
                "The loss calls the model more than once, which no pipeline computes here; use the strategy file fsdp2."
            )
        return received

    def _neighbour(self, steps: int) -> int:
        """The process with the next part of the layers, or with the one before."""
        return self.line_ranks[(self.stage + steps) % self.stages]

    def leave_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave to an optimizer of the whole model what this stage steps."""
        own = self.own_parameters()
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each in own]

    def begin(self, model: torch.nn.Module) -> None:
        """Have the model's forward passes end losses, from here on. A strategy has done by then what it does around
        them: it comes before, at their end."""
        model.register_forward_hook(self._end_loss)

    def step_as_one(self, model: torch.nn.Module) -> None:
        """Give the last stage the first one's embeddings, where they are the head's weights too and each rounds them
        with noise of its own. Collective."""
        known = dict(model.named_parameters()) if self.is_first or self.is_last else {}
        for name in self.shared:
            if name in known and known[name].dtype == torch.bfloat16:
                dist.broadcast(local_shard(known[name].detach()), self.line_ranks[0], group=self.ends)

    def own_parameters(self) -> set[torch.nn.Parameter]:
        """Of the modules of this stage."""
        return {each for module in self.modules for each in module.parameters()}

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Within it a forward pass returns the scores of the next tokens in every stage."""
        self._answers = True
        try:
            yield
        finally:
            self._answers = False

    def owns(self, name: str) -> bool:
        """Whether a parameter counts as one of this stage: embeddings that are the head's too, of the first."""
        return self.owners[name] == self.stage

    def broadcast(self, value: torch.Tensor, name: str) -> None:
        """Give all stages the whole value of a parameter, of the stage that counts it. Collective."""
        dist.broadcast(value, self.line_ranks[self.owners[name]], group=self.line)

    def from_the_last(self, names: list[str]) -> list[str]:
        """What the last stage has. Collective over the stages."""
        found = [names]
        dist.broadcast_object_list(found, self.line_ranks[-1], group=self.line)
        return found[0]

    def add_up_ends(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add up the gradients of embeddings that are the head's weights too, when those of replicas have been: in this
        order all who have them get the same sum, to the bit. Collective."""
        if self.is_first or self.is_last:
            for name in self.shared:
                dist.all_reduce(gradients[name], group=self.ends)


def _nothing(config: Any, dtype: torch.dtype, input_ids: torch.Tensor) -> torch.Tensor:
    """What is in the place of embeddings where no layer takes them: a model that uses them all the same must not
    train, and with a loss that is not a number it does not."""
    return torch.full((*input_ids.shape, config.hidden_size), torch.nan, dtype=dtype, device=input_ids.device)


def _same(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden


def _free(part: Any, kept: set[torch.nn.Parameter]) -> None:
    """Leave of a module of another stage the names and shapes of its parameters, but for those kept."""
    if hasattr(part, "gradient_checkpointing"):
        part.gradient_checkpointing = False
    if hasattr(part, "quant_state"):  # of bitsandbytes, which a 4-bit layer holds beside its weight
        part.quant_state = None
    for name, parameter in list(part.named_parameters(recurse=False)):
        if parameter not in kept:
            setattr(part, name, torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))
