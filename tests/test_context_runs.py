"""Runs whose rows processes share are those of one process; what does not go with that is refused."""

import json
from pathlib import Path
from typing import Any

import corpora
import every_recipe
import pytest
import scenarios
import sharing
import tiny
import yaml
from alike import FIGURES, assert_alike, assert_alike_in_16_bits, texts_in

from finetune.output.run_reading import read_run

PROVEN = pytest.mark.prove
TOGETHER = ["cp", "ulysses"]
CP, SP = "PARALLELISM_CONFIG_CP_SIZE", "PARALLELISM_CONFIG_SP_SIZE"
OTHER_WAYS = "but processes spread rows in one of these ways; set the other to 1."
REFUSED: dict[str, tuple[str, int, dict[str, str], dict[str, Any], str]] = {
    "three processes": (
        "cp",
        3,
        {},
        {},
        "cp was launched with 2 GPUs for each row, but with 3 processes; launch a multiple of 2",
    ),
    "one process": ("ulysses", 1, {}, {}, "2 GPUs for each row, but with 1 process; launch a multiple of 2"),
    "noise": ("cp", 2, {}, {"train__neftune_alpha": 5.0}, "train.neftune_alpha draws noise for whole documents; set"),
    "attention": ("ulysses", 2, {}, {"model__attention": "sdpa"}, "has its own attention; set model.attention to auto"),
    "offload": ("cp", 2, {"FSDP_OFFLOAD_PARAMS": "1"}, {}, "set fsdp_offload_params to false, or use the strategy"),
    "replicas": (
        *("cp", 4, {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, {}),
        "cp shards weights over all processes; set parallelism_config_dp_replicate_size to 1, or parallelism_config_cp",
    ),
    "both ways": ("cp", 4, {SP: "2"}, {}, f"cp_size to 2 and parallelism_config_sp_size to 2, {OTHER_WAYS}"),
    "no sharding": ("ddp", 2, {CP: "2"}, {}, "but not distributed_type to FSDP"),
    "deepspeed": ("zero2", 2, {SP: "2"}, {}, "use the strategy file ulysses, or set parallelism_config_sp_size to 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_and_settings_that_do_not_go_with_shared_rows_are_refused(
    name: str, ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    strategy, processes, environment, changes, sentence = REFUSED[name]
    changes = {"train__steps": 1, "train__global_batch_size": 12, "train__micro_batch_size": 1} | changes
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes)
    asked = "recipes.sft", config.model_dump(), environment
    for said in ranks(processes).run(sharing.refused_by_a_run, *asked, strategy=strategy):
        assert sentence in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("loss", ["dpo", "simpo", "kto"])
def test_answers_that_are_compared_are_refused(loss: str, ranks: Any, model_folder: Path, tmp_path: Path):
    [recipe] = [each for each in every_recipe.RECIPES if each.name == loss]
    pairs = recipe.write(tmp_path / "pairs.jsonl", rows=8, seed=0)
    values = every_recipe.values_of(recipe, model_folder, pairs, tmp_path / "run")
    for said in ranks(2).run(sharing.refused_by_a_run, "recipes.dpo", values, {}, strategy="cp"):
        assert said.startswith("cp spreads a row over processes, and answers are compared as a whole; use the strategy")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return texts_in(tmp_path_factory.mktemp("texts"))


PRETRAINING: dict[str, Any] = {
    "pretrain__z_loss": 1e-3,
    "train__label_smoothing": 0.1,
    "train__steps": None,
    "train__tokens": 2400,
    "train__global_batch_tokens": 384,
    "train__batch_warmup": [{"until_tokens": 1000, "global_batch_tokens": 192}],
    "eval__every": 4,
}
"""Of a batch that grows from 4 rows to 8."""


@pytest.mark.parametrize("packing", ["concatenate", pytest.param(True, marks=PROVEN)])
def test_pretraining_is_that_of_one_process(
    packing: bool | str, ranks: Any, model_folder: Path, texts: dict[str, Any], tmp_path: Path
):
    found = {}
    for strategy, processes in (("single", 1), ("cp", 2), ("ulysses", 2)):
        changes = PRETRAINING | texts | {"data__packing": packing}
        values = corpora.values_of(model_folder, Path(), tmp_path / strategy, **changes)
        asked = corpora.pretrain, values
        assert ranks(processes).run(*asked, strategy=strategy) == [processes] * processes
        found[strategy] = scenarios.read_metrics(tmp_path / strategy)
    for name in ("cp", "ulysses"):
        assert len(found[name]) == len(found["single"])
        for one, other in zip(found[name], found["single"]):
            compared = ["loss", "grad_norm", "tokens", "total_tokens", *(FIGURES if "eval_loss" in other else [])]
            assert [one[key] for key in compared] == pytest.approx([other[key] for key in compared], rel=1e-5)
    assert sum("eval_loss" in line for line in found["single"]) > 1


SFT: dict[str, Any] = {"train__steps": 4, "train__micro_batch_size": 2, "eval__every": 2, "eval__prompts": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "averages, answers and layers computed again": {
        "train__ema_decay": 0.5,
        "eval__exact_match": True,
        "train__activation_checkpointing": "full",
    },
    "lora, one layer computed again": {
        "adapter__type": "lora",
        "adapter__rank": 4,
        "train__activation_checkpointing": 1,
    },
    "lora, activations in host memory": {
        "adapter__type": "lora",
        "adapter__rank": 4,
        "train__activation_checkpointing": "offload",
    },
    "qlora, packed": {
        "adapter__type": "lora",
        "adapter__rank": 4,
        "quantization__bits": 4,
        "data__packing": True,
    },
    "a last step of fewer rows": {"train__steps": None, "train__epochs": 0.25, "train__global_batch_size": 8},
    "streamed": {"data__streaming": True},
}


@pytest.fixture(scope="module")
def tuned(
    ranks: Any, model_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    folder = tmp_path_factory.mktemp("tuned")

    def run(name: str, strategy: str, processes: int, precision: str = "no", **changes: Any) -> list[dict[str, Any]]:
        settings = SFT | {"data__eval": [str(held_out)]} | changes
        config = scenarios.configuration(model_folder, conversations, folder / name, **settings)
        for seen in ranks(processes).run(scenarios.train, config, strategy=strategy, mixed_precision=precision):
            assert seen["world_size"] == processes
        return scenarios.read_metrics(folder / name)

    run.folder = folder
    return run


SHOWN = ["averages, answers and layers computed again"]


@pytest.mark.parametrize(
    "name", [*SHOWN, *(pytest.param(each, marks=PROVEN) for each in SETTINGS if each not in SHOWN)]
)
def test_tuning_and_its_held_out_loss_are_those_of_one_process(name: str, tuned: Any):
    strategy = TOGETHER[list(SETTINGS).index(name) % 2]
    expected = tuned("alone", "single", 1, **SETTINGS[name])
    answers = read_run(tuned.folder / "alone")["answers"]
    assert_alike(tuned("shared", strategy, 2, **SETTINGS[name]), expected)
    assert read_run(tuned.folder / "shared")["answers"] == answers


@PROVEN
def test_a_run_goes_on_with_rows_shared_and_with_rows_whole_as_one_that_was_not_interrupted(tuned: Any):
    expected = tuned("alone", "single", 1, train__steps=6)
    for before, after in (("cp", "fsdp2"), ("fsdp2", "ulysses"), ("ulysses", "cp")):
        tuned(before, before, 2, train__steps=6, checkpoint__every=3, checkpoint__keep=5)
        step = tuned.folder / before / "checkpoints" / "step-00000003"
        found = tuned(f"{before}-{after}", after, 2, train__steps=6, checkpoint__resume=str(step))
        assert_alike(found, expected[3:])


@PROVEN
def test_dropout_of_adapters_is_another_one_on_each_process(tuned: Any):
    """Each draws for its own positions, so that a step is not that of one process, but learns as it does."""
    lora = {"adapter__type": "lora", "adapter__rank": 4, "adapter__dropout": 0.2}
    found, expected = tuned("cp", "cp", 2, **lora), tuned("alone", "single", 1, **lora)
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-2)
    assert [line["grad_norm"] for line in found] != pytest.approx([line["grad_norm"] for line in expected], rel=1e-5)


@PROVEN
@pytest.mark.parametrize("strategy", TOGETHER)
def test_two_groups_ask_and_score_as_one_process(strategy: str, tuned: Any, tmp_path: Path):
    """Questions are answered, and rows scored, whole: each process has some of them."""
    words = ["house", "tree", "dog", "cat", "red"]
    rows = [{"question": f"the red {word}", "answer": word, "choices": [word, "green"]} for word in words]
    (tmp_path / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [{"name": name, "data": str(tmp_path / "task.jsonl"), "score": name} for name in ("exact_match", "choice")]
    changes = {"train__micro_batch_size": 1, "eval__tasks": tasks, "eval__exact_match": True}
    expected = tuned("alone", "single", 1, **changes)
    found = tuned("shared", strategy, 4, **changes)
    assert_alike(found, expected)
    for key in ("eval_exact_match", "eval_choice"):
        assert found[-1][key] == expected[-1][key]
    assert read_run(tuned.folder / "shared")["answers"] == read_run(tuned.folder / "alone")["answers"]


@PROVEN
def test_weights_in_16_bits_train_as_on_one_process(tuned: Any):
    found, expected = (
        tuned(strategy, strategy, processes, "bf16", train__weights="bf16")
        for strategy, processes in (("cp", 2), ("single", 1))
    )
    assert_alike_in_16_bits(found, expected)


def test_memory_is_checked_with_this_processs_part_of_the_heaviest_micro_batch(
    ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    """Of rows that four processes share: some of them train none of its positions."""
    changes: dict[str, Any] = {"train__steps": 2, "train__micro_batch_size": 1}
    config = scenarios.configuration(model_folder, conversations, tmp_path / "shared", **changes)
    seen = ranks(4).run(sharing.heaviest_of_a_run, config, {CP: "4"}, strategy="cp")
    assert yaml.safe_load((tmp_path / "shared" / "run.yaml").read_text())["strategy"]["processes_of_a_row"] == 4
    assert seen == [[(16, 64)]] * 4  # 61 tokens, filled up to chunks of equal size
    alone = scenarios.configuration(model_folder, conversations, tmp_path / "alone", **changes)
    ranks(1).run(scenarios.train, alone, strategy="single")
    assert_alike(scenarios.read_metrics(tmp_path / "shared"), scenarios.read_metrics(tmp_path / "alone"))


def test_a_heaviest_micro_batch_that_does_not_fit_is_named(
    ranks: Any, model_folder: Path, conversations: Path, tmp_path: Path
):
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", train__micro_batch_size=2)
    for said in ranks(2).run(sharing.fails_for_memory, config, strategy="cp"):
        assert said.startswith("The largest micro-batch of the run (2 rows of up to 61 tokens")
        assert "does not fit on the GPU" in said


@PROVEN
@pytest.mark.parametrize("strategy", TOGETHER)
def test_dropout_in_attention_is_another_one_on_each_process(strategy: str, tuned: Any, tmp_path: Path):
    folder = tiny.build_model_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.1}
    (folder / "config.json").write_text(json.dumps(config))
    found = tuned("shared", strategy, 2, model__path=str(folder))
    expected = tuned("alone", "single", 1, model__path=str(folder))
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-2)
    assert [line["grad_norm"] for line in found] != pytest.approx([line["grad_norm"] for line in expected], rel=1e-5)
