"""Adapters that go on, and evaluations that are compared: the best weights are the result, and a run ends in time."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import scenarios
import tiny
import torch
import yaml
from accelerate import PartialState
from parity import FP32_TOLERANCE, assert_parity, assert_really_active
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from thinning import thinned
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from finetune.checkpoint import folder as folders
from finetune.checkpoint import resuming, room_problems
from finetune.config import adapter_file, sections
from finetune.config.command_line import parse
from finetune.config.dpo_section import Dpo
from finetune.config.refusals import question_problems
from finetune.distributed import Strategy
from finetune.errors import InputError
from finetune.models import adapter, continued_adapter, loading
from finetune.output import run_files
from finetune.output.run_record import Progress
from finetune.report import tables
from finetune.report.run_read import RunRead
from finetune.run import improvement
from finetune.run.pairs import caches_reference, pair_problems
from finetune.run.preflight import folder_problems
from finetune.run.resumption import Resumption, is_finished
from finetune.training.loss import Objective
from finetune.training.preferences import Preferences
from finetune.training.pretraining import Pretraining
from recipes import sft


class Runs:
    """Trains under a strategy, which is asserted to be active."""

    def __init__(self, ranks: Any, model: Path, rows: Path, held_out: Path) -> None:
        self.ranks, self.model, self.rows, self.held_out = ranks, model, rows, held_out

    def __call__(self, strategy: str, world_size: int, folder: Path, **settings: Any) -> list[dict[str, Any]]:
        changes = {"data__eval": str(self.held_out), "train__micro_batch_size": 4 // world_size} | settings
        config = scenarios.configuration(self.model, self.rows, folder, **changes)
        for seen in self.ranks(world_size).run(scenarios.train, config, strategy=strategy):
            assert_really_active(seen, strategy, world_size)
        return scenarios.read_metrics(folder)


@pytest.fixture(scope="module")
def runs(ranks: Any, weights_folder: Path, conversations: Path, held_out: Path) -> Runs:
    return Runs(ranks, weights_folder, conversations, held_out)


def record_of(folder: Path) -> Any:
    return yaml.safe_load((folder / "run.yaml").read_text())


# -- adapter.from ----------------------------------------------------------------------------------------------------

LORA = {"adapter__type": "lora", "adapter__rank": 4, "adapter__targets": ["q_proj", "down_proj"], "train__steps": 3}


@pytest.fixture(scope="module")
def first(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run that trains an adapter, and one that continues from it, on one process."""
    folder = tmp_path_factory.mktemp("first")
    began = runs("single", 1, folder / "began", **LORA, train__learning_rate=1e-2)
    metrics = runs("single", 1, folder / "went-on", adapter__from=str(folder / "began"), train__steps=3)
    before = record_of(folder / "went-on")["eval_loss"]["before"]
    assert before == pytest.approx(began[-1]["eval_loss"], abs=1e-6)
    assert before < record_of(folder / "began")["eval_loss"]["before"] - 0.01
    return folder, metrics


@pytest.mark.parametrize("strategy", thinned(["zero3"], ["ddp", "fsdp2", "zero2"]))
def test_a_run_continues_from_an_adapter_under_every_strategy(
    strategy: str, first: tuple[Path, Any], runs: Runs, tmp_path: Path
):
    folder, expected = first
    metrics = runs(strategy, 2, tmp_path / "run", adapter__from=str(folder / "began"), train__steps=3)
    assert_parity(metrics, expected, FP32_TOLERANCE)
    recorded = record_of(tmp_path / "run")
    assert {key: recorded["config"]["adapter"][key] for key in ("type", "rank", "alpha", "targets")} == {
        "type": "lora",
        "rank": 4,
        "alpha": 32.0,
        "targets": ["down_proj", "q_proj"],
    }
    assert recorded["data"]["adapter"] == record_of(folder / "went-on")["data"]["adapter"]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head has weights of its own."""
    folder = tiny.build_model_folder(tmp_path_factory.mktemp("untied"), tied=False, hidden_size=128)
    return tiny.write_weights(folder)


@pytest.fixture
def saved_by_peft(untied: Path, tmp_path: Path) -> tuple[Path, Any]:
    """An adapter that PEFT has made, with values in all of its matrices; and the model with it."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"q_proj": 2}, modules_to_save=["lm_head"])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(untied), config)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1 if "lora" in name else 0.02)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter", PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(untied), tmp_path / "adapter"
    )


