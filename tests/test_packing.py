"""Packing: nothing is lost or cut, the rule is best-fit-decreasing, and chat lengths fill the packs."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.packing import Packs, efficiency, pack


@st.composite
def documents(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    capacity = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(1, capacity), max_size=80))
    return np.array(lengths, dtype=draw(st.sampled_from([np.int32, np.int64, np.uint16]))), capacity


def naive_fills(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing as its definition says, one document after the other."""
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, fill in enumerate(fills) if fill + length <= capacity]
        if fitting:
            fills[max(fitting, key=lambda i: fills[i])] += length
        else:
            fills.append(length)
    return fills


def chat_lengths(count: int, capacity: int, seed: int = 0) -> np.ndarray:
    """Lognormal, median 200 tokens, cut at the capacity as rows are."""
    drawn = np.random.default_rng(seed).lognormal(np.log(200), 1.0, count)
    return np.clip(drawn, 8, capacity).astype(np.int32)


@given(given=documents())
@settings(max_examples=300, deadline=None)
def test_every_document_is_in_one_pack_and_no_pack_is_over_capacity(given: tuple[np.ndarray, int]):
    lengths, capacity = given
    packs = pack(lengths, capacity)
    held = [packs[i] for i in range(len(packs))]
    assert sorted(np.concatenate([*held, []]).tolist()) == list(range(len(lengths)))
    assert [int(lengths[each].sum()) for each in held] == packs.tokens(lengths).tolist()
    assert all(0 < tokens <= capacity for tokens in packs.tokens(lengths))
    assert packs.documents.dtype == np.int32
    assert packs.bounds.dtype == np.int64


@given(given=documents())
@settings(max_examples=300, deadline=None)
def test_packs_are_filled_as_the_naive_best_fit_decreasing_fills_them(given: tuple[np.ndarray, int]):
    lengths, capacity = given
    assert sorted(pack(lengths, capacity).tokens(lengths)) == sorted(naive_fills(lengths.tolist(), capacity))


@pytest.mark.parametrize("seed", range(3))
def test_realistic_lengths_are_filled_as_the_naive_rule_fills_them(seed: int):
    lengths = chat_lengths(2000, 4096, seed)
    assert sorted(pack(lengths, 4096).tokens(lengths)) == sorted(naive_fills(lengths.tolist(), 4096))


@given(given=documents())
@settings(max_examples=50, deadline=None)
def test_packs_are_the_same_each_time_and_equal_lengths_keep_their_order(given: tuple[np.ndarray, int]):
    lengths, capacity = given
    first, second = pack(lengths, capacity), pack(lengths.copy(), capacity)
    assert first.documents.tolist() == second.documents.tolist()
    assert first.bounds.tolist() == second.bounds.tolist()
    for i in range(len(first)):
        keys = [(-int(lengths[document]), int(document)) for document in first[i]]
        assert keys == sorted(keys)


@pytest.mark.parametrize("capacity", [2048, 4096, 8192])
def test_chat_lengths_fill_99_percent(capacity: int):
    lengths = chat_lengths(20_000, capacity)
    assert efficiency(lengths, pack(lengths, capacity), capacity) >= 0.99


def test_efficiency_is_the_share_of_places_with_a_token():
    lengths = np.array([6, 5, 4])
    assert efficiency(lengths, pack(lengths, 10), 10) == 15 / 20


def test_documents_as_long_as_a_pack_get_one_each():
    packs = pack(np.array([8, 8, 8]), 8)
    assert [packs[i].tolist() for i in range(len(packs))] == [[0], [1], [2]]


def test_no_document_gives_no_pack():
    packs = pack(np.array([], dtype=np.int32), 8)
    assert (len(packs), packs.tokens(np.array([], dtype=np.int32)).tolist()) == (0, [])
    assert efficiency(np.array([], dtype=np.int32), packs, 8) == 1.0


@pytest.mark.parametrize("lengths", [[3, 9], [0, 3]])
def test_documents_that_no_pack_takes_are_refused(lengths: list[int]):
    with pytest.raises(ValueError, match="documents of 1 to 8 tokens"):
        pack(np.array(lengths), 8)


def test_a_pack_that_is_not_there_is_an_index_error_so_that_iteration_ends():
    packs = Packs(np.array([1, 0], np.int32), np.array([0, 1, 2]))
    assert [each.tolist() for each in packs] == [[1], [0]]
    with pytest.raises(IndexError, match="there are 2 packs"):
        packs[-1]


def test_memory_is_a_few_arrays_of_the_documents():
    lengths = chat_lengths(500_000, 4096)
    tracemalloc.start()
    pack(lengths, 4096)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * lengths.nbytes
