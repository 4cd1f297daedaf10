"""The closed form beside a dry run of the recipe's own step, part by part."""

from dataclasses import dataclass

from finetune.planner.judged_rows import Row
from finetune.planner.model_config import read_config
from finetune.planner.peak_memory import CUBLAS_BYTES
from finetune.trace.child import trace_in_child
from finetune.trace.findings import Trace
from finetune.units import GIB

OF_PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "temporaries", "weight_copies"),
    "loss": ("logits",),
    "gathered": ("gathered",),
    "workspace": ("kernels",),
}
"""Parts of the closed form, and the categories of a trace that they are counted as."""


@dataclass(frozen=True)
class Comparison:
    """Bytes at the peak, predicted and traced, without the workspace of cuBLAS, which a dry run does not see."""

    predicted: dict[str, int]
    traced: dict[str, int]
    seconds: float
    """That the dry run took."""

    @property
    def ratio(self) -> float:
        """Of the predicted peak to the traced one."""
        return sum(self.predicted.values()) / sum(self.traced.values())

    @property
    def lines(self) -> list[str]:
        """A table of plain text."""
        rows = [("", "closed form", "dry run"), *((name, *_cells(self, name)) for name in OF_PARTS)]
        peaks = [f"{sum(each.values()) / GIB:.3f}" for each in (self.predicted, self.traced)]
        table = [f"{name:<13}{ours:>12}{theirs:>10}" for name, ours, theirs in [*rows, ("peak, GiB", *peaks)]]
        return [*table, f"The closed form is {self.ratio:.4f} of the dry run, which took {self.seconds:.0f} s."]


def _cells(comparison: Comparison, name: str) -> tuple[str, str]:
    return f"{comparison.predicted[name] / GIB:.3f}", f"{comparison.traced[name] / GIB:.3f}"


def compare(row: Row, model: str, revision: str | None, rank: int = 0) -> Comparison:
    """Trace a row in a process of its own, as one of its processes, and hold the closed form against it.

    Raises:
        InputError: if it cannot be traced.
        RunStopped: if the dry run failed.
    """
    found = trace_in_child(read_config(model, revision), row.setting, rank=rank)
    predicted = row.memory.parts | {"workspace": row.memory.parts["workspace"] - CUBLAS_BYTES}
    return Comparison(predicted, in_parts(found), found.seconds)


def in_parts(found: Trace) -> dict[str, int]:
    """A trace's peak by the parts of the closed form."""
    categories = found.peak.categories
    return {part: sum(categories.get(name, 0) for name in names) for part, names in OF_PARTS.items()}
