"""One row of the answer: a way to train, the memory that it needs, its speed, and whether it fits."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from finetune.planner.memory import StepMemory, needed_bytes
from finetune.planner.question import Question
from finetune.planner.speed import StepTime
from finetune.trace.setting import Setting
from finetune.units import GIB

Verdict = Literal["fits", "tight", "does not fit"]
COMFORTABLE = 0.9
"""Share of a memory up to which something fits without a doubt; above it, up to all of it, it is tight."""


@dataclass(frozen=True)
class Need:
    """Bytes of one kind of memory: needed, and there (None: not known)."""

    what: str
    bytes: int
    there: int | None

    @property
    def share(self) -> float | None:
        if self.there:
            return self.bytes / self.there
        return None if self.there is None else math.inf if self.bytes else 0.0

    @property
    def verdict(self) -> Verdict:
        """What is not known is no obstacle."""
        return "fits" if self.there is None else verdict(self.bytes, self.there)


def verdict(needed: float, there: float) -> Verdict:
    """Whether so many bytes find room."""
    if needed > there:
        return "does not fit"
    return "fits" if needed <= COMFORTABLE * there else "tight"


@dataclass(frozen=True)
class Row:
    """A way to train, judged."""

    setting: Setting
    memory: StepMemory
    """At the peak, as PyTorch's allocator counts it."""
    gpu: Need
    """With what a GPU needs beside the allocator's peak."""
    host: Need
    """Of one machine."""
    disk: Need
    """Of one checkpoint, and of what is swapped to disk during training."""
    time: StepTime

    @property
    def name(self) -> str:
        """As part of a sentence."""
        method = "full fine-tuning" if self.setting.adapter == "none" else self.setting.method.text
        return f"{method} under {self.setting.launched}"

    @property
    def offloads(self) -> bool:
        """Whether anything waits in host memory or on disk for its use."""
        return self.setting.placement.optimizer_on != "gpu" or self.setting.offloads_activations

    @property
    def worst(self) -> Need:
        """The memory of which most is taken."""
        return max((self.gpu, self.host, self.disk), key=lambda need: need.share or 0.0)

    @cached_property
    def verdict(self) -> Verdict:
        return self.worst.verdict


def gpu_need(question: Question, setting: Setting, memory: StepMemory | None = None) -> Need:
    """What a way to train needs of each GPU.

    Args:
        memory: of its step, if it is known.
    """
    gpu = question.machines.gpu
    memory = memory or question.model.memory(setting, large_workspaces=gpu.has_large_workspaces)
    return Need("GPU memory", needed_bytes(memory, setting), int(gpu.memory_gib * GIB))


def judged(question: Question, setting: Setting) -> Row:
    """Predict one way to train."""
    model, machines = question.model, question.machines
    memory = model.memory(setting, large_workspaces=machines.gpu.has_large_workspaces)
    host = model.host_bytes(setting, processes_of_machine=machines.gpus_per_node)
    swapped = model.swapped_bytes(setting)
    return Row(
        setting=setting,
        memory=memory,
        gpu=gpu_need(question, setting, memory),
        host=Need("host memory", host, question.host_bytes),
        disk=Need("disk", model.checkpoint_bytes(setting) + swapped, question.disk_beside(swapped)),
        time=model.time(setting, machines, mean_document_tokens=question.attended(setting)),
    )
