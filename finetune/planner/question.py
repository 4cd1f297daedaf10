"""What is asked of the planner: a model, machines, what is given, and what is left open."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from finetune.config.compatibility import STRATEGIES
from finetune.hardware.cards import Machines
from finetune.planner.model import Model
from finetune.trace.setting import Setting


class Method(NamedTuple):
    """What is trained beside how many bits: an adapter or none, and the bits of the frozen weights."""

    adapter: str
    bits: int | None

    @property
    def text(self) -> str:
        """As people say it: full, LoRA, QLoRA, LoRA8 (8-bit weights), DoRA."""
        if self.adapter == "none":
            return "full"
        name = {"lora": "LoRA", "dora": "DoRA"}[self.adapter]
        return {None: name, 4: f"Q{name}", 8: f"{name}8"}[self.bits]


METHODS = {
    "full": Method("none", None),
    "lora": Method("lora", None),
    "qlora": Method("lora", 4),
    "lora_8bit": Method("lora", 8),
}
"""By the names that ``finetune plan --method`` takes."""


@dataclass(frozen=True)
class Question:
    """A question: the rows of its answer are the strategies times the methods."""

    model: Model
    machines: Machines
    base: Setting
    """What every row has in common; its processes are the machines' GPUs."""
    global_batch_size: int
    """Rows of an optimizer step."""
    mean_document_tokens: float
    attended_tokens: float | None = None
    """Tokens of the document of a token, on average over tokens; None where documents are of equal length."""
    methods: tuple[Method, ...] = tuple(METHODS.values())
    strategies: tuple[str, ...] = STRATEGIES
    checkpointing: tuple[bool, ...] = (False, True)
    """Activation checkpointing, as far as it is left open."""
    micro_batch_size: int | None = None
    """None: left open."""
    chosen: frozenset[str] = frozenset()
    """Which of weights and optimizer were chosen: the others may be reduced before anything is offloaded."""
    epoch_tokens: float | None = None
    """Positions of an epoch, padding included, if known."""
    host_bytes: int | None = None
    """Memory of one machine, if known."""
    disk_bytes: int | None = None
    """Free for one checkpoint, if known."""
    recipe: str = "recipes/sft.py"
    config_file: str | None = None
    """Of the recipe, for the command."""
    flags: tuple[tuple[str, str], ...] = ()
    """Flags of the recipe that the command repeats."""

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Those to choose from, ascending; none where the batch does not divide."""
        unit = self.machines.world_size * (self.micro_batch_size or 1)
        if self.global_batch_size % unit:
            return ()
        rows = self.global_batch_size // self.machines.world_size
        if self.micro_batch_size is not None:
            return (self.micro_batch_size,)
        return tuple(n for n in range(1, rows + 1) if rows % n == 0)

    def attended(self, setting: Setting) -> float:
        """Tokens of the document of a token, in rows of a setting."""
        attended = self.attended_tokens or self.mean_document_tokens
        return attended if setting.flat else min(attended, setting.row_tokens)  # flat, rows need not be equally long

    def setting(self, strategy: str, method: Method, checkpointing: bool, micro_batch_size: int) -> Setting:
        """One way to train that answers."""
        return replace(
            self.base,
            strategy=strategy,
            adapter=method.adapter,
            bits=method.bits,
            activation_checkpointing=checkpointing,
            micro_batch_size=micro_batch_size,
            accumulation=self.global_batch_size // (micro_batch_size * self.machines.world_size),
        )


def method_of(setting: Setting) -> Method:
    """The method of a setting."""
    return Method(setting.adapter, setting.bits)


def question_about(
    model: Model,
    setting: Setting,
    machines: Machines,
    *,
    mean_document_tokens: float,
    strategies: Sequence[str] = STRATEGIES,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> Question:
    """A question of which a setting is one of the answers, with everything but its method and strategies given."""
    return Question(
        model=model,
        machines=machines,
        base=setting,
        global_batch_size=setting.micro_batch_size * setting.accumulation * setting.world_size,
        mean_document_tokens=mean_document_tokens,
        methods=(method_of(setting),),
        strategies=tuple(strategies),
        checkpointing=(setting.activation_checkpointing,),
        micro_batch_size=setting.micro_batch_size,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )
