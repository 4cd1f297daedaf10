"""The plan of a run that starts: what it chooses, what it refuses, what it says before and after."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scenarios
import yaml
from plan_models import ArithmeticTracer, arithmetic

from finetune import distributed, planner
from finetune.errors import InputError
from finetune.hardware.cards import Machines, parse_gpus
from finetune.models import loading
from finetune.planner import RunPlan, Setting, plan_run
from finetune.run import sizes
from recipes import sft

pytestmark = pytest.mark.planned

LLAMA_8B = arithmetic("llama-3.1-8b")


def planned(gpus: str | None, setting: Setting, **given: Any) -> RunPlan:
    machines = parse_gpus(gpus) if gpus else None
    defaults = {"global_batch_size": 16, "mean_row_tokens": 4096.0, "mean_document_tokens": 800.0}
    chosen = {"micro_batch_size": 1, "activation_checkpointing": None}
    return plan_run(LLAMA_8B, setting, machines=machines, **defaults | chosen | given)


LORA = Setting(adapter="lora", row_tokens=4096)


@pytest.mark.parametrize(("gpus", "recomputes"), [("1xH100", False), ("1x32GB", True)])
def test_activations_are_kept_where_they_fit_and_recomputed_where_not(gpus: str, recomputes: bool):
    plan = planned(gpus, LORA)
    assert plan.setting.activation_checkpointing == recomputes
    assert plan.problems() == []


def test_micro_batch_that_is_left_open_fits_and_divides_the_global_batch():
    small, large = (planned(gpus, LORA, micro_batch_size=None).setting for gpus in ("1x32GB", "1xH200"))
    assert all(setting.micro_batch_size * setting.accumulation == 16 for setting in (small, large))
    assert small.micro_batch_size <= large.micro_batch_size


def test_what_is_given_stays_as_it_is_even_where_it_does_not_fit():
    plan = planned("1x24GB", LORA, micro_batch_size=8, activation_checkpointing=False)
    assert (plan.setting.micro_batch_size, plan.setting.activation_checkpointing) == (8, False)
    [problem] = plan.problems()
    assert "This run would need" in problem
    assert "To fit, set " in problem
    assert "plan_check off" in problem


def test_what_is_refused_fits_once_it_is_changed_as_the_sentence_says():
    plan = planned("1x24GB", LORA)
    [problem] = plan.problems()
    assert "set quantization.bits to 4" in problem
    assert planned("1x24GB", replace(LORA, bits=4)).problems() == []


def test_rehearsal_keeps_activations_and_judges_nothing():
    plan = planned(None, LORA, micro_batch_size=None)
    assert (plan.setting.micro_batch_size, plan.setting.activation_checkpointing) == (1, False)
    assert plan.problems() == []
    assert "tokens_per_second" not in plan.record()


@pytest.mark.parametrize("strategy", ["tp_pp", "fsdp2_tp_pp"])
def test_replicas_and_shards_of_pipelines_of_split_layers_share_the_rows_of_a_step(strategy: str):
    setting = Setting(strategy, 16, tensor=4, stages=2, row_tokens=4096, layout="flat")
    plan = planned("2x8xH100", setting, micro_batch_size=None)
    assert plan.problems() == []
    assert plan.setting.micro_batch_size * plan.setting.accumulation * 2 == 16
    assert plan.setting.sizes == setting.sizes


@pytest.mark.parametrize("gpus", [None, "8xH100", "1x24GB", "2x8xH100"])
def test_plan_is_told_in_three_lines_of_a_hundred_columns(gpus: str | None):
    world = 1 if gpus is None else parse_gpus(gpus).world_size
    setting = replace(LORA, strategy="single" if world == 1 else "fsdp2", world_size=world)
    lines = planned(gpus, setting, global_batch_size=1024).describe()
    assert len(lines) == 3
    assert all(line.startswith("plan: ") and len(line) <= 100 for line in lines)


def test_parts_that_are_told_add_up_to_the_peak():
    first = planned("8xH100", replace(LORA, strategy="fsdp2", world_size=8)).describe()[0]
    peak, *parts = [float(number) for number in re.findall(r"\d+\.\d", first)]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(peak, abs=0.3)


def test_parts_add_up_to_the_peak():
    plan = planned("1xH100", LORA)
    assert sum(plan.record()["parts_gib"].values()) == pytest.approx(plan.record()["peak_memory_gib"], abs=0.001)


def test_predicted_stands_beside_measured():
    plan = planned("1xH100", LORA)
    predicted = plan.record()
    lines = plan.compare(peak_memory_gib=predicted["peak_memory_gib"] / 1.1, tokens_per_second=1000.0)
    assert "(+10.0%)" in lines[0]
    assert lines[1].startswith("speed: 1,000 tokens/s, predicted ")
    assert plan.compare(peak_memory_gib=None, tokens_per_second=None) == []


def test_strategy_that_the_planner_does_not_know_is_told():
    with pytest.raises(InputError, match=r"The planner does not know zero2_offload yet; set train.activation_checkp"):
        planned("1xH100", replace(LORA, strategy="zero2_offload"))


def test_what_is_assumed_beside_the_peak_refuses_no_run():
    peak = planned("1xH100", LORA).memory.peak
    machines = parse_gpus("1xH100")
    given: dict[str, Any] = {"global_batch_size": 16, "mean_row_tokens": 4096, "mean_document_tokens": 800}
    given |= {"micro_batch_size": 1, "activation_checkpointing": False}
    for spare, problems in ((2**20, 0), (-(2**20), 1)):
        snug = replace(machines, gpu=replace(machines.gpu, memory_gib=(peak + spare) / 2**30))
        plan = plan_run(LLAMA_8B, LORA, machines=snug, **given)
        assert plan.row is not None
        assert plan.row.verdict == "does not fit"
        assert len(plan.problems()) == problems


def test_speed_is_that_of_mean_rows_and_memory_that_of_the_longest():
    short, long = planned("1xH100", LORA, mean_row_tokens=200), planned("1xH100", LORA)
    assert short.memory.peak == long.memory.peak
    assert short.record()["tokens_per_second"] < long.record()["tokens_per_second"]


def tiny_gpu(memory_gib: float) -> Machines:
    machines = parse_gpus("1xH100")
    return replace(machines, gpu=replace(machines.gpu, memory_gib=memory_gib))


def test_run_that_cannot_fit_is_refused_before_weights_load_and_starts_without_the_check(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr(distributed, "machines_of", lambda strategy: tiny_gpu(0.01))
    monkeypatch.setattr(sizes, "Tracer", ArithmeticTracer)
    config = scenarios.configuration(model_folder, conversations, tmp_path / "run", train__steps=1)
    with mock.patch.object(loading, "load_model") as load, pytest.raises(InputError, match="This run would need"):
        sft.main(config)
    assert not load.called
    assert not (tmp_path / "run").exists()
    sft.main(
        scenarios.configuration(model_folder, conversations, tmp_path / "run", train__steps=1, train__plan_check="off")
    )
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.slow
def test_run_records_its_plan_its_choices_and_what_was_measured(
    model_folder: Path, conversations: Path, tmp_path: Path, capsys: Any
):
    changes = {"train__steps": 2, "train__micro_batch_size": "auto"}
    sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "run", **changes))
    run = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert run["config"]["train"]["micro_batch_size"] == 1
    assert run["config"]["train"]["activation_checkpointing"] == "none"
    assert run["plan"]["peak_memory_gib"] > 0
    speeds = [json.loads(line)["tokens_per_second"] for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert min(speeds) <= run["measured"]["tokens_per_second"] <= max(speeds)
    assert capsys.readouterr().out.count("plan: ") == 3


def test_unknown_model_trains_without_a_plan_and_cannot_leave_its_micro_batch_open(
    model_folder: Path, conversations: Path, tmp_path: Path, capsys: Any
):
    with mock.patch.object(planner, "plan_run", side_effect=InputError("Nobody knows it.")):
        config = scenarios.configuration(model_folder, conversations, tmp_path / "run", train__steps=1)
        sft.main(config)
        assert "plan: none. Nobody knows it." in capsys.readouterr().out
        changes = {"train__micro_batch_size": "auto"}
        with pytest.raises(InputError, match=r"auto lets the planner choose. Nobody knows it. Set it to a number"):
            sft.main(scenarios.configuration(model_folder, conversations, tmp_path / "other", **changes))


@pytest.mark.slow
def test_longest_row_that_is_trained_counts_and_not_what_a_row_could_hold(
    model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sizes, "Tracer", ArithmeticTracer)
    seen = []

    def plan(config: Any, setting: Setting, **given: Any) -> RunPlan:
        seen.append(setting.row_tokens)
        return plan_run(config, setting, **given)

    common = {"train__steps": 1, "data__max_length": 4096}
    with mock.patch.object(planner, "plan_run", plan):
        for changes in ({"train__global_batch_size": 1}, {"data__packing": True}):
            config = scenarios.configuration(model_folder, conversations, tmp_path / "run", **common | changes)
            sft.main(config)
    assert len(seen) == 2
    assert all(tokens < 4096 for tokens in seen)
