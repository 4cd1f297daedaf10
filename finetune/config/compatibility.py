"""Compatibility of strategies, quantisation, adapters and optimizers. The only table of it: all other code asks it.

A cell is (strategy, bits of the frozen weights, adapter, optimizer). It trains with the losses of one process, or is
refused by the first rule that applies, whose sentence names the nearest thing that works.
``tests/test_compatibility.py`` walks every cell; the tables of docs/compatibility.md are written from it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from finetune.config.strategy_names import (
    IN_PARTS,
    SHARDED_PARTS,
    STRATEGIES,
    TOGETHER,
    has_stages,
    splits_layers,
    whole_layers,
)

BITS = (None, 8, 4)
ADAPTERS = ("none", "lora", "dora")
OPTIMIZERS = ("adamw", "adamw_8bit", "paged_adamw_8bit", "lion_8bit", "adafactor", "sgd")


class Cell(NamedTuple):
    """One combination."""

    strategy: str
    bits: int | None
    adapter: str
    optimizer: str

    @property
    def shards_weights(self) -> bool:
        return self.strategy.startswith(("fsdp2", "hsdp", "cp", "ulysses", "zero3", "tp"))

    @property
    def offloads(self) -> bool:
        return self.strategy.endswith(("_offload", "_nvme"))


class Rule(NamedTuple):
    """What is refused, and the sentence that says why and what works instead."""

    applies: Callable[[Cell], bool]
    sentence: str


RULES = (
    Rule(
        lambda c: c.bits is not None and c.adapter == "none",
        "Weights quantised to {bits} bits are frozen and cannot be trained; set adapter.type to lora, or "
        "quantization.bits to none.",
    ),
    Rule(
        lambda c: c.bits == 8 and c.shards_weights,
        "{strategy} cannot shard the 8-bit layers of bitsandbytes, which keep a second reference to their weights; set "
        "quantization.bits to 4, or use the strategy file zero2 or ddp.",
    ),
    Rule(
        lambda c: c.bits == 8 and c.adapter == "dora",
        "DoRA reads the whole weight in each step, which makes the 8-bit layers of bitsandbytes lose their scales; set "
        "adapter.type to lora, or quantization.bits to 4.",
    ),
    Rule(
        lambda c: c.bits == 4 and c.adapter == "dora" and c.strategy.startswith("zero3"),
        "DoRA reads the whole weight in each step, but {strategy} does not gather 4-bit weights for it; set "
        "adapter.type "
        "to lora, or use the strategy file fsdp2.",
    ),
    Rule(
        lambda c: c.strategy == "zero3_nvme" and c.optimizer != "adamw",
        "{strategy} only works with DeepSpeed's CPU Adam; set train.optimizer to adamw, or use the strategy file "
        "zero3_offload.",
    ),
    Rule(
        lambda c: c.adapter == "dora" and splits_layers(c.strategy),
        "DoRA needs the norms of whole weights, but {strategy} gives each process only a part of them; set "
        "adapter.type to lora, or use the strategy file {whole}.",
    ),
    Rule(
        lambda c: c.bits is not None and c.strategy == "ep",
        "{strategy} shares experts, which bitsandbytes does not quantise; set quantization.bits to none.",
    ),
    Rule(
        lambda c: c.optimizer == "adafactor" and c.strategy not in ("single", "ddp", "pp"),
        "Adafactor needs whole matrices, but {strategy} gives each process only a part of them; set "
        "train.optimizer to adamw_8bit, or use the strategy file ddp.",
    ),
    Rule(
        lambda c: c.optimizer == "paged_adamw_8bit" and c.offloads,
        "{strategy} already keeps the optimizer state in host memory, so there is nothing to page; set "
        "train.optimizer to adamw_8bit.",
    ),
)


def refusal(cell: Cell) -> str | None:
    """Why a combination is refused, in a sentence; None for one that trains."""
    for rule in RULES:
        if rule.applies(cell):
            return rule.sentence.format(**cell._asdict(), whole=whole_layers(cell.strategy))
    return None


def bf16_weights_problems(cell: Cell, *, weights: str, precision: str) -> list[str]:
    """Why weights cannot be kept in bf16 alone.

    Args:
        weights: as ``train.weights``.
        precision: the launch's mixed precision.
    """
    if weights != "bf16":
        return []
    found = []
    if precision != "bf16":
        found.append("train.weights: bf16 computes in bf16; launch with --mixed_precision bf16.")
    if cell.optimizer in ("adafactor", "sgd"):
        found.append(
            f"train.weights: bf16 would lose the small updates of {cell.optimizer}, which rounds to nearest; set "
            "train.optimizer to adamw or adamw_8bit, which round stochastically, or train.weights to fp32_master."
        )
    if cell.strategy.startswith("zero") and cell.offloads:
        found.append(
            f"train.weights: bf16 is not available under {cell.strategy}, whose optimizer keeps fp32 state in host "
            "memory; use fp32_master, or a strategy file without offload."
        )
    return found


def reference_problems(strategy: str, reference: str) -> list[str]:
    """Why preference tuning cannot take its reference from where ``dpo.reference`` says."""
    if reference != "model" or strategy != "zero3_nvme":
        return []
    return [
        f"dpo.reference: model exchanges weights in memory, but {strategy} keeps them on disk; set it to cached, or "
        "use the strategy file zero3_offload."
    ]


def context_problems(strategy: str, *, embedding_noise: bool, paired: bool, attention: str) -> list[str]:
    """Why the processes of a launch cannot compute rows together.

    Args:
        paired: answers are compared with one another.
        attention: as ``model.attention``.
    """
    if strategy not in TOGETHER:
        return []
    whole = TOGETHER[strategy]
    instead = f"or use the strategy file {whole}"
    found = {
        f"{strategy} spreads a row over processes, and answers are compared as a whole; use the strategy file "
        f"{whole}.": paired,
        f"{strategy} spreads a row over processes, and train.neftune_alpha draws noise for whole documents; set it to "
        f"0, {instead}.": embedding_noise,
        f"{strategy} has its own attention; set model.attention to auto, {instead}.": attention != "auto",
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def pipeline_problems(strategy: str, *, parts: int, schedule: str, embedding_noise: bool, paired: bool) -> list[str]:
    """Why the processes of a launch cannot be the stages of a pipeline, or not in an order.

    Args:
        parts: of the layers that each stage has.
        schedule: as ``train.pipeline_schedule``.
        embedding_noise: noise is added to embeddings.
        paired: answers are compared with one another.
    """
    if not has_stages(strategy):
        plain = {
            f"train.pipeline_parts is {parts}": ("1", parts == 1),
            f"train.pipeline_schedule is {schedule}": ("1f1b", schedule == "1f1b"),
        }
        return [
            f"{key}, but {strategy} has no stages; set it to {value}, or use the strategy file pp."
            for key, (value, is_plain) in plain.items()
            if not is_plain
        ]
    shards = strategy in SHARDED_PARTS
    whole = SHARDED_PARTS.get(strategy)
    found = {
        f"train.pipeline_schedule is {schedule}, but {strategy} adds up the gradients of a layer's weights before it "
        f"frees them; set it to 1f1b, or use the strategy file {whole}.": shards and schedule != "1f1b",
        f"{strategy} computes the loss of one pass of one model, and preferences take several; use the strategy file "
        "fsdp2.": paired,
        f"{strategy} fills rows up to equal length, and train.neftune_alpha draws noise for each document; set it to "
        "0, or use the strategy file fsdp2.": embedding_noise,
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def scaling_problems(strategy: str, *, precision: str) -> list[str]:
    """Why losses are not scaled where each process has a part of the model.

    Args:
        precision: the launch's mixed precision.
    """
    if precision != "fp16" or strategy not in (*IN_PARTS, *SHARDED_PARTS):
        return []
    return [f"{strategy} does not scale losses, which fp16 needs; launch with --mixed_precision bf16 or no."]


def split_problems(strategy: str, reasons: Sequence[str], saved: Sequence[str]) -> list[str]:
    """Sentences of why a model's layers cannot be split over processes.

    Args:
        reasons: clauses.
        saved: layers of adapter.modules_to_save that are split.
    """
    whole = whole_layers(strategy)
    found = [f"{each}; use the strategy file {whole}, or another --megatron_lm_tp_degree." for each in reasons]
    if saved:
        found.append(
            f"adapter.modules_to_save names {', '.join(saved)}, of which {strategy} gives each process a part; train "
            f"adapters on them instead, or use the strategy file {whole}."
        )
    return found


def shard_problems(strategy: str, bundled: Sequence[str]) -> list[str]:
    """Why parts of layers cannot be sharded, as a sentence.

    Args:
        bundled: trained parameters that are several tensors end to end.
    """
    if not bundled:
        return []
    other = whole_layers(strategy) if strategy in TOGETHER else SHARDED_PARTS[strategy]
    return [
        f"{strategy} does not shard adapters of experts ({bundled[0]}); set adapter.targets to other layers, or use "
        f"the strategy file {other}."
    ]


def stage_problems(strategy: str, model: str, layers: int, stages: int, parts: int = 1) -> list[str]:
    """Why a model's layers cannot be divided into the stages of a pipeline, as a sentence.

    Args:
        model: its class.
        layers: by ``models.pipeline_stages.units_of``; 0 where they are not one list.
        parts: of each stage.
    """
    if stages == 1 or layers >= stages * parts:
        return []
    if not layers:
        return [
            f"{strategy} divides one list of layers that hand on hidden states, between an embedding and a head, which "
            f"{model} is not; use the strategy file fsdp2."
        ]
    there = f"but the model has {layers} layer{'s' if layers > 1 else ''}"
    if layers >= stages:
        return [
            f"{strategy} was launched with {stages} stages, and train.pipeline_parts is {parts}, which makes "
            f"{stages * parts} parts, {there}; set it to "
            f"{layers // stages}{' or less' if layers // stages > 1 else ''}."
        ]
    return [
        f"{strategy} was launched with {stages} stages, {there}; set --megatron_lm_pp_degree to that many or fewer, or "
        "use the strategy file fsdp2."
    ]


ADA = (8, 9)
"""NVIDIA's number for the first cards that multiply in fp8. Hopper is (9, 0)."""


