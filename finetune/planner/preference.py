"""Which of several rows a practitioner would take.

What fits comes before what may just fit; what stays on the GPUs as it was asked for before bf16 weights or 8-bit state,
and these before offload. Among rows of one kind the fastest counts, but speeds within a tenth are equal, and of those
the simplest wins: 100 tokens/s under zero2, 95 under ddp and 80 under fsdp2 are ordered ddp, zero2, fsdp2.
"""

from collections.abc import Iterable, Sequence

from finetune.config.compatibility import Cell
from finetune.config.strategy_names import STRATEGIES
from finetune.planner.changes import reduction
from finetune.planner.judged_rows import Row
from finetune.trace.setting import Setting

SAME_SPEED = 0.10
"""Share by which the speeds of two rows may differ and be equal: predictions across strategies are no better."""
SIMPLEST_FIRST = tuple(sorted(STRATEGIES, key=lambda strategy: Cell(strategy, None, "none", "adamw").offloads))
"""Strategies: what needs no further package comes first, offload last."""


def in_order(rows: Iterable[Row], base: Setting) -> list[Row]:
    """All rows, the one to take first; what does not fit last, on the GPUs before offloaded, by what it needs.

    Args:
        base: the setting that was asked for, of which rows may be reductions.
    """
    by_kind: dict[tuple[int, bool, bool], list[Row]] = {}
    for row in rows:
        place = ("fits", "tight", "does not fit").index(row.verdict)
        by_kind.setdefault((place, row.offloads, bool(reduction(row.setting, base))), []).append(row)
    found: list[Row] = []
    for (place, _, _), alike in sorted(by_kind.items(), key=lambda kind: kind[0]):
        if place == 2:
            found += sorted(alike, key=_share)
        else:
            found += [row for band in bands(alike) for row in sorted(band, key=_simplicity)]
    return found


def bands(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of equal speed together, measured by the fastest of each band; the fastest band first."""
    found: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: -row.time.tokens_per_second):
        if found and row.time.tokens_per_second >= (1 - SAME_SPEED) * found[-1][0].time.tokens_per_second:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def simplest_of_the_fastest(rows: Sequence[Row]) -> Row:
    return min(bands(rows)[0], key=_simplicity)


def _simplicity(row: Row) -> tuple[int, int, bool, float, float]:
    """Smaller is simpler. Full or adapter is the user's choice, which only speed decides; 16 bits before quantised."""
    setting = row.setting
    return (
        SIMPLEST_FIRST.index(setting.strategy),
        setting.size,
        setting.bits is not None,
        -row.time.tokens_per_second,
        _share(row),
    )


def _share(row: Row) -> float:
    return row.worst.share or 0.0
