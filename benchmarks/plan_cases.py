"""The runs that the planner's predictions are held against: models without weights, data of exact lengths, settings.

None of them was used to fit a constant. Beside the fixed ones there are runs at the edge of the GPU's memory, whose
rows are as long as the planner believes to need a given share of it.
"""

import contextlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from finetune.hardware.cards import Machines
from finetune.models.loading import config_from
from finetune.planner import Model
from finetune.planner.memory import needed_bytes
from finetune.trace.setting import Setting
from finetune.trace.tracer import Tracer
from finetune.units import GIB

POSITIONS = 131072


def _model(
    kind: str, hidden: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "max_position_embeddings": POSITIONS,
        "dtype": "bfloat16",
    } | others


MODELS = {
    "SmolLM2-135M": _model("llama", 576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True),
    "Qwen2.5-0.5B": _model("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True),
    "TinyLlama-1.1B": _model("llama", 2048, 5632, 22, 32, 4, 32000, tie_word_embeddings=False),
    "Llama-3.2-1B": _model("llama", 2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "Qwen3-1.7B": _model("qwen3", 2048, 6144, 28, 16, 8, 151936, tie_word_embeddings=True, head_dim=128),
    "Llama-3.2-3B": _model("llama", 3072, 8192, 28, 24, 8, 128256, tie_word_embeddings=True, head_dim=128),
    "Llama-3.1-8B": _model("llama", 4096, 14336, 32, 32, 8, 128256, tie_word_embeddings=False),
    "OLMoE-1B-7B": _model("olmoe", 2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8),
    "tiny": _model("llama", 64, 128, 3, 4, 2, 2048, tie_word_embeddings=True),
    "tiny-mixture": _model("olmoe", 64, 96, 3, 4, 2, 2048, num_experts=4, num_experts_per_tok=2),
}
"""Sizes of published models, whose names they bear; the tiny ones are for rehearsals."""
WORDS = 1500
TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
TOKENS_OF_TEMPLATE = 5
"""Of a conversation, beside the words of its answer: three marks, a question of one word, and one mark more."""
EDGE_ROWS, EDGE_STEP = 8, 16
"""Rows of a micro-batch at the edge, and the tokens by which their length is chosen."""


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    setting: Setting
    document_tokens: int
    """Of every document; of the row where rows are not packed."""
    edge: float | None = None
    """Share of the GPU's memory that it is made to need by the plan."""

    @property
    def name(self) -> str:
        """Tells a case from all others."""
        s = self.setting
        method = (
            {None: s.adapter, 4: f"4-bit {s.adapter}", 8: f"8-bit {s.adapter}"}[s.bits]
            if s.adapter != "none"
            else "full"
        )
        weights = s.weights if s.adapter == "none" else f"r{s.rank}"
        targets = "" if isinstance(s.targets, str) else " " + "+".join(s.targets)
        dropout = f" dropout {s.dropout:g}" if s.dropout else ""
        optimizer = "" if s.optimizer == "adamw" else f" {s.optimizer}"
        kept = "recomputed" if s.activation_checkpointing else "kept"
        accumulated = f" x{s.accumulation}" if s.accumulation > 1 else ""
        packed = f" packed with {self.document_tokens}" if s.packing else ""
        launched = "" if s.world_size == 1 else f", {s.launched} on {s.world_size}"
        rows = f"{s.micro_batch_size}x{s.row_tokens}{packed}{accumulated}"
        at = "" if self.edge is None else f", at {self.edge:.0%}"
        return f"{self.model} {method} {weights}{targets}{dropout}{optimizer}, {kept}, {rows}{launched}{at}"

    @property
    def global_batch_size(self) -> int:
        return self.setting.micro_batch_size * self.setting.accumulation * self.setting.data_processes


def _case(model: str, rows: int, tokens: int, *, documents: int | None = None, **setting: Any) -> Case:
    """Documents: tokens of each, packed; else each row is a document."""
    layout = "flat" if documents is None else "packed"
    chosen = Setting(micro_batch_size=rows, row_tokens=tokens, layout=layout, **setting)
    return Case(model, chosen, documents or tokens)


KEPT: dict[str, Any] = {"activation_checkpointing": False}
RECOMPUTED: dict[str, Any] = {"activation_checkpointing": True}
BF16: dict[str, Any] = {"weights": "bf16"}
LORA: dict[str, Any] = {"adapter": "lora"}
QLORA: dict[str, Any] = {"adapter": "lora", "bits": 4}
INT8: dict[str, Any] = {"adapter": "lora", "bits": 8}

TELLING = (
    _case("Llama-3.1-8B", 2, 2048, **LORA, **KEPT),
    _case("Llama-3.1-8B", 3, 8192, documents=1024, **QLORA, **RECOMPUTED),
    _case("Llama-3.2-1B", 1, 8192, **KEPT),
    _case("Llama-3.1-8B", 1, 8192, optimizer="adamw_8bit", **BF16, **RECOMPUTED),
    _case("SmolLM2-135M", 8, 2048, **KEPT),
    _case("Llama-3.1-8B", 2, 4096, **INT8, **RECOMPUTED),
    _case("Llama-3.2-3B", 2, 4096, **RECOMPUTED),
    _case("Qwen3-1.7B", 2, 16384, documents=2048, **BF16, **RECOMPUTED),
    _case("Llama-3.1-8B", 1, 4096, **QLORA, **KEPT),
    _case("Llama-3.1-8B", 1, 32768, documents=8192, **LORA, **RECOMPUTED),
)
"""The runs that say most, each of another kind: first, in case that there is no time for all."""
OTHERS = (
    _case("SmolLM2-135M", 1, 32768, **RECOMPUTED),
    _case("Qwen2.5-0.5B", 4, 2048, **KEPT),
    _case("Qwen2.5-0.5B", 8, 2048, accumulation=2, **RECOMPUTED),
    _case("TinyLlama-1.1B", 2, 4096, documents=1024, **KEPT),
    _case("TinyLlama-1.1B", 4, 8192, **RECOMPUTED),
    _case("Llama-3.2-1B", 1, 32768, documents=4096, **RECOMPUTED),
    _case("Llama-3.2-1B", 2, 4096, documents=2048, **BF16, **KEPT),
    _case("Llama-3.2-3B", 1, 4096, optimizer="adamw_8bit", **BF16, **KEPT),
    _case("Qwen3-1.7B", 4, 2048, **LORA, **KEPT),
    _case("Llama-3.2-3B", 2, 4096, documents=512, rank=64, targets=("q_proj", "v_proj"), **LORA, **KEPT),
    _case("SmolLM2-135M", 8, 4096, dropout=0.05, **LORA, **KEPT),
    _case("TinyLlama-1.1B", 4, 2048, adapter="dora", **RECOMPUTED),
    _case("Llama-3.2-3B", 1, 8192, optimizer="paged_adamw_8bit", **QLORA, **KEPT),
    _case("TinyLlama-1.1B", 1, 16384, **QLORA, **RECOMPUTED),
    _case("Qwen2.5-0.5B", 4, 4096, rank=64, **QLORA, **KEPT),
    _case("Llama-3.2-1B", 2, 2048, **INT8, **KEPT),
    _case("TinyLlama-1.1B", 8, 2048, documents=256, **INT8, **RECOMPUTED),
)
ON_ONE_GPU = TELLING + OTHERS
ON_ALL_GPUS = (
    _case("Llama-3.2-1B", 1, 8192, documents=2048, strategy="ddp", **KEPT),
    _case("Llama-3.1-8B", 1, 4096, strategy="fsdp2", **RECOMPUTED),
    _case("Llama-3.1-8B", 1, 4096, strategy="fsdp2", **QLORA, **RECOMPUTED),
    _case("Llama-3.2-1B", 2, 4096, strategy="zero2", **KEPT),
    _case("Llama-3.2-3B", 1, 4096, strategy="zero3", **RECOMPUTED),
)
"""On as many as there are, where there are several."""
AT_THE_EDGE = (
    (_case("Llama-3.2-1B", EDGE_ROWS, EDGE_STEP, **KEPT), (0.97, 1.02, 0.88, 1.08)),
    (_case("TinyLlama-1.1B", EDGE_ROWS, EDGE_STEP, **LORA, **KEPT), (0.97, 1.02, 0.88)),
)
REHEARSED = _case("tiny", 2, 128, documents=32, accumulation=2, **KEPT)


def cases(machines: Machines) -> list[Case]:
    """All runs for these GPUs, those that say most first."""
    n = machines.gpus_per_node
    several = [replace(case, setting=replace(case.setting, world_size=n)) for case in ON_ALL_GPUS] if n > 1 else []
    edges = (at_edge(case, share, machines) for case, shares in AT_THE_EDGE for share in shares)
    every = [*TELLING, *several, *(case for case in edges if case is not None), *OTHERS]
    return [replace(case, setting=replace(case.setting, flash=machines.gpu.has_flash_attention)) for case in every]


def at_edge(case: Case, share: float, machines: Machines) -> Case | None:
    """A case with the longest rows of which the planner believes that they need no more than a share of the memory.

    None if its weights alone need more.
    """

    memory_bytes, large = machines.gpu.memory_gib * GIB, machines.gpu.has_large_workspaces

    def of_length(steps: int) -> Case:
        tokens = steps * EDGE_STEP
        setting = replace(case.setting, row_tokens=tokens, flash=machines.gpu.has_flash_attention)
        return Case(case.model, setting, tokens, edge=share)

    def fits(model: Model, steps: int) -> bool:
        setting = of_length(steps).setting
        memory = model.memory(setting, large_workspaces=large)
        return needed_bytes(memory, setting) <= share * memory_bytes

    low, high = 0, POSITIONS // EDGE_STEP
    with asked(case.model, POSITIONS) as model:
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(model, middle) else (low, middle - 1)
    return of_length(low) if low else None


@contextlib.contextmanager
def asked(model: str, row_tokens: int) -> Iterator[Model]:
    """The planner's view of a model, by the same traces as that of a run with rows of this length."""
    config = config_from(MODELS[model]).to_dict()
    config.pop("_name_or_path")
    with Tracer(config, row_tokens=row_tokens) as tracer:
        yield Model(config, tracer)


def write_model(folder: Path, model: str) -> Path:
    """A model folder without weights, and a tokenizer of as many words as it takes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    words = ["<user>", "<assistant>", "<end>", "<unknown>", *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def write_rows(path: Path, case: Case) -> Path:
    """Conversations of exactly as many tokens as the case's documents have, enough for one step."""
    draw = random.Random(0)
    count = case.global_batch_size * (case.setting.row_tokens // case.document_tokens)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = " ".join(f"w{draw.randrange(WORDS)}" for _ in range(case.document_tokens - TOKENS_OF_TEMPLATE))
            messages = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def configuration(case: Case, model_folder: Path, rows: Path, output: Path, *, steps: int) -> dict[str, Any]:
    """The recipe's configuration of a case."""
    s = case.setting
    adapter: dict[str, Any] = {"type": s.adapter}
    if s.adapter != "none":
        targets = s.targets if isinstance(s.targets, str) else list(s.targets)
        adapter |= {"rank": s.rank, "dropout": s.dropout, "targets": targets}
    return {
        "model": {"path": str(model_folder)},
        "quantization": {"bits": s.bits or "none"},
        "adapter": adapter,
        "data": {"train": str(rows), "max_length": s.row_tokens, "packing": s.packing},
        "train": {
            "output_dir": str(output),
            "steps": steps,
            "global_batch_size": case.global_batch_size,
            "micro_batch_size": s.micro_batch_size,
            "optimizer": s.optimizer,
            "weights": s.weights,
            "activation_checkpointing": "full" if s.activation_checkpointing else "none",
            "plan_check": "off",
        },
        "checkpoint": {"every": 0, "at_end": False},
    }
