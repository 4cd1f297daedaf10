"""What is asked of the planner: a model, machines, what is given, and what is left open."""

from dataclasses import dataclass, replace

from finetune.config.strategy_names import STRATEGIES
from finetune.hardware.cards import Machines
from finetune.planner.model import Model
from finetune.trace.setting import Method, Setting

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
    """Free for checkpoints and what is swapped to disk, if known."""
    checkpoints: int = 1
    """That lie there at a time: those that are kept, and the one that is being written."""
    recipe: str = "recipes/sft.py"
    config_file: str | None = None
    """Of the recipe, for the command."""
    adapter_defaults: tuple[tuple[str, str], ...] = ()
    """Keys of the adapter that are set, with their defaults, which a run without an adapter must have."""
    flags: tuple[tuple[str, str], ...] = ()
    """Flags of the recipe that the command repeats."""

    def disk_beside(self, swapped: int) -> int | None:
        """Of the free disk what one checkpoint may take, with all that is swapped; None where it is not known."""
        if self.disk_bytes is None:
            return None
        return (self.disk_bytes - swapped) // self.checkpoints + swapped

    def attended(self, setting: Setting) -> float:
        """Tokens of the document of a token, in rows of a setting."""
        attended = self.attended_tokens or min(self.mean_document_tokens, setting.row_tokens)
        return attended if setting.flat else min(attended, setting.row_tokens)  # flat, rows need not be equally long

    def ways(self, base: Setting, *, checkpointing: bool) -> list[Setting]:
        """Settings with the micro-batches to choose from, ascending; none where the batch does not divide.

        Args:
            base: what they have in common.
        """
        unit = base.data_processes * (self.micro_batch_size or 1)
        rows = self.global_batch_size // base.data_processes
        sizes = range(1, rows + 1) if self.micro_batch_size is None else [self.micro_batch_size]
        return [
            replace(base, activation_checkpointing=checkpointing, micro_batch_size=n, accumulation=rows // n)
            for n in sizes
            if self.global_batch_size % unit == 0 and rows % n == 0
        ]


def question_about(model: Model, setting: Setting, machines: Machines, *, mean_document_tokens: float) -> Question:
    """A question of which a setting is the only answer."""
    return Question(
        model=model,
        machines=machines,
        base=setting,
        global_batch_size=setting.micro_batch_size * setting.accumulation * setting.data_processes,
        mean_document_tokens=mean_document_tokens,
        methods=(setting.method,),
        strategies=(setting.strategy,),
        checkpointing=(setting.activation_checkpointing,),
        micro_batch_size=setting.micro_batch_size,
    )
