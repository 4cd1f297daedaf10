"""An answer in sentences: why a row is recommended, what it needs, what it gives up, and what else there is."""

from collections.abc import Mapping
from dataclasses import replace

from finetune.cli.planning import largest_term
from finetune.planner.changes import given_up, reduction, with_8_bit_state, with_bf16_weights
from finetune.planner.choose import Plan
from finetune.planner.judged_rows import Need, Row, judged
from finetune.planner.preference import SAME_SPEED, bands
from finetune.units import GIB

FIT = {"fits": ("fits", "fit"), "tight": ("may just fit", "may just fit")}
"""One and several."""


def reasons(plan: Plan) -> tuple[str, ...]:
    """Sentences on the row to take, the choice first; or where nothing fits, on what would."""
    if plan.best is None:
        return _nothing_fits(plan)
    return (
        f"{_choice(plan, plan.best)} It needs {_needs(plan.best)}.",
        *_less_exact(plan, plan.best),
        *_just_fits_alone(plan, plan.best),
        *_left_untried(plan, plan.best),
        *_faster_offloaded(plan, plan.best),
        *_threads_of_the_host(plan.best),
        *_every_weight(plan, plan.best),
        *_unbalanced(plan),
        largest_term.sentence(plan.question, plan.best),
    )


def _nothing_fits(plan: Plan) -> tuple[str, ...]:
    """What would fit, and what takes most of the row that is nearest to fitting."""
    least, nearest = plan.rows[0], plan.nearest
    worst = least.worst
    if nearest is None:
        found = [
            f"Nothing fits, and no similar option does: {least.name} needs {worst.bytes / GIB:,.1f} GiB of "
            f"{worst.what}, but there are {(worst.there or 0) / GIB:,.1f} GiB.",
            "Use more or larger GPUs, or a smaller model."
            if worst is least.gpu
            else f"Use more machines, machines with more {worst.what}, or a smaller model.",
        ]
    else:
        host = f", with {_host_memory(nearest.row)}" if nearest.row.offloads else ""
        found = [f"Nothing fits. The nearest option that fits is {nearest.row.name}{host}: {nearest.text}."]
        found += nearest.given_up
    if worst is least.gpu:
        found.append(largest_term.sentence(plan.question, least, f"the peak of {least.name}"))
    return tuple(found)


def _host_memory(row: Row) -> str:
    """What a machine must have, as part of a sentence."""
    return f"{_of_those_there(row.host)} of host memory per machine"


def _choice(plan: Plan, best: Row) -> str:
    """Out of how many; what offloads, or is less exact than asked, is counted apart."""
    asked = plan.question.base
    alike = [
        row
        for row in plan.rows
        if (row.verdict, row.offloads) == (best.verdict, best.offloads)
        and bool(reduction(row.setting, asked)) == bool(reduction(best.setting, asked))
    ]
    gpus = "on the GPU" if plan.question.machines.world_size == 1 else "on the GPUs"
    where = "with offload" if best.offloads else gpus
    one, several = (f"{fit} {where}" for fit in FIT[best.verdict])
    of_same_speed = bands(alike)[0]
    if len(plan.rows) == 1:
        rank = one
    elif len(alike) == 1:
        rank = f"is the only option that {one}"
    elif best is of_same_speed[0]:
        rank = f"is the fastest of {len(alike)} options that {several}"
    else:
        among = f"{len(of_same_speed)} options that {several} and are within {SAME_SPEED:.0%} of the fastest"
        rank = f"is the simplest of {among}"
    before = ""
    if best.verdict == "tight":
        before = "No option leaves a tenth of the memory free: "
    elif best.offloads and _tight_alone(plan) is not None:
        before = f"{gpus} alone no option leaves a tenth of the memory free: "
    elif best.offloads and not all(row.offloads for row in plan.rows):
        before = f"Nothing fits {gpus} alone: "
    elif reduced := reduction(best.setting, asked):
        before = f"With {joined(reduced)}, "
    return _sentence_start(f"{before}{best.name} {rank}.")


def _needs(row: Row) -> str:
    parts = [f"{row.gpu.bytes / GIB:.1f} of {(row.gpu.there or 0) / GIB:.1f} GiB of a GPU"]
    if row.worst is row.disk and row.verdict == "tight":
        parts.append(f"{_of_those_there(row.disk)} of disk")
    if row.offloads or (row.worst is row.host and row.verdict == "tight"):
        hint = " (see --host-memory)" if row.host.there is None else ""
        parts.append(_host_memory(row) + hint)
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _of_those_there(need: Need) -> str:
    there = "" if need.there is None else f" of {need.there / GIB:,.0f}"
    return f"{need.bytes / GIB:,.0f}{there} GiB"