def test_an_adapter_of_peft_goes_on_from_what_peft_computes(saved_by_peft: tuple[Path, Any], untied: Path):
    folder, theirs = saved_by_peft
    section = sections.Adapter.model_validate({"from": str(folder)})
    assert (section.type, section.rank, section.rank_pattern, section.targets) == ("lora", 4, {"q_proj": 2}, ["q_proj"])
    model = AutoModelForCausalLM.from_pretrained(untied)
    assert continued_adapter.problems(model, section) == []
    adapter.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
    continued_adapter.load_values(model, section)
    input_ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        expected, found = theirs(input_ids=input_ids).logits, model(input_ids=input_ids).logits
        base = AutoModelForCausalLM.from_pretrained(untied)(input_ids=input_ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - base).abs().max() > 0.1


def configured(*flags: str) -> Any:
    return parse(sft.Config, ["--model.path", "m", "--data.train", "d", "--train.output_dir", "o", *flags])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--adapter.rank", "8"], r"adapter\.rank is 8, but the adapter in .* has 4; leave the key out"),
        (["--adapter.targets", "[v_proj]"], r"adapter\.targets is \['v_proj'\], but the adapter in .* \['q_proj'\]"),
        (["--adapter.type", "dora"], r"adapter\.type is 'dora', but the adapter"),
        (["--adapter.rank", "4", "--adapter.targets", "[q_proj]"], None),
    ],
)
def test_keys_that_contradict_the_adapter_are_refused(
    flags: list[str], said: str | None, saved_by_peft: tuple[Path, Any]
):
    flags = ["--adapter.from", str(saved_by_peft[0]), *flags]
    if said is None:
        found = configured(*flags)
        assert found.adapter.modules_to_save == ["lm_head"]
        assert found.train.learning_rate == 2e-4
        assert found.model_dump()["adapter"]["from"] == str(saved_by_peft[0])
        return
    with pytest.raises(InputError, match=said):
        configured(*flags)


def test_what_is_no_adapter_or_not_of_the_model_is_refused(saved_by_peft: tuple[Path, Any], untied: Path):
    folder, _ = saved_by_peft
    with pytest.raises(InputError, match=r"adapter\.from: .* holds no adapter .* give the folder of an adapter"):
        configured("--adapter.from", str(untied))
    assert "set adapter.from to it" in loading.problems(str(folder), None, None)[0]
    model = AutoModelForCausalLM.from_pretrained(untied)
    everywhere = sections.Adapter.model_validate({"from": str(folder), "targets": "all-linear"})
    assert "k_proj.lora_A.weight is missing" in continued_adapter.problems(model, everywhere)[0]
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [0]}))
    with pytest.raises(InputError, match="uses layers_to_transform, which a run cannot continue; merge"):
        configured("--adapter.from", str(folder))
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 8, "rank_pattern": {}}))
    assert (
        "instead of (8, 128)"
        in continued_adapter.problems(model, sections.Adapter.model_validate({"from": str(folder)}))[0]
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(folder / adapter.WEIGHTS)
    save_file({name: value for name, value in tensors.items() if "lora_B" not in name}, folder / adapter.WEIGHTS)
    section = sections.Adapter.model_validate({"from": str(folder)})
    adapter.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
    with pytest.raises(InputError, match=r"lora_B\.weight is missing"):
        continued_adapter.load_values(model, section)


def test_each_tensor_of_the_adapter_is_compared_before_weights_load(saved_by_peft: tuple[Path, Any], untied: Path):
    folder, _ = saved_by_peft
    section, tensors = sections.Adapter.model_validate({"from": str(folder)}), load_file(folder / adapter.WEIGHTS)
    skeleton = loading.without_weights(AutoConfig.from_pretrained(untied), False)
    (name, b), *_ = ((name, value) for name, value in tensors.items() if "lora_B" in name)
    head = "base_model.model.lm_head.weight"
    broken = {
        f"{name} is missing": {key: value for key, value in tensors.items() if key != name},
        f"{name} has shape": tensors | {name: torch.cat([b, b])},
        f"{head} is missing": {key: value for key, value in tensors.items() if key != head},
        "lora_magnitude_vector is unexpected": tensors
        | {name.replace("B.weight", "magnitude_vector"): b[:, 0].clone()},
    }
    assert continued_adapter.problems(skeleton, section) == []
    for said, saved in broken.items():
        save_file(saved, folder / adapter.WEIGHTS)
        assert said in continued_adapter.problems(skeleton, section)[0]
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    dora = sections.Adapter.model_validate({"from": str(folder)})
    save_file(tensors, folder / adapter.WEIGHTS)
    assert "lora_magnitude_vector is missing" in continued_adapter.problems(skeleton, dora)[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("init_lora_weights", name) for name in ("pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica")),
        ("alora_invocation_tokens", [7]),
        ("arrow_config", {"top_k": 2}),
        ("use_bdlora", {"nblocks": 2}),
    ],
)
def test_adapters_with_another_base_or_another_way_of_computing_are_refused(
    key: str, value: Any, saved_by_peft: tuple[Path, Any]
):
    file = saved_by_peft[0] / "adapter_config.json"
    config = json.loads(file.read_text())
    for known in (True, False, "gaussian", "eva"):
        file.write_text(json.dumps(config | {"init_lora_weights": known}))
        assert configured("--adapter.from", str(file.parent)).adapter.type == "lora"
    file.write_text(json.dumps(config | {key: value}))
    with pytest.raises(InputError, match=f"uses {key}.* which a run cannot continue; merge the adapter instead"):
        configured("--adapter.from", str(file.parent))


