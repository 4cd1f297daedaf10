"""The load-balancing loss of a mixture of experts is transformers' for one row, and the same under every split."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import balancing
import every_recipe
import numpy as np
import pytest
import scenarios
import sharing
import torch
from full_trace import full_trace
from parity import FP32_TOLERANCE, assert_parity
from test_attention import small_model
from thinning import thinned
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from finetune.config.compatibility import router_problems
from finetune.data.batches import IGNORED, collate
from finetune.data.encoding import Row
from finetune.models import attention
from finetune.models.recomputation import recompute_activations
from finetune.models.routers import top_k_of
from finetune.trace.setting import Setting
from finetune.training.loss import next_token_loss_sum, take_losses
from finetune.training.router_balance import FIGURE, Documents, RouterBalance, balance_losses

CPU = torch.device("cpu")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
COEFFICIENT = 0.5
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("num_experts", "num_local_experts"), 6),
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": COEFFICIENT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    attention.register()
    config = AutoConfig.for_model(family, **SMALL | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed", dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.train()


def rows_of(*lengths: int) -> list[Row]:
    """Documents of which a part is trained."""
    draw = np.random.default_rng(0)
    drawn = [draw.integers(3, 97, size=length, dtype=np.int32) for length in lengths]
    return [Row(tokens, [(1 + len(tokens) // 3, len(tokens))], "") for tokens in drawn]


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def learnt(model: Any, parts: list[list[Row]], *, flat: bool = True) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Of micro-batches: the mean loss of a trained token, the figure, and the gradients."""
    model, balance = copy.deepcopy(model), RouterBalance.of(COEFFICIENT, model)
    if not flat:
        model.set_attn_implementation("sdpa")
    take_losses(model)
    tokens = sum(end - first for rows in parts for row in rows for first, end in row.spans)
    total = 0.0
    for rows in parts:
        loss = next_token_loss_sum(
            model, collate([[row] for row in rows], CPU, flat=flat), balance=balance.of_micro_batch
        )
        (loss / tokens).backward()
        total += float(loss.detach()) / tokens
    figure = balance.take_figures()[FIGURE]
    return total, float(figure.total / figure.divisor), gradients(model)


