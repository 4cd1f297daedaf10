"""The row order is a function of seed, epoch and step alone, and uses every row once per epoch."""

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.refusals import batch_problems
from finetune.data.sampler import EMPTY, dealt, dealt_batch, global_batch, micro_batches, positions_in, positions_of


def run_of(rows: int, batch: int, epochs: int, seed: int) -> list[list[int]]:
    return [
        global_batch(step, rows=rows, rows_in_run=rows * epochs, global_batch_size=batch, seed=seed)
        for step in range(1, math.ceil(rows * epochs / batch) + 1)
    ]


@given(rows=st.integers(1, 60), batch=st.integers(1, 17), epochs=st.integers(1, 4), seed=st.integers(0, 9))
def test_every_row_is_used_once_per_epoch_and_only_the_last_step_is_filled_up(
    rows: int, batch: int, epochs: int, seed: int
):
    steps = run_of(rows, batch, epochs, seed)
    assert all(len(step) == batch for step in steps)
    assert all(EMPTY not in step for step in steps[:-1])
    used = [row for step in steps for row in step if row != EMPTY]
    assert Counter(used) == dict.fromkeys(range(rows), epochs)
    for epoch in range(epochs):
        assert sorted(used[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(rows=st.integers(1, 60), seed=st.integers(0, 9), micro=st.integers(1, 4), accumulation=st.integers(1, 4))
def test_processes_together_hold_the_global_batch_for_any_number_of_them(
    rows: int, seed: int, micro: int, accumulation: int
):
    for world_size in (1, 2, 4):
        size = micro * accumulation * world_size
        batch = global_batch(1, rows=rows, rows_in_run=rows, global_batch_size=size, seed=seed)
        shares = [
            micro_batches(batch, rank=r, world_size=world_size, micro_batch_size=micro) for r in range(world_size)
        ]
        assert all(len(share) == accumulation for share in shares)
        in_turn = [rows for i in range(accumulation) for share in shares for rows in share[i]]
        assert in_turn == batch


def test_epochs_have_different_orders_and_seeds_too():
    first, second = run_of(50, 50, 2, seed=0)
    assert first != second
    assert first != run_of(50, 50, 1, seed=1)[0]


def test_fractional_epochs_end_in_the_middle_of_one():
    last = global_batch(4, rows=10, rows_in_run=15, global_batch_size=4, seed=0)
    assert last.count(EMPTY) == 1


def test_batch_that_does_not_divide_names_the_nearest_that_do():
    assert batch_problems(16, 2, 4) == []
    (problem,) = batch_problems(18, 2, 4)
    assert "16 or 24" in problem
    (problem,) = batch_problems(3, 2, 2)
    assert "set it to 4," in problem


def test_positions_count_the_padding_of_each_micro_batch():
    lengths = np.array([5, 3, 7])
    assert positions_in([0, 1, 2, EMPTY], lengths, micro_batch_size=2, flat=False) == 2 * 5 + 2 * 7
    assert positions_in([0, EMPTY], lengths, micro_batch_size=1, flat=False) == 5 + 1
    assert positions_in([0, 1, 2, EMPTY], lengths, micro_batch_size=2, flat=True) == 5 + 3 + 7 + 1


@st.composite
def global_batches(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Sizes of the rows of some global batches, and the rows of a micro-batch."""
    micro_batch_size, micro_batches, steps = (draw(st.integers(1, most)) for most in (5, 8, 3))
    row = st.lists(st.integers(1, 3000), min_size=(rows := micro_batch_size * micro_batches), max_size=rows)
    return np.array([draw(row) for _ in range(steps)]), micro_batch_size


@given(global_batches())
def test_flat_micro_batches_of_a_step_differ_by_no_more_than_two_of_its_rows(drawn: tuple[np.ndarray, int]):
    sizes, micro_batch_size = drawn
    order = dealt(sizes, micro_batch_size, flat=True)
    for row, places in zip(sizes, order):
        assert sorted(places) == list(range(len(row)))
        tokens = positions_of(row[places], micro_batch_size, flat=True)
        assert tokens.max() - tokens.min() <= row.max() - row.min()
        assert tokens.tolist() == sorted(tokens, reverse=True)  # those computed together are alike


@given(global_batches())
def test_padded_micro_batches_stand_beside_rows_of_their_own_length(drawn: tuple[np.ndarray, int]):
    sizes, micro_batch_size = drawn
    for row, places in zip(sizes, dealt(sizes, micro_batch_size, flat=False)):
        assert sorted(places) == list(range(len(row)))
        padded = positions_of(row[places], micro_batch_size, flat=False)
        assert padded.sum() <= positions_of(row, micro_batch_size, flat=False).sum()
        longest = np.sort(row)[::-1].reshape(-1, micro_batch_size)[:, 0]
        assert padded.tolist() == (micro_batch_size * longest).tolist()


def test_rows_of_a_step_are_those_that_its_number_tells_in_whatever_order():
    lengths = np.array([3, 90, 2, 70, 50, 8])
    for step in (1, 2, 3):
        places = global_batch(step, rows=6, rows_in_run=10, global_batch_size=4, seed=0)
        for flat in (False, True):
            assert sorted(dealt_batch(places, lengths, 2, flat=flat)) == sorted(places)