def test_every_setting_of_peft_is_known_to_be_continued_or_not():
    continued = {*adapter_file.KEYS.values(), "bias", "init_lora_weights", "peft_type", "target_modules", "use_dora"}
    continued.add("trainable_token_indices")  # of the same tokens: see test_new_tokens
    of_no_effect = {  # on what a saved adapter computes, or only together with another key
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "layers_pattern", "qalora_group_size"),
        *(
            "ensure_weight_tying",
            "fan_in_fan_out",
            "lora_dropout",
            "megatron_config",
            "megatron_core",
            "runtime_config",
        ),
    }
    assert {field.name for field in fields(LoraConfig)} == continued | of_no_effect | {*adapter_file.NOT_CONTINUED}


@pytest.mark.parametrize(
    ("kind", "settings"), [("llama", {"modules_to_save": ["lm_head"]}), ("gpt2", {}), ("gpt2", {"type": "dora"})]
)
def test_adapters_of_a_tied_head_and_of_gpt2_go_on_as_they_were_saved(
    kind: str, settings: dict[str, Any], model_folder: Path, tmp_path: Path
):
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    small: Any = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    config = AutoConfig.from_pretrained(model_folder) if kind == "llama" else small
    saved, model = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    how: dict[str, Any] = {"base": "", "revision": None, "dtype": torch.float32}
    adapter.attach(saved, sections.Adapter.model_validate({"type": "lora"} | settings), **how, seed=0)
    trained = {name: value.detach() for name, value in saved.named_parameters() if value.requires_grad}
    adapter.save(tmp_path / "adapter", saved, trained)
    section = sections.Adapter.model_validate({"from": str(tmp_path / "adapter")})
    assert continued_adapter.problems(loading.without_weights(config, False), section) == []
    adapter.attach(model, section, **how, seed=1)
    continued_adapter.load_values(model, section)
    values = dict(model.named_parameters())
    assert trained
    assert all(torch.equal(values[name], value) for name, value in trained.items())


def folder_said(tmp_path: Path, continued: Path, **changes: Any) -> str:
    run = tmp_path / "run"
    config = scenarios.configuration(tmp_path, tmp_path / "rows.jsonl", run, adapter__from=str(continued), **changes)
    return " ".join(folder_problems(config))


