"""Pipeline parallelism: each process has some layers, and passes on hidden states, and their gradients back.

The processes of a stage follow one another: of four processes in two stages, ranks 0 and 1 have the first. They are
replicas, and compute different rows. So gradients are added up within a machine, and hidden states, which are far
fewer bytes, go between machines.

A stage is the whole model's object, in which modules of other stages pass on what they get: names, configuration and
the model's own forward stay as they are. Every stage calls the loss; in all but the last the model ends it, with what
the next stage takes. The loss must call the model once.

A stage may have several parts of the layers: of 2 stages with 2 parts each, the first has the parts 0 and 2, the second
1 and 3. In training a forward pass is one of a part, in which the other parts of the stage pass on too; elsewhere all
parts compute in one pass, which hands hidden states to the other stages and takes them back between its parts.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutputWithPast

from finetune.distributed.clipping import clip_parts
from finetune.distributed.part_shards import whole_part
from finetune.distributed.strategy import Strategy
from finetune.errors import InputError
from finetune.models.deferred_gradients import DeferredGradients, deferring_layers
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
        dtype: in which it computes.
        order: of its stages, in which micro-batches pass them.
    """

    strategy = "pp"

    def __init__(self, model: Any, strategy: Strategy, device: torch.device, dtype: torch.dtype, order: Order) -> None:
        self.stage, self.stages, self.device, self.dtype = strategy.stage, strategy.stages, device, dtype
        self.order = order
        self.parts = range(strategy.stage, strategy.stages * order.parts, strategy.stages)
        """Of the layers, by their numbers in the model."""
        self.is_first, self.is_last = self.stage == 0, self.stage == self.stages - 1
        width, ranks = strategy.data_processes, range(strategy.world_size)
        lines = [list(ranks[row::width]) for row in range(width)]
        self.line_ranks = lines[strategy.rank % width]
        """The processes that compute the same rows, in the order of their stages."""
        self.line = [dist.new_group(each) for each in lines][strategy.rank % width]
        self.ends = [dist.new_group([each[0], each[-1]]) for each in lines][strategy.rank % width]
        stages = [list(ranks[first : first + width]) for first in ranks[::width]]
        self.ranks_of_stage = stages[self.stage]
        self.replicas = [dist.new_group(each) for each in stages][self.stage]
        """The processes that have the same layers, or shards of them."""
        self.shards = strategy.shards
        """Into which each layer is cut."""
        self.shares = strategy.shares
        """Of the rows, that of each process."""
        self.knowing = [each[-1] for each in lines]
        """The process that knows the loss, for each share of the rows."""
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
        self.names = {name for name, _ in model.named_parameters()}
        """Of all parameters of the whole model."""
        trained = [name for name, each in model.named_parameters() if each.requires_grad]
        self._leave_own(model)
        own = {name for name, each in model.named_parameters() if each.device.type != "meta"}
        held: list[Any] = [None] * self.stages
        dist.all_gather_object(held, own & set(trained), group=self.line)
        self.owners = {name: min(stage for stage, names in enumerate(held) if name in names) for name in trained}
        """The stage that counts each trained parameter: the first that has it."""
        self.shared = [name for name in trained if name in held[0] and name in held[-1]]
        """Embeddings that are the head's weights too."""
        self.deferred = DeferredGradients(deferring_layers(model)) if order.zero_bubble else None
        """Gradients of weights that a schedule computes later."""
        self.shells = {name: each for name, each in model.named_parameters() if name in self.owners and name not in own}
        """Of trained parameters of other stages."""
        _known[model] = self

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
        kept = set(self._of_stage(self.modules))
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
        whole, base = model.forward, model.base_model

        def forward(**inputs: Any) -> Any:
            self._shape = *inputs["input_ids"].shape, model.config.get_text_config().hidden_size
            if self._has_scores:
                return self._last_scores(model, whole(**inputs)) if self._answers else whole(**inputs)
            hidden = base(**{key: value for key, value in inputs.items() if key not in OF_HEAD}).last_hidden_state
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
        own = set(self._of_stage(self.modules))
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each in own]

    def settle(self, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Put those of some parameters that this stage has on its device, where replicas begin with the weights of the
        first. Collective."""
        for name, each in parameters.items():
            if not each.is_meta:
                model.get_submodule(name.rpartition(".")[0]).to(self.device)  # quantised weights with their scales
                if dist.get_world_size(self.replicas) > 1:
                    dist.broadcast(each.data, self.ranks_of_stage[0], group=self.replicas)

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

    @staticmethod
    def _of_stage(modules: list[torch.nn.Module]) -> dict[torch.nn.Parameter, None]:
        return dict.fromkeys(each for module in modules for each in module.parameters())

    @torch.no_grad()
    def told(self, function: Callable[[], torch.Tensor], *shape: int) -> torch.Tensor:
        """What a function of one forward pass, without gradients, returns in the last stage; zeros of its shape in the
        others. Collective over the stages."""
        try:
            return function()
        except PassedOn:
            return torch.zeros(shape, device=self.device)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Within it a forward pass returns the scores of the next tokens in every stage."""
        self._answers = True
        try:
            yield
        finally:
            self._answers = False

    def clip(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """Clip the gradients of all stages by their common norm, which is returned as it was before."""
        groups = self.shards, self.line, self.replicas
        return clip_parts(model, max_norm, *groups, counts=self.owns, device=self.device)

    @torch.no_grad()
    def parameters(self, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of each trained parameter of all stages. Collective over the stages."""
        known = dict(model.named_parameters())
        for name, owner in self.owners.items():
            own = known[name].detach()
            value = whole_part(own) if self.owns(name) else torch.empty(own.shape, dtype=own.dtype, device=self.device)
            dist.broadcast(value, self.line_ranks[owner], group=self.line)
            yield name, value

    def owns(self, name: str) -> bool:
        """Whether a trained parameter counts as one of this stage: embeddings that are the head's too, of the first."""
        return self.owners[name] == self.stage

    def figures(self, found: dict[str, Any]) -> dict[str, Any]:
        """Figures of the loss, which the last stage knows; of the same names with zeros in the others. Collective."""
        names = [list(found)]
        dist.broadcast_object_list(names, self.line_ranks[-1], group=self.line)
        zero = torch.zeros((), device=self.device)
        return found if self.is_last else dict.fromkeys(names[0], (zero, zero))


_known: "weakref.WeakKeyDictionary[torch.nn.Module, Pipeline]" = weakref.WeakKeyDictionary()


def pipeline_of(model: torch.nn.Module) -> Pipeline | None:
    """The pipeline that a model is a stage of."""
    return _known.get(model)


@contextmanager
def trained_everywhere(model: torch.nn.Module) -> Iterator[None]:
    """Within it parameters that other stages train are trained ones of this model, too: for the list of a result."""
    shells = pipeline.shells.values() if (pipeline := pipeline_of(model)) else ()
    for shell in shells:
        shell.requires_grad = True
    try:
        yield
    finally:
        for shell in shells:
            shell.requires_grad = False


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
