"""The loss of a causal language model as a sum over trained tokens, without the scores of all positions at once.

A sum, because only a sum can be divided once, by the trained tokens of the whole global batch: means of
micro-batches with unequal numbers of trained tokens do not add up to the mean of the batch.

Of 8,192 positions and a vocabulary of 128,256 the scores take 3.9 GiB in fp32, and their gradients as much again. Here
they are made for some positions at a time, and with them the gradients of what they were made from, so that nothing of
them is left when the forward pass ends; of positions that are not trained they are not made at all. Whatever a model
does to its scores beside the product (a bias, Gemma's cap, Granite's and Cohere's factors), its own forward does here.
"""

import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from finetune.data.batches import IGNORED, trained_positions
from finetune.errors import InputError
from finetune.models import token_rows
from finetune.units import MIB, largest_part

LossSum = Callable[[torch.nn.Module, Any], torch.Tensor]
"""What a recipe learns: a model and a micro-batch to the sum of the loss over its trained tokens, a scalar."""
OfRouters = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""The scores of the routers of each layer, (positions, experts), to what is added to the loss of a micro-batch."""


class Figure(NamedTuple):
    """A mean in the metrics, as the parts of it that a process knows; both are scalars."""

    total: torch.Tensor
    divisor: torch.Tensor
    """What the total of all processes is divided by: their pairs, for example."""


def added(figure: Figure, known: Figure | None) -> Figure:
    """The figure of two parts of a batch; of one, where nothing is known of another."""
    return figure if known is None else Figure(figure.total + known.total, figure.divisor + known.divisor)


@dataclass(frozen=True)
class Objective:
    """What a recipe learns, and what the mean is of that a step divides its sum into."""

    loss_sum: LossSum
    per_row: bool = False
    """The loss is a mean over rows of the input, else over trained tokens."""
    figures: Callable[[], dict[str, Figure]] = dict
    """Others of what ``loss_sum`` was called for on this process since they were last asked for, by their names."""
    figure_names: Collection[str] | None = None
    """Of those in an evaluation; None where they are known only once it was made."""
    remembers_beginning: bool = False
    """The weights that training begins with are compared with all along: a run is resumed with no others."""
    remember: Callable[[torch.nn.Module], object] = lambda model: None
    """Given the prepared model with these weights, before its memory is checked and before a checkpoint is restored."""
    look_over: Callable[..., None] = lambda *which, **how: None
    """Called before held-out rows are judged one by one, as ``Preferences.know_reference_point`` is. Collective."""

    def count(self, *, rows: int, tokens: int) -> int:
        """What of a step or of held-out data the loss is divided by."""
        return rows if self.per_row else tokens


SCORES_BYTES = 512 * MIB
"""Of the scores that exist at a time, in fp32, beside a head that is frozen."""
Call = Callable[..., Any]
SumOf = Callable[[torch.Tensor, slice], torch.Tensor]
"""Hidden states of some positions, and which these are, to their losses."""
FP16_SCALE = 8.0
"""By which gradients are made larger while they are fp16, which knows no number below 6e-8 but 0. The loss scale comes
later, and divided by the tokens of the step: 65,536 over 8,192 tokens is 8."""


@dataclass(frozen=True)
class LossOfScores:
    """What a forward pass is to return in the place of scores."""

    losses_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Scores, of shape (1, N, vocabulary), and the targets of their positions, (1, N), to the sum of their losses, a
    scalar; where there is ``of_all``, to the loss of each, of shape (N,). It is called for some of the positions at a
    time."""
    positions_N: torch.Tensor
    """Of the micro-batch, its rows end to end; at least one."""
    targets_N: torch.Tensor
    of_all: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The losses of all positions, (N,), to what is returned: of a loss that is not their sum. Scores are made twice
    then: for the losses, and for their gradients, once it is known how much each counts."""
    of_routers: OfRouters | None = None


def next_token_loss_sum(
    model: torch.nn.Module,
    micro_batch: tuple[torch.Tensor, dict[str, Any]],
    *,
    label_smoothing: float = 0.0,
    balance: Callable[[torch.Tensor, dict[str, Any]], OfRouters | None] = lambda *_: None,
) -> torch.Tensor:
    """The loss of supervised fine-tuning, summed over the trained tokens of a micro-batch, in nats.

    The run, its held-out loss, the memory check, the dry run and the probe all call it. Scores are made of trained
    positions alone, and of some at a time.

    Args:
        model: prepared by ``take_losses``.
        micro_batch: ``next_tokens`` and the model's keyword arguments, as ``data.batches.collate`` makes them.
        label_smoothing: see ``token_loss_sum``; in training only, so that held-out losses can be compared.
        balance: a micro-batch to what is added of its routers (``RouterBalance.of_micro_batch``); in training only.
    """
    next_tokens, inputs = micro_batch
    positions_N, trains = trained_positions(next_tokens), is_training(model)
    smoothing, of_routers = (label_smoothing, balance(*micro_batch)) if trains else (0.0, None)
    losses_of = partial(token_loss_sum, label_smoothing=smoothing) if smoothing else token_loss_sum
    wanted = LossOfScores(losses_of, positions_N, next_tokens.flatten()[positions_N], of_routers=of_routers)
    found: torch.Tensor = model(**inputs, use_cache=False, loss_of_scores=wanted)
    return found


def is_training(model: torch.nn.Module) -> bool:
    """Whether a prepared model is in training: DeepSpeed's engine around it does not know."""
    return bool(getattr(model, "module", model).training)