def _less_exact(plan: Plan, best: Row) -> list[str]:
    """What bf16 weights and 8-bit state give up, and how to keep it."""
    asked = plan.question.base
    if not reduction(best.setting, asked):
        return []
    kept = f"With {' '.join(f'--{key} {value}' for key, value in reduction(asked, best.setting).items())}, "
    exact = [
        row
        for row in plan.rows
        if row.setting.method == best.setting.method
        and not reduction(row.setting, asked)
        and row.verdict != "does not fit"
    ]
    if not exact:
        return [*given_up(best.setting, asked), kept + "nothing fits."]
    strategy, speed = exact[0].setting.launched, _speed(exact[0], best)
    how = f"reaches {speed} of that speed, with {_host_memory(exact[0])}"
    if not exact[0].offloads:
        how = f"may just fit, at {speed} of that speed"
    return [*given_up(best.setting, asked), f"{kept}{strategy} {how}."]


def _tight_alone(plan: Plan) -> Row | None:
    """The first row that may just fit without offload."""
    return next((row for row in plan.rows if row.verdict == "tight" and not row.offloads), None)


def _just_fits_alone(plan: Plan, best: Row) -> list[str]:
    """What could do without the offload that is recommended."""
    tight = _tight_alone(plan) if best.offloads else None
    if tight is None:
        return []
    return [
        f"Without offload {tight.name} may just fit ({tight.gpu.share or 0:.0%} of the GPU), at "
        f"{_speed(tight, best)} of that speed."
    ]


def _left_untried(plan: Plan, best: Row) -> list[str]:
    """What would have been tried before offload, had it been left open."""
    if not best.offloads or best.setting.adapter != "none" or all(row.offloads for row in plan.rows):
        return []
    base, untried = plan.question.base, {}
    if "weights" in plan.question.chosen and with_bf16_weights(base):
        untried["train.weights"] = "bf16 weights"
    if "optimizer" in plan.question.chosen and with_8_bit_state(base):
        untried["train.optimizer"] = "8-bit optimizer state"
    if not untried:
        return []
    return [f"Leave out {' and '.join(untried)} to have {' and '.join(untried.values())} tried before offload."]


def _faster_offloaded(plan: Plan, best: Row) -> list[str]:
    """What offloading could gain, where nothing needs it."""
    offloaded = [row for row in plan.rows if row.verdict == best.verdict and row.offloads]
    fastest = max(offloaded, key=lambda row: row.time.tokens_per_second, default=best)
    if best.offloads or fastest.time.tokens_per_second <= (1 + SAME_SPEED) * best.time.tokens_per_second:
        return []
    return [
        f"{_sentence_start(fastest.name)} is predicted to reach {_speed(fastest, best)} of that speed if every "
        f"transfer overlaps with computation, with {_host_memory(fastest)}."
    ]


def _threads_of_the_host(best: Row) -> list[str]:
    """How to speed up an optimizer that steps on the host."""
    if best.setting.placement.optimizer_on == "gpu":
        return []
    share = best.time.parts.optimizer / best.time.step_seconds
    if share < 0.01:
        return []
    return [
        f"The optimizer steps on the host, with one thread per process ({share:.0%} of the time): put "
        "OMP_NUM_THREADS=N in front of the command, with N cores for each GPU."
    ]


def _every_weight(plan: Plan, best: Row) -> list[str]:
    """How to train every weight, where an adapter is recommended."""
    whole = [
        row for row in plan.rows if row.setting.adapter == "none" and row.verdict == best.verdict and not row.offloads
    ]
    if best.setting.adapter == "none" or not whole:
        return []
    row, asked = whole[0], plan.question.base
    reduced = reduction(row.setting, asked)
    changed = f" with {joined(reduced)}" if reduced else ""
    speed = _speed(row, best)
    return [f"To train every weight, use {row.setting.launched}{changed}: {speed} of that speed (--method full)."]


def _unbalanced(plan: Plan) -> list[str]:
    """What it would take where routers are not balanced: of the first row whose GPUs share experts."""
    sharing = [row for row in plan.rows if row.setting.experts > 1 and row.verdict != "does not fit"]
    if not sharing:
        return []
    row = sharing[0]
    loaded = judged(plan.question, replace(row.setting, expert_load=2))
    more = (loaded.gpu.bytes - row.gpu.bytes) / GIB
    less = "let more GPUs share the experts"
    if row.setting.micro_batch_size > 1:
        less = "reduce train.micro_batch_size"
    elif not row.setting.activation_checkpointing or row.setting.recomputed_layers is not None:
        less = "set train.activation_checkpointing to full"
    fits = {"fits": "", "tight": ", which just fits", "does not fit": f", which does not fit; {less} until they are"}
    return [
        f"{row.setting.launched} is planned for balanced routers: with twice the tokens for its experts, at "
        f"{_speed(loaded, row)} of the speed, a GPU needs {more:.1f} GiB more{fits[loaded.verdict]}."
    ]


def joined(keys: Mapping[str, str]) -> str:
    """Keys and their values, as part of a sentence."""
    return " and ".join(f"{key} {value}" for key, value in keys.items())


def _speed(row: Row, best: Row) -> str:
    return f"{row.time.tokens_per_second / best.time.tokens_per_second:.0%}"


def _sentence_start(text: str) -> str:
    return text[0].upper() + text[1:]
