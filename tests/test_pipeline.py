"""A pipeline trains as one process does, each stage with its own layers alone; what it cannot do is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import every_recipe
import pipelines
import pytest
import scenarios
import sharing
import tiny
import torch
import yaml
from alike import assert_alike, assert_alike_in_16_bits, assert_answers_alike, assert_pretrains_alike
from hypothesis import given
from hypothesis import strategies as st
from parity import FP32_TOLERANCE, assert_parity
from safetensors.torch import load_file
from tiny_types import described
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from finetune.config.compatibility import stage_problems
from finetune.data.batches import IGNORED, document_bounds
from finetune.distributed import pipeline_step
from finetune.errors import InputError
from finetune.models import pipeline_stages
from finetune.models.loading import without_weights
from finetune.models.recomputation import layers_of
from finetune.models.stage_cuts import cuts

PROVEN = pytest.mark.prove
STAGES = "MEGATRON_LM_PP_DEGREE"


def dearest(costs: list[float], bounds: tuple[int, ...]) -> float:
    return max(sum(costs[first:end]) for first, end in itertools.pairwise((0, *bounds, len(costs))))


@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=8), stages=st.integers(1, 8))
def test_no_other_cut_has_a_dearest_stage_that_costs_less(costs: list[float], stages: int):
    stages = min(stages, len(costs))
    found = cuts(costs, stages)
    assert [unit for first, end in found for unit in range(first, end)] == list(range(len(costs)))
    assert min(end - first for first, end in found) >= 1
    every = itertools.combinations(range(1, len(costs)), stages - 1)
    assert dearest(costs, tuple(end for _, end in found[:-1])) == min(dearest(costs, bounds) for bounds in every)


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, and an embedding that is not the head."""
    return tiny.build_model_folder(tmp_path_factory.mktemp("deep"), tied=False, layers=6)


def test_a_large_head_leaves_its_stage_fewer_layers(deep_folder: Path):
    layers, of_stage = [], {}
    for vocabulary in (512, 4096):
        config = AutoConfig.from_pretrained(deep_folder, vocab_size=vocabulary)
        every = pipeline_stages.stages_of(without_weights(config, False), 2)
        of_stage = [[type(each).__name__ for each in modules] for modules in every]
        layers.append([names.count("LlamaDecoderLayer") for names in of_stage])
    assert layers == [[3, 3], [5, 1]]
    assert of_stage[0][0] == "Embedding"
    assert of_stage[1][1:] == ["LlamaRMSNorm", "Linear"]


def test_models_that_have_no_such_stages_are_refused(deep_folder: Path):
    config = AutoConfig.from_pretrained(deep_folder)
    layers = len(pipeline_stages.units_of(without_weights(config, False)))
    assert stage_problems("pp", "Llama", layers, 6) == []
    (sentence,) = stage_problems("pp", "Llama", layers, 8)
    assert sentence.startswith("pp was launched with 8 stages, but the model has 6 layers; set --megatron_lm_pp_degree")
    with torch.device("meta"):
        two_towers = T5ForConditionalGeneration(T5Config(num_layers=2, d_model=64, d_ff=64, num_heads=2))
    assert pipeline_stages.units_of(two_towers) == []
    small = {"hidden_size": 64, "vocab_size": 512, "layer_types": ["sliding_attention", "full_attention"] * 2}
    for of_each, shared, units in ((8, 0, 0), (0, 2, 0), (0, 0, 4)):
        more = {"num_hidden_layers": 4, "hidden_size_per_layer_input": of_each, "num_kv_shared_layers": shared}
        config = AutoConfig.for_model("gemma4_text", **small, **more)
        assert len(pipeline_stages.units_of(without_weights(config, False))) == units
    (sentence,) = stage_problems("pp", "T5", 0, 2)
    assert "which T5 is not; use the strategy file fsdp2" in sentence


