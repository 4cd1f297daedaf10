"""Learning rates of single weights, as factors of that of the step.

Example: a model of two layers with a layer decay of 0.5. Layer 1, what follows it and the output head have the factor
1, layer 0 has 0.5, the embeddings have 0.25. With a LoRA+ ratio of 16 a matrix B in layer 0 has the factor 8.
"""

import re
from collections.abc import Collection, Iterable

LAYER = re.compile(r"\.([0-9]+)\.")
"""The number of a layer in a parameter's name: the first one, since experts are numbered within a layer."""


def scales_of(
    names: Collection[str],
    *,
    of_model: Iterable[str],
    embeddings: Collection[str],
    layer_decay: float = 1.0,
    lora_plus_ratio: float = 1.0,
) -> dict[str, float]:
    """Factor of the learning rate of each trained parameter, by its name.

    Args:
        names: of trained parameters. The layers are numbered from 0.
        of_model: of all parameters, trained or not: the last layer may have none that is trained.
        embeddings: those of embeddings.
        layer_decay: the factor of a layer over that of the layer above it (Howard and Ruder, arXiv:1801.06146).
        lora_plus_ratio: that of LoRA's matrices B over that of its matrices A (Hayou et al., arXiv:2402.12354).
    """
    places = {name: place for name in names if (place := _place(name))}
    layers: dict[str, int] = {}
    for of, number in filter(None, map(_place, of_model)):
        layers[of] = max(number + 1, layers.get(of, 0))
    most = max((layers[of] for of, _ in places.values()), default=0)
    scales = {}
    for name in names:
        below_top = most if name in embeddings else 0
        if name in places:
            of, number = places[name]
            below_top = layers[of] - 1 - number
        scales[name] = layer_decay**below_top * (lora_plus_ratio if ".lora_B." in name else 1.0)
    return scales


def _place(name: str) -> tuple[str, int] | None:
    """The list of layers that a parameter is in, and the number of its layer; None of one in no layer."""
    found = LAYER.search(f".{name}.")
    return (name[: found.start()], int(found[1])) if found else None