def token_loss_sum(
    logits_BTV: torch.Tensor, next_tokens_BT: torch.Tensor, *, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Sum of the cross-entropy over the trained positions, in nats, computed in fp32.

    Args:
        logits_BTV: scores of the token that follows each position; batch, positions, vocabulary.
        next_tokens_BT: the token that follows each position (labels already shifted), or ``IGNORED``.
        label_smoothing: share of the target that all tokens of the vocabulary have in equal parts (arXiv:1512.00567).

    Returns:
        A scalar on the logits' device; 0 with zero gradients where no position is trained.
    """
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        next_tokens_BT.flatten(),
        ignore_index=IGNORED,
        reduction="sum",
        label_smoothing=label_smoothing,
    )


def token_losses(
    logits_BTV: torch.Tensor, next_tokens_BT: torch.Tensor, *, label_smoothing: float = 0.0
) -> torch.Tensor:
    """As ``token_loss_sum``, of each position, of shape (N,); 0 where it is not trained."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(),
        next_tokens_BT.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=label_smoothing,
    )


def positions_at_once(vocabulary: int, trained: Iterable[torch.Tensor]) -> int:
    """Whose scores may exist at a time.

    Where the head is trained, each part costs a pass over the gradients of its weights, and of several parts there are
    sums of them in fp32. Scores, in about three tensors in fp32, may take as much memory again as these gradients and
    sums: parts that are smaller would cost time, and save little.

    Args:
        trained: weights of the head.
    """
    sums = sum(each.numel() * (each.element_size() + 4) for each in trained)
    return max(1, SCORES_BYTES // (4 * vocabulary)) + sums // (12 * vocabulary)


@dataclass(frozen=True)
class Parts:
    """Of all positions: as few as there can be, and as equal."""

    positions: int
    at_once: int

    def __iter__(self) -> Iterator[slice]:
        size = largest_part(self.positions, self.at_once)
        for start in range(0, self.positions, size):
            yield slice(start, start + size)


def take_losses(model: PreTrainedModel) -> None:
    """Have the model's forward take ``loss_of_scores``, a ``LossOfScores``, and return its sum in the place of scores.

    Without it, it returns what it returned before. An adapter must be attached before.
    """
    own = type(model).forward

    def forward(self: Any, *args: Any, loss_of_scores: LossOfScores | None = None, **inputs: Any) -> Any:
        if loss_of_scores is None:
            return own(self, *args, **inputs)
        return _loss(self, own, loss_of_scores, *args, **inputs)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # transformers looks for names in it
    model.forward = types.MethodType(forward, model)


def head_of(model: PreTrainedModel) -> torch.nn.Module:
    """The output head; where an adapter trains it whole, the copy that learns, unless the adapter is off."""
    head = model.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)  # of PEFT's wrapper
    if copies is None:
        return head
    found: torch.nn.Module = head.original_module if head.disable_adapters else copies[head.active_adapters[0]]
    return found


