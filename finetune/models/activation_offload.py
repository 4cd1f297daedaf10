"""Activation offloading: what recomputed layers keep for their backward pass waits in host memory.

Of rows of 131,072 tokens, 32 layers with 4,096 channels in 16 bits have inputs of 1 GiB each. Here each is copied to
pinned host memory while its layer computes, and comes back while the backward pass is one layer behind. So does what
attention returned, which takes as much, and is not computed again: of such rows it has 71 % of a layer's FLOPs. On a
GPU the copies run on a stream of their own; on a CPU they are plain copies, in the same order.

So the GPU holds what the layer that computes has kept, and in the backward pass what the next one needs. (A model's own
forward also holds the first input.) What has not left when it is needed, as of the last layer, is taken as it is:

    forward   compute 0    compute 1    compute 2            backward  compute 2    compute 1    compute 0
    copies    0 to host    1 to host    2 to host            copies    1 to GPU     0 to GPU

Limits: attention with dropout, and attention that is no operation of PyTorch, as of other packages, is computed again.
All operations of such a layer pass through Python, which is slower than the GPU where rows are short. Under pp a
schedule keeps what enters and leaves a stage on the GPU. PyTorch rounds pinned memory up to powers of two.
"""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from finetune.compat.torch_private import DispatchMode, storage_key
from finetune.compat.transformers_private import checkpoint_by

ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
    }
)
"""Operations whose results are kept."""


def offload_activations(layers: list[Any]) -> None:
    """Have recomputed layers keep their inputs, and what attention returned, in host memory."""
    offload = Offload()
    for place, layer in enumerate(layers):
        checkpoint_by(layer, partial(offload.checkpoint, place))


class Offload:
    """What the layers of a model keep, on its way to host memory and back."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._newest: Callable[[], _Layer | None] = _nothing
        """Of the layer that was computed last, some of whose tensors may not have left yet."""

    def checkpoint(self, place: int, function: Callable[..., Any], hidden: torch.Tensor, *others: Any) -> Any:
        """Call a layer, and again in the backward pass, with an input that waits in host memory meanwhile.

        Args:
            place: of the layer among those of the model.
            function: the layer's forward.
            hidden: its input. What else it is called with is kept as it is: layers share it.
        """
        own, key = _Layer(place, self._newest()), storage_key(hidden.untyped_storage())

        def pack(saved: torch.Tensor) -> "torch.Tensor | _Layer":
            if storage_key(saved.untyped_storage()) != key:
                return saved
            self._begin(own, saved)
            return own

        def contexts() -> tuple[DispatchMode, DispatchMode]:
            return _Keeping(own, self._sent), _Giving(own)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._take):
            found = checkpoint(lambda given: function(given, *others), hidden, use_reentrant=False, context_fn=contexts)
        if torch.is_grad_enabled() and own.hidden is None:
            raise RuntimeError(
                f"Layer {place} did not keep its input, which train.activation_checkpointing: offload sends to host "
                "memory; set it to full."
            )
        return found

    def _begin(self, own: "_Layer", hidden: torch.Tensor) -> None:
        """A layer begins. What the one before keeps has had the time of a layer to leave, and is let go."""
        if (before := self._newest()) is not None:
            for each in before.kept():
                each.wait()
                each.here = None
        self._newest = weakref.ref(own)
        own.hidden = self._sent(hidden)

    def _sent(self, tensor: torch.Tensor) -> "_Kept":
        """A tensor that begins to leave."""
        kept = _Kept(tensor.detach())
        kept.copied = self._copy(kept.host, tensor.detach())
        return kept

    def _take(self, kept: "torch.Tensor | _Layer") -> torch.Tensor:
        """The input of a layer that is computed again now; what the next one needs begins to come back."""
        if isinstance(kept, torch.Tensor):
            return kept
        self._bring_back(kept)
        for each in kept.kept():
            each.wait()
        if (before := kept.before()) is not None:
            self._bring_back(before)
        assert kept.hidden is not None
        return kept.hidden.given()

    def _bring_back(self, layer: "_Layer") -> None:
        for each in layer.kept():
            if each.here is None:
                each.here = torch.empty_like(each.host, device=each.device)
                each.copied = self._copy(each.here, each.host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event | None:
        """Begin to copy what has been computed by now; what tells that it is done, None where it is.

        Both tensors belong to the stream that computes, which waits for the copy before it lets go of either.
        """
        device = next((each.device for each in (target, source) if each.is_cuda), None)
        if device is None:
            target.copy_(source)
            return None
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()


class _Kept:
    """A tensor between the forward and the backward pass of a layer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self.here: torch.Tensor | None = tensor
        """On its device, before it has left and when it comes back."""
        self.host = in_host_memory(tensor)
        self.copied: torch.cuda.Event | None = None
        """The end of the last copy of it that has begun."""

    def wait(self) -> None:
        """Have the stream that computes wait for that copy."""
        if self.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def given(self) -> torch.Tensor:
        """On its device, where it is not kept any longer."""
        here, self.here = self.here, None
        assert here is not None
        return here


class _Layer:
    """What a layer keeps of one forward pass."""

    def __init__(self, place: int, newest: "_Layer | None") -> None:
        self.place = place
        self.hidden: _Kept | None = None
        """Its input."""
        self.attention: list[tuple[Any, ...] | None] = []
        """What each call of attention returned, with what is kept for tensors; None if it is computed again."""
        follows = newest is not None and newest.place == place - 1
        self.before: Callable[[], _Layer | None] = weakref.ref(newest) if newest is not None and follows else _nothing
        """The layer before in the same forward pass, which is computed again next."""

    def kept(self) -> Iterator[_Kept]:
        """All tensors."""
        every = (self.hidden, *(each for returned in self.attention for each in returned or ()))
        return (each for each in every if isinstance(each, _Kept))


class _Keeping(DispatchMode):
    """Within it what attention returns is kept."""

    def __init__(self, layer: _Layer, sent: Callable[[torch.Tensor], _Kept]) -> None:
        super().__init__()
        self._layer, self._sent = layer, sent

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() not in ATTENTION:
            return func(*args, **(kwargs or {}))
        drawn = drawn_on(args[0].device)
        returned = func(*args, **(kwargs or {}))
        sent = (self._sent(each) if isinstance(each, torch.Tensor) else each for each in returned)
        self._layer.attention.append(tuple(sent) if drawn_on(args[0].device) == drawn else None)
        return returned


class _Giving(DispatchMode):
    """Within it attention returns what was kept, and is not computed."""

    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self._layer, self._left = layer, iter(layer.attention)

    def __enter__(self) -> Any:
        self._left = iter(self._layer.attention)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = next(self._left) if func.name() in ATTENTION else None
        if kept is None:
            return func(*args, **(kwargs or {}))
        return tuple(each.given() if isinstance(each, _Kept) else each for each in kept)


def _nothing() -> None:
    """As a weak reference to nothing."""


def drawn_on(device: torch.device) -> int:
    """How many random numbers were drawn by a GPU. Attention that draws some must be computed again, so that those
    after it are the same."""
    return torch.cuda.default_generators[device.index].get_offset() if device.type == "cuda" else 0


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Room for a tensor: pinned, so that a GPU copies beside its computation."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