def test_a_run_does_not_replace_the_adapter_that_it_continues_from(saved_by_peft: tuple[Path, Any], tmp_path: Path):
    adapter_folder, run = saved_by_peft[0], tmp_path / "run"
    run.mkdir()
    adapter_folder.rename(run / "final")
    (tmp_path / "link").symlink_to(run / "final")
    for named in (run, run / "final", tmp_path / "link"):
        assert folder_said(tmp_path, named) == (
            "adapter.from is the result that this run would replace; choose another train.output_dir."
        )
        assert "would replace" in folder_said(tmp_path, named, train__overwrite=False, checkpoint__resume="auto")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(run / "final", elsewhere)
    assert folder_said(tmp_path, elsewhere) == ""


def test_the_adapter_may_lie_in_a_new_output_folder_and_a_run_beside_the_adapter(
    saved_by_peft: tuple[Path, Any], tmp_path: Path
):
    (tmp_path / "run").mkdir()
    inside = saved_by_peft[0].rename(tmp_path / "run" / "began")
    assert folder_said(tmp_path, inside) == ""
    config = scenarios.configuration(tmp_path, tmp_path / "r.jsonl", inside / "next", adapter__from=str(inside))
    assert folder_problems(config) == []


def test_preferences_are_compared_with_the_adapter_that_training_begins_with(saved_by_peft: tuple[Path, Any]):
    config, launch = configured("--adapter.from", str(saved_by_peft[0])), Strategy("single", 0, 1, 1, "no", True)
    assert caches_reference(config, Dpo(), launch)
    assert not caches_reference(configured("--adapter.type", "lora"), Dpo(), launch)
    assert any("adapter.from" in each for each in pair_problems(config, Dpo(reference="adapter_off"), launch))


def test_a_head_that_was_trained_apart_from_the_embeddings_it_shares_weights_with_is_refused(
    saved_by_peft: tuple[Path, Any], weights_folder: Path
):
    section = sections.Adapter.model_validate({"from": str(saved_by_peft[0])})
    tied = AutoModelForCausalLM.from_pretrained(weights_folder)
    adapter.attach(tied, section, base="", revision=None, dtype=torch.float32, seed=0)
    with pytest.raises(InputError, match=r"embed_tokens\.weight is missing"):
        continued_adapter.load_values(tied, section)


# -- the best evaluation ---------------------------------------------------------------------------------------------


def after(section: sections.Eval, *values: float) -> Progress:
    PartialState()
    progress = Progress()
    for step, value in enumerate(values, start=1):
        progress = improvement.judged(section, progress, {"step": step, section.metric: value})
    return progress


@pytest.mark.parametrize(
    ("metric", "values", "best", "since"),
    [
        ("eval_loss", [3.0, 2.0, 2.0, 2.5], 2, 2),
        ("eval_loss/news.jsonl", [2.0, 1.0], 2, 0),
        ("eval_loss_of_reasons", [0.1, 0.2], 2, 0),  # a task that somebody called so
        ("eval_bits_per_byte", [0.9, 1.0], 1, 1),
        ("eval_accuracy", [0.5, 0.7, 0.6], 2, 1),
        ("eval_loss", [float("nan"), 3.0, float("nan"), 2.9], 4, 0),
    ],
)
def test_less_of_a_loss_and_more_of_a_score_is_better_and_nan_never_is(
    metric: str, values: list[float], best: int, since: int
):
    found = after(sections.Eval(metric=metric, keep_best=True), *values)
    assert found.best is not None
    assert (found.best["step"], found.evaluations_since_best) == (best, since)


def test_training_stops_after_so_many_evaluations_without_a_better_one():
    section = sections.Eval(early_stopping=2)
    assert not improvement.has_stopped(section, after(section, 2.0, 2.1))
    assert improvement.has_stopped(section, after(section, 2.0, 2.1, 2.0))
    assert not improvement.has_stopped(sections.Eval(keep_best=True), after(sections.Eval(keep_best=True), 1, 2, 3))


def test_a_figure_that_no_evaluation_has_is_refused_with_those_that_there_are():
    with pytest.raises(InputError, match="has no eval_rouge; set it to one of eval_loss, eval_kl"):
        improvement.judged(
            sections.Eval(metric="eval_rouge", keep_best=True), Progress(), {"eval_loss": 1, "eval_kl": 2}
        )


