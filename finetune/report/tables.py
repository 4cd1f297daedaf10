"""Tables of a report: what runs were, what came of them, and in what their configurations differ."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.report.run_read import RunRead
from finetune.units import spoken

ALWAYS_DIFFERENT = ("train.output_dir", "train.overwrite", "checkpoint.resume")
NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Rows of texts, of which the first column names what the others tell."""

    head: list[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, head: Sequence[str], rows: Mapping[str, Sequence[str]]) -> "Table":
        """Without rows that tell nothing."""
        told = [[name, *cells] for name, cells in rows.items() if any(cell != NOTHING for cell in cells)]
        return cls(["", *head], told)


def summary(runs: Sequence[RunRead]) -> Table:
    """A column for each run."""
    return Table.of(
        [run.name for run in runs],
        {
            "model": [str(run.part("config", "model").get("path", NOTHING)) for run in runs],
            "trained": [_trained(run) for run in runs],
            "launch": [_launch(run) for run in runs],
            "state": [state(run) for run in runs],
            "loss of the last step": [_loss_of_last_step(run) for run in runs],
            "held-out loss": [_before_and_after(run, "eval_loss", ".4f") for run in runs],
            "exact match": [_before_and_after(run, "exact_match", ".1%") for run in runs],
            "trained tokens": [_text(run.total("tokens") or None, ",.0f") for run in runs],
            "speed": [_text(run.typical("tokens_per_second"), ",.0f", " tokens/s") for run in runs],
            "MFU": [_text(run.typical("mfu"), ".1%") for run in runs],
            "peak memory": [_peak(run) for run in runs],
            "time in steps": [spoken(run.total("step_seconds")) if run.steps else NOTHING for run in runs],
            "hardware": [_hardware(run) for run in runs],
        },
    )


def state(run: RunRead) -> str:
    """How far a run is."""
    steps, done = run.record.get("steps"), run.steps[-1]["step"] if run.steps else 0
    stopped_after = run.part("stopped").get("after_step")
    if run.has_result and run.record.get("measured") and done in (steps, stopped_after):
        return f"finished, {done:,} steps" if stopped_after is None else f"stopped early, {done:,} of {steps:,} steps"
    return f"{done:,} of {steps:,} steps" if isinstance(steps, int) else f"{done:,} steps"


def differences(runs: Sequence[RunRead]) -> Table:
    """Keys of the configurations, and of what else decides on a run, in which the runs differ."""
    flat = [dict(_flat(run)) for run in runs]
    keys = [key for key in dict.fromkeys(key for each in flat for key in each) if key not in ALWAYS_DIFFERENT]
    values = {key: [str(each.get(key, NOTHING)) for each in flat] for key in keys}
    return Table.of([run.name for run in runs], {key: told for key, told in values.items() if len(set(told)) > 1})


def data(run: RunRead) -> Table:
    """What a run reads."""
    parts = {"train": "training", "eval": "held-out"}
    found = {name: run.part("data_figures", part) for part, name in parts.items()}
    found = {name: figures for name, figures in found.items() if figures}
    rows: dict[str, list[str]] = {}
    for key in ("rows", "tokens", "trained_tokens", "longest", "truncated", "dropped", "rejected"):
        name = {"longest": "longest row", "truncated": "rows cut at max_length", "dropped": "too long, left out"}
        rows[name.get(key, key.replace("_", " "))] = [f"{figures[key]:,}" for figures in found.values()]
    rows["formats"] = [", ".join(figures["formats"]) for figures in found.values()]
    return Table.of(list(found), rows if found else {})


def _flat(run: RunRead) -> Iterator[tuple[str, Any]]:
    for section, values in run.part("config").items():
        for key, value in values.items() if isinstance(values, dict) else ():
            yield f"{section}.{key}", value
    for key in ("name", "processes", "precision"):
        yield {"name": "strategy"}.get(key, key), run.part("strategy").get(key, NOTHING)
    for key in ("train", "eval"):
        yield f"fingerprint of data.{key}", str(run.part("data").get(key) or NOTHING)[:12]
    yield "commit", run.record.get("git_commit", NOTHING)
    yield from run.part("packages").items()


def _trained(run: RunRead) -> str:
    adapter, bits = run.part("config", "adapter").get("type"), run.part("config", "quantization").get("bits")
    if adapter is None:
        return NOTHING
    if adapter == "none":
        return "all weights"
    return f"{adapter} of rank {run.part('config', 'adapter')['rank']}" + (
        f", base in {bits} bits" if bits != "none" else ""
    )


def _launch(run: RunRead) -> str:
    launch = run.part("strategy")
    if not launch:
        return NOTHING
    count = launch["processes"]
    return f"{launch['name']}, {count:,} process{'es' if count > 1 else ''}, precision {launch['precision']}"


def _hardware(run: RunRead) -> str:
    gpus = run.part("hardware").get("gpus")
    if gpus is None:
        return NOTHING
    return (
        ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
        or f"{run.part('hardware')['cpus']} CPU cores, no GPU"
    )


def _before_and_after(run: RunRead, name: str, form: str) -> str:
    """As run.yaml tells it; of a run that is not finished, the last one."""
    found = run.part(name)
    if not found:
        return _text(run.last(name), form)
    return f"{_text(found['before'], form)} before, {_text(found['after'], form)} after"


def _loss_of_last_step(run: RunRead) -> str:
    """Not that of the last step which had one: an earlier loss would hide how a run ended."""
    found = run.course("loss")[-1:]
    if not found or found[0][0] != run.steps[-1]["step"]:
        return NOTHING
    return f"{found[0][1]:.4f}" if math.isfinite(found[0][1]) else "not finite"


def _peak(run: RunRead) -> str:
    measured, predicted = run.last("peak_memory_gib"), run.part("plan").get("peak_memory_gib")
    told = [] if measured is None else [f"{measured:.2f} GiB"]
    told += [] if predicted is None else [f"{predicted:.2f} GiB predicted"]
    return ", ".join(told) or NOTHING


def _text(value: float | None, form: str, unit: str = "") -> str:
    return NOTHING if value is None else f"{value:{form}}{unit}"
