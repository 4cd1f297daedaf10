"""What the libraries need so that the step runs on fake tensors, in a process group that answers by itself.

The only module that changes foreign code, each time in a context that restores it. What is changed, and until when,
stands in ``finetune.compat``, one module for each library.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from finetune.compat import fake_tensors
from finetune.compat.fake_tensors import Change
from finetune.compat.peft_private import import_peft
from finetune.compat.torch_private import without_modes
from finetune.models import activation_offload, expert_layers
from finetune.models.exchange import exchange
from finetune.trace.powers import CONSTANT, PARTS
from finetune.trace.shallow import MORE_PARTS, OFFLOADED
from finetune.training import loss

if TYPE_CHECKING:
    from finetune.trace.ledger import Ledger


@contextlib.contextmanager
def _replaced(*changes: Change) -> Iterator[None]:
    originals = [(owner, name, vars(owner).get(name)) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, original in originals:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def storages_tell_their_size(tell: Callable[[torch.UntypedStorage], None]) -> contextlib.AbstractContextManager[None]:
    """Call ``tell`` after a storage is resized, which no dispatch mode sees: so FSDP2 frees its gathered layers.

    Until PyTorch shows it to modes.
    """
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        returned = original(storage, size)
        tell(storage)
        return returned

    return _replaced((torch.UntypedStorage, "resize_", resize_))


@contextlib.contextmanager
def libraries_take_fakes() -> Iterator[None]:
    """Everything that each library needs while a model is built, prepared and trained on fake tensors."""
    # PEFT and Accelerate import the like of these when they are first used: a constant of theirs would stay fake
    import_peft()
    from finetune.compat import bitsandbytes_private, transformers_private
    from finetune.models import document_attention
    from finetune.trace.building import Params4bit

    with _replaced(
        *fake_tensors.changes(),
        *transformers_private.fake_tensor_changes(),
        *bitsandbytes_private.fake_tensor_changes(Params4bit),
        (document_attention, "each_document", _in_one_kernel),
        _meshes_of_groups(),
    ):
        yield


def _meshes_of_groups() -> Change:
    """A mesh of the processes of a group reads their ranks off a tensor that it makes (until meshes hold none)."""
    original: Any = DeviceMesh.from_group

    def from_group(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return original(*args, **kwargs)

    return DeviceMesh, "from_group", staticmethod(from_group)


def engines_take_fakes(*, fp16: bool) -> contextlib.AbstractContextManager[None]:
    """For DeepSpeed's engine, where it is installed; its operations are not called, and need not be compiled."""
    from finetune.compat import traced_engine
    from finetune.distributed import deepspeed_ops

    return _replaced(*traced_engine.fake_tensor_changes(fp16=fp16), (deepspeed_ops, "build", lambda **_: None))


def kernels_of_a_gpu(*, flash: bool) -> contextlib.AbstractContextManager[None]:
    """Attention as PyTorch computes it on a GPU. Of its kernels only flash attention takes grouped queries as they are,
    and only in 16 bits, on Ampere and later; else its composite of products and a softmax keeps the scores, in fp32
    (``can_use_mem_efficient_attention`` in PyTorch 2.13's native/transformers/cuda/sdp_utils.cpp).

    Args:
        flash: whether the GPU has flash attention.
    """
    original: Any = functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, *others: Any, enable_gqa: bool = False, **known: Any) -> Any:
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        keeps_scores = enable_gqa and not (flash and dtype in (torch.bfloat16, torch.float16))
        with sdpa_kernel(SDPBackend.MATH) if keeps_scores else contextlib.nullcontext():
            return original(query, *others, enable_gqa=enable_gqa, **known)

    return _replaced((functional, "scaled_dot_product_attention", attention))


def scores_in_two_parts(positions: int, ledger: "Ledger") -> contextlib.AbstractContextManager[None]:
    """Scores of so many positions exist at a time, and the second of two such parts stands for all of them: of how
    many positions a question is, a trace does not know."""

    class TwoParts(loss.Parts):
        def __iter__(self) -> Iterator[slice]:
            assert 2 * positions <= self.positions
            ledger.most_scored = self.at_once
            ledger.times = None
            yield slice(0, positions)
            ledger.begin(MORE_PARTS)
            ledger.times = PARTS
            yield slice(positions, 2 * positions)
            ledger.begin("loss")
            ledger.times = CONSTANT

    return _replaced((loss, "Parts", TwoParts))


def routers_are_balanced(load: int) -> contextlib.AbstractContextManager[None]:
    """Tokens go to the experts of all processes of a group alike: which ones they choose, a trace does not know.

    Args:
        load: how many times as many come to this process as it sends.
    """

    def counted(expert_S: torch.Tensor, own: int, group: Any) -> tuple[torch.Tensor, list[int], list[int]]:
        size = dist.get_world_size(group)
        share, others = divmod(len(expert_S), size)
        sent = [share + (place < others) for place in range(size)]
        received_WE = exchange(expert_S.new_empty(size, own), group)
        return received_WE, sent, [load * each for each in sent]

    return _replaced((expert_layers, "counted", counted))


def offloaded_activations_are_known(ledger: "Ledger") -> contextlib.AbstractContextManager[None]:
    """The ledger is told which tensors lie in host memory: here all of them seem to."""
    own = activation_offload.in_host_memory

    def in_host_memory(hidden: torch.Tensor) -> torch.Tensor:
        found = own(hidden)
        ledger.tell([found], OFFLOADED)
        return found

    return _replaced((activation_offload, "in_host_memory", in_host_memory))


def _in_one_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: list[int],
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
    key_bounds: list[int] | None = None,
) -> torch.Tensor:
    """For our own attention of rows that lie end to end, which takes a GPU's way when it sees a GPU: take it here too.
    What it computes with has a fake for every device."""
    from finetune.models.attention import _varlen
    from finetune.models.context_attention import longest

    with without_modes():
        of_queries, of_keys = (
            (torch.tensor(each, dtype=torch.int32), longest(each)) for each in (bounds, key_bounds or bounds)
        )
    return _varlen(query, key, value, *of_queries, scaling, sliding_window, dropout, of_keys)
