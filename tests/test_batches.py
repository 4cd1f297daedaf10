"""Batches: the same documents in the same step for any split of the work, and tensors that say the same as the rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.data import dataset
from finetune.data.batches import IGNORED, Batches, collate, document_bounds, trained_positions
from finetune.data.encoding import Row, Settings
from finetune.data.rows import Rows
from finetune.data.sampler import EMPTY, dealt_batch, global_batch, heaviest_micro_batch, micro_batches
from finetune.data.sources import Source
from finetune.models import attention
from finetune.training.loss import token_loss_sum

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows(conversations: Path) -> Rows:
    return tiny.read_rows(conversations, tiny.build_tokenizer())


def batches(rows: Rows, **changes: Any) -> Batches:
    values: dict[str, Any] = {
        "packing": True,
        "flat": True,
        "max_length": 128,
        "steps": None,
        "epochs": 2.0,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seed": 0,
    }
    return Batches(rows, **(values | changes))


def dealt(work: Batches, step: int, world_size: int, micro_batch_size: int) -> list[list[list[str]]]:
    """Sources of the documents of each micro-batch of a step, process by process in the order of the global batch."""
    shares = [
        micro_batches(work.step(step).places, rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for rank in range(world_size)
    ]
    assert len({len(share) for share in shares}) == 1
    in_order = [places for turn in zip(*shares) for places in turn]
    return [[row.source for place in places for row in work.documents(place)] for places in in_order]


@pytest.mark.parametrize("flat", [True, False])
def test_two_documents_that_follow_one_another_are_a_row_of_pairs(rows: Rows, flat: bool):
    work = batches(rows, packing=False, paired=True, flat=flat)
    work.references = np.arange(len(rows), dtype=np.float32)
    assert work.rows_in_epoch == len(rows) // 2
    batch = work.step(1)
    assert batch.rows == 8
    documents = [work.documents(place) for place in batch.places]
    assert [[row.source for row in each] for each in documents] == [
        [rows[2 * place].source, rows[2 * place + 1].source] for place in batch.places
    ]
    assert [[row.reference for row in each] for each in documents] == [[2 * p, 2 * p + 1] for p in batch.places]
    assert batch.tokens == sum(len(row.tokens) for each in documents for row in each)
    next_tokens, inputs = collate(documents[:2], CPU, flat=flat)
    lengths = [len(row.tokens) for each in documents[:2] for row in each]
    assert inputs["input_ids"].shape == ((1, sum(lengths)) if flat else (4, max(lengths)))
    assert int((next_tokens != IGNORED).sum()) == sum(row.trained_tokens for each in documents[:2] for row in each)
    padded = sum(2 * max(len(row.tokens) for row in each) for each in documents)
    assert (batch.total_tokens if flat else int(work.lengths[batch.places].sum())) == (batch.tokens if flat else padded)


@pytest.mark.parametrize("packing", [False, True])
def test_same_documents_in_the_same_step_for_1_2_and_4_processes(rows: Rows, packing: bool):
    work = batches(rows, packing=packing)
    assert work.steps > 4
    for step in range(1, work.steps + 1):
        whole = [source for part in dealt(work, step, 1, 8) for source in part]
        for world_size in (1, 2, 4):
            for micro_batch_size in (1, 2):
                assert [s for part in dealt(work, step, world_size, micro_batch_size) for s in part] == whole


@pytest.mark.parametrize("packing", [False, True])
def test_step_needs_no_step_before_it(rows: Rows, packing: bool):
    in_order = batches(rows, packing=packing)
    expected = [in_order.step(step) for step in range(1, in_order.steps + 1)]
    for step in range(in_order.steps, 0, -1):
        assert batches(rows, packing=packing).step(step) == expected[step - 1]


@pytest.mark.parametrize("packing", [False, True])
def test_every_document_is_used_once_in_each_epoch(rows: Rows, packing: bool):
    work = batches(rows, packing=packing, global_batch_size=1, micro_batch_size=1)
    sources = [row.source for step in range(1, work.steps + 1) for row in work.documents(work.step(step).places[0])]
    assert sorted(sources) == sorted([row.source for row in rows] * 2)


def test_packed_batches_count_tokens_as_the_documents_do(rows: Rows):
    work = batches(rows)
    for step in range(1, work.steps + 1):
        batch = work.step(step)
        documents = [row for place in batch.places for row in work.documents(place)]
        assert batch.trained_tokens == sum(row.trained_tokens for row in documents)
        assert batch.tokens == sum(len(row.tokens) for row in documents)
        assert batch.total_tokens == batch.tokens + batch.places.count(EMPTY)
        for place in batch.places:
            assert sum(len(row.tokens) for row in work.documents(place)) <= 128
        assert [name == "" for name in batch.sources()] == [place == EMPTY for place in batch.places]


def test_no_packed_row_holds_a_document_twice_though_its_source_has_a_weight(conversations: Path):
    rows, _ = dataset.load([Source(str(conversations), weight=3)], [], tiny.build_tokenizer(), Settings(64))
    work = batches(rows)
    assert work.packs is not None
    sources = [[row.source for row in work.documents(place)] for place in range(len(work.packs))]
    assert all(len(set(each)) == len(each) for each in sources)
    assert sorted(source for each in sources for source in each) == sorted(row.source for row in rows)
    assert len(rows) == 240


def test_batch_is_shifted_padded_on_the_right_and_counts_as_the_rows_do(rows: Rows):
    next_tokens, inputs = collate([[rows[4]], [], [rows[1]]], CPU, flat=False)
    assert inputs.keys() == {"input_ids"}
    assert (next_tokens != IGNORED).sum(1).tolist() == [rows[4].trained_tokens, 0, rows[1].trained_tokens]
    for place, row in ((0, rows[4]), (2, rows[1])):
        assert inputs["input_ids"][place, : len(row.tokens)].tolist() == row.tokens.tolist()
        for position, label in enumerate(next_tokens[place].tolist()):
            expected = position + 1 < len(row.tokens) and row.trained[position + 1]
            assert label == (row.tokens[position + 1] if expected else IGNORED)


def test_labels_carry_their_trained_positions_and_what_is_made_of_them_does_not(rows: Rows):
    labels, _ = collate([[rows[4]], [], [rows[1]]], CPU, flat=False)
    expected = (labels.flatten() != IGNORED).nonzero().flatten()
    assert torch.equal(trained_positions(labels), expected)
    assert trained_positions(labels) is trained_positions(labels)

    fewer = labels.clone()
    fewer[0] = IGNORED
    assert len(trained_positions(fewer)) == rows[1].trained_tokens
    nothing, _ = collate([[]], CPU, flat=True)
    assert trained_positions(nothing).tolist() == [0]


def test_packed_batch_is_flat_and_no_document_predicts_the_next_ones_first_token(rows: Rows):
    places = [[rows[0], rows[1]], [], [rows[2]]]
    next_tokens, inputs = collate(places, CPU, flat=True)
    lengths = [len(rows[0].tokens), len(rows[1].tokens), 1, len(rows[2].tokens)]
    assert inputs["input_ids"].shape == next_tokens.shape == (1, sum(lengths))
    assert inputs["cu_seq_lens_q"].tolist() == [0, *np.cumsum(lengths)]
    assert inputs["position_ids"][0].tolist() == [i for length in lengths for i in range(length)]
    assert all(next_tokens[0, end - 1] == IGNORED for end in np.cumsum(lengths))
    assert (next_tokens != IGNORED).sum() == sum(rows[i].trained_tokens for i in range(3))


def model_under(implementation: str, folder: Path, dtype: torch.dtype) -> Any:
    """The model with its first weights, the same at every call."""
    attention.register()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)


def gradients(model: Any, parts: list[tuple[torch.Tensor, dict[str, Any]]]) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    total = 0.0
    for next_tokens, inputs in parts:
        loss = token_loss_sum(model(**inputs, use_cache=False).logits, next_tokens)
        loss.backward()
        total += loss.item()
    return total, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=3))
def test_packed_batch_gives_the_loss_and_the_gradients_of_its_documents_alone(
    model_folder: Path, lengths: list[list[int]]
):
    reference, model = (model_under(name, model_folder, torch.float64) for name in ("sdpa", attention.PACKED))
    random = np.random.default_rng(sum(map(sum, lengths)))
    places = [[random_row(random, length) for length in documents] for documents in lengths]
    alone = [collate([[row]], CPU, flat=False) for documents in places for row in documents]
    loss, gradient = gradients(reference, alone)
    packed_loss, packed_gradient = gradients(model, [collate(places, CPU, flat=True)])
    assert packed_loss == pytest.approx(loss, rel=1e-6)  # the loss itself is computed in fp32
    assert (packed_gradient - gradient).norm() <= 1e-6 * max(1.0, float(gradient.norm()))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


def random_row(random: np.random.Generator, length: int) -> Row:
    first, end = sorted(random.integers(1, length + 1, 2).tolist())
    return Row(random.integers(0, 512, length).astype(np.int32), [(first, end)] if first < end else [], "test:1")


def test_comparison_rejects_a_batch_without_its_bounds(model_folder: Path, rows: Rows):
    model = model_under(attention.PACKED, model_folder, torch.float64)
    places = [[rows[0], rows[1], rows[2]]]
    loss, gradient = gradients(model, [collate(places, CPU, flat=True)])
    next_tokens, inputs = collate(places, CPU, flat=True)
    one_document = document_bounds([next_tokens.numel()], CPU)
    leaking_loss, leaking = gradients(model, [(next_tokens, inputs | one_document)])
    assert abs(leaking_loss - loss) > 1e-4 * loss
    assert (leaking - gradient).norm() > 1e-2 * gradient.norm()


def test_padding_does_not_change_the_loss_of_a_row(model_folder: Path, rows: Rows):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
    short, long = rows[int(rows.lengths.argmin())], rows[int(rows.lengths.argmax())]

    def loss(places: list[list[Row]]) -> torch.Tensor:
        next_tokens, inputs = collate(places, CPU, flat=False)
        return token_loss_sum(model(**inputs).logits, next_tokens)

    torch.testing.assert_close(loss([[short], [long]]), loss([[short]]) + loss([[long]]))


@settings(max_examples=80, deadline=None)
@example(lengths=[1], micro_batch_size=2, accumulation=1, epochs=2.0, flat=True, rows_at_once=1)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    micro_batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    epochs=st.floats(0.1, 3),
    flat=st.booleans(),
    rows_at_once=st.integers(1, 100),
)
def test_heaviest_micro_batch_is_the_heaviest_that_any_step_has(
    lengths: list[int], micro_batch_size: int, accumulation: int, epochs: float, flat: bool, rows_at_once: int
):
    rows_in_run = max(1, round(len(lengths) * epochs))
    order = {"rows_in_run": rows_in_run, "global_batch_size": micro_batch_size * accumulation, "seed": 3}

    def positions(places: list[int]) -> int:
        sizes = [lengths[i] if i != EMPTY else 1 for i in places]
        return sum(sizes) if flat else len(sizes) * max(sizes)

    how: Any = {"micro_batch_size": micro_batch_size, "flat": flat, "rows_at_once": rows_at_once}
    found = heaviest_micro_batch(np.array(lengths), **how, **order)
    of_run = []
    for step in range(1, -(-rows_in_run // (micro_batch_size * accumulation)) + 1):
        batch = global_batch(step, rows=len(lengths), **order)
        batch = dealt_batch(batch, np.array(lengths), micro_batch_size, flat=flat)
        of_run += micro_batches(batch, rank=0, world_size=1, micro_batch_size=micro_batch_size)
    assert positions(found) == max(map(positions, of_run))
    assert found in of_run