@pytest.mark.parametrize(
    ("values", "held_out", "said"),
    [
        ({"keep_best": True, "every": 2}, None, "there is no eval_loss without held-out rows"),
        ({"early_stopping": 2}, "e", "no evaluation is made during training; set eval.every"),
        ({"every": 2}, None, "eval.every: there is nothing to evaluate; set data.eval or eval.tasks"),
        ({"metric": "eval_kl", "every": 2}, "e", "nothing is compared by it"),
        ({"early_stopping": 2, "every": 2, "metric": "eval_kl"}, None, None),
    ],
)
def test_comparisons_without_evaluations_are_refused(values: dict[str, Any], held_out: Any, said: str | None):
    problems = question_problems(sections.Eval(**values), held_out)
    assert len(problems) == (said is not None)
    assert all(str(said) in problem for problem in problems)


def test_the_best_checkpoint_outlives_newer_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for step in range(1, 6):
        (tmp_path / folders.name_of(step)).mkdir()
    monkeypatch.setattr(folders, "is_complete", lambda path: True)
    folders.remove_older(tmp_path, 2, bests={2})
    assert [path.name for path in folders.in_place(tmp_path)] == [folders.name_of(step) for step in (5, 4, 2)]


def test_the_best_checkpoint_stays_until_that_of_a_better_evaluation_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for step in (1, 2, 4, 5, 6):
        (tmp_path / folders.name_of(step)).mkdir()
    monkeypatch.setattr(folders, "is_complete", lambda path: True)
    folders.remove_older(tmp_path, 2, bests={1, 2, 3})  # that of step 3 could not be written
    assert [path.name for path in folders.in_place(tmp_path)] == [folders.name_of(step) for step in (6, 5, 2)]
    folders.remove_older(tmp_path, 1, bests={1, 2, 3, 5})
    assert [path.name for path in folders.in_place(tmp_path)] == [folders.name_of(step) for step in (6, 5)]


def test_a_run_whose_best_checkpoint_is_missing_has_a_result_all_the_same(tmp_path: Path):
    PartialState()
    section, launch = sections.Eval(keep_best=True), Strategy("single", 0, 1, 1, "no", True)
    progress, last, said = after(section, 2.0, 3.0), {"step": 2, "eval_loss": 3.0}, list[str]()
    parts: Any = (None, None)
    assert improvement.take_best(tmp_path, launch, *parts, progress, last, say=said.append) == last
    assert "after step 1, cannot be read" in said[0]
    assert "those of the last step, 2" in said[0]
    record: Any = SimpleNamespace(steps=2)
    assert improvement.recorded(record, section, progress, last=2, taken=2) is record


def test_no_evaluation_is_named_the_best_where_none_was_a_number():
    section = sections.Eval(keep_best=True)
    record: Any = SimpleNamespace(steps=1)
    assert improvement.recorded(record, section, after(section, float("nan")), last=1, taken=1) is record


BOTH = {"step": 4, "eval_loss": 2.0, "eval_kl": 0.5}


@pytest.mark.parametrize(
    ("values", "was_by", "names", "is_kept"),
    [
        ({"early_stopping": 3}, "eval_loss", {"eval_loss"}, True),
        ({"early_stopping": 3, "metric": "eval_kl"}, "eval_loss", {"eval_loss"}, False),
        ({"early_stopping": 3}, "eval_loss", {"eval_loss", "eval_new_task"}, False),
        ({"early_stopping": 3}, None, {"eval_loss"}, False),
        ({"keep_best": True}, "eval_loss", {"eval_loss"}, False),
    ],
    ids=["unchanged", "another metric", "a new task", "another run", "no checkpoint"],
)
def test_a_resumed_run_goes_on_comparing_only_with_what_is_comparable(
    values: dict[str, Any], was_by: str | None, names: set[str], is_kept: bool, tmp_path: Path
):
    PartialState()
    section, before = sections.Eval(**values), Progress(step=6, best=BOTH, evaluations_since_best=2)
    found = improvement.known_in(tmp_path, section, before, was_by=was_by, names=names)
    assert (found.best, found.evaluations_since_best) == ((BOTH, 2) if is_kept else (None, 0))
    figures = dict.fromkeys({section.metric, *names}, 9.0)
    assert improvement.judged(section, found, figures).evaluations_since_best == (3 if is_kept else 0)


