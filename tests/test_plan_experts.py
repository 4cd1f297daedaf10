"""The plan of shared experts: held against what real processes hold, and its traffic against arithmetic by hand."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import live_bytes
import pytest
import scenarios
import tiny
import yaml
from full_trace import FullTrace, full_trace
from test_plan_choose import GIB, LLAMA_8B, row_of
from tracing import traced_step

from finetune.cli.planning.launch_command import launcher_flags
from finetune.cli.planning.reasons import reasons
from finetune.hardware.cards import Machines, parse_gpus
from finetune.planner.candidates import candidates, splits
from finetune.planner.changes import sharded, spread
from finetune.planner.choose import Plan
from finetune.planner.judged_rows import Row, judged
from finetune.planner.memory import reference_bytes
from finetune.planner.model import Model
from finetune.planner.nearest import Nearest
from finetune.planner.of_run import plan_run
from finetune.planner.possible import why_not
from finetune.planner.question import question_about
from finetune.trace.setting import Setting
from finetune.trace.tracer import Tracer

TOKENS, LAYERS, WIDTH, INNER, EXPERTS, CHOSEN, VOCABULARY = 64, 6, 64, 96, 8, 2, 512
MIXTURE = {
    "model_type": "mixtral",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SHARED = Setting("ep", 8, experts=4, row_tokens=TOKENS, accumulation=3, layout="flat")
MACHINES = parse_gpus("8xH100")
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "lora": ({"adapter": "lora", "rank": 4}, {"adapter__type": "lora", "adapter__rank": 4}),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Tracer(MIXTURE, row_tokens=TOKENS, folder=tmp_path_factory.mktemp("traces")) as tracer:
        yield Model(MIXTURE, tracer)


def test_routers_that_choose_by_a_buffer_are_traced(tmp_path: Path):
    experts = {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER, "n_shared_experts": 1}
    described = MIXTURE | experts | {"model_type": "glm4_moe", "first_k_dense_replace": 1, "head_dim": 16}
    with Tracer(described, row_tokens=TOKENS, folder=tmp_path) as tracer:
        assert tracer.step(SHARED).layers == LAYERS


def sent(model: Model, setting: Setting) -> dict[str, float]:
    """Bytes in a step, by what they are."""
    found = model.time(setting, MACHINES, mean_document_tokens=TOKENS).transfers
    assert not any(each.overlaps for each in found)
    return {each.what: each.bytes for each in found}


def folder_of_mixture(folder: Path, family: str) -> tuple[Path, dict[str, Any]]:
    """A model folder without weights, and what its config.json says."""
    file = tiny.build_model_folder(folder, tied=False) / "config.json"
    experts = {"model_type": family, "num_experts_per_tok": 2, "num_hidden_layers": 4}
    experts |= {"num_experts" if family == "qwen3_moe" else "num_local_experts": 4, "moe_intermediate_size": 64}
    described = json.loads(file.read_text()) | experts
    file.write_text(json.dumps(described))
    return folder, described


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("method", METHODS)
def test_weights_gradients_and_state_are_those_that_a_real_process_holds(
    family: str, method: str, ranks: Any, conversations: Path, tmp_path: Path
):
    asked, changes = METHODS[method]
    folder, described = folder_of_mixture(tmp_path / "model", family)
    changes = changes | {"train__steps": 2, "train__micro_batch_size": 2}
    config = scenarios.configuration(folder, conversations, tmp_path / "run", **changes)
    everyone = ranks(2).run(live_bytes.bytes_held, config, strategy="ep", mixed_precision="bf16")
    assert len(everyone) == 2
    setting = replace(SHARED, world_size=2, experts=2, accumulation=2, **asked)
    step = traced_step(described, setting, row_tokens=TOKENS)
    every = step.moments(step.micro_batch(2, TOKENS), accumulation=2)
    live_bytes.assert_as_planned(every, everyone)


EVERY_EXPERT = MIXTURE | {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 4}
"""A mixture whose tokens choose all experts, so that its routers are balanced."""


def traced(setting: Setting, *, real: bool = False, rank: int = 0) -> FullTrace:
    return full_trace(EVERY_EXPERT, setting, real=real, rank=rank, as_on_gpu=False)


def real_trace(setting: Setting) -> FullTrace:
    return traced(setting, real=True, rank=int(os.environ["RANK"]))


@pytest.mark.parametrize("recomputes", [False, True])
def test_activations_are_those_that_real_processes_keep_where_routers_are_balanced(recomputes: bool, ranks: Any):
    setting = Setting("ep", 2, experts=2, row_tokens=96, accumulation=2, activation_checkpointing=recomputes)
    found = ranks(2).run(real_trace, setting, strategy="ep", mixed_precision="bf16")
    assert len(found) == 2
    for rank, real in enumerate(found):
        fake = traced(setting, rank=rank)
        for one, other in ((fake.held, real.held), (fake.saved, real.saved)):
            # Gloo's thread lets go of what it has sent when it will
            assert one.categories == {each: size for each, size in other.categories.items() if each != "gathered"}


@pytest.mark.parametrize("change", [{}, {"expert_load": 2}, {"adapter": "lora", "activation_checkpointing": True}])
def test_peak_by_two_shallow_traces_is_that_of_all_layers(change: dict[str, Any], mixture: Model):
    setting = replace(SHARED, micro_batch_size=2, accumulation=2, **change)
    step = mixture.tracer.step(setting)
    every = step.moments(step.micro_batch(2, TOKENS), accumulation=2)
    assert max(each.bytes for each in every) == pytest.approx(full_trace(MIXTURE, setting).peak.bytes, rel=0.01)


def test_tokens_are_exchanged_twice_in_each_pass_of_a_layer_and_in_a_recomputed_one_again(mixture: Model):
    tokens = 3 * LAYERS * TOKENS * CHOSEN * WIDTH * 2 * 3 / 4  # bf16, to three of four GPUs
    counts = 3 * LAYERS * EXPERTS * 8 * 3 / 4
    found = sent(mixture, SHARED)
    assert found["all-to-all of rows in the forward pass"] == pytest.approx(2 * tokens)
    assert found["all-to-all of rows in the backward pass"] == pytest.approx(2 * tokens)
    assert found["all-to-all of counts in the forward pass"] == pytest.approx(counts)
    again = sent(mixture, replace(SHARED, activation_checkpointing=True))
    assert again["all-to-all of rows in the forward pass"] == pytest.approx(2 * tokens)
    assert again["all-to-all of rows in the backward pass"] == pytest.approx(4 * tokens)


def test_gradients_of_experts_are_added_up_over_replicas_and_others_over_all_once_a_step(mixture: Model):
    experts = LAYERS * EXPERTS * 3 * WIDTH * INNER
    others = mixture.anatomy.parameters - experts
    over_replicas, over_all = 4 * experts / 4 * 2 * 1 / 2, 4 * others * 2 * 7 / 8  # 2 (n - 1) / n of 4 bytes
    for accumulation in (1, 3):
        found = sent(mixture, replace(SHARED, accumulation=accumulation))
        # and a byte for each parameter, which says whether any process has a gradient of it
        assert found["all-reduce in the backward pass"] == pytest.approx(over_replicas + over_all, rel=1e-4)


def test_all_gpus_compute_different_rows(mixture: Model):
    assert SHARED.data_processes == 8
    assert mixture.time(SHARED, MACHINES, mean_document_tokens=TOKENS).tokens == 8 * 3 * TOKENS


def test_more_gpus_for_the_experts_hold_less_of_them_and_checkpoints_are_of_whole_weights(mixture: Model):
    experts = 4 * LAYERS * EXPERTS * 3 * WIDTH * INNER
    others = 4 * mixture.anatomy.parameters - experts
    for size in (2, 4, 8):
        shared = replace(SHARED, experts=size)
        weights = mixture.memory(shared).parts["weights"]
        assert weights == pytest.approx(others + experts / size, abs=live_bytes.ROUNDING * 100)
        assert mixture.checkpoint_bytes(shared) == mixture.checkpoint_bytes(Setting())
        copies = reference_bytes(mixture.tracer.step(shared), replace(shared, reference="model"))
        assert copies == others + experts // size


def test_twice_the_tokens_for_the_experts_of_a_gpu_are_more_activations_and_more_work(mixture: Model):
    row, loaded = (
        judged(question_about(mixture, each, MACHINES, mean_document_tokens=TOKENS), each)
        for each in (SHARED, replace(SHARED, expert_load=2))
    )
    hidden = TOKENS * CHOSEN * WIDTH * 2
    more = {part: loaded.memory.parts[part] - size for part, size in row.memory.parts.items()}
    assert more["activations"] >= LAYERS * hidden
    assert more["weights"] == more["gradients"] == more["optimizer"] == 0
    received = [sum(each.bytes for each in of.time.transfers if "of rows" in each.what) for of in (row, loaded)]
    assert received[1] == pytest.approx(2 * received[0])
    assert loaded.time.parts.matrix_products > row.time.parts.matrix_products


def test_answer_says_what_routers_that_are_not_balanced_would_take(mixture: Model):
    asked = question_about(mixture, SHARED, MACHINES, mean_document_tokens=TOKENS)
    (told,) = [each for each in reasons(Plan(asked, (judged(asked, SHARED),), (), None)) if "router" in each]
    assert told.startswith("ep 4 is planned for balanced routers: with twice the tokens for its experts, at ")


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"micro_batch_size": 2}, "reduce train.micro_batch_size"),
        ({}, "set train.activation_checkpointing to full"),
        ({"activation_checkpointing": True, "recomputed_layers": 2}, "set train.activation_checkpointing to full"),
        ({"activation_checkpointing": True}, "let more GPUs share the experts"),
    ],
)
def test_what_unbalanced_routers_do_not_leave_room_for_has_advice_that_can_be_followed(
    change: dict[str, Any], advice: str, mixture: Model
):
    setting = replace(SHARED, **change)

    def on(machines: Machines, setting: Setting) -> Row:
        return judged(question_about(mixture, setting, machines, mean_document_tokens=TOKENS), setting)

    needed = [on(MACHINES, each).gpu.bytes for each in (setting, replace(setting, expert_load=2))]
    small = replace(MACHINES, gpu=replace(MACHINES.gpu, memory_gib=sum(needed) / 2 / GIB))
    row = on(small, setting)
    assert row.verdict == "tight"
    asked = question_about(mixture, setting, small, mean_document_tokens=TOKENS)
    (told,) = [each for each in reasons(Plan(asked, (row,), (), None)) if "router" in each]
    assert told.endswith(f"which does not fit; {advice} until they are.")


def test_a_plan_of_a_run_takes_routers_as_balanced(mixture: Model):
    plan = plan_run(
        mixture,
        SHARED,
        machines=MACHINES,
        global_batch_size=24,
        mean_row_tokens=TOKENS,
        mean_document_tokens=TOKENS,
        micro_batch_size=None,
        activation_checkpointing=None,
    )
    assert plan.setting.micro_batch_size * plan.setting.accumulation == 3
    assert "assuming balanced routers" in plan.describe()[-1]


def test_a_run_of_shared_experts_has_a_plan_that_chooses_its_micro_batch(
    ranks: Any, conversations: Path, tmp_path: Path
):
    folder, _ = folder_of_mixture(tmp_path / "model", "mixtral")
    changes = {"train__steps": 1, "train__micro_batch_size": "auto"}
    config = scenarios.configuration(folder, conversations, tmp_path / "run", **changes)
    assert [each["world_size"] for each in ranks(2).run(scenarios.train, config, strategy="ep")] == [2, 2]
    run = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert run["config"]["train"]["micro_batch_size"] == 1
    assert run["plan"]["peak_memory_gib"] > 0


def test_every_divisor_of_the_experts_inside_a_machine_is_compared_and_the_command_says_it(mixture: Model):
    machines = parse_gpus("2x8xH100")
    assert [each["experts"] for each in splits("ep", machines, LAYERS)] == [2, 4, 8]
    assert [each["experts"] for each in splits("ep", parse_gpus("4x2xH100"), LAYERS)] == [2]
    base = replace(SHARED, world_size=16, experts=8)
    asked = replace(
        question_about(mixture, base, machines, mean_document_tokens=TOKENS),
        strategies=("ep",),
        global_batch_size=64,
        micro_batch_size=None,
    )
    rows, left_out = candidates(asked, lambda of, setting: row_of(of, setting, GIB))
    assert [row.setting.experts for row in rows] == [2, 4, 8]
    assert left_out == []
    assert ["--megatron_lm_expert_model_parallel_size", "8"] in launcher_flags(base, machines)
    assert base.launched == "ep 8"


def test_from_shared_experts_that_do_not_fit_more_gpus_share_them_or_strategies_shard(mixture: Model):
    setting = replace(SHARED, experts=2, accumulation=4)
    found = {(each.strategy, each.experts, each.accumulation) for each in sharded(setting)}
    assert {("ep", 4, 4), ("ep", 8, 4), ("fsdp2", 1, 4), ("zero3", 1, 4)} <= found
    assert all(each.data_processes * each.accumulation == 32 for each in sharded(setting))
    assert spread(setting) == []
    asked = question_about(mixture, setting, MACHINES, mean_document_tokens=TOKENS)
    nearest = Nearest(row_of(asked, replace(setting, experts=4), GIB), {}, None, ())
    assert nearest.text == "launch with --megatron_lm_expert_model_parallel_size 4"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"experts": 3}, "shared by 3 processes, but each layer has 8"),
        ({"world_size": 12}, "use a multiple of 8 GPUs"),
        ({"experts": 16}, "shared by 16 processes, but each layer has 8"),
        ({"precision": "fp16"}, "ep does not scale losses"),
        ({"optimizer": "adafactor"}, "needs whole matrices"),
        ({"adapter": "lora", "bits": 4}, "which bitsandbytes does not quantise"),
    ],
)
def test_what_a_run_would_refuse_is_no_option(change: dict[str, Any], words: str, mixture: Model):
    setting = replace(SHARED, **{"world_size": 16, "experts": 8} | change)
    assert words in (why_not(mixture, setting) or "")


def test_a_dense_model_has_no_experts_to_share():
    for processes, size in ((8, 4), (3, 1)):  # also on GPUs that could not share any
        setting = replace(SHARED, world_size=processes, experts=size)
        assert "this model has none that can be shared" in (why_not(LLAMA_8B, setting) or "")
