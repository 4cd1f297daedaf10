"""The benchmark of data preparation: its rows are as varied as real ones, and its bounds break when they should."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import data_preparation as benchmark
from benchmarks import made_up_rows

OURS, THEIRS = benchmark.NAMES["ours"], benchmark.NAMES["trl"]
ASKED = [
    {"role": "user", "content": "Natalia sold 48 clips. How many has Natalia left of 99?"},
    {"role": "assistant", "content": "Natalia has 51 left."},
]


def measured(seconds: float, tokens: int = 7) -> dict[str, list[dict[str, Any]]]:
    keys = ("seconds", "core_seconds", "wall_seconds", "resident_mib", "anonymous_mib")
    run = dict.fromkeys(keys, seconds) | {"tokens": tokens}
    return {benchmark.FIRST: [run], benchmark.SECOND: [run]}


def speed(ours: float, theirs: float, *, their_tokens: int = 7) -> dict[str, Any]:
    runs = {OURS: measured(ours), THEIRS: measured(theirs, their_tokens)}
    return {"runs": runs, "summary": {name: benchmark.summary(states, runs[OURS]) for name, states in runs.items()}}


def test_no_repetition_of_a_conversation_equals_another_and_its_name_is_changed_in_all_messages():
    rows = list(made_up_rows.repeated([ASKED], 200))
    assert len({row[0]["content"] for row in rows}) == len(rows) == 200
    for times, (question, answer) in enumerate(rows):
        name = question["content"].split()[0]
        assert question["content"] == f"{name} sold {48 + times} clips. How many has {name} left of {99 + times}?"
        assert answer == {"role": "assistant", "content": f"{name} has {51 + times} left."}


def test_made_up_conversations_are_the_same_each_time_and_of_the_length_asked_for():
    rows = list(made_up_rows.made_up_conversations(500, words_question=35, words_answer=45))
    assert rows == list(made_up_rows.made_up_conversations(500, words_question=35, words_answer=45))
    words = [len(message["content"].split()) for row in rows for message in row]
    assert sum(words[::2]) / 500 == pytest.approx(36, abs=2)  # and a name
    assert sum(words[1::2]) / 500 == pytest.approx(45, abs=2)


@given(ours=st.floats(0.1, 100), theirs=st.floats(0.1, 1000))
def test_too_little_a_gain_is_told_and_no_other(ours: float, theirs: float):
    sentences = benchmark.too_slow(speed(ours, theirs))
    assert [THEIRS in sentence for sentence in sentences] == [True] * (theirs / ours < benchmark.FASTER)


def test_other_work_than_ours_is_told():
    (sentence,) = benchmark.too_slow(speed(1.0, 10.0, their_tokens=8))
    assert "different numbers of tokens" in sentence


@pytest.mark.parametrize(("last_mib", "told"), [(560, 0), (700, 1)])
def test_memory_that_grows_with_the_rows_is_told(last_mib: int, told: int):
    runs = [{"rows": 100_000, "anonymous_mib": 500}, {"rows": 2_000_000, "anonymous_mib": last_mib}]
    memory = {"runs": runs, "bytes_per_row": benchmark.growth(runs)}
    assert len(benchmark.too_large(memory)) == told