def test_only_a_run_that_is_resumed_in_its_own_folder_is_compared_with_what_it_was(tmp_path: Path):
    eval_before = {"run": {"config": {"eval": {"metric": "eval_kl"}, "train": {}}}}
    found: Any = SimpleNamespace(contents=eval_before)
    launch = Strategy("single", 0, 1, 1, "no", True)
    assert Resumption(configured(), launch, found, weights_only=False, is_same_run=True).compared_by == "eval_kl"
    assert Resumption(configured(), launch, found, weights_only=False, is_same_run=False).compared_by is None
    assert Resumption(configured(), launch, found, False, is_same_run=True, same_tasks=False).compared_by is None


@pytest.mark.parametrize(
    ("metric", "objective", "said"),
    [
        ("eval_rouge", Objective(lambda model, batch: model, figure_names=()), "set it to one of eval_loss, eval_math"),
        ("eval_math", Objective(lambda model, batch: model, figure_names=()), None),
        ("eval_kl", Preferences(Dpo()).objective, None),
        ("eval_kl", Preferences(Dpo(loss="simpo")).objective, "one of eval_loss, eval_reward_chosen"),
        ("eval_reference_point", Preferences(Dpo(loss="kto")).objective, None),
        ("eval_bits_per_byte", Pretraining(0.0, None).objective, None),
        ("eval_kl", Pretraining(0.0, None).objective, "one of eval_loss, eval_bits_per_byte, eval_math"),
        ("eval_own", Objective(lambda model, batch: model), None),
    ],
)
def test_a_figure_that_no_evaluation_will_have_is_refused_before_weights_are_loaded(
    metric: str, objective: Objective, said: str | None
):
    tasks, rows = cast(Any, [SimpleNamespace(figure="eval_math")]), cast(Any, [1])
    found = improvement.metric_problems(sections.Eval(metric=metric, keep_best=True), objective, tasks, rows)
    assert len(found) == (said is not None)
    assert all(str(said) in problem for problem in found)


def test_an_early_stopped_run_is_finished_until_its_patience_is_raised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    record = {
        "id": "x",
        "steps": 100,
        "stopped": {"after_step": 40, "evaluations": 3},
        "measured": {"a": 1},
        "data": {"train": "rows"},
    }
    batches = cast(Any, SimpleNamespace(steps=100, fingerprint="rows"))
    for folder in (tmp_path, tmp_path / "final"):
        folder.mkdir(exist_ok=True)
        run_files.write_run(folder, record | {"config": {"eval": {"metric": "eval_loss"}}})
    flags = ["--train.output_dir", str(tmp_path), "--checkpoint.resume", "auto", "--eval.early_stopping"]
    assert is_finished(configured(*flags, "3"), batches)
    assert "is finished: early stopping ended it after step 40." in capsys.readouterr().out
    assert not is_finished(configured(*flags, "10"), batches)
    assert not is_finished(configured(*flags, "0"), batches)
    assert not is_finished(configured(*flags, "3", "--eval.metric", "eval_kl"), batches)
    [problem] = resuming.step_problems(tmp_path, None, 100)
    assert "a finished run of 40 steps and no checkpoint" in problem
    read = RunRead("run", record, [{"step": 40}], 0, has_result=True)
    assert tables.state(read) == "stopped early, 40 of 100 steps"
    assert tables.state(replace(read, has_result=False)) == "40 of 100 steps"


@pytest.mark.parametrize(
    ("settings", "best_of_every", "most"),
    [
        ({"every": 0}, 5, 2),
        ({"every": 0, "at_end": False}, 5, 2),
        ({"every": 0, "at_end": False}, 4, 3),
        ({"every": 1}, 1, 4),
        ({"every": 5, "keep": 9}, 2, 6),
        ({"every": 5, "keep": 9}, 0, 2),
    ],
)
def test_room_is_asked_for_no_more_checkpoints_than_there_can_be(
    settings: dict[str, Any], best_of_every: int, most: int
):
    assert resuming.checkpoints_at_once(sections.Checkpoint(**settings), 10, best_of_every=best_of_every) == most


