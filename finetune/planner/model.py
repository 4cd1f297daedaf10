"""A model that is asked about: its sizes, and what its steps take by their traces."""

from collections.abc import Mapping
from typing import Any

from finetune.hardware.cards import Machines
from finetune.models.model_config import published_bits, stored_dtype
from finetune.planner import memory, speed
from finetune.planner.memory import StepMemory
from finetune.planner.speed import StepTime
from finetune.trace.layers import Anatomy
from finetune.trace.setting import Setting
from finetune.trace.tracer import Tracer, with_whole_layers


class Model:
    """What the planner's questions ask a model. It is compared by identity.

    Each answer raises what ``Tracer.step`` does.
    """

    def __init__(self, config: Mapping[str, Any], tracer: Tracer, *, is_stored: bool = True) -> None:
        """
        Args:
            config: contents of a config.json.
            tracer: of the same configuration.
            is_stored: whether there are weights to read; else random ones are drawn.

        Raises:
            InputError: if the model is published in a way that cannot be trained.
        """
        self.published_bits = published_bits(config)
        self._stored = stored_dtype(config) if is_stored else None
        self.tracer = tracer

    @property
    def anatomy(self) -> Anatomy:
        """Its sizes.

        Raises:
            InputError: if transformers cannot build it.
        """
        return self.tracer.anatomy

    def memory(self, setting: Setting, *, large_workspaces: bool = True) -> StepMemory:
        """Bytes of a GPU at the peak of the step; see ``memory.step_memory``."""
        step, anatomy = self.tracer.step(setting), self.tracer.anatomy_of(setting)
        return memory.step_memory(step, setting, anatomy, large_workspaces=large_workspaces)

    def time(self, setting: Setting, machines: Machines, *, mean_document_tokens: float) -> StepTime:
        """Seconds of the step; see ``speed.step_time``."""
        step, anatomy = self.tracer.step(setting), self.tracer.anatomy_of(setting)
        return speed.step_time(step, setting, machines, anatomy, mean_document_tokens=mean_document_tokens)

    def host_bytes(self, setting: Setting, *, processes_of_machine: int) -> int:
        """Host memory of one machine; see ``memory.host_bytes``."""
        step = self.tracer.step(setting)
        return memory.host_bytes(
            step, self.anatomy, setting, processes_of_machine=processes_of_machine, stored=self._stored
        )

    def checkpoint_bytes(self, setting: Setting) -> int:
        """Of one checkpoint on disk; see ``memory.checkpoint_bytes``."""
        setting = with_whole_layers(setting)
        return memory.checkpoint_bytes(self.tracer.step(setting), setting)

    def swapped_bytes(self, setting: Setting) -> int:
        """On disk during training; see ``memory.swapped_bytes``."""
        return memory.swapped_bytes(self.tracer.step(setting), self.anatomy, setting)
