"""The row order is a function of seed, epoch and step alone, and uses every row once per epoch."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from finetune.config.refusals import batch_problems
from finetune.data.sampler import EMPTY, global_batch, micro_batches, positions_in


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
        dealt = [rows for i in range(accumulation) for share in shares for rows in share[i]]
        assert dealt == batch


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
    assert positions_in([0, 1, 2, EMPTY], lengths=[5, 3, 7], micro_batch_size=2, padded=True) == 2 * 5 + 2 * 7
    assert positions_in([0, EMPTY], lengths=[5], micro_batch_size=1, padded=True) == 5 + 1
    assert positions_in([0, 1, 2, EMPTY], lengths=[5, 3, 7], micro_batch_size=2, padded=False) == 5 + 3 + 7 + 1
