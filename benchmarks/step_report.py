"""What ``benchmarks.step`` measured, as a table, a chart, and the manual's table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "step.jsonl"
PEERS = {
    "recipe": "recipe",
    "fp8": "recipe, fp8",
    "recomputed": "recipe, layers recomputed",
    "offloaded": "recipe, activations in host memory",
    "padded": "recipe, padded rows",
    "plain": "recipe, plain kernels",
    "trainer": "transformers' Trainer",
    "trl": "TRL's SFTTrainer",
}
SAME = ("model", "method", "max_length", "rows", "micro_batch", "packing", "weights", "optimizer")
"""What is the same of runs that are compared, on one device."""
HEADINGS = ("model", "method", "rows", "by", "tokens/s", "of recipe", "TFLOP/s", "peak GiB")


def sentence(case: dict[str, Any], found: dict[str, Any]) -> str:
    """What a run gave, or why it gave nothing."""
    what = f"{case['model']} {case['method']}, {PEERS[case['peer']]}: "
    if "error" in found:
        return what + found["error"]
    return what + f"{found['tokens_per_second']:,.0f} tokens/s, peak {found['peak_gib']:.1f} GiB"


def recorded(results: Path = RESULTS) -> list[dict[str, Any]]:
    """What was measured, oldest first."""
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def rows_of(records: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The newest figures of each case, beside those of the recipe: a text for each heading."""
    rows: list[tuple[str, ...]] = []
    for record in newest(records):
        if "error" in record:
            continue
        speed, own = record["tokens_per_second"], of_recipe(records, record)
        rows.append(
            (
                record["model"],
                how(record),
                micro_batch(record),
                PEERS[record["peer"]],
                f"{speed:,.0f}",
                f"{speed / own:.2f}" if own else "",
                f"{record['tflops_per_second']:.2f}",
                f"{record['peak_gib']:.1f}",
            )
        )
    return rows


def how(record: dict[str, Any]) -> str:
    """The method, with what is not the default: ``full bf16 adamw_8bit``."""
    has_bf16 = record["method"] == "full" and record["weights"] == "bf16"
    others = ["bf16"] * has_bf16 + [record["optimizer"]] * (record["optimizer"] != "adamw")
    return " ".join([record["method"], *others])


def micro_batch(record: dict[str, Any]) -> str:
    """Its rows, and their length in positions."""
    return f"{record['micro_batch']} x {record['max_length']:,}"


def report(records: Sequence[dict[str, Any]], chart: Path) -> None:
    """A table in the terminal, a sentence for each run that failed, and a chart."""
    console, table = Console(width=80), Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        wraps = heading in ("method", "by")
        table.add_column(heading, no_wrap=not wraps, min_width=len("adamw_8bit") * wraps)
    for row in rows_of(records):
        table.add_row(*row)
    console.print(table)
    for record in newest(records):
        if "error" in record:
            console.print(sentence(record, record))
    draw(records, chart)


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """For the manual."""
    lines: list[tuple[str, ...]] = [HEADINGS, ("---",) * len(HEADINGS), *rows_of(records)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def newest(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case on each device; a run that failed tells no device, and counts until its case is measured."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in records:
        case = tuple(record[key] for key in ("peer", *SAME))
        found.pop((*case, None), None)
        found[(*case, record.get("device"))] = record
    return list(found.values())


def of_recipe(records: Sequence[dict[str, Any]], record: dict[str, Any]) -> float | None:
    """Tokens a second of the recipe in the same case."""
    same = [
        r
        for r in newest(records)
        if r["peer"] == "recipe" and all(r.get(key) == record.get(key) for key in (*SAME, "device"))
    ]
    return same[0].get("tokens_per_second") if same else None


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of speed, and of memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [record for record in newest(records) if "error" not in record][::-1]
    names = [f"{r['model']} {how(r)}, {micro_batch(r)}\n{PEERS[r['peer']]}" for r in shown]
    colors = ["tab:blue" if r["peer"] == "recipe" else "lightgray" for r in shown]
    figure, both = plt.subplots(1, 2, figsize=(10, 1 + 0.5 * len(shown)), sharey=True, layout="constrained")
    for axes, key, title in zip(both, ("tokens_per_second", "peak_gib"), ("tokens a second", "peak memory, GiB")):
        # by their places: those of several devices may have one name
        bars = axes.barh(range(len(shown)), [r[key] for r in shown], color=colors)
        axes.bar_label(bars, fmt="{:,.0f}" if key == "tokens_per_second" else "{:.1f}", padding=3)
        axes.set_yticks(range(len(shown)), names)
        axes.set_title(title)
        axes.margins(x=0.25)
    figure.savefig(path)
    plt.close(figure)