def test_lack_of_room_for_the_best_checkpoint_names_its_key(tmp_path: Path):
    [problem] = room_problems(tmp_path, 2**60, at_once=4, keeps_best=True)
    assert "the best one, of eval.keep_best" in problem
    assert "set eval.keep_best to false" in problem
    assert "keep_best" not in room_problems(tmp_path, 2**60, at_once=3)[0]


WORSE = {
    "train__steps": 12,
    "train__learning_rate": 0.05,
    "train__schedule": "constant",
    "eval__every": 1,
    "eval__early_stopping": 3,
    "eval__keep_best": True,
    "checkpoint__every": 1,
    "train__overwrite": False,
}
"""A learning rate at which the held-out loss soon rises."""


@pytest.fixture(scope="module")
def stopped(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, int]:
    """A run on one process that stops early, its metrics, and the step that was the best."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    metrics = runs("single", 1, folder, **WORSE, checkpoint__keep=20)
    losses = [line["eval_loss"] for line in metrics]
    best = losses.index(min(losses)) + 1
    assert len(metrics) == best + 3 < 12
    return folder, metrics, best


def test_final_has_the_weights_of_the_best_evaluation(stopped: tuple[Path, Any, int], held_out: Path):
    folder, metrics, best = stopped
    recorded = record_of(folder)
    assert recorded["best"] == {"step": best, "eval_loss": metrics[best - 1]["eval_loss"]}
    assert recorded["eval_loss"]["after"] == metrics[best - 1]["eval_loss"]
    assert recorded["stopped"] == {"after_step": best + 3, "evaluations": 3}
    model = AutoModelForCausalLM.from_pretrained(folder / "final").eval()
    rows = tiny.read_rows(held_out, tiny.build_tokenizer())
    total = 0.0
    with torch.no_grad():
        for row in rows:
            next_tokens, input_ids = tiny.tensors(row)
            labels = next_tokens.flatten()
            total += torch.nn.functional.cross_entropy(
                model(input_ids=input_ids).logits[0], labels, ignore_index=-100, reduction="sum"
            ).item()
    assert total / sum(rows.trained_tokens) == pytest.approx(metrics[best - 1]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("strategy", thinned(["zero3"], ["ddp", "fsdp2", "zero2"]))
def test_two_processes_stop_where_one_does_and_keep_the_best_checkpoint(
    strategy: str, stopped: tuple[Path, Any, int], runs: Runs, tmp_path: Path
):
    folder, expected, best = stopped
    metrics = runs(strategy, 2, tmp_path / "run", **WORSE, checkpoint__keep=1)
    assert len(metrics) == len(expected)
    assert metrics[best - 1]["eval_loss"] == pytest.approx(expected[best - 1]["eval_loss"], abs=1e-5)
    kept = [path.name for path in folders.in_place(tmp_path / "run" / "checkpoints")]
    assert kept == [folders.name_of(best + 3), folders.name_of(best)]
    assert record_of(tmp_path / "run")["best"]["step"] == best
    found, single = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "run", folder))
    assert all((found[name] - single[name]).abs().mean() < 1e-4 for name in single)


def test_a_resumed_run_stops_where_the_uninterrupted_one_did(
    stopped: tuple[Path, Any, int], runs: Runs, tmp_path: Path
):
    folder, metrics, best = stopped
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "final")
    for step in (best + 2, best + 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / folders.name_of(step))
    resumed = runs("single", 1, tmp_path / "run", **WORSE, checkpoint__keep=20, checkpoint__resume="auto")
    for figure in ("step", "loss", "grad_norm", "eval_loss"):
        assert [line[figure] for line in resumed] == [line[figure] for line in metrics]
    found, whole = (load_file(run / "final" / "model.safetensors") for run in (tmp_path / "run", folder))
    assert all(torch.equal(found[name], whole[name]) for name in whole)
