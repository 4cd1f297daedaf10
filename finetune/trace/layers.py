"""Which of a model's layers are alike, and how many of them tell of all. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAYER_KEYS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"}
"""Names of the number of layers in a config.json."""


@dataclass(frozen=True)
class Anatomy:
    """A model, as far as the planner looks at it."""

    parameters: int
    active_parameters: int
    """Those that a token meets: of a mixture's experts, those chosen for it."""
    linear_parameters: int
    """Of linear layers but for the output head, which quantisation takes."""
    largest_parameter: int
    """Elements of the largest tensor."""
    dimensions: tuple[int, ...]
    """Of all weights."""
    layers: int
    lead: int
    """Layers at the beginning that are like no others."""
    period: int
    """After them, each layer is like the one so many places before."""
    positions: int | None
    """The longest row that the model is made for."""
    keeps_apart: bool = False
    """Whether its attention keeps the documents of a flat row apart, on GPUs that can."""
    heads: tuple[int, int] = (1, 1)
    """Of attention: of queries, and of keys and values."""
    width: int = 0
    """Elements of a hidden state."""
    costs: tuple[float, ...] = ()
    """Of each layer and, in the last, the head: multiplications for a token. Empty where the model cannot be a
    pipeline."""
    deferrable_share: float = 0.0
    """Of the layers' multiplications, those with weights whose gradients a pipeline can defer."""
    deferrable_width: int = 0
    """Elements of a position that a layer keeps for these gradients, at most: inputs, each as if it were no other's,
    and gradients of outputs."""
    ties: bool = False
    """Whether the embedding is the head's weight too."""
    not_spread: tuple[str, ...] = ()
    """Why positions of a row cannot be spread over processes, as clauses."""
    sizes: tuple[tuple[str, int], ...] = ()
    """That several GPUs share which split its layers (``trace.tensor_parts``); none where they share others as well."""
    experts: int = 0
    """Of each layer, which several GPUs may share; 0 of a model without any."""
    not_split: tuple[tuple[int, int | None, str], ...] = ()
    """Why its layers cannot be split, as a clause: over so many GPUs, in so many bits."""
    split_names: tuple[str, ...] = ()
    """Last names of the linear layers that are split then."""
    router_coefficient: float = 0.0
    """Of a loss that balances its experts, by its own configuration."""
    balances: bool = False
    """Whether there is such a loss for it."""

    def depths(self, least: int) -> tuple[int, int]:
        """Two numbers of layers to trace; twice all where these are less work.

        Args:
            least: layers of which all different spans of a step are seen: 2 where the layers do not know of one
                another, 3 where one fetches the weights of the next.
        """
        low = max(least, self.lead + self.period + 1)
        low += (self.layers - low) % self.period
        high = low + self.period
        return (low, high) if low + high < self.layers else (self.layers, self.layers)

    def shortened(self, config: Mapping[str, Any], layers: int) -> dict[str, Any]:
        """A config.json for so many layers: lists with an entry for each layer are shortened too."""
        shorter: dict[str, Any] = {
            key: value[:layers] if isinstance(value, list) and len(value) == self.layers else value
            for key, value in config.items()
        }
        if isinstance(config.get("text_config"), Mapping):
            shorter["text_config"] = self.shortened(config["text_config"], layers)
        return shorter | dict.fromkeys(LAYER_KEYS & config.keys(), layers)


def repetition(kinds: Sequence[object]) -> tuple[int, int]:
    """How many of a sequence lead it, and the period in which the others repeat; the shortest of both together.

    ``a b b b b`` is one that leads, and a period of 1; ``a b a b a`` is a period of 2; ``a b c`` repeats nothing, and
    is a period of 3.
    """
    best = (0, len(kinds))
    for period in range(1, len(kinds)):
        lead = len(kinds) - period
        while lead and kinds[lead - 1] == kinds[lead - 1 + period]:
            lead -= 1
        if lead + period < sum(best):
            best = (lead, period)
    return best
