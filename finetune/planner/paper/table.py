"""The answer as text of 80 columns, and as a dictionary for JSON."""

from dataclasses import asdict, replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from finetune.planner.paper.cluster import ASSUMED, Assumptions, Cluster
from finetune.planner.paper.layout import Layout
from finetune.planner.paper.offload import offloads
from finetune.planner.paper.prediction import Prediction, predict
from finetune.planner.paper.ranking import Question, Ranking, rank, reason, row_lengths
from finetune.planner.pipeline_schedule import Balance
from finetune.units import GIB

if TYPE_CHECKING:
    from finetune.planner.shape import ModelShape

WIDTH = 80
ROWS_THAT_FIT = 10
ROWS_THAT_DO_NOT = 4
BALANCES: tuple[Balance, ...] = ("time", "parameters", "memory")


def show(
    shape: "ModelShape",
    cluster: Cluster,
    question: Question,
    assumptions: Assumptions = ASSUMED,
) -> dict[str, Any]:
    """The whole answer: every layout, for the first its stages, traffic, offloads and other row lengths.

    Raises:
        InputError: see ``ranking.rank``.
    """
    ranking = rank(shape, cluster, question, assumptions)
    first = ranking.possible[0]
    swept = row_lengths(shape, cluster, first.layout, first.job, assumptions)
    return {
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "cluster": asdict(cluster),
        "assumptions": asdict(assumptions),
        "job": asdict(first.job),
        "layouts": [
            {**_figures(one), "reason": reason(one, first, cluster), "seconds": one.seconds} for one in ranking.possible
        ],
        "impossible": [{"layout": asdict(layout), "reasons": why} for layout, why in ranking.impossible],
        "stages": [asdict(stage) for stage in first.stages],
        "memory": asdict(first.memory),
        "traffic": [asdict(one) for one in first.traffic],
        "offload": [asdict(one) for one in offloads(first, cluster)],
        "row_lengths": [_figures(one) for pair in swept for one in pair],
    }


def _figures(one: Prediction) -> dict[str, Any]:
    return {
        "layout": asdict(one.layout),
        "row_tokens": one.job.row_tokens,
        "activation_checkpointing": one.job.activation_checkpointing,
        "layers": [stage.layers for stage in one.stages],
        "memory_gib": one.memory.total / GIB,
        "fits": one.fits,
        "bubble": one.bubble,
        "imbalance": one.imbalance,
        "step_seconds": one.step_seconds,
        "tokens_per_second": one.tokens_per_second,
        "tflops_per_gpu": one.tflops_per_gpu,
    }


def explain(
    shape: "ModelShape",
    cluster: Cluster,
    question: Question,
    assumptions: Assumptions = ASSUMED,
) -> str:
    """The answer to read, in lines of at most 80 columns.

    Raises:
        InputError: see ``ranking.rank``.
    """
    ranking = rank(shape, cluster, question, assumptions)
    first = ranking.possible[0]
    blocks = [
        _opening(shape, cluster, question, ranking),
        _layouts(ranking, cluster),
        _stages(shape, cluster, first, assumptions),
        _traffic(first),
        _offloads(first, cluster),
        _row_lengths(shape, cluster, first, assumptions),
        _closing(shape, cluster, question, ranking, assumptions),
    ]
    return "\n\n".join(blocks) + "\n"


def _opening(shape: "ModelShape", cluster: Cluster, question: Question, ranking: Ranking) -> str:
    job = ranking.possible[0].job
    active = shape.active_parameters
    met = f", {active / 1e9:.2f} billion of them met by a token" if active != shape.parameters else ""
    state = "split over the replicas" if question.shards_optimizer else "whole in every replica"
    return _paragraph(
        f"{shape.parameters / 1e9:.2f} billion parameters{met}; on {cluster.name}: {cluster.gpus} GPUs with "
        f"{cluster.memory_gib:.1f} GiB. {job.global_batch_rows} rows of {job.row_tokens} tokens a step, "
        f"{job.micro_batch_rows} a micro-batch; optimizer state {state}. Computed, not measured."
    )


def _paragraph(text: str) -> str:
    return "\n".join(wrap(text, WIDTH))


def _layouts(ranking: Ranking, cluster: Cluster) -> str:
    """For each pair of tensor and pipeline factors the best layout: the fastest that fit, the nearest that do not."""
    first = ranking.possible[0]
    each: dict[tuple[int, int], Prediction] = {}
    for one in ranking.possible:
        each.setdefault((one.layout.tensor, one.layout.pipeline), one)
    fitting = [one for one in each.values() if one.fits != "does not fit"]
    misfits = [one for one in each.values() if one.fits == "does not fit"]
    lines = [
        "tensor pipeline context expert data  recompute    GiB  bubble TFLOP/s",
        *(_row(one, reason(one, first, cluster)) for one in fitting[:ROWS_THAT_FIT]),
        *(_row(one, reason(one, first, cluster)) for one in misfits[:ROWS_THAT_DO_NOT]),
    ]
    if any(one.fits == "tight" for one in fitting[:ROWS_THAT_FIT]):
        lines.append("? over 80 % of the memory: may run out")
    return "\n".join(lines)