@pytest.mark.parametrize("family", ["llama", *sorted(pipeline_stages.OTHERWISE), "glm_moe_dsa", "hy_v4"])
def test_models_whose_layers_hand_on_more_than_hidden_states_have_no_stages(family: str):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**described(family)))
    found: list[Any] = []
    layers_of(model)[0].register_forward_hook(lambda *known: found.append(known[-1]))
    model(input_ids=torch.zeros(1, 3, dtype=torch.int64), use_cache=False)
    passes = isinstance(found[0], torch.Tensor) and found[0].shape == (1, 3, 64)
    assert (passes, len(pipeline_stages.units_of(model))) == ((True, 2) if family == "llama" else (False, 0))


REFUSED: dict[str, tuple[int, dict[str, str], dict[str, Any], str]] = {
    "three processes": (3, {}, {}, "pp was launched with 2 stages, but with 3 processes; launch a multiple of 2"),
    "one stage": (2, {STAGES: "1"}, {}, "asks for a pipeline of one stage; set megatron_lm_pp_degree (strategy file"),
    "shared experts": (
        *(4, {"MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": "2"}, {}),
        "for which there is no strategy; use the strategy file pp or ep.",
    ),
    "more stages than layers": (4, {STAGES: "4"}, {}, "with 4 stages, but the model has 2 layers; set --megatron_lm"),
    "noise": (2, {}, {"train__neftune_alpha": 5.0}, "draws noise for each document; set it to 0, or use the strategy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_and_settings_that_do_not_go_with_a_pipeline_are_refused(
    name: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    sharing.assert_refused(ranks, REFUSED[name], model_folder, conversations, tmp_path / "run", "pp")


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_preferences_are_refused(loss: str, ranks: Any, model_folder: Path, tmp_path: Path):
    [recipe] = [each for each in every_recipe.RECIPES if each.name == loss]
    pairs = recipe.write(tmp_path / "pairs.jsonl", rows=8, seed=0)
    values = every_recipe.values_of(recipe, model_folder, pairs, tmp_path / "run")
    for said in ranks(2).run(sharing.refused_by_a_run, "recipes.dpo", values, {}, strategy="pp"):
        assert said.startswith("pp computes the loss of one pass of one model, and preferences take several; use")


def test_a_stage_has_and_steps_its_own_layers_alone(ranks: Any, deep_folder: Path, conversations: Path, tmp_path: Path):
    with torch.device("meta"):
        whole: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(deep_folder))
    config = scenarios.configuration(deep_folder, conversations, tmp_path, train__steps=2, train__micro_batch_size=2)
    found = ranks(3).run(pipelines.held_in, config, 3, strategy="pp")
    assert [each["stage"] for each in found] == [0, 1, 2]
    names = [name for each in found for name in each["held"]]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())  # each in one stage
    assert [each["stepped"] for each in found] == [each["held"] for each in found]
    of_layers = [{name.split(".")[2] for name in each["held"] if ".layers." in name} for each in found]
    assert of_layers == [{"0", "1"}, {"2", "3"}, {"4", "5"}]
    total = sum(each.nbytes for each in whole.parameters())
    assert {each["bytes"]["total_bytes"] for each in found} == {total}
    assert sum(each["bytes"]["held_bytes"] for each in found) == total
    assert max(each["bytes"]["held_bytes"] for each in found) < total / 2
    recorded = yaml.safe_load((tmp_path / "run.yaml").read_text())["strategy"]
    assert (recorded["stages"], recorded["sharding"]["layers"]) == (3, 2)


def test_a_stage_between_the_ends_of_a_model_that_ties_them_has_no_part_in_them(
    ranks: Any, conversations: Path, tmp_path: Path
):
    folder = tiny.build_model_folder(tmp_path / "tied", layers=3)
    changes: dict[str, Any] = {"train__steps": 2, "train__micro_batch_size": 2}
    config = scenarios.configuration(folder, conversations, tmp_path / "run", **changes)
    alone = scenarios.configuration(folder, conversations, tmp_path / "alone", **changes)
    found = ranks(3).run(pipelines.held_in, config, 3, strategy="pp")
    assert [each["stage"] for each in found] == [0, 1, 2]
    ranks(1).run(scenarios.train, alone, strategy="single")
    assert_alike(scenarios.read_metrics(tmp_path / "run"), scenarios.read_metrics(tmp_path / "alone"))
    whole, expected = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("run", "alone"))
    assert whole.keys() == expected.keys()
    assert all(torch.allclose(whole[name], expected[name], atol=1e-5) for name in whole)


