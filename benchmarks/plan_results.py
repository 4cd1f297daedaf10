"""What the recorded runs say of the planner: a table, how far off it was, false verdicts, and broken bounds."""

import statistics
from dataclasses import dataclass
from typing import Any

MEDIAN_ERROR, WORST_ERROR = 0.03, 0.05
"""Of the peak of memory, at most."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Summary:
    """Counts of runs, and errors as shares of what was measured."""

    finished: int
    memory_errors: dict[str, float]
    """By run, of those that finished: predicted over measured peak, less 1."""
    speed_errors: dict[str, float]
    ran_out: dict[str, list[str]]
    """By verdict, the runs that ran out of memory."""
    refused_but_ran: list[str]
    failed: list[str]
    to_be_measured: list[str]


def summary(runs: dict[str, Record]) -> Summary:
    """Sum up recorded runs, by name."""
    of = {name: run["measured"]["outcome"] if run["measured"] else "none" for name, run in runs.items()}
    finished = {name: run for name, run in runs.items() if of[name] == "finished"}
    timed = {name: run for name, run in finished.items() if run["predicted"]["tokens_per_second"]}
    ran_out: dict[str, list[str]] = {"fits": [], "tight": [], "does not fit": []}
    for name, run in runs.items():
        if of[name] == "out of memory":
            ran_out[run["predicted"]["verdict"]].append(name)
    return Summary(
        finished=len(finished),
        memory_errors={name: memory_error(run) for name, run in finished.items()},
        speed_errors={name: speed_error(run) for name, run in timed.items()},
        ran_out=ran_out,
        refused_but_ran=[name for name, run in finished.items() if run["predicted"]["verdict"] == "does not fit"],
        failed=[name for name in runs if of[name] == "failed"],
        to_be_measured=[name for name in runs if of[name] == "none"],
    )


def memory_error(run: Record) -> float:
    error: float = run["predicted"]["peak_gib"] / run["measured"]["allocated_gib"] - 1
    return error


def speed_error(run: Record) -> float:
    error: float = run["predicted"]["tokens_per_second"] / run["measured"]["tokens_per_second"] - 1
    return error


def table(runs: dict[str, Record]) -> str:
    """Predicted beside measured, in Markdown, with what it amounts to; peaks in GiB."""
    lines = [
        "| run | peak, predicted | measured | off | reserved | tokens/s, predicted | measured | off | verdict | it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join([name, *_cells(run)])} |" for name, run in runs.items()]
    return "\n".join([*lines, "", *sentences(runs)])


def _cells(run: Record) -> list[str]:
    predicted, measured = run["predicted"], run["measured"] or {"outcome": "was not run"}
    speed = predicted["tokens_per_second"]
    first, expected = f"{predicted['peak_gib']:.2f}", f"{speed:,.0f}" if speed else ""
    if measured["outcome"] != "finished":
        return [
            first,
            "",
            "",
            "",
            expected,
            "",
            "",
            predicted["verdict"],
            _TOLD.get(measured["outcome"], "was not run"),
        ]
    return [
        first,
        f"{measured['allocated_gib']:.2f}",
        f"{memory_error(run):+.1%}",
        f"{measured['reserved_gib']:.2f}",
        expected,
        f"{measured['tokens_per_second']:,.0f}",
        f"{speed_error(run):+.0%}" if speed else "",
        predicted["verdict"],
        "ran",
    ]


_TOLD = {"out of memory": "ran out of memory", "failed": "failed"}


def sentences(runs: dict[str, Record]) -> list[str]:
    """What the table amounts to."""
    found = summary(runs)
    told = [f"{found.finished} of {len(runs)} runs finished."]
    for what, errors in (("Peak of memory", found.memory_errors), ("Speed", found.speed_errors)):
        if errors:
            worst = max(errors, key=lambda name: abs(errors[name]))
            median = statistics.median(map(abs, errors.values()))
            told.append(f"{what}: median error {median:.1%}, worst {errors[worst]:+.1%} ({worst}).")
    told.append(
        f"Ran out of memory: {len(found.ran_out['fits'])} of those that should fit, {len(found.ran_out['tight'])} of "
        f"the tight ones, {len(found.ran_out['does not fit'])} of those that should not fit; "
        f"{len(found.refused_but_ran)} that should not fit ran."
    )
    return told


def broken_bounds(runs: dict[str, Record]) -> list[str]:
    """Sentences on what is worse than it may be."""
    found = summary(runs)
    told = [f"{name}: called to fit, and ran out of memory." for name in found.ran_out["fits"]]
    told += [f"{name}: the run failed; its record says why." for name in found.failed]
    told += [
        f"{name}: the peak is {error:+.1%} off, of which at most {WORST_ERROR:.0%} are allowed."
        for name, error in found.memory_errors.items()
        if abs(error) > WORST_ERROR
    ]
    if found.memory_errors and (median := statistics.median(map(abs, found.memory_errors.values()))) > MEDIAN_ERROR:
        told.append(f"The median error of the peak is {median:.1%}, of which at most {MEDIAN_ERROR:.0%} are allowed.")
    return told
