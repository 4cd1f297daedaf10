"""The plan of pipelines of split layers: held against what real processes hold, and its arithmetic by hand."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import live_bytes
import pytest
import scenarios
from plan_models import arithmetic
from test_plan_choose import GIB, row_of
from test_plan_part_shards import ADAPTED, MODEL, TOKENS, WIDTH, asked_of
from thinning import thinned
from tracing import traced_step

from finetune.cli.planning.launch_command import launcher_flags
from finetune.config.strategy_names import SHARDED_PARTS
from finetune.errors import InputError
from finetune.hardware.cards import parse_gpus
from finetune.planner import pipelines
from finetune.planner.candidates import candidates, splits
from finetune.planner.changes import sharded
from finetune.planner.judged_rows import Row
from finetune.planner.model import Model
from finetune.planner.nearest import Nearest
from finetune.planner.possible import why_not
from finetune.planner.question import METHODS, Question, question_about
from finetune.trace.setting import Setting
from finetune.trace.tracer import Tracer

BOTH = Setting("tp_pp", 8, tensor=2, stages=2, row_tokens=TOKENS, accumulation=3, layout="flat")
SHARDED = replace(BOTH, strategy="fsdp2_tp_pp")
PROCESSES = {"tp_pp": 4, "fsdp2_tp_pp": 8}
LLAMA_70B = arithmetic("llama-3.1-70b")
LLAMA_405B = arithmetic(
    "llama-3.1-70b", hidden_size=16384, intermediate_size=53248, num_attention_heads=128, num_hidden_layers=126
)
LAYER = (8 + 4) * 8 * WIDTH + 3 * WIDTH * 96 // 2 + 2 * WIDTH
"""Elements of one of two parts of a layer: half of queries, keys, values and outputs, half of the MLP, and norms."""
ENDS = 2 * 512 * WIDTH // 2 + WIDTH
"""Of embedding, head and the norm before it."""
LAYERS = (5, 3)
"""Of the stages: the head counts as one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Tracer(MODEL, row_tokens=TOKENS, folder=tmp_path_factory.mktemp("traces")) as tracer:
        yield Model(MODEL, tracer)


