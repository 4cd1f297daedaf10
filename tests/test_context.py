"""Context parallelism: processes that share rows compute what one has of whole rows, and what could not is refused."""

import random
from typing import Any

import pytest
import sharing
import torch
from sharing import Case, full
from test_attention import EVERY
from transformers import AutoConfig

from finetune.config.compatibility import heads_problems
from finetune.data.batches import IGNORED
from finetune.distributed import Strategy, describe
from finetune.models.packing_support import why_not_spread

HOW = ["gather", "exchange"]
PROVEN = pytest.mark.prove


def cases_for(processes: int, how: str) -> list[Case]:
    """Of documents of any length and heads shared in any way."""
    unit, draw = 2 * processes, random.Random(processes)
    directed = [
        [16 * unit],  # one document in all chunks
        [5, 16 * unit - 5],
        [1] * (2 * unit),
        [3] * (4 * unit),
        [8 * unit - 1, 1, 8 * unit],  # a document ends within the chunks of the process that has both in the middle
        [8 * unit, 8 * unit],  # at the border between them
        [16 * unit - 2, 2],
        [2, 1, 15 * unit],
        [160 * unit // processes],  # longer than what is computed together
    ]
    drawn = [[draw.randint(1, draw.choice([3, 20, 150])) for _ in range(draw.randint(1, 9))] for _ in range(12)]
    heads = [(4, 2), (4, 4), (8, 2), (4, 1), (8, 4)] if processes != 3 else [(4, 2), (3, 1), (6, 3)]
    windows = [None, None, 1, 3, 17, 200]
    return [
        Case(full(lengths, processes), how, *draw.choice(heads), draw.choice(windows), draw.choice([4, 8]))
        for lengths in directed + drawn
    ]


@pytest.mark.parametrize(("processes", "how"), [(2, "gather"), (2, "exchange"), (4, "gather"), (4, "exchange")])
def test_outputs_and_gradients_are_those_of_the_whole_row(processes: int, how: str, ranks: Any):
    cases = cases_for(processes, how)
    for world_size, errors in ranks(processes).run(sharing.errors_of, cases, strategy="fsdp2"):
        assert world_size == processes
        for case, found in zip(cases, errors, strict=True):
            assert max(found) < 1e-12, case


def test_gathered_keys_need_no_number_of_heads_that_processes_share(ranks: Any):
    cases = cases_for(3, "gather")
    for world_size, errors in ranks(3).run(sharing.errors_of, cases, strategy="fsdp2"):
        assert world_size == 3
        assert max(map(max, errors)) < 1e-12


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_so_in_the_precision_of_training(how: str, dtype: torch.dtype, ranks: Any):
    cases = [Case(full([7, 90, 30], 2), how, dtype=dtype), Case(full([300, 40], 2), how, window=30, dtype=dtype)]
    for world_size, errors in ranks(2).run(sharing.errors_of, cases, strategy="fsdp2"):
        assert world_size == 2
        assert max(map(max, errors)) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_the_comparison_rejects_processes_that_look_at_their_own_positions_only(ranks: Any):
    cases = [Case(full(lengths, 2), "gather") for lengths in ([64], [10, 54], [20, 3, 41])]
    for _, errors in ranks(2).run(sharing.errors_of, cases, "own keys only", strategy="fsdp2"):
        assert min(map(max, errors)) > 1e-2


def test_the_comparison_rejects_gradients_of_which_a_process_keeps_its_own_part(ranks: Any):
    cases = [Case((64,), "gather")]
    found = ranks(2).run(sharing.errors_of, cases, "own gradients only", strategy="fsdp2")
    for _, [[of_output, of_query, of_key, of_value]] in found:
        assert max(of_output, of_query) < 1e-12
        assert min(of_key, of_value) > 1e-2


@pytest.mark.parametrize("name", ["cp", "ulysses"])
@pytest.mark.parametrize("lengths", [[16], [5, 9, 23], [1, 1, 1], [3, 12, 2, 30, 1]], ids=str)
@pytest.mark.parametrize(("processes", "context"), [(2, 2), (4, 4), (4, 2)])
def test_each_process_has_its_positions_of_a_micro_batch_and_no_others(
    processes: int, context: int, lengths: list[int], name: str, ranks: Any
):
    strategy = Strategy(name, 0, processes, replicas=1, mixed_precision="no", rehearsal=True, context=context)
    found = ranks(processes).run(sharing.shares_of, lengths, strategy, strategy="fsdp2")
    for first in range(0, processes, context):
        _assert_shared(found[first : first + context], lengths)


def test_a_run_says_how_many_processes_share_a_row():
    strategy = Strategy("cp", 0, 8, replicas=1, mixed_precision="no", rehearsal=True, context=4)
    assert describe(strategy).startswith("cp on 8 processes, 4 for each row, computing in fp32")


def _assert_shared(group: list[dict[str, Any]], lengths: list[int]) -> None:
    unit, tokens, whole = 2 * len(group), sum(lengths), group[0]["whole"]
    missing = -tokens % unit
    row = tokens + missing
    assert sorted(place for each in group for place in each["own"]) == list(range(row))
    chunk = row // unit
    for number, each in enumerate(group):
        assert each["documents"] == [*lengths, *([missing] if missing else [])]  # padding is one of its own
        ends = [number * chunk, (unit - 1 - number) * chunk]  # one chunk from each end
        assert each["own"] == [place for begin in ends for place in range(begin, begin + chunk)]
        for name, filler in (("tokens", 0), ("next", IGNORED), ("origins", 0)):
            assert each[name] == [(whole[name] + [filler] * missing)[place] for place in each["own"]], name
        assert len(each["tokens"]) == row // len(group)
        assert each["positions"] == [[*whole["positions"], *range(missing)][place] for place in each["own"]]
    assert [sum(each) for each in zip(*(each["bytes"] for each in group), strict=True)] == whole["bytes"]
    assert [each["bytes"] for each in group[1:]] == [[0, 0]] * (len(group) - 1)  # bytes of a text are counted once


COMMON = ["llama", "mistral", "qwen3", "gemma3_text", "smollm3", "olmo2", "mixtral", "deepseek_v3"]


@pytest.mark.parametrize("how", HOW)
def test_models_have_the_logits_and_gradients_of_the_whole_row(how: str, ranks: Any):
    kinds = [type(AutoConfig.for_model(name)) for name in COMMON]
    for found in ranks(2).run(sharing.errors_of_models, kinds, how, strategy="fsdp2"):
        assert len(found) == len(kinds)
        assert max(found.values()) < 1e-5, found


@PROVEN
@pytest.mark.parametrize("how", HOW)
def test_every_model_that_may_share_rows_has_the_logits_and_gradients_of_the_whole_row(how: str, ranks: Any):
    for found in ranks(2).run(sharing.errors_of_models, None, how, strategy="fsdp2", timeout=600):
        assert len(found) > 70
        assert max(found.values()) < 1e-5, found


def test_the_comparison_of_models_rejects_keys_of_ones_own(ranks: Any):
    kinds = [type(AutoConfig.for_model(name)) for name in ("llama", "mixtral")]
    for found in ranks(2).run(sharing.errors_of_models, kinds, "gather", "own keys only", strategy="fsdp2"):
        assert min(found.values()) > 1e-3


def test_a_model_that_does_not_hand_its_share_on_to_attention_fails(ranks: Any):
    """``why_not_spread`` refuses it before; one that is not known to be such a model trains nothing either."""
    config = AutoConfig.for_model("nemotron", **EVERY)
    for said in ranks(2).run(sharing.refused_by_a_model, config, strategy="fsdp2"):
        assert "without document bounds" in said


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma2", {}, "caps attention logits, which packed attention lacks"),
        ("gpt_oss", {}, "has attention sinks, which packed attention lacks"),
        ("nemotron", {}, "does not tell attention where documents begin"),
        ("mamba", {}, "does not support attention packed"),
        ("qwen3_next", {}, "layers (linear_attention) that mix packed documents"),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "layers (conv) that mix"),
    ],
)
def test_models_that_cannot_share_rows_are_refused(model_type: str, changes: dict[str, Any], reason: str):
    config = AutoConfig.for_model(model_type, **changes)
    found = why_not_spread(config, dtype=torch.float32, capability=None)
    assert any(reason in problem for problem in found), found
    assert not any("use " in each or "choose" in each for each in found)  # what packing advises would not be enough


