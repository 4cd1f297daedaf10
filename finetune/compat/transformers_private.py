"""Private names of transformers. Read in 5.17 to 5.23."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from transformers import PreTrainedConfig


def attention_of(config: PreTrainedConfig) -> str | None:
    """The attention that a model computes with. Goes when the configuration has it as a public attribute."""
    return config._attn_implementation


def takes_registered_attention(architecture: Any) -> bool:
    """Whether a model class calls attention functions by their registered names. Goes with a public class attribute."""
    return bool(architecture._supports_attention_backend)


def takes_flash_attention(architecture: Any) -> bool:
    """Whether a model class computes with flash attention. Goes with a public class attribute."""
    return bool(architecture._supports_flash_attn)


def is_stateful(architecture: Any) -> bool:
    """Whether a model class carries a state along the row, as Mamba does. Goes with a public class attribute."""
    return bool(architecture._is_stateful)


def recorded_outputs(model: Any) -> Collection[str]:
    """Names of what a model without a head can return beside hidden states. Goes with a public class attribute."""
    return model._can_record_outputs or ()


def forget_conversions(model: Any) -> None:
    """Save weights under the names and shapes they have now, not as they were packed in the files that were read.

    Goes when ``remove_quantization_config`` does it.
    """
    model._weight_conversions = None


def forget_unused_conversions(model: Any) -> None:
    """Save weights under the names of the files that were read.

    Each conversion that is known for a model is for one layout of its files, and saving reverses them all. Where
    ZeRO-3 partitions weights as they are read, transformers keeps those for other layouts too, and their reverses give
    names and shapes that nothing reads. Goes when ``_load_state_dict_into_zero3_model`` keeps those that were used, as
    loading whole weights does.
    """
    model._weight_conversions = [each for each in vars(model).get("_weight_conversions") or () if each.was_used()]


def checkpoint_by(layer: Any, function: Callable[..., Any]) -> None:
    """Have a layer whose activations are checkpointed call a function, with its forward and its arguments, in the place
    of PyTorch's. Goes when ``activation_checkpointing_enable`` takes a function."""
    layer._gradient_checkpointing_func = function


@contextlib.contextmanager
def read_whole() -> Iterator[None]:
    """Within it, ``from_pretrained`` does not know of ZeRO-3, which partitions weights as they are read.

    Goes when the configuration that ``unset_hf_deepspeed_config`` forgets can be read, to set it again.
    """
    from transformers.integrations import deepspeed

    partitioned = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = partitioned


def fake_tensor_changes() -> list[tuple[Any, str, Any]]:
    """What transformers needs on fake tensors: the functions that read values to choose a mask choose none.

    Goes when they ask whether a tensor is fake before they read it.
    """
    import transformers.masking_utils as masks

    return [
        (masks, "find_packed_sequence_indices", lambda position_ids: None),
        (masks, "is_tracing", lambda tensor=None: False),
    ]
