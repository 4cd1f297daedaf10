"""A model that is asked about: its sizes, and what its steps take by their traces."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from finetune.errors import InputError
from finetune.hardware.cards import Machines
from finetune.planner import memory, speed
from finetune.planner.memory import StepMemory
from finetune.planner.rates import Rates
from finetune.planner.speed import StepTime
from finetune.trace.layers import Anatomy
from finetune.trace.placement import traced_as
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step
from finetune.trace.tracer import Tracer

Answer = TypeVar("Answer")


class NotTraced(Exception):
    """An answer needs the steps of settings, which will be traced together with others."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        super().__init__(settings)
        self.settings = settings


class Model:
    """What the planner's questions ask a model. It is compared by identity."""

    def __init__(self, config: Mapping[str, Any], tracer: Tracer) -> None:
        """
        Args:
            config: contents of a config.json.
            tracer: of the same configuration.

        Raises:
            InputError: if the model is published in a way that cannot be trained.
        """
        self.published_bits = published_bits(config)
        self.tracer = tracer
        self._puts_off = False

    @property
    def anatomy(self) -> Anatomy:
        """Its sizes.

        Raises:
            InputError: if transformers cannot build it.
        """
        return self.tracer.anatomy

    def together(self, questions: Sequence[Callable[[], Answer]]) -> list[Answer]:
        """Answers to questions about this model, which may be asked several times.

        What they need is traced in rounds, of all questions together: one that needs the step of a setting that is not
        traced yet is put off to the next round. Two questions that need two traces each, the second after the first,
        take two rounds of two traces.

        Raises:
            InputError, RunStopped: see ``step``.
        """
        if self._puts_off:  # within a question
            return [question() for question in questions]
        answers: dict[int, Answer] = {}
        self._puts_off = True
        try:
            while len(answers) < len(questions):
                needed = list[Setting]()
                for number, question in enumerate(questions):
                    try:
                        answers[number] = answers[number] if number in answers else question()
                    except NotTraced as missing:
                        needed += missing.settings
                self.tracer.prepare(needed)
        finally:
            self._puts_off = False
        return [answers[number] for number in range(len(questions))]

    def prepare(self, settings: Sequence[Setting]) -> None:
        """Have the steps of settings traced together.

        Raises:
            RunStopped: if the process that traces them ended.
        """
        missing = [traced for traced in map(traced_setting, settings) if not self.tracer.knows(traced)]
        if missing and self._puts_off:
            raise NotTraced(missing)
        self.tracer.prepare(missing)

    def step(self, setting: Setting) -> Step:
        """The traced step of a setting.

        Raises:
            InputError: if it cannot be trained, or not be traced.
            RunStopped: if the libraries here cannot be traced.
        """
        self.prepare([setting])
        return self.tracer.step(traced_setting(setting))

    def memory(self, setting: Setting, *, mean_document_tokens: float, large_workspaces: bool = True) -> StepMemory:
        """Bytes of a GPU at the peak of the step; see ``memory.step_memory``."""
        return memory.step_memory(
            self.step(setting), setting, mean_document_tokens=mean_document_tokens, large_workspaces=large_workspaces
        )

    def time(
        self, setting: Setting, machines: Machines, *, mean_document_tokens: float, rates: Rates | None = None
    ) -> StepTime:
        """Seconds of the step; see ``speed.step_time``."""
        return speed.step_time(
            self.step(setting), setting, machines, mean_document_tokens=mean_document_tokens, rates=rates
        )

    def host_bytes(self, setting: Setting, *, processes_of_machine: int) -> int:
        """Host memory of one machine; see ``memory.host_bytes``."""
        return memory.host_bytes(self.step(setting), self.anatomy, setting, processes_of_machine=processes_of_machine)

    def checkpoint_bytes(self, setting: Setting) -> int:
        """Of one checkpoint on disk; see ``memory.checkpoint_bytes``."""
        return memory.checkpoint_bytes(self.step(setting), setting)


def traced_setting(setting: Setting) -> Setting:
    """The setting whose step is traced for another."""
    strategy, world_size = traced_as(setting.strategy, setting.world_size)
    precision = setting.precision
    if precision == "fp16" and strategy != setting.strategy:
        precision = "bf16"  # what fp16 adds to the engine's step is done on the host
    layout = "flat" if setting.flat else "padded"
    return replace(setting, strategy=strategy, world_size=world_size, precision=precision, layout=layout)


def published_bits(config: Mapping[str, Any]) -> int | None:
    """Bits that bitsandbytes quantised a published model's linear layers to; None for one that is not quantised.

    Raises:
        InputError: for a model that is quantised by something else.
    """
    stored = config.get("quantization_config")
    if not stored:
        return None
    method = stored.get("quant_method", "an unknown method") if isinstance(stored, Mapping) else stored
    if isinstance(stored, Mapping) and (method == "bitsandbytes" or {"load_in_4bit", "load_in_8bit"} & set(stored)):
        return 4 if stored.get("load_in_4bit") else 8
    raise InputError(
        f"config.json: the model is published quantised with {method}, which is not supported; use its 16-bit version."
    )
