"""What a dry run found: bytes, by what they are for, over the phases of a step. Imports nothing that is slow."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PHASES = ("forward", "loss", "backward", "step")
CATEGORIES = (
    "weights",
    "weight_copies",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "temporaries",
    "kernels",
)
"""``weights``: with buffers and quantisation constants. ``weight_copies``: that autocast makes and keeps.
``activations``: made in the forward pass and kept for the backward pass, with the inputs. ``logits``: everything of
the size of the logits, in forward, loss and backward. ``gathered``: what collectives read and write, and gathered
layers. ``temporaries``: what lives within a forward, backward or optimizer pass, recomputed activations too.
``kernels``: what CUDA's kernels take for themselves while they run."""


@dataclass(frozen=True)
class Moment:
    """The memory in use at one moment."""

    bytes: int
    categories: dict[str, int]


@dataclass(frozen=True)
class Point:
    """A place on the picture of memory over one step."""

    at: float
    """From 0, the beginning of the step, to 1, by the number of allocations and frees."""
    phase: str
    moment: Moment


@dataclass(frozen=True)
class Group:
    """Blocks of one kind that are alive at the peak."""

    category: str
    phase: str
    """In which they were made."""
    operation: str
    shape: tuple[int, ...]
    dtype: str
    blocks: int
    bytes: int


@dataclass(frozen=True)
class Trace:
    """A dry run's last optimizer step, on one process; bytes of GPU memory as its allocator hands it out."""

    peak: Moment
    peak_phase: str
    phases: dict[str, Moment]
    """The peak of each phase, over the micro-batches of the step."""
    saved: Moment
    """Alive where the first backward pass of the step begins."""
    held: Moment
    """Alive between steps: weights, optimizer state, buckets."""
    host_bytes: int
    """Of weights, gradients and optimizer state that the strategy keeps in host memory; they are in no moment."""
    points: tuple[Point, ...]
    largest: tuple[Group, ...]
    """At the peak, by their bytes."""
    allocations: int
    seconds: float
    """That the dry run took."""

    def record(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def trace_of(record: Mapping[str, Any]) -> Trace:
    """The trace of a record that was JSON."""
    fields = dict(record)
    for name in ("peak", "saved", "held"):
        fields[name] = Moment(**fields[name])
    fields["phases"] = {name: Moment(**moment) for name, moment in fields["phases"].items()}
    fields["points"] = tuple(Point(**point | {"moment": Moment(**point["moment"])}) for point in fields["points"])
    fields["largest"] = tuple(Group(**group | {"shape": tuple(group["shape"])}) for group in fields["largest"])
    return Trace(**fields)
