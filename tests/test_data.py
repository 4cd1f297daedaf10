"""Reading data of a run: what is used, cut, dropped or refused, with the line it stands on; splits and weights."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scenarios
import tiny
from chat_templates import QWEN3, tokenizer_for
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config import sections
from finetune.data import dataset
from finetune.data.encoding import Settings
from finetune.data.rows import Rows
from finetune.data.sources import Source
from finetune.errors import InputError
from finetune.run import preflight
from recipes import sft

TOKENIZER = tiny.build_tokenizer()
GOOD = json.dumps({"messages": [{"role": "user", "content": "the tree"}, {"role": "assistant", "content": "walks"}]})


def read(path: Path, text: str | bytes, max_length: int = 64, **manner: Any) -> Rows:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return tiny.read_rows(path, TOKENIZER, max_length, **manner)


def conversation(question: str, answer: str = "walks") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "JSON"),
        (GOOD + GOOD, "JSON"),
        (b'{"messages": "\xff\xfe"}', "not UTF-8"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no assistant turn"),
        ('{"chosen": "a", "rejected": "b"}', "preference"),
        ('{"nothing": 1}', "nothing"),
    ],
)
def test_bad_line_is_refused_with_file_line_and_reason(tmp_path: Path, line: str | bytes, reason: str):
    line = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(InputError, match=f"rows.jsonl:3: .*{reason}"):
        read(tmp_path / "rows.jsonl", GOOD.encode() + b"\n\n" + line + b"\n" + GOOD.encode())


def test_first_ten_bad_rows_are_named_in_the_order_of_the_file_and_all_are_counted_with_what_to_do(tmp_path: Path):
    # broken lines and lines that are no conversation are found at different stages; each is another reason
    with pytest.raises(InputError) as error:
        read(
            tmp_path / "rows.jsonl",
            "\n".join([GOOD, *(f'{{"n{i}": 1}}' if i % 2 else " " * i + "{" for i in range(1, 27))]),
        )
    problems = error.value.problems
    assert [int(problem.split(".jsonl:")[1].split(":")[0]) for problem in problems[:10]] == list(range(2, 12))
    assert problems[10].startswith("... and 16 more")
    assert problems[11].startswith("26 rows cannot be used")
    assert "data.on_bad_row skip" in problems[11]


def test_reason_that_many_rows_share_is_said_once(tmp_path: Path):
    with pytest.raises(InputError) as error:
        read(tmp_path / "rows.jsonl", "\n".join([GOOD, *['{"nothing": 1}'] * 26]))
    same, more, what_to_do = error.value.problems
    assert re.findall(r"rows\.jsonl:(\d+)", same) == [str(line) for line in range(2, 12)]
    assert more.startswith("... and 16 more")
    assert "train on the other 1 with" in what_to_do


@pytest.mark.parametrize("skip_bad_rows", [False, True])
def test_data_without_a_usable_row_are_refused_in_one_sentence_that_offers_no_other_rows(
    tmp_path: Path, skip_bad_rows: bool
):
    with pytest.raises(InputError) as error:
        read(tmp_path / "rows.jsonl", '{"nothing": 1}\n' * 2 + "7\n" * 24, skip_bad_rows=skip_bad_rows)
    (problem,) = error.value.problems
    assert "no usable row." in problem
    assert "rows.jsonl:1: " in problem
    assert re.search(r"; [^;]*rows\.jsonl:3: [^;]*object; the reasons", problem)  # each reason once
    assert "rows.jsonl:2:" not in problem
    assert "the reasons for all 26 rows are in" in problem
    assert "on_bad_row" not in problem


def test_skipped_rows_are_all_kept_with_source_reason_and_text(tmp_path: Path):
    rows = read(tmp_path / "rows.jsonl", "\n".join([GOOD, "{broken", GOOD, '{"nothing": 1}']), skip_bad_rows=True)
    assert [row.source.rsplit(":")[-1] for row in rows] == ["1", "3"]
    rejected = [json.loads(line) for line in dataset.rejected_lines(rows)]
    assert [entry["source"].rsplit(":")[-1] for entry in rejected] == ["2", "4"]
    assert rejected[0]["raw"] == "{broken"
    assert json.loads(rejected[1]["raw"]) == {"nothing": 1}
    assert "2 rejected" in dataset.describe(rows, "training")


def test_the_first_unusable_row_is_among_those_that_are_shown(tmp_path: Path):
    broken = ["{broken", '{"a": 1}', '{"messages": 1}', '{"prompt": 1}', "{broken"]
    with pytest.raises(InputError, match=r"no usable row\. \S*rows\.jsonl:1: .*rows\.jsonl:2: ") as error:
        read(tmp_path / "rows.jsonl", "\n".join(broken), skip_bad_rows=True)
    assert "rows.jsonl:5" not in str(error.value)


def test_skipping_never_leaves_an_empty_run(tmp_path: Path):
    with pytest.raises(InputError, match=r"no usable row\. .*rows\.jsonl:1: "):
        read(tmp_path / "rows.jsonl", "{broken", skip_bad_rows=True)


def test_empty_file_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no rows found"):
        read(tmp_path / "rows.jsonl", "")


def test_long_rows_are_cut_and_rows_that_lose_their_trained_tokens_dropped_and_both_counted(tmp_path: Path):
    cut, lost = conversation("a", "tree " * 99), conversation("tree " * 99, "a")
    rows = read(tmp_path / "rows.jsonl", "\n".join([GOOD, json.dumps(cut), json.dumps(lost)]), max_length=32)
    assert (len(rows), rows.summary["truncated"], rows.summary["dropped"]) == (2, 1, 1)
    assert rows.summary["first_dropped"][0].endswith(":3")
    assert max(rows.lengths) == 32
    assert rows[1].uncut_tokens > 99
    line = dataset.describe(rows, "training")
    assert "1 row cut at data.max_length" in line
    assert "1 left out as too long for data.max_length" in line
    assert "rows.jsonl:3" in line
    assert "max_length 32" in next(dataset.rejected_lines(rows))


def test_file_whose_rows_all_lose_their_trained_tokens_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"longer than data\.max_length"):
        read(tmp_path / "rows.jsonl", GOOD, max_length=3)


def test_every_row_of_many_is_stored_as_it_was_encoded(tmp_path: Path):
    path = tiny.write_conversations(tmp_path / "rows.jsonl", 1000)  # several batches of the Arrow file
    rows = tiny.read_rows(path, TOKENIZER)
    assert [row.source for row in rows] == [f"{path}:{i}" for i in range(1, 1001)]
    assert rows.lengths.tolist() == [len(row.tokens) for row in rows]
    assert rows.trained_tokens.tolist() == [row.trained_tokens for row in rows]
    for i in (0, 255, 256, 999):
        messages = json.loads(path.read_text().splitlines()[i])["messages"]
        text = TOKENIZER.apply_chat_template(messages, tokenize=False)
        assert rows[i].tokens.tolist() == TOKENIZER(text)["input_ids"][:64]
        prompt = TOKENIZER.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        if rows[i].uncut_tokens <= 64:
            assert TOKENIZER.decode(rows[i].tokens[: rows[i].prompt_tokens]) == prompt
            assert rows[i].question == messages[-2]["content"]
    with pytest.raises(IndexError):
        rows[1000]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=200), good=st.booleans())
def test_any_bytes_give_rows_or_an_error_with_a_line_number(tmp_path_factory: Any, content: bytes, good: bool):
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    problem = None
    try:
        rows = read(path, content + b"\n" + GOOD.encode() if good else content)
    except InputError as error:
        problem = error.problems[0]
    assert len(rows) > 0 if problem is None else f"{path}:" in problem or "no rows found" in problem


def test_split_by_a_fraction_keeps_every_row_on_its_side_whatever_is_added(tmp_path: Path):
    contents = [conversation(f"tree {i}") for i in range(400)]
    small = tiny.read_rows(write(tmp_path / "small.jsonl", contents[:200]), TOKENIZER)
    large = tiny.read_rows(write(tmp_path / "large.jsonl", contents[::-1]), TOKENIZER)
    sides = []
    for rows in (small, large):
        train, held_out = dataset.split(rows, 0.2)
        assert len(train) + len(held_out) == len(rows)
        assert 0.1 < len(held_out) / len(rows) < 0.3
        sides.append({row.question for row in held_out})
    assert sides[0] == sides[1] & {row.question for row in small}


def test_rows_that_agree_in_the_split_key_stay_on_one_side(tmp_path: Path):
    rows = [conversation(f"tree {i}") | {"document": i // 5} for i in range(200)]
    path = write(tmp_path / "rows.jsonl", rows)
    stored = dataset.read_rows([Source(str(path))], TOKENIZER, Settings(64, split_key="document"))
    documents = [{int(row.question.split()[1]) // 5 for row in side} for side in dataset.split(stored, 0.3)]
    assert all(documents)
    assert not documents[0] & documents[1]
    with pytest.raises(InputError, match=r"no key 'chapter', which data\.split_key names"):
        dataset.read_rows([Source(str(path))], TOKENIZER, Settings(64, split_key="chapter"))


def test_rows_of_one_long_text_are_split_too(tmp_path: Path):
    (tmp_path / "text.txt").write_text("".join(f"the tree number {i} walks over the river\n" for i in range(4000)))
    rows = tiny.read_rows(tmp_path / "text.txt", TOKENIZER)
    _, held_out = dataset.split(rows, 0.1)
    assert 0.05 < len(held_out) / len(rows) < 0.15


def test_split_that_leaves_a_side_empty_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="choose another fraction"):
        dataset.split(read(tmp_path / "rows.jsonl", GOOD), 0.5)


def test_copies_that_differ_in_what_is_not_trained_are_on_the_same_side(tmp_path: Path):
    copies = [
        {**conversation(f"tree {i}"), "id": f"{i}-{copy}", "score": copy} for copy in range(3) for i in range(300)
    ]
    rows = tiny.read_rows(write(tmp_path / "rows.jsonl", copies), TOKENIZER)
    kept, held_out = dataset.split(rows, 0.3)
    assert len(held_out) > 100
    assert not {row.question for row in kept} & {row.question for row in held_out}


def test_copies_that_differ_in_keys_of_their_messages_are_on_the_same_side(tmp_path: Path):
    copies = [conversation("tree") for _ in range(3)]
    copies[1]["messages"][0]["id"], copies[2]["messages"][1]["timestamp"] = "7", "2024-01-01"
    rows = tiny.read_rows(write(tmp_path / "rows.jsonl", copies), TOKENIZER)
    assert len(set(rows.column("split_hash").tolist())) == 1


def test_answers_without_a_trained_token_within_max_length_are_counted(tmp_path: Path):
    turns = [{"role": role, "content": f"{role} {i}"} for i in range(3) for role in ("user", "assistant")]
    tokenizer = tokenizer_for(QWEN3)
    path = write(tmp_path / "rows.jsonl", [{"messages": turns}])
    whole = dataset.read_rows([Source(str(path))], tokenizer, Settings(1000))
    assert len(whole) == 3
    rows = dataset.read_rows([Source(str(path))], tokenizer, Settings(int(whole.lengths[1]) - 4))
    assert (len(rows), rows.summary["dropped"]) == (2, 1)
    (line,) = dataset.rejected_lines(rows)
    assert re.search(r"answers of which nothing is left within data.max_length \d+: 1", line)


def test_marks_of_untrained_answers_are_refused_where_everything_is_trained(tmp_path: Path):
    row = {"messages": [*conversation("tree")["messages"], *conversation("river")["messages"]]}
    row["messages"][1]["weight"] = 0
    with pytest.raises(InputError, match=r"marked as not trained, but data\.train_on is all"):
        dataset.read_rows([Source(str(write(tmp_path / "rows.jsonl", [row])))], TOKENIZER, Settings(64, train_on="all"))


@pytest.mark.parametrize("column", ["split_hash", "weight_hash"])
def test_sides_and_weights_are_those_of_the_words_whatever_the_tokenizer_and_its_length(tmp_path: Path, column: str):
    path = write(tmp_path / "rows.jsonl", [conversation(f"tree {i}", "walks over the river") for i in range(50)])
    bare = tiny.build_tokenizer("{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}")
    found = [
        dataset.read_rows([Source(str(path))], tokenizer, Settings(length)).column(column).tolist()
        for tokenizer, length in [(TOKENIZER, 64), (TOKENIZER, 24), (bare, 64)]
    ]
    assert found == found[:1] * 3
    assert len({*found[0]}) == 50


def test_sources_with_weights_are_trained_as_often_as_they_say(tmp_path: Path):
    first = write(tmp_path / "first.jsonl", [conversation(f"tree {i}") for i in range(100)])
    second = write(tmp_path / "second.jsonl", [conversation(f"river {i}") for i in range(50)])
    sources = [Source(str(first), weight=0.5), Source(str(second), weight=2)]
    rows, _ = dataset.load(sources, [], TOKENIZER, Settings(64))
    questions = [row.question for row in rows]
    assert 30 < sum("tree" in question for question in questions) < 70
    assert len({question for question in questions if "tree" in question}) == sum("tree" in q for q in questions)
    assert sorted(q for q in questions if "river" in q) == sorted([f"river {i}" for i in range(50)] * 2)
    again, _ = dataset.load(sources, [], TOKENIZER, Settings(64))
    assert again.fingerprint == rows.fingerprint
    unweighted, _ = dataset.load([Source(str(first)), Source(str(second))], [], TOKENIZER, Settings(64))
    assert unweighted.fingerprint != rows.fingerprint


@pytest.mark.parametrize(("weight", "share"), [(0.25, 0.25), (0.5, 0.5), (1.2, 1.2)])
def test_weights_hold_among_the_rows_that_a_split_leaves(tmp_path: Path, weight: float, share: float):
    path = write(tmp_path / "rows.jsonl", [conversation(f"tree {i}") for i in range(1000)])
    rows, held_out = dataset.load([Source(str(path), weight=weight)], 0.3, TOKENIZER, Settings(64))
    assert held_out is not None
    assert abs(len(rows) / (1000 - len(held_out)) - share) < 0.07
    assert not {row.question for row in rows} & {row.question for row in held_out}


def test_weights_hold_among_the_rows_that_a_split_leaves_of_one_long_text(tmp_path: Path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the tree number {i} walks over the river\n" for i in range(4000)))
    rows, held_out = dataset.load([Source(str(path), weight=0.5)], 0.4, TOKENIZER, Settings(64))
    assert held_out is not None
    assert abs(len(rows) / (held_out.summary["rows"] - len(held_out)) - 0.5) < 0.07


def test_weight_of_held_out_rows_is_refused():
    assert preflight.held_out_problems([Source("a.jsonl")]) == []
    (problem,) = preflight.held_out_problems([Source("a.jsonl"), Source("b.jsonl", weight=2)])
    assert "b.jsonl has the weight 2" in problem


def test_rows_longer_than_the_model_has_positions_are_refused(tmp_path: Path):
    rows = read(tmp_path / "rows.jsonl", GOOD)
    longest = int(rows.lengths.max())

    def problems(train: Any, held: Any, positions: int | None, streaming: bool = False) -> list[str]:
        model: Any = SimpleNamespace(text_config=SimpleNamespace(vocab_size=10**6, max_position_embeddings=positions))
        data = sections.Data(train="rows.jsonl", max_length=4096, streaming=streaming)
        return preflight.row_problems(train, held, data, model)

    assert problems(rows, None, longest) == []
    assert problems(rows, rows, None) == []
    assert f"set data.max_length to {longest - 1} or less" in problems(rows, None, longest - 1)[0]
    assert "4,096 tokens" in problems(None, rows, 1024)[0]  # a stream
    assert "4,096 tokens" in problems(rows, None, 1024, streaming=True)[0]


def test_held_out_rows_that_are_trained_too_are_counted(tmp_path: Path):
    train = tiny.read_rows(write(tmp_path / "a.jsonl", [conversation(f"tree {i}") for i in range(9)]), TOKENIZER)
    other = tiny.read_rows(write(tmp_path / "b.jsonl", [conversation(f"tree {i}") for i in range(7, 14)]), TOKENIZER)
    assert dataset.shared_with(other, train) == 2


def test_fingerprint_changes_with_a_token_and_with_a_mask(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [conversation("tree")])
    found = {tiny.read_rows(path, TOKENIZER).fingerprint}
    found.add(dataset.read_rows([Source(str(path))], TOKENIZER, Settings(64, train_on="all")).fingerprint)
    found.add(tiny.read_rows(write(tmp_path / "other.jsonl", [conversation("river")]), TOKENIZER).fingerprint)
    assert len(found) == 3
    assert tiny.read_rows(write(tmp_path / "same.jsonl", [conversation("tree")]), TOKENIZER).fingerprint in found


def test_token_that_the_model_does_not_know_is_refused(tmp_path: Path):
    rows = read(tmp_path / "rows.jsonl", GOOD)
    largest = int(np.concatenate([row.tokens for row in rows]).max())
    assert preflight.vocabulary_problems([rows, None], largest + 1) == []
    (problem,) = preflight.vocabulary_problems([rows, None], largest)
    assert f"token {largest}" in problem


@pytest.mark.parametrize("held_out", [0.3, "own file"])
def test_run_writes_each_row_that_it_skips_once(held_out: Any, tmp_path: Path, model_folder: Path, conversations: Path):
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text(conversations.read_text() + "{broken\n")
    config = scenarios.configuration(
        model_folder,
        tmp_path / "train.jsonl",
        tmp_path / "run",
        train__steps=1,
        data__on_bad_row="skip",
        data__eval=held_out if held_out == 0.3 else str(tmp_path / "held_out.jsonl"),
    )
    sft.main(config)
    rejected = [json.loads(line)["source"] for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    files = ["train.jsonl"] if held_out == 0.3 else ["train.jsonl", "held_out.jsonl"]
    assert rejected == [f"{tmp_path / name}:81" for name in files]


def test_rows_are_counted_by_their_lengths_in_equal_parts(tmp_path: Path):
    rows = tiny.read_rows(tiny.write_conversations(tmp_path / "rows.jsonl", rows=60), TOKENIZER)
    found = dataset.figures([rows, rows])
    up_to = found["lengths"]["up_to"]
    assert up_to[-2] < found["longest"] == rows.lengths.max() <= up_to[-1]
    assert len(up_to) <= dataset.MOST_PARTS_OF_HISTOGRAM
    expected, _ = np.histogram(rows.lengths, bins=[0.5, *(end + 0.5 for end in up_to)])
    assert found["lengths"]["rows"] == (2 * expected).tolist()
    assert (found["rows"], found["tokens"]) == (120, 2 * rows.lengths.sum())
    assert found["rejected"] == 0  # of two mixes from one store, counted once