@pytest.mark.parametrize(
    ("strategy", "method"),
    thinned([("tp_pp", "full")], [("tp_pp", "lora"), ("fsdp2_tp_pp", "full"), ("fsdp2_tp_pp", "lora")]),
)
def test_weights_gradients_and_state_of_parts_of_stages_are_those_that_real_processes_hold(
    method: str, strategy: str, ranks: Any, conversations: Path, tmp_path: Path
):
    asked, changes = ADAPTED[method]
    described = live_bytes.model_with(tmp_path / "model", num_hidden_layers=8)
    changes = changes | {"train__steps": 2, "train__micro_batch_size": 2}
    config = scenarios.configuration(tmp_path / "model", conversations, tmp_path / "run", **changes)
    processes = PROCESSES[strategy]
    everyone = ranks(processes).run(live_bytes.bytes_held, config, strategy=strategy, mixed_precision="bf16")
    assert len(everyone) == processes
    both = replace(BOTH, strategy=strategy, world_size=processes, **asked)
    both = replace(both, accumulation=4 // both.data_processes)
    with tempfile.TemporaryDirectory() as traces, Tracer(described, row_tokens=TOKENS, folder=Path(traces)) as tracer:
        step, anatomy = tracer.step(both), tracer.anatomy
    of_stage = processes // 2
    for stage in pipelines.stages_of(both, anatomy):
        every = pipelines.moments_of(step, both, stage, step.micro_batch(2, TOKENS), anatomy)
        live_bytes.assert_as_planned(every, everyone[of_stage * stage.number : of_stage * (stage.number + 1)])


def sent(model: Model, setting: Setting, gpus: str = "4x2xH100") -> dict[str, float]:
    """Bytes in a step, by what they are, but for a few of flags and norms."""
    found = model.time(setting, parse_gpus(gpus), mean_document_tokens=TOKENS).transfers
    return {each.what: each.bytes for each in found if each.bytes > 1000}


@pytest.mark.slow
def test_each_gpu_hands_on_whole_hidden_states_adds_up_those_of_its_own_layers_and_the_gradients_of_its_part(
    model: Model,
):
    assert tuple(each.layers for each in pipelines.stages_of(BOTH, model.anatomy)) == LAYERS
    hidden = 3 * TOKENS * WIDTH * 2
    both_ways = hidden * (2 * 1 / 2)  # 2 (n - 1) / n of it
    expected = {
        "hidden states to the next stage": hidden,
        "gradients to the stage before": hidden,
        "all-reduce of hidden states": (2 * 5 + 1) * both_ways,
        "all-reduce of gradients of hidden states": 2 * 5 * both_ways,
    }
    trained = 5 * LAYER + ENDS / 2
    assert sent(model, BOTH) == expected | {"all-reduce over replicas": pytest.approx(4 * trained * (2 * 1 / 2))}
    again = sent(model, replace(BOTH, activation_checkpointing=True))
    assert again["all-reduce of hidden states, recomputed"] == 2 * 5 * both_ways
    some = sent(model, replace(BOTH, activation_checkpointing=True, recomputed_layers=3))
    assert some["all-reduce of hidden states, recomputed"] == 2 * 3 * both_ways
    assert sent(model, SHARDED) == expected | {
        "all-gather in the forward pass": pytest.approx(3 * 2 * (5 * LAYER + ENDS / 2) / 2, rel=1e-3),
        # of the embedding too, by the first stage
        "all-gather in the backward pass": pytest.approx(3 * 2 * (5 * LAYER + ENDS / 2) / 2, rel=1e-3),
        "reduce-scatter in the backward pass": pytest.approx(3 * 4 * (5 * LAYER + ENDS / 2) / 2, rel=1e-3),
    }


def test_scores_are_put_together_in_the_last_stage_alone():
    """Of a model with few layers it is the one that takes longest."""
    wide, setting = arithmetic("llama-3.1-70b", num_hidden_layers=2), replace(BOTH, tensor=4)
    assert [each.layers for each in pipelines.stages_of(setting, wide.anatomy)] == [1, 1]
    found = sent(wide, setting, "8xH100")
    hidden = 3 * TOKENS * 8192 * 2 * (2 * 3 / 4)
    assert found["all-gather of scores"] == 3 * TOKENS * 128256 * 2 * 3 / 4
    assert found["all-reduce of hidden states"] == 2 * hidden  # and none of embeddings
    assert found["all-reduce of gradients of hidden states"] == 3 * hidden


@pytest.mark.parametrize(
    ("gpus", "sizes", "through"),
    [
        ("2x8xH100", (4, 2), {"hidden states to the next stage": 1, "all-reduce over replicas": 0}),
        ("2x8xH100", (8, 2), {"hidden states to the next stage": 1}),
        ("4x4xH100", (4, 2), {"hidden states to the next stage": 1, "all-reduce over replicas": 1}),
        ("16xH100", (4, 2), {"hidden states to the next stage": 0, "all-reduce over replicas": 0}),
    ],
)
def test_gpus_of_a_layer_are_neighbours_then_come_replicas_then_the_next_stage(
    gpus: str, sizes: tuple[int, int], through: dict[str, int]
):
    """What leaves a machine goes through its GPUs' adapters, of which each has its own share."""
    machines, (tensor, stages) = parse_gpus(gpus), sizes
    setting = replace(BOTH, world_size=16, tensor=tensor, stages=stages, row_tokens=4096)
    transfers = LLAMA_70B.time(setting, machines, mean_document_tokens=4096).transfers
    speed = {each.what: each.bytes / each.seconds / 1e9 for each in transfers}
    inside, network = machines.gpu.node_link.gb_per_second, machines.gpu.network.gb_per_second
    for what, leaves in ({"all-reduce of hidden states": 0} | through).items():
        assert speed[what] == pytest.approx(network if leaves else inside, rel=0.15)
    assert ("all-reduce over replicas" in speed) == (tensor < 8)


def test_sums_within_layers_make_each_pass_longer_also_those_that_stages_wait_for():
    setting = replace(BOTH, world_size=32, tensor=4, stages=8, accumulation=16, row_tokens=2048)
    for parts in (1, 2):
        time = LLAMA_70B.time(replace(setting, parts=parts), parse_gpus("4x8xH100"), mean_document_tokens=2048)
        of_passes = sum(each.seconds for each in time.transfers if each.when != "step")
        assert time.parts.communication == pytest.approx((16 + 7 / parts) / 16 * of_passes)


def test_stages_of_split_layers_wait_for_one_another_as_whole_ones_do():
    idle = {}
    for micro_batches in (4, 64):
        setting = replace(BOTH, world_size=32, tensor=4, stages=8, accumulation=micro_batches, row_tokens=2048)
        parts = LLAMA_70B.time(setting, parse_gpus("4x8xH100"), mean_document_tokens=2048).parts
        busy = parts.seconds - parts.communication - parts.optimizer
        idle[micro_batches] = parts.idle / busy
    assert idle == pytest.approx({m: 7 / (m + 7) for m in (4, 64)}, rel=0.1)


def test_products_of_a_part_of_a_stage_are_shared_by_the_gpus_of_a_layer():
    machines = parse_gpus("4x8xH100")
    whole = Setting("pp", 32, stages=8, row_tokens=2048, accumulation=16, layout="flat")
    split = replace(whole, strategy="tp_pp", tensor=4)
    one, other = (LLAMA_70B.time(each, machines, mean_document_tokens=2048) for each in (whole, split))
    assert other.parts.matrix_products == pytest.approx(one.parts.matrix_products / 4, rel=0.05)
    assert other.model_flops == pytest.approx(one.model_flops / 4, rel=0.05)
    assert other.tokens == one.tokens / 4


@pytest.mark.slow
def test_weights_are_divided_by_parts_and_stages_and_shards_and_checkpoints_are_of_whole_weights(model: Model):
    every = 4 * model.anatomy.parameters
    for setting, parts in ((replace(BOTH, world_size=4), 4), (BOTH, 4), (SHARDED, 8)):
        step, found = model.tracer.step(setting), 0.0
        for stage in pipelines.stages_of(setting, model.anatomy):
            moments = pipelines.moments_of(step, setting, stage, step.micro_batch(1, TOKENS), model.anatomy)
            found += max(each.categories["weights"] for each in moments if each.phase == "step")
        norms = 4 * (2 * 8 + 1) * WIDTH * (2 / parts) / 2  # whole on each GPU of a layer
        assert found == pytest.approx(2 * every / parts + norms, abs=live_bytes.ROUNDING * (9 * 8 + 3))
        assert model.checkpoint_bytes(setting) == model.checkpoint_bytes(Setting())


@pytest.mark.slow
def test_what_a_part_defers_is_what_it_has_of_layers(model: Model):
    deferred = model.tracer.anatomy_of(replace(BOTH, pipeline_schedule="zero_bubble"))
    queries, keys, inner = 32, 16, 48
    outputs = queries + 2 * keys + WIDTH + 2 * inner + WIDTH
    assert deferred.deferrable_width == 3 * WIDTH + queries + 2 * WIDTH + inner + outputs
    assert deferred.costs == model.anatomy.costs


def test_the_command_and_the_nearest_one_say_both_sizes():
    machines = parse_gpus("2x8xH100")
    setting = replace(BOTH, world_size=16, tensor=4)
    flags = launcher_flags(setting, machines)
    assert ["--megatron_lm_tp_degree", "4"] in flags
    assert ["--megatron_lm_pp_degree", "2"] in flags
    assert setting.launched == "tp_pp 4x2"
    deeper = replace(setting, stages=4, accumulation=6)
    assert {replace(setting, strategy="fsdp2_tp_pp"), deeper} <= {*sharded(setting)}
    assert {each.launched for each in sharded(replace(setting, strategy="fsdp2_tp_pp"))} == set()
    asked = asked_of(LLAMA_70B, setting, machines)
    nearest = Nearest(row_of(asked, replace(setting, strategy="fsdp2_tp_pp"), GIB), {}, "fsdp2_tp_pp", ())
    assert nearest.text == (
        "launch with accelerate_configs/fsdp2_tp_pp.yaml --megatron_lm_tp_degree 4 --megatron_lm_pp_degree 2"
    )


def test_by_name_every_pair_of_sizes_is_planned_that_the_gpus_can_be_divided_into():
    machines = parse_gpus("3x4xH100")
    pairs = {strategy: [tuple(each.values()) for each in splits(strategy, machines, 80)] for strategy in PROCESSES}
    assert pairs == {"tp_pp": [(2, 2), (2, 3), (2, 6), (4, 3)], "fsdp2_tp_pp": [(2, 2), (2, 3)]}
    assert (2, 6) not in [tuple(each.values()) for each in splits("tp_pp", machines, 5)]
    base = Setting(world_size=12, row_tokens=2048, accumulation=2)
    asked = asked_of(LLAMA_70B, base, machines, strategies=("tp_pp",), methods=(METHODS["full"],))
    rows, left_out = candidates(asked, lambda of, setting: row_of(of, setting, GIB))
    assert [row.setting.launched for row in rows] == ["tp_pp 2x2", "tp_pp 2x3", "tp_pp 2x6", "tp_pp 4x3"]
    assert left_out == []


def compared(gpus: str, fits: set[str]) -> set[str]:
    """What is compared beside other strategies where of pipelines and split layers these fit, and nothing else."""
    machines = parse_gpus(gpus)
    base = Setting(world_size=machines.world_size, row_tokens=2048, accumulation=2)
    strategies = *SHARDED_PARTS.values(), *SHARDED_PARTS
    asked = question_about(LLAMA_70B, base, machines, mean_document_tokens=2048)
    asked = replace(asked, strategies=strategies, methods=(METHODS["full"],))

    def judge(of: Question, setting: Setting) -> Row:
        return row_of(of, setting, (1 if setting.launched in fits else 100) * GIB)

    rows, _ = candidates(asked, judge)
    return {row.setting.launched for row in rows if "tp_pp" in row.setting.strategy}


@pytest.mark.slow
def test_both_are_compared_on_several_machines_where_neither_fits_by_itself():
    some = {f"tp_pp {tensor}x{stages}" for tensor in (2, 4, 8) for stages in (2, 4)}
    shards = {f"fsdp2_{each}" for each in some - {"tp_pp 8x4"}}  # of which there are no two of a part
    every = some | shards
    assert compared("4x8xH100", set()) == every
    assert compared("4x8xH100", {"tp 8"}) == {each for each in every if " 8x" not in each}
    assert compared("4x8xH100", {"tp 8", "pp 4"}) == {each for each in every if " 8x" not in each and "x2" in each}
    assert compared("4x8xH100", {"tp_pp 2x4"}) == every - {"fsdp2_tp_pp 2x4"}
    assert compared("8xH100", set()) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "gpus"), [(LLAMA_70B, "4x8xH100"), (LLAMA_405B, "32x8xH100")])
