"""The plan of split layers: by the trace of the model that each GPU computes, and held against what real ones hold."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import live_bytes
import pytest
import scenarios
import tiny
from test_plan_choose import GIB, LLAMA_8B, row_of
from thinning import thinned
from tracing import traced_anatomy, traced_step

from finetune.cli.planning.launch_command import launcher_flags
from finetune.errors import InputError
from finetune.hardware.cards import parse_gpus
from finetune.planner.candidates import candidates, splits
from finetune.planner.changes import sharded, spread
from finetune.planner.possible import why_not
from finetune.planner.question import question_about
from finetune.trace.setting import Setting
from finetune.trace.tensor_parts import part_config

TOKENS = 64
SPLIT = Setting("tp", 2, tensor=2, row_tokens=TOKENS, accumulation=2, layout="flat")
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "lora": ({"adapter": "lora", "rank": 4}, {"adapter__type": "lora", "adapter__rank": 4}),
}


@pytest.mark.parametrize(
    ("family", "method"),
    thinned([("llama", "lora"), ("qwen3_moe", "full")], [("llama", "full"), ("qwen3_moe", "lora")]),
)
def test_weights_gradients_and_state_are_those_that_a_real_process_holds(
    family: str, method: str, ranks: Any, conversations: Path, tmp_path: Path
):
    asked, changes = METHODS[method]
    folder = tiny.build_model_folder(tmp_path / "model", tied=False)
    experts = {"model_type": family, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    described = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 4, "head_dim": 16}
    described |= experts if family == "qwen3_moe" else {}
    (folder / "config.json").write_text(json.dumps(described))
    changes |= {"train__steps": 2, "train__micro_batch_size": 2}
    config = scenarios.configuration(folder, conversations, tmp_path / "run", **changes)
    everyone = ranks(2).run(live_bytes.bytes_held, config, strategy="tp", mixed_precision="bf16")
    assert len(everyone) == 2
    step = traced_step(described, replace(SPLIT, **asked), row_tokens=TOKENS)
    every = step.moments(step.micro_batch(2, TOKENS), accumulation=2)
    live_bytes.assert_as_planned(every, everyone)


@pytest.mark.parametrize("rows", [1, 64])
def test_scores_are_whole_on_each_gpu_of_a_layer_and_of_as_few_positions_at_a_time(rows: int):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_hidden_layers": 4}
    config = {"model_type": "llama", "vocab_size": 2**18, "pad_token_id": 1, **sizes}
    most = []
    for setting in (SPLIT, replace(SPLIT, strategy="single", world_size=1, tensor=1)):
        step = traced_step(config, setting, row_tokens=TOKENS)
        micro_batch = step.micro_batch(rows, TOKENS)
        assert (micro_batch.scored < rows * TOKENS) == (rows > 1)
        most.append(max(each.categories.get("logits", 0.0) for each in step.moments(micro_batch)))
    assert most[0] == pytest.approx(most[1], rel=0.01)


def test_a_part_of_a_model_has_what_its_file_leaves_to_defaults():
    anatomy = traced_anatomy({"model_type": "qwen3", "num_hidden_layers": 4, "vocab_size": 151936})
    part = part_config({"model_type": "qwen3"}, dict(anatomy.sizes), 4)
    assert (part["num_attention_heads"], part["num_key_value_heads"], part["head_dim"]) == (8, 8, 128)
    assert (part["intermediate_size"], part["vocab_size"], part["pad_token_id"]) == (5504, 37984, None)
    assert part_config({}, {"num_key_value_heads": 2, "vocab_size": 9, "head_dim": 8}, 4)["num_key_value_heads"] == 1


def test_models_that_put_outputs_together_have_no_plan_but_a_sentence():
    config = {"model_type": "phi3", "num_hidden_layers": 4, "vocab_size": 512, "pad_token_id": 1}
    with pytest.raises(InputError, match="does not know how the layers of this model are split"):
        traced_step(config, SPLIT, row_tokens=TOKENS)


def test_hidden_states_are_added_up_twice_in_each_layer_and_gradients_of_replicas_once_a_step():
    setting, machines = replace(SPLIT, world_size=8, tensor=4, accumulation=3), parse_gpus("8xH100")
    sent = {each.what: each.bytes for each in LLAMA_8B.time(setting, machines, mean_document_tokens=TOKENS).transfers}
    hidden = 3 * TOKENS * 4096 * 2 * (2 * 3 / 4)  # bf16, 2 (n - 1) / n of it
    trained = sum(count * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape, count in
                  LLAMA_8B.tracer.step(setting).trained().items())  # fmt: skip
    assert sent == {
        "all-reduce of hidden states": 65 * hidden,
        "all-gather of scores": 3 * TOKENS * 128256 * 2 * 3 / 4,
        "all-reduce of gradients of hidden states": 65 * hidden,
        "all-reduce over replicas": pytest.approx(4 * trained),  # 2 (n - 1) / n of 4 bytes
    }
    again = LLAMA_8B.time(replace(setting, activation_checkpointing=True), machines, mean_document_tokens=TOKENS)
    assert {each.what: each.bytes for each in again.transfers}["all-reduce of hidden states, recomputed"] == 64 * hidden
    assert again.tokens == 2 * 3 * TOKENS  # of two replicas


def test_more_gpus_for_each_layer_hold_less_of_it_and_checkpoints_are_of_whole_weights():
    found = [LLAMA_8B.memory(replace(SPLIT, world_size=8, tensor=size)).parts for size in (2, 4, 8)]
    assert [parts["weights"] for parts in found] == sorted((parts["weights"] for parts in found), reverse=True)
    assert found[2]["weights"] == pytest.approx(found[0]["weights"] / 4, rel=0.01)
    whole = LLAMA_8B.checkpoint_bytes(Setting())
    assert {LLAMA_8B.checkpoint_bytes(replace(SPLIT, world_size=8, tensor=size)) for size in (2, 8)} == {whole}


def test_every_number_of_gpus_of_a_layer_inside_a_machine_is_compared_and_the_command_says_it():
    machines = parse_gpus("2x8xH100")
    assert [each["tensor"] for each in splits("tp", machines, 40)] == [2, 4, 8]
    assert [each["tensor"] for each in splits("tp", parse_gpus("4x2xH100"), 40)] == [2]
    base = replace(SPLIT, world_size=16, tensor=8)
    asked = replace(
        question_about(LLAMA_8B, base, machines, mean_document_tokens=2048),
        strategies=("tp",),
        global_batch_size=64,
        micro_batch_size=None,
    )
    rows, left_out = candidates(asked, lambda of, setting: row_of(of, setting, GIB))
    assert [row.setting.tensor for row in rows] == [2, 4, 8]
    assert left_out == []
    assert ["--megatron_lm_tp_degree", "8"] in launcher_flags(base, machines)
    assert base.launched == "tp 8"


def test_from_split_layers_that_do_not_fit_strategies_that_shard_are_tried():
    setting = replace(SPLIT, world_size=8, tensor=2, accumulation=4)
    found = {(each.strategy, each.tensor, each.accumulation) for each in sharded(setting)}
    assert {("fsdp2", 1, 2), ("zero3", 1, 2)} <= found
    assert all(each.data_processes * each.accumulation == 16 for each in sharded(setting))
    assert [each.strategy for each in sharded(replace(setting, accumulation=1))] == ["fsdp2_tp"]
    assert spread(setting) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor": 3}, "use a multiple of 3 GPUs"),
        ({"precision": "fp16"}, "tp does not scale losses"),
        ({"optimizer": "adafactor"}, "needs whole matrices"),
    ],
)
def test_what_a_run_would_refuse_is_no_option(change: dict[str, Any], words: str):
    setting = replace(SPLIT, **{"world_size": 16, "tensor": 8} | change)
    assert words in (why_not(LLAMA_8B, setting) or "")