def test_micro_batches_of_a_step_are_as_long_as_its_longest(
    ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path, train__steps=4, train__micro_batch_size=2)
    for found in ranks(2).run(pipelines.lengths_computed, config, strategy="pp"):
        assert [len(step) for step in found] == [2, 4, 4, 4, 4]  # the memory check, and the steps
        assert all(len(set(step)) == 1 for step in found)
        assert len({step[0] for step in found[1:]}) > 1


@pytest.mark.parametrize("changes", [{}, {"train__pipeline_parts": 2}], ids=["", "parts"])
def test_what_has_no_weights_and_follows_the_layers_computes_once(
    changes: dict[str, Any], ranks: Any, conversations: Path, tmp_path: Path
):
    """OLMo's last norm, which no stage has."""
    folder = tmp_path / "olmo"
    tiny.build_tokenizer().save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    described = {"model_type": "olmo", "vocab_size": 512, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(described | sizes))
    metrics = []
    for strategy, processes, more in (("single", 1, {}), ("pp", 2, changes)):
        config = scenarios.configuration(folder, conversations, tmp_path / strategy, train__steps=3, **more)
        for seen in ranks(processes).run(scenarios.train, config, strategy=strategy):
            assert seen["world_size"] == processes
        metrics.append(scenarios.read_metrics(tmp_path / strategy))
    assert_parity(metrics[1], metrics[0], FP32_TOLERANCE)


def test_a_model_that_takes_its_embeddings_twice_does_not_train(
    ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    changes: dict[str, Any] = {"train__steps": 2, "train__max_bad_steps": 1, "train__micro_batch_size": 2}
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes)
    asked = pipelines.train_a_model_that_adds_embeddings_at_the_end, config
    for said in ranks(2).run(*asked, strategy="pp"):
        assert said.startswith("step 1: the loss is not finite")


LORA: dict[str, Any] = {"adapter__type": "lora", "adapter__rank": 4}
SETTINGS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "four stages": (4, 4, {}),
    "fewer micro-batches than stages": (3, 3, {"train__micro_batch_size": 4}),
    "averages, the best kept, layers computed again": (
        *(2, 2),
        {"train__ema_decay": 0.5, "eval__keep_best": True, "train__activation_checkpointing": "full"},
    ),
    "lora, one layer computed again": (3, 3, LORA | {"train__activation_checkpointing": 1}),
    "qlora, packed, replicas": (4, 2, LORA | {"quantization__bits": 4, "data__packing": True}),
    "8 bits": (2, 2, LORA | {"quantization__bits": 8}),
    "padded rows": (4, 2, {"model__attention": "sdpa"}),
    "a last step of fewer rows": (4, 2, {"train__steps": None, "train__epochs": 0.25, "train__global_batch_size": 8}),
    "streamed": (2, 2, {"data__streaming": True}),
    "an embedding that is trained beside adapters": (2, 2, LORA | {"adapter__modules_to_save": ["embed_tokens"]}),
    "rates by layer": (4, 2, {"train__layer_decay": 0.5, "train__decay_embeddings": False}),
    "an adapter that starts with the weights": (4, 2, LORA | {"adapter__init": "pissa"}),
    "stages in which nothing is trained": (3, 3, LORA | {"adapter__targets": ["lm_head"]}),
}
"""Processes and stages."""
SHOWN = ["averages, the best kept, layers computed again", "qlora, packed, replicas"]


@pytest.fixture(scope="module")
def tuned(
    ranks: Any, deep_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return pipelines.Tuned(ranks, deep_folder, conversations, held_out, tmp_path_factory.mktemp("tuned"))


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in SETTINGS if each not in SHOWN)]
)
def test_tuning_and_its_held_out_loss_are_those_of_one_process(name: str, tuned: Any):
    processes, stages, changes = SETTINGS[name]
    tuned.assert_alike(processes, stages, **changes)


@PROVEN
@pytest.mark.parametrize(("processes", "stages"), [(2, 2), (4, 2), (3, 3)])
def test_questions_are_answered_and_choices_scored_as_by_one_process(
    processes: int, stages: int, tuned: Any, tmp_path: Path
):
    assert_answers_alike(tuned, processes, stages, tmp_path)