def assert_alike(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", MIXTURES)
def test_one_row_has_the_loss_and_the_gradients_of_transformers(family: str):
    model, (row,) = model_of(family), rows_of(23)
    reference = copy.deepcopy(model)
    next_tokens, inputs = collate([[row]], CPU, flat=True)
    labels = torch.full_like(next_tokens, IGNORED)
    labels[:, 1:] = next_tokens[:, :-1]
    outputs = reference(**inputs, labels=labels, output_router_logits=True, use_cache=False)
    outputs.loss.backward()
    assert outputs.aux_loss > 1
    assert_alike(
        learnt(model, [[row]]), (float(outputs.loss.detach()), float(outputs.aux_loss.detach()), gradients(reference))
    )


def test_every_family_that_is_said_to_balance_its_experts_has_the_loss_of_transformers():
    checked, ids = set(), torch.arange(3, 20)[None]
    labels: Any = torch.zeros_like(ids)
    labels.line_tokens = torch.tensor([ids.shape[1]])
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        model = small_model(kind)
        if model is None or (top_k := top_k_of(model)) is None:
            continue
        with torch.no_grad():
            outputs = model(input_ids=ids, output_router_logits=True, use_cache=False)
            (found,) = balance_losses(outputs.router_logits, Documents.of(labels, {}), top_k)
        torch.testing.assert_close(found, outputs.aux_loss, rtol=1e-6, atol=0.0, msg=kind.__name__)
        checked.add(model.config.model_type)
    assert {"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "phimoe"} < checked
    assert len(checked) >= 18


@pytest.mark.parametrize("flat", [True, False])
def test_the_split_into_micro_batches_changes_nothing(flat: bool):
    model, rows = model_of("mixtral"), rows_of(23, 9, 14, 2, 30)
    expected = learnt(model, [[row] for row in rows])
    assert_alike(learnt(model, [rows], flat=flat), expected)
    assert_alike(learnt(model, [rows[:3], rows[3:]], flat=flat), expected)


@pytest.mark.parametrize("flat", [True, False])
def test_rows_that_are_not_there_count_nothing(flat: bool):
    model, rows = model_of("mixtral"), rows_of(23, 9)
    filler = Row(np.zeros(1, np.int32), [], "")
    assert_alike(learnt(model, [[*rows, filler]], flat=flat), learnt(model, [rows]))


def test_recomputed_layers_are_counted_once():
    model, rows = model_of("mixtral"), rows_of(23, 9, 14)
    expected = learnt(model, [rows])
    recompute_activations(model)
    assert_alike(learnt(model, [rows]), expected)


def test_held_out_losses_have_none_of_it():
    model = model_of("mixtral").eval()
    take_losses(model)
    balance, micro_batch = RouterBalance(COEFFICIENT, 2), collate([rows_of(23)], CPU, flat=True)
    found = next_token_loss_sum(model, micro_batch, balance=balance.of_micro_batch)
    assert found == next_token_loss_sum(model, micro_batch)
    assert balance.take_figures() == {}


@pytest.mark.parametrize(
    ("family", "asks", "asked", "expected"),
    [
        ("mixtral", False, None, 0.0),
        ("mixtral", True, None, COEFFICIENT),
        ("mixtral", True, 0.0, 0.0),
        ("mixtral", False, 0.1, 0.1),
        ("llama", False, None, 0.0),
    ],
)
def test_the_model_has_the_coefficient_that_transformers_would_take(
    family: str, asks: bool, asked: float | None, expected: float
):
    assert RouterBalance.of(asked, model_of(family, output_router_logits=asks)).coefficient == expected


def test_what_cannot_be_balanced_is_refused_in_a_sentence():
    of_mixtral: dict[str, Any] = {"coefficient": 0.1, "balances": True, "paired": False}
    assert router_problems("fsdp2", "MixtralForCausalLM", **of_mixtral) == []
    (of_stages,) = router_problems("pp", "MixtralForCausalLM", **of_mixtral)
    assert of_stages.endswith("set it to 0, or use the strategy file fsdp2.")
    (of_pairs,) = router_problems("fsdp2", "MixtralForCausalLM", **of_mixtral | {"paired": True})
    assert "pairs are compared; set it to 0." in of_pairs
    (of_dense,) = router_problems("fsdp2", "LlamaForCausalLM", **of_mixtral | {"balances": False})
    assert of_dense == (
        "train.router_aux_loss_coef is 0.1, but transformers has no load-balancing loss for LlamaForCausalLM; set it "
        "to null."
    )
    assert router_problems("pp", "LlamaForCausalLM", coefficient=0.0, balances=False, paired=True) == []


@pytest.fixture(scope="module")
def run(ranks: Any, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("router-balance")
    models = {each: balancing.mixture_folder(folder / each, each) for each in ("mixtral", "qwen3_moe")}

    def train(strategy: str, world_size: int, micro_batch_size: int, *, bug: bool = False, **changes: Any) -> Any:
        family = changes.pop("family", "mixtral")
        changes = {
            "train__steps": 4,
            "train__optimizer": "sgd",
            "train__learning_rate": 0.2,
            "train__max_grad_norm": 0.0,
            "train__micro_batch_size": micro_batch_size,
            "train__router_aux_loss_coef": COEFFICIENT,
            "checkpoint__at_end": False,
        } | changes
        config = scenarios.configuration(models[family], conversations, folder / "run", **changes)
        for seen in ranks(world_size).run(balancing.train, config, bug, strategy=strategy):
            assert seen["world_size"] == world_size
        return scenarios.read_metrics(folder / "run")

    return train


def assert_same_run(metrics: Any, expected: Any) -> None:
    assert len(metrics) == 4
    assert_parity(metrics, expected, FP32_TOLERANCE)
    for one, other in zip(metrics, expected):
        assert one[FIGURE] == pytest.approx(other[FIGURE], abs=1e-5)


LAUNCHES = [("single", 1, 1), ("ddp", 2, 2), ("fsdp2", 2, 4), ("zero2", 2, 2), ("cp", 2, 4), ("tp", 2, 4)]
OTHERS = [("single", 1, 2), ("single", 1, 4), ("ulysses", 2, 8), ("zero3", 2, 4), ("zero1", 2, 1), ("ddp", 4, 1)]


@pytest.mark.parametrize(("strategy", "world_size", "micro_batch_size"), thinned(LAUNCHES, OTHERS))
def test_it_is_the_same_under_every_strategy(strategy: str, world_size: int, micro_batch_size: int, run: Any):
    assert_same_run(run(strategy, world_size, micro_batch_size), run("single", 1, 8))


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter__type": "lora", "train__learning_rate": 0.05},
        {"model__attention": "sdpa"},
        {"train__activation_checkpointing": "full"},
        {"family": "qwen3_moe"},
        {"data__packing": True, "data__max_length": 96},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_it_is_the_same_whatever_is_trained_and_however_rows_lie(changes: dict[str, Any], run: Any):
    assert_same_run(run("fsdp2", 2, 2, **changes), run("single", 1, 8, **changes))


def test_it_is_part_of_what_is_trained(run: Any):
    without = run("single", 1, 8, train__router_aux_loss_coef=0.0)
    with_it = run("single", 1, 8)
    assert FIGURE not in without[0]
    assert with_it[0]["loss"] == pytest.approx(without[0]["loss"] + COEFFICIENT * with_it[0][FIGURE], abs=1e-5)
    assert with_it[0]["grad_norm"] != pytest.approx(without[0]["grad_norm"], abs=1e-4)


def test_a_loss_of_whole_micro_batches_is_rejected(run: Any):
    with pytest.raises(AssertionError, match="differs"):
        assert_same_run(run("ddp", 2, 2, bug=True), run("single", 1, 8, bug=True))


def test_a_loss_that_does_not_add_it_is_refused(ranks: Any, conversations: Path, tmp_path: Path):
    [recipe] = [each for each in every_recipe.RECIPES if each.name == "distillation"]
    model = balancing.mixture_folder(tmp_path / "mixtral", "mixtral")
    changes = {"train__router_aux_loss_coef": COEFFICIENT}
    values = every_recipe.values_of(recipe, model, conversations, tmp_path / "run", **changes)
    (said,) = ranks(1).run(sharing.refused_by_a_run, recipe.module.__name__, values, {}, strategy="single")
    assert said.startswith("train.router_aux_loss_coef is 0.5, but the loss of this recipe does not add it; give")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_plans_know_what_it_keeps():
    model = SMALL | {"model_type": "mixtral", "vocab_size": 203}
    setting = Setting(row_tokens=96, layout="packed", router_aux_loss_coef=COEFFICIENT)
    without = replace(setting, router_aux_loss_coef=None)
    kept = [full_trace(model, each, as_on_gpu=False).saved.bytes for each in (without, setting)]
    of_each_layer = 96 * 6 * 4  # probabilities of six experts
    assert kept[1] >= kept[0] + 3 * of_each_layer


def test_a_dense_model_is_refused_before_its_weights_load(ranks: Any, model_folder: Path, tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "one", "completion": "two"}) + "\n")
    config = scenarios.configuration(model_folder, data, tmp_path / "run", train__router_aux_loss_coef=0.1)
    with pytest.raises(AssertionError, match=r"no load-balancing loss for LlamaForCausalLM; set it to null"):
        ranks(1).run(scenarios.train, config, strategy="single")
