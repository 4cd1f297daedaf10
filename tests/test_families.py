"""Models of every family train under every kind of strategy with the losses and gradient norms of one process.

Strategies find a model's layers by its classes, of which each family has its own. `make test` trains each family under
one strategy, each strategy with several families; `make prove` every pair.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
from parity import FP32_TOLERANCE, assert_parity

MIXTURES = ("mixtral", "qwen3_moe")
FAMILIES = (
    "llama",
    "granite",
    "smollm3",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "olmo3",
    "mixtral",
    "qwen3_moe",
)
"""Values of model_type."""
LAUNCHES = [("ddp", 2), ("fsdp2", 2), ("zero2", 2), ("zero3", 2), ("pp", 2), ("tp", 2), ("fsdp2_tp", 4)]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "eos_token_id": 1,
    "bos_token_id": None,
    "dtype": "float32",
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
STEPS = 4


@pytest.fixture(scope="module")
def run(ranks: Any, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("families")
    known: dict[str, Any] = {}

    def train(family: str, strategy: str, world_size: int) -> list[dict[str, Any]]:
        model = folder / family
        if not model.exists():
            tiny.build_tokenizer().save_pretrained(model)
            experts = EXPERTS if family in MIXTURES else {}
            (model / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **experts}))
        changes = {"train__steps": STEPS, "train__micro_batch_size": 8 // (2 * world_size), "checkpoint__at_end": False}
        config = scenarios.configuration(model, conversations, folder / "run", **changes)
        for seen in ranks(world_size).run(scenarios.train, config, strategy=strategy):
            assert seen["world_size"] == world_size
        return scenarios.read_metrics(folder / "run")

    def reference(family: str) -> list[dict[str, Any]]:
        if family not in known:
            known[family] = train(family, "single", 1)
        return known[family]

    train.reference = reference
    return train


@pytest.mark.parametrize(
    ("family", "strategy", "world_size"), [(family, *launch) for family in FAMILIES for launch in LAUNCHES]
)
def test_family_trains_under_a_strategy_as_on_one_process(family: str, strategy: str, world_size: int, run: Any):
    expected, metrics = run.reference(family), run(family, strategy, world_size)
    assert len(metrics) == STEPS
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert_parity(metrics, expected, FP32_TOLERANCE)