def test_large_models_on_many_machines_have_pipelines_of_split_layers_among_what_fits(model: Model, gpus: str):
    machines = parse_gpus(gpus)
    base = Setting(world_size=machines.world_size, row_tokens=2048, accumulation=1, layout="flat")
    strategies = "fsdp2", "tp", "pp", "tp_pp", "fsdp2_tp_pp"
    asked = asked_of(model, base, machines, methods=(METHODS["full"],), strategies=strategies)
    asked = replace(asked, global_batch_size=32, micro_batch_size=1)
    rows, left_out = candidates(asked)
    fitting = {row.setting.launched for row in rows if row.verdict == "fits"}
    assert {each for each in fitting if each.startswith("tp_pp")}
    assert not {each for each in fitting if each.startswith("tp ")}
    refused = {each.strategy for each in left_out}
    assert ("fsdp2" in refused) == (model is LLAMA_405B)  # 32 rows for 256 GPUs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor": 3}, "tp_pp splits each layer over 3 GPUs and has 2 stages, each on GPUs of its own; use a"),
        ({"world_size": 12}, "use a multiple of 8 GPUs"),
        ({"stages": 1}, "has 2 stages, each on GPUs of its own; use a multiple of 8 GPUs"),
        ({"precision": "fp16"}, "tp_pp does not scale losses"),
        ({"optimizer": "adafactor"}, "Adafactor needs whole matrices, but tp_pp"),
        ({"adapter": "dora"}, "DoRA needs the norms of whole weights, but tp_pp"),
        ({"adapter": "lora", "bits": 8}, "tp_pp cannot shard the 8-bit layers"),
        ({"fp8": True}, "model.fp8: tp_pp gives each process a part"),
        ({"paired": True}, "tp_pp computes the loss of one pass"),
        ({"embedding_noise": True}, "train.neftune_alpha draws noise"),
        ({"parts": 41}, "82 parts, but the model has 80 layers"),
        ({"router_aux_loss_coef": 0.1}, "transformers has no load-balancing loss for this model"),
        ({"strategy": "fsdp2_tp_pp", "stages": 4}, "use at least 32 of them"),
        ({"strategy": "fsdp2_tp_pp", "pipeline_schedule": "zero_bubble"}, "use the strategy file tp_pp"),
    ],
)
def test_what_a_run_would_refuse_is_no_option(change: dict[str, Any], words: str):
    setting = replace(BOTH, **{"world_size": 16, "tensor": 4} | change)
    assert words in (why_not(LLAMA_70B, setting) or "")
    assert why_not(LLAMA_70B, replace(BOTH, world_size=16, tensor=4)) is None