def fp8_problems(
    asked: bool, *, strategy: str, bits: int | None, precision: str, capability: tuple[int, int] | None
) -> list[str]:
    """Why ``model.fp8`` cannot be, as sentences.

    Args:
        bits: of the weights, where they are quantised.
        precision: the launch's mixed precision.
        capability: of the GPU; None if it is not known, or where a rehearsal multiplies on the CPU.
    """
    found = {
        f"model.fp8 rounds 16-bit weights, and these are quantised to {bits} bits; set model.fp8 to false, or "
        "quantization.bits to none.": bits is not None,
        f"model.fp8 returns products in bf16, and the launch computes in {precision}; launch with "
        "--mixed_precision bf16.": precision != "bf16",
        f"model.fp8: {strategy} gathers the weights of one module at a time, for PyTorch's own products alone; use "
        "the strategy file fsdp2.": strategy.startswith("zero3"),
        f"model.fp8: {strategy} gives each process a part of the numbers that share a scale; set it to false, or use "
        f"the strategy file {whole_layers(strategy)}.": splits_layers(strategy),
        "model.fp8: this GPU does not multiply in fp8, as Ada, Hopper and newer ones do; set it to false.": (
            capability is not None and capability < ADA
        ),
    }
    return [sentence for sentence, applies in found.items() if asked and applies]


