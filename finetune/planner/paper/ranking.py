"""Every layout of a job, predicted and put in order, and for each the reason why it is not the best."""

from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Literal

from finetune.errors import InputError
from finetune.planner.paper.cluster import Assumptions, Cluster
from finetune.planner.paper.layout import Job, Layout, layouts
from finetune.planner.paper.prediction import Prediction, predict
from finetune.units import GIB

if TYPE_CHECKING:
    from finetune.planner.shape import ModelShape

USUAL_TOKENS_PER_STEP = 2**22
ROW_LENGTHS = (2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class Question:
    """What is asked: a job, and the factors that are given."""

    row_tokens: int
    global_batch_rows: int | None = None
    """None: about four million tokens, a multiple of the GPUs so that no number of replicas is left out."""
    micro_batch_rows: int = 1
    activation_checkpointing: Literal["none", "full"] | None = None
    """None: of each layout the faster that fits."""
    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    virtual_stages: int = 1
    shards_optimizer: bool = False
    """False, as is Megatron-LM's default: every replica keeps the whole optimizer state."""

    def rows(self, cluster: Cluster) -> int:
        """Of an optimizer step."""
        if self.global_batch_rows is not None:
            return self.global_batch_rows
        unit = cluster.gpus * self.micro_batch_rows
        return unit * ceil(USUAL_TOKENS_PER_STEP / (self.row_tokens * unit))


@dataclass(frozen=True)
class Ranking:
    """Answers in order."""

    possible: tuple[Prediction, ...]
    """The fastest that fits first; those that do not fit last, by what they need. Each layout once."""
    impossible: tuple[tuple[Layout, tuple[str, ...]], ...]

    @property
    def best(self) -> Prediction | None:
        """None where nothing fits."""
        first = self.possible[0]
        return None if first.fits == "does not fit" else first


def rank(shape: "ModelShape", cluster: Cluster, question: Question, assumptions: Assumptions) -> Ranking:
    """All layouts of the cluster's GPUs.

    Raises:
        InputError: if there is no possible layout at all, with the reasons of those that were asked for; or if a number
            is not positive.
    """
    numbers = (question.row_tokens, question.rows(cluster), question.micro_batch_rows, question.virtual_stages)
    if min(numbers) < 1:
        raise InputError(f"Row length, batch sizes and virtual stages are {numbers}; each must be at least 1.")
    kept = question.activation_checkpointing
    jobs = [
        Job(question.row_tokens, question.rows(cluster), question.micro_batch_rows, checkpointing)
        for checkpointing in (("none", "full") if kept is None else (kept,))
    ]
    found = layouts(
        cluster.gpus,
        shape,
        jobs[0],
        tensor=question.tensor,
        pipeline=question.pipeline,
        context=question.context,
        expert=question.expert,
        virtual_stages=question.virtual_stages,
        shards_optimizer=question.shards_optimizer,
    )
    possible = [
        min((predict(shape, layout, job, cluster, assumptions) for job in jobs), key=_order)
        for layout, reasons in found
        if not reasons
    ]
    impossible = tuple((layout, tuple(reasons)) for layout, reasons in found if reasons)
    if not possible:
        asked = (
            f"No layout of {cluster.gpus} GPUs is possible as it was asked; leave factors out, or give such whose "
            f"product divides {cluster.gpus}."
        )
        raise InputError([asked, *dict.fromkeys(sentence for _, reasons in impossible for sentence in reasons)])
    return Ranking(tuple(sorted(possible, key=_order)), impossible)


def _order(prediction: Prediction) -> tuple[bool, float]:
    """Sorting key: what fits by speed, what does not by need."""
    misfit = prediction.fits == "does not fit"
    return misfit, prediction.memory.total if misfit else prediction.step_seconds


def reason(prediction: Prediction, best: Prediction, cluster: Cluster) -> str:
    """Why a layout is not the best: what it needs, or the cause that costs most more, in % of the best's step."""
    if prediction.fits == "does not fit":
        return f"needs {prediction.memory.total / GIB:.0f} of {cluster.memory_gib:.0f} GiB"
    more = {cause: seconds - best.seconds.get(cause, 0.0) for cause, seconds in prediction.seconds.items()}
    cause = max(more, key=lambda name: more[name])
    if prediction.layout == best.layout or more[cause] <= 0:
        return ""
    worded = "smaller products" if cause == "matrix products" else cause
    return f"{worded} +{more[cause] / best.step_seconds:.1%}"


def row_lengths(
    shape: "ModelShape", cluster: Cluster, layout: Layout, job: Job, assumptions: Assumptions
) -> list[tuple[Prediction, Prediction]]:
    """A layout at other row lengths with the same tokens a step, without and with activation checkpointing.

    Row lengths at which a step has no whole number of micro-batches are left out.
    """
    found = []
    for row_tokens in ROW_LENGTHS:
        rows = job.tokens_per_step // row_tokens
        if rows and rows % (layout.data * job.micro_batch_rows) == 0 and row_tokens % (2 * layout.context) == 0:
            without = replace(job, row_tokens=row_tokens, global_batch_rows=rows, activation_checkpointing="none")
            jobs = (without, replace(without, activation_checkpointing="full"))
            without_it, with_it = (predict(shape, layout, one, cluster, assumptions) for one in jobs)
            found.append((without_it, with_it))
    return found