@pytest.mark.parametrize(
    ("heads", "key_heads", "processes", "is_refused"),
    [
        *((4, 2, 2, False), (4, 2, 4, False), (4, 1, 4, False), (8, 4, 2, False), (6, 3, 3, False)),
        *((4, 4, 3, True), (6, 2, 3, True), (6, 3, 2, True), (2, 2, 4, True)),
    ],
)
def test_heads_that_processes_cannot_share_are_refused(heads: int, key_heads: int, processes: int, is_refused: bool):
    sentence = (
        f"ulysses shares the attention heads among {processes} processes, but the model has {heads}, and {key_heads} "
        "of keys and values; use the strategy file cp, or another number of processes for each row."
    )
    assert heads_problems("ulysses", processes, heads, key_heads) == ([sentence] if is_refused else [])
    assert heads_problems("cp", processes, heads, key_heads) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("heads", [8, 2])
def test_the_gpu_kernel_gives_queries_in_the_middle_of_documents_what_the_cpu_does(window: int | None, heads: int):
    queries, seen = [0, 100, 101, 250, 300], [0, 340, 341, 790, 840]  # of four documents, two of which begin before
    shapes = [(1, 8, 300, 64), (1, heads, 840, 64), (1, heads, 840, 64)]
    on_cpu = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    on_gpu = [each.detach().cuda().requires_grad_() for each in on_cpu]
    weights = torch.randn(1, 300, 8, 64).bfloat16()
    exact = [each.detach().float().requires_grad_() for each in on_cpu]
    expected = sharing.part_of(exact, queries, seen, window)
    found = sharing.part_of(on_gpu, queries, seen, window)
    expected.backward(weights.float())
    found.backward(weights.cuda())
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    for one, other in zip(on_gpu, exact):
        assert (one.grad.cpu().float() - other.grad).norm() < 2e-2 * other.grad.norm() + 1e-2