def expert_problems(model: str, experts: int, processes: int) -> list[str]:
    """Why the processes of a launch cannot share a model's experts.

    Args:
        model: its class.
        experts: the greatest common divisor of those of each layer, by ``models.expert_layers.experts_of``.
        processes: that are to share them; 1 where none are.
    """
    if processes == 1 or (experts and experts % processes == 0):
        return []
    if not experts:
        return [
            f"ep shares the experts of each layer, and {model} has none that can be shared; use the strategy file "
            "fsdp2."
        ]
    return [
        f"ep has the experts shared by {processes} processes, but each layer has {experts} or a multiple of it; set "
        f"--megatron_lm_expert_model_parallel_size to a divisor of {experts}, or use the strategy file fsdp2."
    ]


def spread_problems(strategy: str, reasons: Sequence[str]) -> list[str]:
    """Sentences of why a model's rows cannot be spread over processes, given as clauses."""
    return [f"{reason}; use the strategy file {TOGETHER[strategy]}." for reason in reasons]


def heads_problems(strategy: str, processes: int, heads: int, key_heads: int) -> list[str]:
    """Why the processes that compute a row together cannot share the model's attention heads.

    Args:
        processes: of each row.
        key_heads: of keys and values.
    """
    if strategy != "ulysses" or not (heads % processes or (key_heads % processes and processes % key_heads)):
        return []
    return [
        f"ulysses shares the attention heads among {processes} processes, but the model has {heads}, and {key_heads} "
        "of keys and values; use the strategy file cp, or another number of processes for each row."
    ]


def router_problems(strategy: str, model: str, *, coefficient: float, balances: bool, paired: bool) -> list[str]:
    """Why the experts of a model cannot be balanced by a loss.

    Args:
        model: its class.
        coefficient: of the loss, by ``train.router_aux_loss_coef`` or by the model's configuration.
        balances: transformers has such a loss for the model.
        paired: answers are compared with one another.
    """
    if not coefficient:
        return []
    known = f"train.router_aux_loss_coef is {coefficient:g}, by this key or by the model's config.json"
    found = {
        f"train.router_aux_loss_coef is {coefficient:g}, but transformers has no load-balancing loss for {model}; set "
        "it to null.": not balances,
        f"{known}, but it belongs to the loss of single tokens, and pairs are compared; set it to 0.": paired,
        f"{known}, but its loss is one of all layers, of which each stage of {strategy} has some; set it to 0, or use "
        "the strategy file fsdp2.": has_stages(strategy),
    }
    return [sentence for sentence, is_wrong in found.items() if is_wrong]


def averaging_problems(strategy: str, *, averages: bool) -> list[str]:
    """Why a run cannot keep averages of its weights."""
    if not averages or strategy != "zero3_nvme":
        return []
    return [
        f"train.ema_decay exchanges weights and their averages in memory, but {strategy} keeps them on disk; set it to "
        "0, or use the strategy file zero3_offload."
    ]


def cells() -> list[Cell]:
    """Every combination."""
    return [Cell(s, b, a, o) for s in STRATEGIES for b in BITS for a in ADAPTERS for o in OPTIMIZERS]