def _seen_as(module: torch.nn.Module, calls: dict[torch.nn.Module, Call]) -> "_Seen":
    """A module for its own forward, which finds that some modules in it do something else when they are called."""
    return _Seen(module, calls.get(module, module), calls)


class _Seen:
    def __init__(self, module: torch.nn.Module, call: Call, calls: dict[torch.nn.Module, Call]) -> None:
        self._module, self._call, self._calls = module, call, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        is_seen = isinstance(found, torch.nn.Module) and any(each in self._calls for each in found.modules())
        return _seen_as(found, self._calls) if is_seen else found


def _loss(model: Any, own: Call, wanted: LossOfScores, *args: Any, **inputs: Any) -> torch.Tensor:
    bases = _bases_of(model)
    known, head = model.get_output_embeddings(), head_of(model)
    rows_apart = token_rows.opened(head)
    held, plain = rows_apart or ([head], head.forward)
    outputs, scored = list[Any](), list[int]()

    def running(base: Any) -> Call:
        def run(*args: Any, **kwargs: Any) -> Any:
            asked = {"output_router_logits": True} if wanted.of_routers else {}
            outputs.append(base(*args, **kwargs | asked))
            return outputs[-1]

        return run

    def score_nothing(hidden: torch.Tensor) -> torch.Tensor:
        scored.append(len(outputs))
        return hidden[..., :0]

    own(_seen_as(model, {base: running(base) for base in bases} | {known: score_nothing}), *args, **inputs)
    if scored != [1] or len(outputs) != 1:
        raise InputError(
            f"{type(model).__name__} does not make its scores from the output of one decoder with one output head, "
            "which training needs; use another model."
        )
    hidden_ND = outputs[0].last_hidden_state.flatten(0, 1).index_select(0, wanted.positions_N)
    of_routers = wanted.of_routers(outputs[0].router_logits) if wanted.of_routers else None
    kind = type(outputs.pop())  # else all hidden states would be kept to the end

    # by modules in it, each of which ZeRO-3 gathers by itself
    is_adapted = rows_apart is None and any(
        each.requires_grad for child in head.children() for each in child.parameters()
    )

    def losses_of(hidden_ND: torch.Tensor, part: slice) -> torch.Tensor:
        given = kind(last_hidden_state=hidden_ND[None])
        seen = _seen_as(model, dict.fromkeys(bases, lambda *args, **kwargs: given) | {known: plain})
        return wanted.losses_of(own(seen, *args, **inputs).logits, wanted.targets_N[part][None])

    def summed(hidden_ND: torch.Tensor) -> torch.Tensor:
        weights = dict.fromkeys(each for module in held for each in module.parameters())
        trained = [each for each in weights if each.requires_grad and torch.is_grad_enabled()]
        every = Parts(len(hidden_ND), positions_at_once(model.config.get_text_config().vocab_size, trained))
        has_gradients = torch.is_grad_enabled() and (bool(trained) or hidden_ND.requires_grad)
        sum_of: SumOf = losses_of
        if wanted.of_all is not None:
            total, weights_N, scale = _counted(wanted.of_all, losses_of, hidden_ND, every)
            if not has_gradients:
                return total
            sum_of = partial(_weighted, losses_of, weights_N)
        if has_gradients and not is_adapted:
            found: torch.Tensor = _Summed.apply(sum_of, every, hidden_ND, *trained)
        else:
            of_part = partial(checkpoint, sum_of, use_reentrant=False) if has_gradients else sum_of
            found = torch.stack([of_part(hidden_ND[part], part) for part in every]).sum()
        return found if wanted.of_all is None else total + scale * (found - found.detach())

    total = _within(held, summed, hidden_ND)
    return total if of_routers is None else total + of_routers