def _row(one: Prediction, why: str) -> str:
    layout = one.layout
    mark = {"fits": " ", "tight": "?", "does not fit": "x"}[one.fits]
    factors = f"{layout.tensor:>6}{layout.pipeline:>9}{layout.context:>8}{layout.expert:>7}{layout.data:>5}"
    recompute = f"  {one.job.activation_checkpointing:<9}"
    figures = f"{one.memory.total / GIB:>7.1f}{mark}{one.bubble:>7.1%}{one.tflops_per_gpu:>8.0f}"
    line = factors + recompute + figures
    return f"{line}\n       {why}" if why else line


def _stages(shape: "ModelShape", cluster: Cluster, one: Prediction, assumptions: Assumptions) -> str:
    """Each stage of a layout, and how the layers would be dealt if something else was balanced."""
    slowest = max(stage.seconds for stage in one.stages)
    lines = [
        _paragraph(f"Stages of {one.layout.name}; embedding in the first, head and loss in the last:"),
        "stage  layers  parameters  micro-batches held   state  activations  busy",
    ]
    lines += [
        f"{stage.index + 1:>5}{stage.layers:>8}{stage.parameters / 1e9:>10.2f}e9{stage.micro_batches_held:>20.4g}"
        f"{stage.state_bytes / GIB:>8.1f}{(stage.held_bytes + stage.once_bytes) / GIB:>13.1f}"
        f"{stage.seconds / slowest:>6.0%}"
        for stage in one.stages
    ]
    for balance in BALANCES:
        other = predict(shape, one.layout, one.job, cluster, assumptions, balance=balance)
        dealt = " ".join(str(stage.layers) for stage in other.stages)
        lines += wrap(
            f"balanced by {balance}: {dealt} layers; the slowest stage has {other.imbalance:.3f} of the mean, "
            f"{other.tflops_per_gpu:.0f} TFLOP/s",
            WIDTH,
            subsequent_indent="  ",
        )
    return "\n".join(lines)


def _traffic(one: Prediction) -> str:
    lines = ["Traffic of a GPU in a step:", "for                 group  link       times        GB  seconds  waited"]
    lines += [
        f"{each.name:<20}{each.group:>5}  {each.link:<8}{each.count:>8.0f}{each.bytes_per_gpu / 1e9:>10.1f}"
        f"{each.seconds:>9.3f}{each.exposed_seconds:>8.3f}\n    {each.what}"
        for each in one.traffic
    ]
    return "\n".join(lines) if one.traffic else "Nothing travels between GPUs."


def _offloads(one: Prediction, cluster: Cluster) -> str:
    lines = [
        f"Kept elsewhere, for a step of {one.step_seconds:.1f} s:",
        "what                   to    GPU GiB  GiB/machine on host  on disk  more s",
    ]
    lines += [
        f"{each.what:<22} {each.to:<4}{each.gpu_bytes / GIB:>9.1f}{each.host_bytes / GIB:>21.0f}"
        f"{each.disk_bytes / GIB:>9.0f}{each.extra_seconds:>+8.1f}"
        for each in offloads(one, cluster)
    ]
    return "\n".join(lines)


def _row_lengths(shape: "ModelShape", cluster: Cluster, one: Prediction, assumptions: Assumptions) -> str:
    lines = [
        _paragraph(f"{one.layout.name} at other row lengths, the same tokens a step:"),
        "row tokens   kept activations          recomputed",
        "              GiB  verdict       TFLOP/s   GiB  verdict       TFLOP/s",
    ]
    for without, with_it in row_lengths(shape, cluster, one.layout, one.job, assumptions):
        cells = [f"{x.memory.total / GIB:>7.1f}  {x.fits:<12}{x.tflops_per_gpu:>9.0f}" for x in (without, with_it)]
        lines.append(f"{without.job.row_tokens:>10}{cells[0]}{cells[1]}")
    return "\n".join(lines)


def _closing(
    shape: "ModelShape", cluster: Cluster, question: Question, ranking: Ranking, assumptions: Assumptions
) -> str:
    """What the answer hangs on."""
    first = ranking.possible[0]
    if ranking.best is None:
        text = f"No layout fits; {first.layout.name} needs least, {first.memory.total / GIB:.0f} GiB a GPU."
    else:
        text = f"Best: {first.layout.name}, activation checkpointing {first.job.activation_checkpointing}."
    contrary = rank(shape, cluster, replace(question, shards_optimizer=not question.shards_optimizer), assumptions)
    other = contrary.possible[0]
    state = "whole in every replica" if question.shards_optimizer else "split over the replicas"
    text += (
        f" With the optimizer state {state} it would be {other.layout.name} ({other.memory.total / GIB:.1f} GiB, "
        f"{other.tflops_per_gpu:.0f} TFLOP/s)."
        if other.layout != replace(first.layout, shards_optimizer=other.layout.shards_optimizer)
        else f" With the optimizer state {state} it is the same."
    )
    if ranking.impossible:
        text += f" {_layouts_left_out(ranking.impossible)}"
    return _paragraph(text)


def _layouts_left_out(impossible: tuple[tuple[Layout, tuple[str, ...]], ...]) -> str:
    layout, why = impossible[0]
    return f"{len(impossible)} layouts are impossible, {layout.name} for one: {why[0]}"
