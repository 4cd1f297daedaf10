"""One way to train, as the planner sees it: everything that decides memory and time, but for model and hardware."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from finetune.config import sections
from finetune.config.compatibility import Cell
from finetune.config.dpo_section import reference_taken
from finetune.config.recipe_classes import PairedRun
from finetune.config.strategy_names import SHARDED_PARTS, SIZES, Size
from finetune.models.pipeline_order import Order
from finetune.trace.placement import Placement, placement_of

APART: dict[str, Any] = {size.field: 1 for sizes in SIZES.values() for size in sizes}
"""Sizes of a setting whose GPUs do nothing together."""


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


@dataclass(frozen=True)
class Setting:
    """A recipe's configuration under a strategy, reduced to what memory and time depend on."""

    strategy: str = "single"
    """Name of a strategy file."""
    world_size: int = 1
    """GPUs, one process on each."""
    bits: int | None = None
    """Of the frozen linear layers: 4, 8, or None for 16."""
    adapter: str = "none"
    """none (every weight is trained), lora or dora."""
    rank: int = 16
    ranks: tuple[tuple[str, int], ...] = ()
    """Other ranks of some targets, by their last names."""
    dropout: float = 0.0
    """Of the adapter's input."""
    targets: str | tuple[str, ...] = "all-linear"
    """Last names of the linear layers that get an adapter."""
    modules_to_save: tuple[str, ...] = ()
    """Last names of the modules that are trained whole beside the adapter."""
    token_rows: int = 0
    """Rows of embedding and output head that are trained beside an adapter (see ``models.new_tokens``)."""
    smooths_labels: bool = False
    router_aux_loss_coef: float | None = None
    """As ``train.router_aux_loss_coef``."""
    optimizer: str = "adamw"
    weights: str = "fp32_master"
    """fp32_master or bf16."""
    averages: bool = False
    """Whether the optimizer keeps averages of the trained weights."""
    precision: str = "bf16"
    """bf16, fp16 or no: the launch's mixed precision."""
    activation_checkpointing: bool = False
    """Whether layers are recomputed in the backward pass."""
    recomputed_layers: int | None = None
    """How many, the first ones; None for all."""
    offloads_activations: bool = False
    """Whether what recomputed layers keep is in host memory."""
    micro_batch_size: int = 1
    """Rows of a micro-batch."""
    row_tokens: int = 2048
    """Positions of the longest row."""
    layout: str = "padded"
    """How the rows of a micro-batch lie: ``padded`` to the longest, ``flat``, which is end to end, or ``packed``, which
    is flat with several documents in each."""
    accumulation: int = 1
    """Micro-batches of one process in an optimizer step."""
    fused: bool = True
    """Whether norms, gated products and LoRA are computed by the kernels of this project (``models.fused``)."""
    fp8: bool = False
    """Whether linear layers multiply in fp8 (``models.fp8``)."""
    one_kernel: bool = True
    """Whether a kernel steps AdamW over bf16 weights on a GPU, instead of chunks (``optim.rounded_adamw``)."""
    flash: bool = True
    """Whether the GPU has flash attention. Without it grouped queries keep scores (``patches.kernels_of_a_gpu``)."""
    reference: str = "none"
    """What preference tuning compares with, as ``dpo.reference``; none without a reference."""
    mismatches: bool = False
    """Whether each step also reads prompts with the answers of others (kto)."""
    paired: bool = False
    """Whether answers are compared with one another."""
    embedding_noise: bool = False
    context: int = 1
    """GPUs that compute each row together."""
    stages: int = 1
    """Of a pipeline, each on GPUs of its own."""
    parts: int = 1
    """Of the layers that each stage of a pipeline has."""
    pipeline_schedule: str = "1f1b"
    """As ``train.pipeline_schedule``."""
    tensor: int = 1
    """GPUs that split each layer, and compute the same rows."""
    experts: int = 1
    """GPUs that share the experts of each layer."""
    expert_load: int = 1
    """Tokens that come to a GPU's experts, as a multiple of those that come where routers are balanced."""

    @classmethod
    def of(
        cls,
        cfg: sections.Run,
        *,
        adapter: str,
        bits: int | None,
        world_size: int,
        precision: str,
        row_tokens: int,
        flat: bool,
        triton: bool = True,
        flash: bool = True,
        token_rows: int = 0,
    ) -> "Setting":
        """A configuration's, under the strategy ``single`` and with micro-batches of one row, until they are chosen.

        Args:
            adapter, bits: those of the configuration, or others to compare it with.
            precision: the launch's mixed precision.
            row_tokens: of the longest row.
            flat: whether rows that are not packed lie end to end, without padding.
            triton: whether Triton is installed beside the GPU.
            flash: whether the GPU has flash attention.
            token_rows: of special tokens that a chat template adds.
        """
        targets, train = cfg.adapter.targets, cfg.train
        return cls(
            world_size=world_size,
            adapter=adapter,
            bits=bits,
            rank=cfg.adapter.rank,
            ranks=tuple(sorted(cfg.adapter.rank_pattern.items())),
            dropout=cfg.adapter.dropout,
            targets=targets if isinstance(targets, str) else tuple(targets),
            modules_to_save=tuple(cfg.adapter.modules_to_save),
            token_rows=token_rows,
            smooths_labels=train.label_smoothing > 0,
            router_aux_loss_coef=train.router_aux_loss_coef,
            recomputed_layers=train.recomputed_layers or None,
            offloads_activations=train.offloads_activations,
            optimizer=train.optimizer,
            weights=train.weights,
            averages=train.averages,
            precision=precision,
            row_tokens=row_tokens,
            fused=cfg.model.kernels == "auto",
            fp8=cfg.model.fp8,
            one_kernel=triton and cfg.model.kernels == "auto",
            layout="packed" if cfg.data.packing is True else "flat" if flat else "padded",
            flash=flash,
            reference=_reference_of(cfg) if isinstance(cfg, PairedRun) else "none",
            mismatches=isinstance(cfg, PairedRun) and cfg.dpo.loss == "kto",
            paired=isinstance(cfg, PairedRun),
            embedding_noise=train.neftune_alpha > 0,
            parts=train.pipeline_parts,
            pipeline_schedule=train.pipeline_schedule,
        )

    @property
    def placement(self) -> Placement:
        """What its strategy splits over its processes, and where it lies."""
        return placement_of(self.strategy, self.world_size, self.model_parts)

    @property
    def sizes(self) -> dict[Size, int]:
        """How many GPUs do together each thing that the strategy is for."""
        return {size: getattr(self, size.field) for size in SIZES.get(self.strategy, ())}

    @property
    def size(self) -> int:
        """GPUs that do together all that the strategy is for; 1 where it is for nothing of the kind."""
        return math.prod(self.sizes.values())

    @property
    def model_parts(self) -> int:
        """Parts of the model, each on GPUs of its own: those of each layer, of each stage."""
        return self.tensor * self.stages

    @property
    def shards_parts(self) -> bool:
        """Whether GPUs that have the same part of the model hold shards of it."""
        return self.strategy in SHARDED_PARTS

    @property
    def order(self) -> Order:
        """In which micro-batches pass the stages of a pipeline."""
        return Order(self.stages, self.parts, self.pipeline_schedule)

    @property
    def launched(self) -> str:
        """Its strategy, with its sizes as ``finetune train --size`` takes them: tp_pp 4x2."""
        return f"{self.strategy} {'x'.join(map(str, self.sizes.values()))}" if self.size > 1 else self.strategy

    @property
    def cell(self) -> Cell:
        return Cell(self.strategy, self.bits, self.adapter, self.optimizer)

    @property
    def method(self) -> Method:
        return Method(self.adapter, self.bits)

    @property
    def forward_passes(self) -> int:
        """Of a micro-batch in a step: the one that is learnt from, those of a reference, and of mismatched answers."""
        in_order = self.placement.zero_stage == 3
        taken = reference_taken(self.reference, adapted=self.adapter != "none", in_order=in_order)
        by_reference = 1 if taken in ("adapter_off", "model") else 0
        return 1 + by_reference + (1 + by_reference if self.mismatches else 0)

    @property
    def packing(self) -> bool:
        """Whether several documents share a row."""
        return self.layout == "packed"

    @property
    def flat(self) -> bool:
        """Whether rows lie end to end, so that attention keeps their documents apart."""
        return self.layout != "padded"

    @property
    def recomputes(self) -> str:
        """As ``train.activation_checkpointing`` says it."""
        if not self.activation_checkpointing:
            return "none"
        if self.offloads_activations:
            return "offload"
        return "full" if self.recomputed_layers is None else str(self.recomputed_layers)

    @property
    def activations(self) -> str:
        """The same in words."""
        if self.activation_checkpointing and self.recomputed_layers:
            return f"activations of {self.recomputed_layers} layers recomputed"
        if self.activation_checkpointing and self.offloads_activations:
            return "activations recomputed, or in host memory"
        return f"activations {'recomputed' if self.activation_checkpointing else 'kept'}"

    @property
    def data_processes(self) -> int:
        """GPUs, or groups of them, that compute different rows."""
        return self.world_size // self.context // self.stages // self.tensor

    @property
    def own_row_tokens(self) -> int:
        """Positions of a row that one GPU computes."""
        return math.ceil(self.row_tokens / self.context)

    @property
    def tokens(self) -> int:
        """Positions of a micro-batch that one GPU computes."""
        return self.micro_batch_size * self.own_row_tokens


def setting_of(fields: Mapping[str, Any]) -> Setting:
    """The setting of a record that was JSON, in which tuples are lists."""
    return TypeAdapter(Setting).validate_python(fields)


def _reference_of(cfg: PairedRun) -> str:
    """``dpo.reference``; what an adapter is at first is part of it, and off is not what it began with."""
    is_something = cfg.adapter.type != "none" and not cfg.adapter.is_nothing_at_first
    return "cached" if is_something and cfg.dpo.compares_with == "auto" else cfg.dpo.compares_with