@PROVEN
def test_a_run_goes_on_in_other_stages_and_without_any_as_one_that_was_not_interrupted(tuned: Any):
    expected = tuned("alone", 1, 1, train__steps=6)
    launches = [(4, 4), (4, 2), (3, 3), (1, 1)]
    for number, (before, after) in enumerate(itertools.pairwise(launches)):
        tuned(f"before-{number}", *before, train__steps=6, checkpoint__every=3, checkpoint__keep=5)
        step = tuned.folder / f"before-{number}" / "checkpoints" / "step-00000003"
        found = tuned(f"after-{number}", *after, train__steps=6, checkpoint__resume=str(step))
        assert_alike(found, expected[3:])


IN_BF16: dict[str, tuple[int, int, dict[str, Any]]] = {
    "weights in bf16": (4, 2, {"train__weights": "bf16"}),
    "layers computed again": (3, 3, {"train__activation_checkpointing": "full"}),
    "activations in host memory": (3, 3, LORA | {"train__activation_checkpointing": "offload"}),
    "fewer micro-batches than stages": (3, 3, LORA | {"train__micro_batch_size": 4}),
}
"""Stages keep several micro-batches, with the same copies of fp32 weights."""


@pytest.mark.parametrize(
    "name", ["layers computed again", *(pytest.param(each, marks=PROVEN) for each in IN_BF16 if each[0] != "l")]
)
def test_computing_in_16_bits_trains_as_on_one_process(name: str, tuned: Any):
    processes, stages, changes = IN_BF16[name]
    settings: dict[str, Any] = {"precision": "bf16"} | changes
    found, expected = tuned("shared", processes, stages, **settings), tuned("alone", 1, 1, **settings)
    assert_alike_in_16_bits(found, expected)


@pytest.mark.parametrize("weights", ["fp32_master", pytest.param("bf16", marks=PROVEN)])
def test_an_embedding_that_is_the_head_too_stays_the_same_in_both_stages(
    weights: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    changes = {"train__weights": weights, "train__layer_decay": 0.9, "train__micro_batch_size": 2, "train__steps": 4}
    config = scenarios.configuration(model_folder, conversations, tmp_path, **changes)
    found = ranks(4).run(pipelines.embedding_of, config, strategy="pp", mixed_precision="bf16")
    assert len(set(found)) == 1


def test_what_a_schedule_wraps_is_told_where_it_is_ours_or_memory():
    lacking, wrong, other = torch.OutOfMemoryError("1 GiB"), InputError("wrong"), ValueError("other")
    for raised, told in ((lacking, lacking), (wrong, wrong), (other, None)):
        outer, inner = RuntimeError("stage 1"), RuntimeError("backward of micro-batch 2")
        outer.__cause__, inner.__cause__ = inner, raised
        assert pipeline_step._cause_of(outer) is (told or outer)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), missing=st.integers(1, 40))
def test_a_row_is_filled_up_with_documents_that_are_not_trained_and_no_longer_than_its_own(
    lengths: list[int], missing: int
):
    bounds, total = document_bounds(lengths, torch.device("cpu")), sum(lengths)
    row = torch.arange(total)[None]
    next_tokens, inputs = pipeline_step._filled_up((row, {"input_ids": row} | bounds), missing)
    assert next_tokens.tolist() == [[*range(total), *[IGNORED] * missing]]
    filled = [end - start for start, end in itertools.pairwise(inputs["cu_seq_lens_q"].tolist())]
    assert (filled[: len(lengths)], sum(filled)) == (lengths, total + missing)
    assert max(filled) == max(lengths) == inputs["max_length_q"]
    assert inputs["position_ids"].tolist() == document_bounds(filled, torch.device("cpu"))["position_ids"].tolist()


def test_pretraining_and_the_figures_of_its_held_out_sources_are_those_of_one_process(
    ranks: Any, model_folder: Path, tmp_path: Path
):
    assert_pretrains_alike(ranks, "pp", 2, model_folder, tmp_path)
