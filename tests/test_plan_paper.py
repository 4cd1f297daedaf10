"""Parallelism on paper: bytes against the closed forms of the papers, sums that must add up, and one known choice."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import InputError
from finetune.hardware.cards import parse_gpus
from finetune.planner.paper import Question, cluster_of, explain, show
from finetune.planner.paper import prediction as predictions
from finetune.planner.paper.cluster import ASSUMED, Cluster
from finetune.planner.paper.layout import Job, Layout, layouts, why_not
from finetune.planner.paper.layout_layer import (
    attended_tokens,
    kept_bytes_per_token,
    layer_seconds,
    met_matrix_elements,
    wave_efficiency,
)
from finetune.planner.paper.layout_memory import layer_count, state_bytes
from finetune.planner.paper.offload import offloads
from finetune.planner.paper.prediction import Prediction, model_flops_per_token, predict
from finetune.planner.paper.ranking import Ranking, rank, row_lengths
from finetune.planner.paper.traffic import link
from finetune.planner.shape import Linear, ModelShape, shape_of

PUBLISHED: dict[str, Any] = {
    name: entry["config"]
    for name, entry in json.loads((Path(__file__).parent / "model_configs.json").read_text()).items()
}
GENIAC = shape_of(
    {
        "model_type": "llama",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "vocab_size": 100096,
    }
)
LLAMA_70B = shape_of(PUBLISHED["llama-2-70b"])
MIXTRAL = shape_of(PUBLISHED["mixtral-8x7b-v0.1"])
SIX_NODES = cluster_of(parse_gpus("6x8xH100"))
JOB = Job(row_tokens=4096, global_batch_rows=1056)
CHOICE = Layout(tensor=1, pipeline=6, context=1, data=8, sequence_parallel=False, shards_optimizer=False)


def gpt(hidden: int, heads: int) -> ModelShape:
    """A layer as in Korthikanti et al.: all heads have keys, four times the hidden size inside, no gate."""
    linears = (Linear("up_proj", hidden, 4 * hidden), Linear("down_proj", 4 * hidden, hidden))
    return replace(
        GENIAC, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads, linears=linears, norms=()
    )


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activations_of_a_gpt_layer_are_those_of_korthikanti(tensor: int, sequence_parallel: bool):
    h, a = 4096, 32
    dropout_masks, log_sum_exp = 2 * h, 4 * a
    paper = h * (34 / tensor if sequence_parallel else 10 + 24 / tensor)  # arXiv:2205.05198, table 2, without scores
    ours = kept_bytes_per_token(gpt(h, a), tensor=tensor, sequence_parallel=sequence_parallel)
    assert ours - log_sum_exp / tensor == paper - dropout_masks / (tensor if sequence_parallel else 1)


def test_activations_of_an_8b_layer_with_fused_kernels_are_34_times_the_hidden_size():
    shape = shape_of(PUBLISHED["llama-3.1-8b"])
    assert kept_bytes_per_token(shape) == 34 * 4096 + 4 * 32


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_of_the_stages_add_up_to_the_models(name: str):
    shape = shape_of(PUBLISHED[name])
    one = predict(shape, replace(CHOICE, pipeline=4), replace(JOB, global_batch_rows=64), SIX_NODES)
    assert sum(stage.parameters for stage in one.stages) == shape.parameters


@pytest.mark.parametrize(("sharded", "expected"), [(False, 18.0), (True, 6 + 12 / 8)])
def test_bytes_of_a_parameter_are_those_of_megatrons_documentation(sharded: bool, expected: float):
    layout = replace(CHOICE, shards_optimizer=sharded)
    count = layer_count(GENIAC, layout)
    assert state_bytes(count, layout) / GENIAC.layer_parameters == expected


def test_memory_of_a_stage_is_the_sum_of_what_it_is_for():
    for layout in (CHOICE, replace(CHOICE, tensor=2, pipeline=3), replace(CHOICE, tensor=2, context=2, data=2)):
        for job in (JOB, replace(JOB, activation_checkpointing="full")):
            one = predict(GENIAC, layout, job, SIX_NODES)
            fullest = max(one.stages, key=lambda stage: stage.total_bytes)
            assert one.memory.stage == fullest.index
            assert one.memory.total == pytest.approx(fullest.total_bytes)
            assert one.memory.weights * 2 == one.memory.gradients


@given(tensor=st.sampled_from([1, 2, 4, 8]), pipeline=st.integers(1, 16), context=st.sampled_from([1, 2, 4]))
@settings(max_examples=40, deadline=None)
def test_causes_add_up_to_the_time_of_the_schedule(tensor: int, pipeline: int, context: int):
    layout = Layout(tensor, pipeline, context, 2, sequence_parallel=tensor > 1)
    one = predict(LLAMA_70B, layout, Job(4096, 64), SIX_NODES)
    assert min(one.seconds.values()) >= -1e-9
    slowest = max(stage.seconds for stage in one.stages)
    waited = sum(each.exposed_seconds for each in one.traffic if each.name in ("pipeline", "data"))
    schedule = 31 * slowest + sum(stage.seconds for stage in one.stages)
    assert one.step_seconds == pytest.approx(schedule + waited + one.seconds["optimizer"])
    assert one.tflops_per_gpu < SIX_NODES.peak_tflops


def sent(one: Prediction, name: str) -> float:
    return next(each.bytes_per_gpu for each in one.traffic if each.name == name)


def test_bytes_that_travel_are_the_closed_forms():
    t, p, c, d, m = 2, 4, 2, 4, 16
    one = predict(LLAMA_70B, Layout(t, p, c, d), Job(4096, d * m), SIX_NODES)
    h, kv, tokens = 8192, 1024, 2048
    stage = max(one.stages, key=lambda stage: stage.seconds)
    assert sent(one, "tensor") == m * stage.layers * 4 * 2 * (t - 1) / t * 2 * h * tokens
    assert sent(one, "context") == m * stage.layers * 3 * (c - 1) * 2 * 2 * kv / t * tokens
    assert sent(one, "pipeline") == m * 2 * 2 * h * tokens / t
    again = predict(LLAMA_70B, Layout(t, p, c, d), Job(4096, d * m, 1, "full"), SIX_NODES)
    layers = max(again.stages, key=lambda stage: stage.seconds).layers
    assert sent(again, "tensor") / layers == pytest.approx(1.5 * sent(one, "tensor") / stage.layers)


def test_gradients_travel_as_the_zero_paper_says():
    alone = replace(CHOICE, pipeline=1, data=48)
    whole = sent(predict(GENIAC, alone, JOB, SIX_NODES), "data")
    sharded = sent(predict(GENIAC, replace(alone, shards_optimizer=True), JOB, SIX_NODES), "data")
    assert whole == pytest.approx(2 * 47 / 48 * 4 * GENIAC.parameters)  # an all-reduce, in fp32
    assert sharded == pytest.approx(47 / 48 * (4 + 2) * GENIAC.parameters)  # reduce-scatter, and weights back


def test_experts_are_counted_for_memory_and_those_met_for_time():
    layout = Layout(1, 4, 1, 8, expert=8)
    one = predict(MIXTRAL, layout, Job(4096, 64), SIX_NODES)
    count = layer_count(MIXTRAL, layout)
    assert count.dense_local + 8 * count.expert_local == MIXTRAL.layer_parameters
    assert sum(stage.parameters for stage in one.stages) == MIXTRAL.parameters
    outside = MIXTRAL.embedding_parameters + MIXTRAL.final_norm + 32 * sum(n.elements for n in MIXTRAL.norms)
    flops = model_flops_per_token(MIXTRAL, 4096) - 6 * 32 * 4096 * 4096
    assert flops == 6 * (MIXTRAL.active_parameters - outside)
    assert met_matrix_elements(MIXTRAL) < MIXTRAL.layer_parameters / 3
    stage = max(one.stages, key=lambda stage: stage.seconds)
    assert sent(one, "expert") == 8 * stage.layers * 4 * 7 / 8 * 2 * 2 * 4096 * 4096


def test_positions_attended_to_are_counted_one_by_one():
    gemma = shape_of(PUBLISHED["gemma-2-2b"])
    assert gemma.sliding_window == 4096
    assert gemma.windowed_layers * 2 == gemma.layers
    for row in (1024, 8192):
        windowed = sum(min(i, 4096) for i in range(row)) / row
        whole = sum(range(row)) / row
        assert attended_tokens(gemma, row) == pytest.approx((windowed + whole) / 2, rel=1e-3)


def test_waves_of_tiles_are_those_of_nvidias_guide():
    assert wave_efficiency(128 * 12, 256 * 11, 132) == 1  # 132 tiles on 132 processors
    assert wave_efficiency(128 * 7, 256 * 19, 132) == pytest.approx(133 / 264)  # one tile more, twice the time
    assert wave_efficiency(128 * 12, 256 * 11 - 255, 132) == pytest.approx((2816 - 255) / 2816)


def test_split_matrices_take_longer_than_their_share():
    whole = layer_seconds(GENIAC, CHOICE, JOB, SIX_NODES, ASSUMED)
    half = layer_seconds(GENIAC, replace(CHOICE, tensor=2), JOB, SIX_NODES, ASSUMED)
    assert half.matrices > whole.matrices / 2


def test_a_ring_crosses_machines_through_as_many_cards_as_it_has_members_in_each():
    assert link(1, 8, SIX_NODES, ring=True).name == "node"
    assert link(1, 6, SIX_NODES, ring=True).name == "network"  # ranks 6 to 11 are on two machines
    alone = link(8, 6, SIX_NODES, ring=True)
    assert alone.bytes_per_second == SIX_NODES.network_gb_per_second * 1e9
    together = link(1, 16, SIX_NODES, ring=True)
    assert together.bytes_per_second == min(8 * SIX_NODES.network_gb_per_second, SIX_NODES.node_gb_per_second) * 1e9
    assert link(1, 16, SIX_NODES, ring=False).bytes_per_second == alone.bytes_per_second


def ranking(**given: Any) -> Ranking:
    return rank(GENIAC, SIX_NODES, Question(row_tokens=4096, **given), ASSUMED)


def test_geniac_is_fastest_with_tensor_1_and_pipeline_6_where_replicas_keep_the_whole_optimizer_state():
    best = ranking().best
    assert best is not None
    assert best.layout == CHOICE
    assert best.job.activation_checkpointing == "none"
    assert [stage.layers for stage in best.stages] == [7, 7, 7, 7, 7, 5]
    assert best.imbalance < 1.01
    fits = {(one.layout.tensor, one.layout.pipeline) for one in ranking().possible if one.fits != "does not fit"}
    assert not {(1, 1), (1, 2), (2, 1)} & fits


@pytest.mark.parametrize("gpus", ["3x8xH100", "6x8xH100", "12x8xH100"])
@pytest.mark.parametrize("rows", [1536, 3072])
def test_geniac_choice_does_not_hang_on_the_number_of_machines(gpus: str, rows: int):
    question = Question(row_tokens=4096, global_batch_rows=rows)
    best = rank(GENIAC, cluster_of(parse_gpus(gpus)), question, ASSUMED).best
    assert best is not None
    assert (best.layout.tensor, best.layout.pipeline) == (1, 6)


def test_geniac_choice_is_lost_when_the_head_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(predictions, "head_seconds", lambda *_: 0.0)
    best = ranking().best
    assert best is not None
    assert best.layout.pipeline == 8  # 40 layers are 8 times 5, and with the head they are 6 times 7


def test_geniac_choice_is_lost_when_the_optimizer_state_is_split():
    best = ranking(shards_optimizer=True).best
    assert best is not None
    assert best.layout.tensor == 1
    assert best.layout.pipeline < 6


def test_geniac_is_faster_without_activation_checkpointing_and_slower_with_rows_that_leave_no_room():
    swept = row_lengths(GENIAC, SIX_NODES, CHOICE, Job(4096, 1536), ASSUMED)
    assert [kept.job.row_tokens for kept, _ in swept] == [2048, 4096, 8192, 16384, 32768]
    for kept, recomputed in swept[:3]:
        assert kept.fits != "does not fit"
        assert kept.tflops_per_gpu > 1.1 * recomputed.tflops_per_gpu
        assert kept.memory.total > recomputed.memory.total
    speed = [kept.tflops_per_gpu for kept, _ in swept]
    assert speed[0] < speed[1] > speed[2]  # longer rows fill the GPU better, until layers must be dealt unevenly
    assert [kept.fits for kept, _ in swept[3:]] == ["does not fit", "does not fit"]
    assert "does not fit" not in [recomputed.fits for _, recomputed in swept]


def test_every_impossible_layout_says_why():
    found = layouts(48, GENIAC, JOB)
    assert all(layout.gpus == 48 for layout, _ in found)
    assert len({layout for layout, _ in found}) == len(found)
    impossible = {(layout.tensor, layout.pipeline): reasons for layout, reasons in found if reasons}
    assert "40 attention heads cannot be divided among 3 GPUs." in impossible[3, 1]
    assert impossible[1, 48] == ["40 layers are too few for 48 stages."]
    odd = why_not(replace(CHOICE, data=8), GENIAC, replace(JOB, global_batch_rows=1001))
    assert odd == ["1001 rows per step are not a multiple of 8 replicas times 1 rows per micro-batch."]
    assert why_not(replace(CHOICE, pipeline=1, virtual_stages=2), GENIAC, JOB) == ["Virtual stages need a pipeline."]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tensor": 3}, "cannot be divided among 3 GPUs"),
        ({"tensor": 5}, "No layout of 48 GPUs .* product divides 48"),
        ({"global_batch_rows": 7, "tensor": 1, "pipeline": 6, "context": 1}, "7 rows per step are not a multiple"),
        ({"pipeline": 48}, "too few for 48 stages"),
        ({"global_batch_rows": 0}, "must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reasons(given: dict[str, Any], sentence: str):
    with pytest.raises(InputError, match=sentence):
        ranking(**given)


def test_memory_alone_tells_no_speed():
    with pytest.raises(InputError, match="name a GPU, for example --gpus"):
        cluster_of(parse_gpus("8x80GB"))


def test_offload_moves_bytes_and_loses_none():
    one = predict(GENIAC, CHOICE, JOB, SIX_NODES)
    found = {(each.what, each.to): each for each in offloads(one, SIX_NODES)}
    assert len(found) == 4
    for what, away in (("optimizer", 12), ("optimizer and weights", 14)):
        parameters = one.memory.weights / 2
        host, disk = found[what, "host"], found[what, "disk"]
        assert one.memory.total - host.gpu_bytes == pytest.approx(away * parameters)
        assert host.host_bytes == pytest.approx(8 * (away + 4) * parameters)  # ZeRO-Offload: 16 bytes with gradients
        assert disk.host_bytes + disk.disk_bytes == pytest.approx(host.host_bytes)
        assert disk.extra_seconds > host.extra_seconds > 0
    more = {key: each.extra_seconds for key, each in found.items()}
    assert more["optimizer and weights", "host"] > more["optimizer", "host"]


@pytest.mark.parametrize(
    ("shape", "gpus"), [(GENIAC, "6x8xH100"), (MIXTRAL, "4x8xH100"), (LLAMA_70B, "1xH100"), (GENIAC, "2x8xRTX 3090")]
)
def test_explanation_fits_a_terminal_and_the_answer_json(shape: ModelShape, gpus: str):
    cluster: Cluster = cluster_of(parse_gpus(gpus))
    question = Question(row_tokens=4096)
    text = explain(shape, cluster, question)
    assert max(len(line) for line in text.splitlines()) <= 80
    answer = json.loads(json.dumps(show(shape, cluster, question), allow_nan=False))
    assert answer["parameters"] == shape.parameters
    first = answer["layouts"][0]
    assert sum(first["layers"]) == shape.layers
    assert sum(first["seconds"].values()) == pytest.approx(first["step_seconds"])
    assert {one["reason"] != "" for one in answer["layouts"][1:]} <= {True}


def test_explanation_names_the_choice_and_what_the_others_lose_by():
    text = explain(GENIAC, SIX_NODES, Question(row_tokens=4096))
    assert "Best: tensor 1, pipeline 6, data 8" in text
    for words in ("tensor collectives +", "unequal stages +", "needs 101 of 79 GiB", "7 7 7 7 7 5 layers", "16384"):
        assert words in text


def test_nothing_heavy_is_imported():
    code = (
        "import finetune.planner.paper, sys; print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
