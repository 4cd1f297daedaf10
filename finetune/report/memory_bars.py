"""Memory by kind as bars: what the plan predicted at the peak of a step, and what each process held between steps."""

from dataclasses import dataclass

from finetune.report.run_read import RunRead
from finetune.units import GIB, size_text

KINDS = ("weights", "masters", "gradients", "optimizer", "activations", "loss", "gathered", "workspace")
"""Of the plan's peak and of ``held_bytes``; a colour of the style sheet each."""
MOST_PROCESSES = 16
"""That have a bar each."""


@dataclass(frozen=True)
class Part:
    """A piece of a bar."""

    kind: str
    text: str
    at: float
    """Share of the longest bar, at which it begins."""
    share: float
    """Of the longest bar."""


@dataclass(frozen=True)
class Bar:
    """A peak, or a process."""

    name: str
    total: str
    parts: list[Part]


def memory_bars(run: RunRead) -> list[Bar]:
    """The predicted peak of a process, then what each held at the end of the run, and its measured peak."""
    predicted = run.part("plan", "parts_gib")
    bars = (
        {"predicted peak": {kind: size * GIB for kind, size in predicted.items() if kind in KINDS}} if predicted else {}
    )
    processes = run.listed("held_bytes")
    for number, held in enumerate(processes[:MOST_PROCESSES]):
        name = f"process {number}" if len(processes) > 1 else "the process"
        bars[f"{name}, between steps"] = {kind: size for kind, size in held.items() if kind in KINDS}
        if "peak" in held:
            bars[f"{name}, measured peak"] = {"peak": held["peak"]}
    longest = max((sum(parts.values()) for parts in bars.values()), default=0)
    return [_bar(name, parts, longest) for name, parts in bars.items()] if longest else []


def _bar(name: str, sizes: dict[str, float], longest: float) -> Bar:
    parts, at = [], 0.0
    for kind, size in sizes.items():
        if size:
            parts.append(Part(kind, f"{kind}: {size_text(size)}", at / longest, size / longest))
            at += size
    return Bar(name, size_text(at), parts)
