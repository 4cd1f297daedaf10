"""Rotary frequencies that are chosen once for a run, by the longest row that it may have.

transformers chooses those of two kinds in each forward, by the longest row of the micro-batch: ``longrope`` (Phi-3,
Phi-4-mini) has long factors for rows beyond the length that the model was first trained with and short factors for
others, ``dynamic`` raises the base with the length. The loss of a row would then depend on which others it shares a
micro-batch with. With ``original_max_position_embeddings: 4096`` and ``data.max_length: 8192`` all rows get the long
factors here, a row of 100 tokens too, as vLLM gives them; with ``data.max_length: 4096`` all get the short ones.

Only modules are changed: the configuration, which is saved with the model, stays. Rotary embeddings in code that comes
with a model are left as they are, unless they are written as those of transformers.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CHOSEN_BY_LENGTH = ("dynamic", "longrope")
FIXED = "fixed"
"""Takes the place of a module's ``rope_type``: none of those that transformers updates, nor one that it knows, so that
to initialise the frequencies again would fail."""


def fix(model: torch.nn.Module, longest: int) -> None:
    """Give rotary embeddings the frequencies for rows of up to ``longest`` tokens, which no forward changes after that.

    Args:
        longest: tokens of the longest row that the run may have, ``data.max_length``.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and kinds in CHOSEN_BY_LENGTH:
            _fix(module, kinds, None, longest)
            vars(module)["rope_type"] = FIXED
        elif isinstance(kinds, dict):  # of kinds of layers, by their names
            chosen = {layer: kind for layer, kind in kinds.items() if kind in CHOSEN_BY_LENGTH}
            for layer, kind in chosen.items():
                _fix(module, kind, layer, longest)
            vars(module)["rope_type"] = kinds | dict.fromkeys(chosen, FIXED)


def depend_on_length(config: PreTrainedConfig) -> bool:
    """Whether a language model has frequencies, of all layers or of one kind, that ``fix`` chooses."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = {each.get("rope_type") for each in (rope, *rope.values()) if isinstance(each, dict)}
    return not kinds.isdisjoint(CHOSEN_BY_LENGTH)


def differ(config: PreTrainedConfig, longest: int, other: int) -> bool:
    """Whether ``fix`` chooses others for rows of up to ``longest`` tokens than for rows of up to ``other``."""
    if not depend_on_length(config):
        return False
    text: Any = config.get_text_config(decoder=True)
    rope = text.rope_parameters
    kinds = {None: rope} if "rope_type" in rope else rope
    for layer, kind in ((layer, each["rope_type"]) for layer, each in kinds.items()):
        if kind in CHOSEN_BY_LENGTH:
            both = [ROPE_INIT_FUNCTIONS[kind](text, "cpu", seq_len=each, layer_type=layer) for each in (longest, other)]
            if both[0][1] != both[1][1] or not torch.equal(both[0][0], both[1][0]):
                return True
    return False


def _fix(module: Any, kind: str, layer: str | None, longest: int) -> None:
    """Of one rotary embedding, or of its frequencies for a kind of layer."""
    prefix = f"{layer}_" if layer else ""
    device = getattr(module, f"{prefix}inv_freq").device
    found, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=longest, layer_type=layer)
    setattr(module, f"{prefix}inv_freq", found)  # it stays a buffer that is not saved
    setattr(module, f"{prefix}attention_scaling", scaling)
    rope = module.config.rope_parameters
    if layer is None and "long_mscale" in rope:  # Phi-3.5-MoE reads its scale off the configuration in each forward
        scale = rope["long_mscale" if longest > rope["original_max_position_embeddings"] else "short_mscale"]
        module.config = copy.deepcopy(module.config)
        module.config.rope_parameters |= {"long_mscale": scale, "short_mscale": scale}
