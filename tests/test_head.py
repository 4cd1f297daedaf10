"""Losses of some positions at a time are those of all scores at once, and so are their gradients."""

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.config import sections
from finetune.data.batches import IGNORED
from finetune.models import adapter as adapters
from finetune.training import loss as losses
from finetune.training.loss import LossOfScores, next_token_loss_sum, positions_at_once, take_losses, token_loss_sum
from finetune.units import largest_part

VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {},  # whose head has a bias
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"word_embed_proj_dim": 16},
    "llama4_text": {"num_local_experts": 2, "moe_layers": [1]},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
}


def model_of(family: str) -> PreTrainedModel:
    kind = family.split(",")[0]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SMALL | FAMILIES[family])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # biases and norms too
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def micro_batch(rows: int = 6, positions: int = 23, seed: int = 1) -> tuple[torch.Tensor, dict[str, Any]]:
    draw = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(VOCABULARY, (rows, positions), generator=draw)
    next_tokens = torch.randint(VOCABULARY, (rows, positions), generator=draw)
    return next_tokens.where(torch.rand(rows, positions, generator=draw) < 0.6, IGNORED), {"input_ids": input_ids}


def whole(model: PreTrainedModel, batch: tuple[torch.Tensor, dict[str, Any]]) -> torch.Tensor:
    next_tokens, inputs = batch
    return token_loss_sum(model(**inputs, use_cache=False).logits, next_tokens)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_alike(model: PreTrainedModel, batch: tuple[torch.Tensor, dict[str, Any]], **close: float) -> None:
    reference = copy.deepcopy(model)
    take_losses(model)
    expected, found = whole(reference, batch), next_token_loss_sum(model, batch)
    torch.testing.assert_close(found, expected, **(close or {"rtol": 1e-6, "atol": 0.0}))
    (expected / 7).backward()
    (found / 7).backward()
    theirs, ours = gradients(reference), gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, **(close or {"rtol": 1e-5, "atol": 1e-6}), msg=name)