def test_losses_that_balance_experts_and_layers_that_are_trained_beside_adapters_are_refused_as_by_a_run():
    known = {"balances": True, "router_coefficient": 0.02, "split_names": ("lm_head", "q_proj")}
    mixture = replace(LLAMA_70B.anatomy, **known)
    saved = replace(BOTH, strategy="tp", stages=1, adapter="lora", modules_to_save=("q_proj", "embed_tokens"))
    with mock.patch.object(type(LLAMA_70B), "anatomy", mock.PropertyMock(return_value=mixture)):
        assert "of which each stage of tp_pp has some" in (why_not(LLAMA_70B, BOTH) or "")
        assert why_not(LLAMA_70B, replace(BOTH, router_aux_loss_coef=0.0)) is None
        assert "adapter.modules_to_save names q_proj, of which tp gives" in (why_not(LLAMA_70B, saved) or "")
        assert why_not(LLAMA_70B, replace(saved, modules_to_save=("embed_tokens",))) is None


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2_tp", "fsdp2_tp_pp"])
def test_adapters_of_experts_have_no_plan_where_their_parts_are_sharded(strategy: str):
    config = MODEL | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    setting = replace(SHARDED, strategy=strategy, adapter="lora", stages=2 if strategy.endswith("pp") else 1)
    whole = strategy.removeprefix("fsdp2_")
    with pytest.raises(InputError, match=f"{strategy} does not shard adapters of experts .* strategy file {whole}"):
        traced_step(config, setting, row_tokens=TOKENS)
    assert traced_step(config, replace(setting, targets=("q_proj",)), row_tokens=TOKENS).trained()
