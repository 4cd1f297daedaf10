"""The record of a run, which run.yaml, each checkpoint and final/ hold."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class RunRecord:
    """What was asked for, on what, and what came of it. Written in this order; what is not known yet is left out."""

    config: dict[str, Any]
    """Sections of the configuration, with what the planner chose."""
    strategy: dict[str, Any]
    """``name``, ``processes``, ``precision``; and ``sharding``, once it is measured."""
    data: dict[str, str | None]
    """Fingerprints of what the run reads: ``train``, ``eval``, ``tokenizer``, ``base``, and the ``adapter`` that it
    continues from."""
    chat_template: Any
    steps: int
    plan: dict[str, Any] | None
    kernels: dict[str, Any]
    """How many modules of each kind compute in one operation, and ``computed_by``, whose kernels these are; of
    AdamW over bf16 weights, ``stepped_by``."""
    launcher: str
    """The launcher's process: the same after it has restarted those of the run."""
    environment: dict[str, Any]
    """``python``, ``packages``, ``hardware``, ``git_commit``: keys of their own in the file."""
    id: str
    data_figures: dict[str, Any] | None = None
    """Figures of what is read: ``train`` and ``eval``, see ``data.dataset.figures``; of a stream there are none."""
    resumed: list[dict[str, Any]] | None = None
    """Where the run was resumed, and how: ``after_step``, ``strategy``, ``processes``, and ``from`` of another run."""
    eval_loss: dict[str, float] | None = None
    """``before`` and ``after`` training."""
    measured: dict[str, float | None] | None = None
    """``peak_memory_gib`` and ``tokens_per_second``."""
    exact_match: dict[str, Any] | None = None
    """``rows``, and the share of right answers ``before`` and ``after``."""
    answers: list[dict[str, str]] | None = None
    """Those that are shown: ``prompt``, ``before`` (where it was asked) and ``after`` training."""
    held_bytes: list[dict[str, int]] | None = None
    """Of each process at the end, by kind: see ``distributed.held_bytes``."""
    tasks: dict[str, dict[str, Any]] | None = None
    """Of each task of eval.tasks by its name: ``score``, ``rows``, and its mean ``before`` and ``after`` training."""
    best: dict[str, Any] | None = None
    """``step`` whose weights are the result, where it is that of the best evaluation, and what that was by."""
    new_tokens: dict[str, Any] | None = None
    """``tokens`` that the chat template added to the tokenizer, ``trained_rows`` of the embedding, and its ``rows``."""
    stopped: dict[str, int] | None = None
    """``after_step``, where training ended early, and how many ``evaluations`` in a row had not improved by then."""

    def as_dict(self) -> dict[str, Any]:
        """As it is written."""
        written: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "environment":
                written |= value
            elif value is not None or each.name in ("plan", "chat_template"):
                written[each.name] = value
        return written


@dataclass(frozen=True)
class Progress:
    """Where a run stands after an optimizer step: what a checkpoint holds beside weights and optimizer state."""

    step: int = 0
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Lines of metrics.jsonl that may not have been written yet; the last is that of the step."""
    counters: dict[str, int] | None = None
    """Steps left out so far, see ``training.meter``."""
    answers: dict[str, str] = field(default_factory=dict)
    """To the questions of eval, before training."""
    eval_loss: float | None = None
    """Before training."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of the tasks of eval.tasks by their names, before training."""
    measured: dict[str, float | None] | None = None
    best: dict[str, Any] | None = None
    """Metrics of the step after which an evaluation was the best, where evaluations are compared."""
    evaluations_since_best: int = 0

    @classmethod
    def read(cls, contents: dict[str, Any]) -> "Progress":
        """Of a checkpoint; older ones lack fields, which have their defaults."""
        known = {each.name for each in fields(cls)}
        return cls(**{key: value for key, value in contents.items() if key in known})

    def as_dict(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return asdict(self)