@pytest.fixture(params=[1, 4, 1000])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Positions whose scores exist at a time."""
    monkeypatch.setattr(losses, "SCORES_BYTES", 4 * VOCABULARY * request.param)
    return request.param


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_the_scores_have_the_loss_and_the_gradients_of_all_of_them(family: str, at_once: int):
    assert_alike(model_of(family), micro_batch())


@pytest.mark.parametrize("what", ["adapter", "adapter on the head", "head trained in full"])
def test_gradients_of_a_frozen_an_adapted_and_a_copied_head_are_the_same(what: str, at_once: int):
    model = model_of("llama")
    targets = ["q_proj", *(["lm_head"] if what == "adapter on the head" else [])]
    saved = ["lm_head"] if what == "head trained in full" else []
    section = sections.Adapter(type="lora", rank=4, targets=targets, modules_to_save=saved)
    adapters.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    assert_alike(model, micro_batch())
    assert any("lm_head" in name for name in gradients(model)) == (what != "adapter")


def with_trained_rows(family: str) -> PreTrainedModel:
    """A model of which an adapter trains the rows of three tokens, in embedding and head."""
    model, section = model_of(family), sections.Adapter(type="lora", rank=4, targets=["q_proj"])
    rows = range(VOCABULARY - 5, VOCABULARY - 2)
    adapters.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0, token_rows=rows)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("family", ["llama", "llama, tied", "gemma2", "granite"])
def test_gradients_of_a_head_whose_rows_are_trained_are_those_of_all_scores(family: str, at_once: int):
    model = with_trained_rows(family)
    assert_alike(model, micro_batch())
    is_tied = bool(model.config.tie_word_embeddings)
    found = [name for name in gradients(model) if "trainable_tokens_delta" in name]
    assert len(found) == (1 if is_tied else 2)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if "base_layer" in name)


@pytest.mark.parametrize("family", ["llama", "llama, tied"])
def test_scores_of_a_head_whose_rows_are_trained_are_made_once(family: str, at_once: int):
    model, (next_tokens, inputs) = with_trained_rows(family), micro_batch()
    take_losses(model)
    made = list[int]()

    def watching(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        made.append(scores.shape[1])
        return token_loss_sum(scores, targets)

    places = losses.trained_positions(next_tokens)
    model(**inputs, loss_of_scores=LossOfScores(watching, places, next_tokens.flatten()[places])).backward()
    assert sum(made) == len(places)


def of_rows(losses_N: torch.Tensor, row_N: torch.Tensor) -> torch.Tensor:
    """Of each row of a micro-batch a function of its sum, as a loss of preferences is."""
    sums = torch.zeros(6).index_add(0, row_N, losses_N)
    return torch.nn.functional.logsigmoid(0.1 * (sums[::2] - sums[1::2])).sum()


@pytest.mark.parametrize("what", ["trained", "frozen", "adapter on the head", "head trained in full", "rows trained"])
def test_loss_that_is_no_sum_over_positions_has_the_gradients_of_all_scores(what: str, at_once: int):
    model, (next_tokens, inputs) = model_of("llama"), micro_batch()
    targets = ["q_proj", *(["lm_head"] if what == "adapter on the head" else [])]
    saved = ["lm_head"] if what == "head trained in full" else []
    if what == "rows trained":
        model = with_trained_rows("llama")
    elif what != "trained":
        section = sections.Adapter(type="lora", rank=4, targets=targets, modules_to_save=saved)
        adapters.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    reference = copy.deepcopy(model)
    take_losses(model)
    each = functools.partial(torch.nn.functional.cross_entropy, ignore_index=IGNORED, reduction="none")
    all_N, row_N = each(reference(**inputs).logits.flatten(0, 1), next_tokens.flatten()), torch.arange(138) // 23
    expected = of_rows(all_N, row_N)
    expected.backward()

    places = losses.trained_positions(next_tokens)
    wanted = LossOfScores(
        lambda scores, targets: each(scores.flatten(0, 1), targets.flatten()),
        places,
        next_tokens.flatten()[places],
        of_all=lambda losses_N: of_rows(losses_N, row_N[places]),
    )
    found = model(**inputs, loss_of_scores=wanted)
    torch.testing.assert_close(found, expected)
    found.backward()
    ours, theirs = gradients(model), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs, loss_of_scores=wanted), expected)


def test_both_passes_over_the_scores_drop_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses, "SCORES_BYTES", 4 * VOCABULARY * 1000)
    model, (next_tokens, inputs) = model_of("llama"), micro_batch()
    section = sections.Adapter(type="lora", rank=4, targets=["lm_head"], dropout=0.5)
    adapters.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
    take_losses(model.train())
    seen = []

    def watching(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        seen.append(found.detach())
        return found

    places = losses.trained_positions(next_tokens)
    for parameter in model.parameters():
        parameter.data.add_(0.1)  # or else the adapter adds nothing
    model(**inputs, loss_of_scores=LossOfScores(watching, places, next_tokens.flatten()[places], torch.sum))
    first, second = seen
    assert torch.equal(first, second)
    assert not torch.equal(first, first.new_zeros(len(first)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_under_autocast_are_as_near_to_fp32_as_those_of_all_scores(dtype: torch.dtype, at_once: int):
    model, batch = model_of("llama"), micro_batch()
    exact = copy.deepcopy(model)
    whole(exact, batch).backward()
    usual = copy.deepcopy(model)
    take_losses(model)
    with torch.autocast("cpu", dtype):
        whole(usual, batch).backward()
        next_token_loss_sum(model, batch).backward()

    def error(of: PreTrainedModel) -> float:
        true = gradients(exact)
        return sum(float((each - true[name]).norm() / true[name].norm()) for name, each in gradients(of).items())

    assert error(model) < 1.1 * error(usual)


@pytest.mark.parametrize("learns", [True, False])
def test_scores_of_more_positions_than_are_allowed_never_exist(at_once: int, learns: bool):
    model, batch = model_of("llama"), micro_batch()
    model.lm_head.requires_grad_(learns)
    take_losses(model)
    most = positions_at_once(VOCABULARY, [model.lm_head.weight] if learns else [])
    assert most == at_once + (32 * (4 + 4) // 12 if learns else 0)
    seen = list[tuple[int, ...]]()

    def watching(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(scores.shape))
        return token_loss_sum(scores, targets)

    trained = (batch[0].flatten() != IGNORED).nonzero().flatten()
    targets = batch[0].flatten()[trained]
    model(**batch[1], use_cache=False, loss_of_scores=LossOfScores(watching, trained, targets))
    assert {shape[2] for shape in seen} == {VOCABULARY}
    assert max(shape[1] for shape in seen) == largest_part(len(trained), most) <= most
    assert len(seen) == -(-len(trained) // most)
    assert sum(shape[1] for shape in seen) == len(trained) < batch[0].numel()


def test_nothing_is_learnt_of_a_micro_batch_without_trained_positions():
    model = model_of("llama")
    take_losses(model)
    next_tokens, inputs = micro_batch()
    loss = next_token_loss_sum(model, (torch.full_like(next_tokens, IGNORED), inputs))
    loss.backward()
    assert loss == 0
    found = gradients(model)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert not any(each.any() for each in found.values())


def test_a_loss_without_gradients_is_the_same():
    model, batch = model_of("gemma2"), micro_batch()
    expected = whole(model, batch)
    take_losses(model)
    with torch.no_grad():
        torch.testing.assert_close(next_token_loss_sum(model, batch), expected)


def test_scores_are_what_they_were_where_no_loss_is_asked_for():
    model, batch = model_of("granite"), micro_batch()
    expected = model(**batch[1]).logits
    take_losses(model)
    assert torch.equal(model(**batch[1]).logits, expected)
    assert torch.equal(model.generate(batch[1]["input_ids"][:1], max_new_tokens=2)[:, :23], batch[1]["input_ids"][:1])


def test_a_second_backward_pass_fails_instead_of_being_wrong():
    model = model_of("llama")
    take_losses(model)
    loss = next_token_loss_sum(model, micro_batch())
    loss.backward(retain_graph=True)
    with pytest.raises((RuntimeError, TypeError)):
        loss.backward()


def test_a_part_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(losses, "Parts", lambda positions, at_once: [slice(0, positions // 2)])
    with pytest.raises(AssertionError):
        assert_alike(model_of("llama"), micro_batch())


def error_of_tiny_gradients() -> float:
    """Of gradients of 3e-8 for each score, in fp16, as a share of theirs."""
    model, batch = model_of("llama"), micro_batch()
    take_losses(model)
    positions = torch.arange(batch[0].numel())
    wanted = LossOfScores(lambda scores, targets: 3e-8 * scores.float().sum(), positions, batch[0].flatten())
    found = []
    for is_fp16 in (False, True):
        with torch.autocast("cpu", torch.float16, enabled=is_fp16):
            loss = model(**batch[1], use_cache=False, loss_of_scores=wanted)
        model.zero_grad()
        loss.backward()
        found.append(model.lm_head.weight.grad.clone())
    return float((found[1] - found[0]).norm() / found[0].norm())


def test_gradients_below_the_numbers_of_fp16_are_not_lost(monkeypatch: pytest.MonkeyPatch):
    assert error_of_tiny_gradients() < 0.1
    monkeypatch.setattr(losses, "FP16_SCALE", 1.0)
    assert error_of_tiny_gradients() > 0.5
