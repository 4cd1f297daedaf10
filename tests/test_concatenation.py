"""Documents of a corpus end to end: every token stands in one row, in its order."""

from pathlib import Path

import corpora
import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.concatenation import Concatenated
from finetune.data.rows import Rows


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return tiny.read_rows(
        corpora.write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl", rows=40), tiny.build_tokenizer()
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(st.integers(0, 39), min_size=1, max_size=30), length=st.integers(2, 200))
def test_rows_are_the_documents_cut_where_a_row_is_full(documents: Rows, chosen: list[int], length: int):
    some = documents.choose(np.array(chosen))
    rows = Concatenated(some, length)
    expected = np.concatenate([row.tokens for row in some])
    found = [row.tokens for row in rows]
    assert [len(tokens) for tokens in found] == rows.lengths.tolist()
    assert len(rows) == len(found)
    kept = np.concatenate(found) if found else np.zeros(0, np.int32)
    assert np.array_equal(kept, expected[: len(kept)])
    assert len(expected) - len(kept) == (len(expected) % length == 1)  # a token that predicts nothing
    assert all(len(tokens) == length for tokens in found[:-1])
    assert all(row.spans == [(1, len(row.tokens))] for row in rows)
    assert rows.trained_tokens.tolist() == [row.trained_tokens for row in rows]


def test_row_names_the_documents_from_which_to_which_it_is(documents: Rows):
    row = Concatenated(documents, 4000)[0]
    first, last = row.source.split(" to ")
    assert first == documents[0].source
    assert last in {each.source for each in documents}


def test_end_of_a_document_is_its_last_token_and_trained(documents: Rows):
    eos = tiny.build_tokenizer().eos_token_id
    (row,) = Concatenated(documents, 10**6)
    assert (row.tokens == eos).sum() == len({each.source for each in documents})


def test_rows_of_another_length_or_of_other_documents_have_another_fingerprint(documents: Rows):
    others = [
        Concatenated(documents, 50),
        Concatenated(documents, 51),
        Concatenated(documents.choose(np.arange(9)), 50),
    ]
    assert len({rows.fingerprint for rows in (*others, Concatenated(documents, 50))}) == 3


def test_row_that_is_not_there_is_refused(documents: Rows, tmp_path: Path):
    rows = Concatenated(documents, 50)
    for number in (-1, len(rows)):
        with pytest.raises(IndexError, match=f"none with number {number}"):
            rows[number]
