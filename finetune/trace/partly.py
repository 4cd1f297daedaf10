"""A step whose first layers are recomputed and whose last ones are not, from the steps of both kinds. Pure arithmetic.

Of 32 layers of which 12 are recomputed, the backward pass of the 30th holds what it does where none is, less what 12
layers keep more than their inputs; that of the 5th what it does where all are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from finetune.trace.powers import MicroBatch
from finetune.trace.shallow import Counted, Highest, Kernel, Place, Sent, Step, between


@dataclass(frozen=True, kw_only=True)
class PartlyRecomputed(Step):
    """The step in which no layer is recomputed, changed by the one in which all are."""

    kept: Step
    all_recomputed: Step
    recomputed_layers: int

    def highest(self, micro_batch: MicroBatch) -> Highest:
        """As of a ``Step``, with the backward pass of the last recomputed layer beside it."""
        kept, again = self.kept.highest(micro_batch), self.all_recomputed.highest(micro_batch)
        less = {place: self._less(place, kept, again) for place in kept.keys() & again.keys()}
        apart = [place for place in less if place[2] == "apart"]  # where all layers are alive, or none
        of_all = max((less[place] for place in apart), key=lambda sizes: sum(sizes.values()))
        found: Highest = {place: (kept[place][0], _without(kept[place][1], less[place])) for place in apart}
        by_layer: dict[tuple[str, int], dict[int, Place]] = {}
        for place in less.keys() - found.keys():
            low, whole = kept[place]
            phase, number, end, distance = place
            layer = distance if end == "start" else self.layers - 1 - distance
            by_layer.setdefault((phase, number), {})[layer] = place
            is_kept = layer >= self.recomputed_layers
            found[place] = low, _without(whole, of_all) if is_kept else again[place][1]
        for (phase, number), known in by_layer.items():
            if phase == "backward":
                last = _at(self.recomputed_layers - 1, {layer: again[place][1] for layer, place in known.items()})
                found[phase, number, "last recomputed", 0] = {}, last
        return found

    def _less(self, place: Place, kept: Highest, again: Highest) -> dict[str, float]:
        """By what less is held where the first layers are recomputed.

        Counted from the step in which all are: the first layer is unlike the others, beside an adapter for example, and
        is recomputed.
        """
        (low, whole), (low_again, whole_again) = kept[place], again[place]
        gap, of_low = _without(whole, whole_again), _without(low, low_again)
        more, still_kept = self.layers - self.low.layers, self.layers - self.recomputed_layers
        of_layer = {
            name: (gap[name] - of_low.get(name, 0.0)) / more if more else gap[name] / self.layers for name in gap
        }
        return {name: size - still_kept * of_layer[name] for name, size in gap.items()}

    @cached_property
    def kernels(self) -> list[Kernel]:
        """All operations."""
        return self._of_both(self.kept.kernels, self.all_recomputed.kernels)

    @cached_property
    def sent(self) -> list[Sent]:
        """All collectives."""
        return self._of_both(self.kept.sent, self.all_recomputed.sent)

    def _of_both(self, kept: Sequence[Counted], again: Sequence[Counted]) -> list[Counted]:
        share = self.recomputed_layers / self.layers
        return [
            replace(each, calls=part * each.calls) for part, of in ((1 - share, kept), (share, again)) for each in of
        ]


def partly_recomputed(kept: Step, again: Step, *, layers: int) -> PartlyRecomputed:
    """The step in which so many layers are recomputed, of those in which none is, and in which all are."""
    alike = {field.name: getattr(kept, field.name) for field in fields(Step)}
    return PartlyRecomputed(**alike, kept=kept, all_recomputed=again, recomputed_layers=layers)


def _without(sizes: dict[str, float], less: dict[str, float]) -> dict[str, float]:
    return {name: sizes.get(name, 0.0) - less.get(name, 0.0) for name in sizes | less}


def _at(layer: int, known: dict[int, dict[str, float]]) -> dict[str, float]:
    """Bytes in a layer, on a straight line between the layers next to it."""
    below, above = max(each for each in known if each <= layer), min(each for each in known if each >= layer)
    return between(known[below], known[above], (layer - below) / max(1, above - below))