def _counted(
    of_all: Callable[[torch.Tensor], torch.Tensor], losses_of: SumOf, hidden_ND: torch.Tensor, every: Iterable[slice]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A function of the losses of all positions, and how much each loss counts in it: its derivative, as numbers up to
    1 and what they are multiplied by, so that none is too small or too large for gradients in fp16."""
    is_needed = torch.is_grad_enabled()
    # the random numbers are left to whoever makes the scores once more
    with torch.no_grad(), torch.random.fork_rng([hidden_ND.device] if hidden_ND.is_cuda else []):
        losses_N = torch.cat([losses_of(hidden_ND[part], part) for part in every])
    with torch.set_grad_enabled(is_needed):
        losses_N.requires_grad_(is_needed)
        total = of_all(losses_N)
    weights_N = torch.autograd.grad(total, losses_N)[0] if is_needed else losses_N
    largest = weights_N.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return total.detach(), weights_N / largest, largest


def _weighted(losses_of: SumOf, weights_N: torch.Tensor, hidden_ND: torch.Tensor, part: slice) -> torch.Tensor:
    return (losses_of(hidden_ND, part) * weights_N[part]).sum()


def _bases_of(model: Any) -> list[PreTrainedModel]:
    """The models within a model. Its modules are looked through once: with an adapter there are thousands."""
    if model not in _known_bases:
        _known_bases[model] = [each for each in model.modules() if isinstance(each, PreTrainedModel)][1:]
    return _known_bases[model]


_known_bases = weakref.WeakKeyDictionary[Any, list[PreTrainedModel]]()


def _within(modules: Sequence[torch.nn.Module], function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """What a function returns, called as the modules' forwards are, one in the other: within what strategies do around
    them. ZeRO-3 gathers a module's weights there."""
    if not modules:
        return function(*args)
    module, *others = modules
    own = vars(module).get("forward")
    module.forward = partial(_within, others, function)
    try:
        found: torch.Tensor = torch.nn.Module.__call__(module, *args)  # a ParameterDict refuses its own
        return found
    finally:
        del module.forward
        if own is not None:
            module.forward = own


class _Summed(torch.autograd.Function):
    """A sum over positions, whose gradients are made with it, part by part.

    For the backward pass they are kept; it multiplies them by the gradient of the sum. Nothing is computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sum_of: SumOf,
        every: Iterable[slice],
        hidden_ND: torch.Tensor,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        kind = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
        ctx.scale = FP16_SCALE if dtype == torch.float16 else 1.0
        of_hidden = torch.empty_like(hidden_ND) if hidden_ND.requires_grad else None
        of_trained: list[torch.Tensor] = []
        total = torch.zeros((), device=hidden_ND.device)
        for part in every:
            with torch.enable_grad():
                piece = hidden_ND[part].detach().requires_grad_(of_hidden is not None)
                loss = sum_of(piece, part)
                wanted = ([piece] if of_hidden is not None else []) + list(trained)
                found = list(torch.autograd.grad(loss * ctx.scale, wanted, materialize_grads=True))
            total += loss.detach()
            if of_hidden is not None:
                of_hidden[part] = found.pop(0)
            if of_trained:
                of_trained = [sum_.float().add_(each) for sum_, each in zip(of_trained, found, strict=True)]
            else:
                of_trained = found
            del piece, loss, wanted, found  # the next part's scores come in their place
        ctx.gradients = of_hidden, [each.to(one.dtype) for each, one in zip(of_trained, trained, strict=True)]
        return total

    @staticmethod
    def backward(ctx: Any, of_sum: torch.Tensor) -> Any:
        of_hidden, of_trained = ctx.gradients
        ctx.gradients = None  # they are changed in place: a second backward pass fails
        factor = of_sum / ctx.scale
        return (
            *(None, None),
            None if of_hidden is None else of_hidden.mul_(factor),
            *(each.mul_(factor) for each in of_trained),
        )
