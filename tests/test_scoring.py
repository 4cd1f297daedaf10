"""Scores of single answers, rows of tasks, and what chance may do to a mean, against values that others published."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from finetune.data.sources import Source
from finetune.errors import InputError
from finetune.scoring.asked_rows import asked_rows
from finetune.scoring.intervals import compared, compared_ratio, mcnemar, mean_interval, share_interval, sign_flip
from finetune.scoring.scores import NAMES, chosen, equal_values, score_of
from finetune.scoring.task_rows import TaskRow, read_task_rows, refuse_unfit

GSM8K = "regex:#### (-?[0-9.,]+)"


def judged(score: str, answer: str, expected: str = "") -> float:
    judge = score_of(score).judge
    assert judge is not None
    return judge(answer, expected)


@pytest.mark.parametrize(
    ("score", "answer", "expected", "value"),
    [
        ("exact_match", " yes\n", "yes", 1),
        ("exact_match", "Yes", "yes", 0),
        ("contains", "I say yes to it", "yes ", 1),
        ("contains", "I say no", "yes", 0),
        (GSM8K, "so 3 * 4\n#### 1,200.", "first 7 * 8\n#### 1200", 1),
        (GSM8K, "#### -18\nQuestion: and now?\n#### 5", "#### -18", 1),
        (GSM8K, "the answer is 18", "#### 18", 0),
        (GSM8K, "#### 18.0", "18", 1),
        (GSM8K, "#### 180", "#### 18", 0),
        (r"regex_last:(-?\d+)", "of 5 apples 3 are left: 2", "2", 1),
        (r"regex:(?:answer is|ANSWER:) (\w)", "ANSWER: C", "the answer is C", 1),
        (r"regex:\b[A-D]\b", "it is B", "B", 1),
        ("json", '{"a": 1}', "", 1),
        ("json", '```json\n["a"]\n```', "", 1),
        ("json", "```JSON\n{}\n```", "", 1),
        ("json", "Sure! {}", "", 0),
        ("json", '{"a": NaN}', "", 0),
        ("json", "[-Infinity]", "", 0),
        ("json", "5", "", 0),
        ("json", "[" * 100_000, "", 0),
        ("json_fields", '{"b": [1, 2], "a": "x", "c": 0}', '{"a": "x", "b": [1, 2]}', 1),
        ("json_fields", '{"a": "x", "b": [2, 1]}', '{"a": "x", "b": [1, 2]}', 0.5),
        ("json_fields", '{"a": 1}', '{"a": true}', 0),
        ("json_fields", '{"a": [1], "b": {"c": 1}}', '{"a": [true], "b": {"c": true}}', 0),
        ("json_fields", '{"a": [1.0, {"c": true}]}', '{"a": [1, {"c": true}]}', 1),
        ("json_fields", '{"a": [1, 2], "b": {"c": 1, "d": 1}}', '{"a": [1], "b": {"c": 1}}', 0),
        ("json_fields", "a: x", '{"a": "x"}', 0),
        ("json_fields:aa", '{"a": "x"}', '{"a": "x"}', 0),
        ("json_fields: b", '{"a": "y", "b": 1.0}', '{"a": "x", "b": 1}', 1),
    ],
)
def test_an_answer_is_judged_by_what_its_score_says(score: str, answer: str, expected: str, value: float):
    assert judged(score, answer, expected) == value


def test_values_are_compared_as_deep_as_json_is_read():
    deep = '{"a": ' + "[" * 600 + "]" * 600 + "}"
    assert judged("json_fields", deep, deep) == 1
    assert judged("json_fields", deep, deep.replace("[]", "[1]")) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,234", "1234"),
        ("$1,234.50", "1234.5"),
        ("-$1,234,567", "-1234567"),
        ("$-5", "-5.00"),
        ("- 5", "-5"),
        ("5 $", "5"),
        ("1,200.", "1200"),
        ("18,", "18"),
        ("1 234", "1234"),
        ("1\u202f234\u202f567.5", "1234567.5"),
        ("1e3", "1,000"),
    ],
)
def test_a_number_is_the_same_however_its_thousands_and_its_dollars_are_written(one: str, other: str):
    assert equal_values(one, other)
    assert equal_values(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1,23", "12,3"),
        ("1, 2, 3", "123"),
        ("3,5", "35"),
        ("1 2 3", "123"),
        ("100, 200", "100200"),
        ("0,123", "123"),
        ("1,2345", "12345"),
        ("1,234 567", "1234567"),
        ("1,234.5,678", "1234.5678"),
        ("5$6", "56"),
        ("NaN", "nan"),
        (",", "."),
    ],
)
def test_commas_that_group_no_thousands_make_no_number(one: str, other: str):
    assert not equal_values(one, other)
    assert not equal_values(other, one)


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("exactmatch", "there is no score 'exactmatch'; did you mean exact_match?"),
        ("bleu", "there is no score 'bleu'; choose one of exact_match, contains"),
        ("regex", "give a pattern behind the colon"),
        ("regex:(", "not a regular expression"),
        ("json_fields:", "give names of fields"),
        ("contains:x", "contains takes nothing behind a colon"),
    ],
)
def test_a_score_that_there_is_not_is_refused_with_what_to_write(score: str, said: str):
    with pytest.raises(InputError) as refused:
        score_of(score)
    assert said in str(refused.value)


def test_each_score_that_is_listed_can_be_taken():
    for name in NAMES:
        assert score_of(name + ":x" * name.startswith("regex")).name.startswith(name)


def test_the_longer_of_two_choices_is_not_at_a_disadvantage_by_its_length():
    choices, log_probabilities = ("no", "certainly"), (-4.0, -9.0)
    assert chosen(log_probabilities, choices, by_length=False) == 0
    assert chosen(log_probabilities, choices, by_length=True) == 1
    assert chosen((-1.0, -1.0), ("a", "b"), by_length=False) == 0


def test_intervals_of_shares_are_wilsons():
    """81 of 263 is the example of Newcombe, Statistics in Medicine 17, 857-872 (1998), table I; so are the others."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (right, rows), interval in published.items():
        assert share_interval(right, rows) == pytest.approx(interval, abs=5e-5)


def test_intervals_of_means_contain_the_true_one_as_often_as_they_say():
    rng = np.random.default_rng(0)
    held = [mean_interval(rng.exponential(size=200).tolist()) for _ in range(400)]
    assert 0.92 <= np.mean([low <= 1 <= high for low, high in held]) <= 0.97
    assert mean_interval([1.0]) == (-math.inf, math.inf)


def test_right_and_wrong_answers_of_two_models_are_compared_by_mcnemars_exact_test():
    """Two-sided binomial tails by their definition, over all outcomes of the rows on which the models differ."""
    for only_first, only_second in ((2, 8), (0, 5), (3, 3), (0, 0), (1, 0)):
        rows = only_first + only_second
        far = abs(only_first - only_second)
        outcomes = [abs(2 * sum(each) - rows) >= far for each in product((0, 1), repeat=rows)]
        assert mcnemar(only_first, only_second) == pytest.approx(np.mean(outcomes))
    first, second = [1.0] * 8 + [0.0] * 4, [1.0] * 6 + [0.0] * 2 + [1.0] * 4
    found = compared(first, second, are_shares=True)
    assert found.value == pytest.approx(2 / 12)
    assert found.p == pytest.approx(mcnemar(2, 4))
    assert found.interval.low < 0 < found.interval.high


def test_other_scores_are_compared_by_flipping_signs():
    """The differences of Darwin's plants (Fisher, The Design of Experiments, 1935, section 21): p = 0.0526 over all
    32,768 signs."""
    darwin = np.array([49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48])
    assert sign_flip(darwin) == pytest.approx(1726 / 32768, abs=0.007)
    assert sign_flip(darwin[:5]) == np.mean(
        [abs(np.dot(signs, darwin[:5])) >= abs(darwin[:5].sum()) for signs in product((-1, 1), repeat=5)]
    )
    assert sign_flip(np.zeros(9)) == 1
    lower = compared_ratio([4.0, 9.0, 2.0] * 20, [3.0, 8.0, 1.0] * 20, [1.0, 2.0, 1.0] * 20)
    assert lower.value == -0.75
    assert lower.p < 0.001
    assert lower.interval.high < 0


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, {"role": "assistant", "content": "b"}]}, "b"),
        ({"messages": [USER]}, None),
        ({"prompt": "a", "completion": "b"}, "b"),
        ({"instruction": "a", "output": "b"}, "b"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "b"),
        ({"prompt": "a", "answer": "b"}, "b"),
        ({"question": "a", "answer": 12}, "12"),
        ({"prompt": "a"}, None),
        ({"text": "a"}, None),
    ],
    ids=str,
)
def test_a_row_of_any_format_says_what_is_expected(row: dict[str, Any], expected: str | None, tmp_path: Path):
    (found,) = read(tmp_path, row)
    assert found.expected == expected


SYSTEM, ANSWER = {"role": "system", "content": "s"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"prompt": "first", "messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER]),
        ({"question": "raw", "messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER]),
        ({"question": "a", "text": "around it", "answer": "b"}, [USER]),
        ({"messages": [SYSTEM, USER, ANSWER, {"role": "user", "content": "thanks"}]}, [SYSTEM, USER]),
    ],
    ids=str,
)
def test_a_row_is_asked_the_question_that_it_trains(row: dict[str, Any], asked: list[Any], tmp_path: Path):
    (found,) = read(tmp_path, row)
    assert found.prompt.asked.messages == asked
    assert found.expected == "b"


def read(folder: Path, *rows: Any, **settings: Any) -> list[TaskRow]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_task_rows([Source(str(path))], "--data", **settings)


@pytest.mark.parametrize("answer", [2, "c d", "C", "2"])
def test_the_right_choice_is_named_by_its_number_its_letter_or_its_text(answer: Any, tmp_path: Path):
    (row,) = read(tmp_path, {"question": "a", "choices": ["a b", "b c", "c d"], "answer": answer})
    assert (row.expected, row.choices) == ("c d", ("a b", "b c", "c d"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "a", "choices": ["b", "c"], "answer": 2}, "`answer` is 2; give the number"),
        ({"question": "a", "choices": ["b", "c"], "answer": "ß"}, "`answer` is 'ß'; give the number"),
        ({"question": "a", "choices": list("ijklmnopq"), "answer": "ı"}, "`answer` is 'ı'; give the number"),
        ({"question": "a", "choices": ["b", "c"]}, "`answer` is None; give the number"),
        ({"question": "a", "choices": ["b", "b"], "answer": 0}, "two of the choices are the same"),
        ({"question": "a", "choices": ["b"], "answer": 0}, "two texts or more"),
        ({"question": "a", "choices": "bc", "answer": 0}, "not a list of texts"),
        ({"prompt": "a", "answer": ["b"]}, "neither a text nor a number"),
        ({"x": 1}, "asks nothing"),
        (["a"], "not one JSON object"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_asked_is_named_with_the_reason(row: Any, reason: str, tmp_path: Path):
    with pytest.raises(InputError) as refused:
        read(tmp_path, {"prompt": "a"}, row)
    assert f"{tmp_path}/rows.jsonl:2: " in str(refused.value)
    assert reason in str(refused.value)


def test_a_limit_reads_the_first_rows_alone(tmp_path: Path):
    assert len(read(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"x": 1}, limit=2)) == 2


def test_rows_that_do_not_fit_a_score_are_refused(tmp_path: Path):
    rows = read(tmp_path, {"prompt": "a"}, {"prompt": "a", "answer": "b"})
    for score, reason in {"choice": "no choices", "contains": "no answer", "json_fields": "not a JSON object"}.items():
        with pytest.raises(InputError, match=reason):
            refuse_unfit(rows, [score_of(score)])
    refuse_unfit(rows, [score_of("json")])


@pytest.mark.parametrize("score", ["exact_match", "contains", r"regex:\d*", "json_fields"])
@pytest.mark.parametrize("answer", ["", " \n"])
def test_an_answer_without_text_is_none_to_compare_with(score: str, answer: str, tmp_path: Path):
    rows = read(tmp_path, {"prompt": "a", "answer": "{}"}, {"prompt": "a", "answer": answer})
    with pytest.raises(InputError, match=r"rows\.jsonl:2: it has no answer to compare with"):
        refuse_unfit(rows, [score_of(score)])
    refuse_unfit(rows, [score_of("json")])


@pytest.mark.parametrize(
    ("score", "answer", "reason"),
    [
        ("json_fields", '["kitchen"]', "not a JSON object"),
        ("json_fields:room", '["room"]', "not a JSON object"),
        (
            "json_fields:roomm,do",
            '{"room": 1, "do": "on"}',
            "has no field 'roomm', which the score json_fields:roomm,do",
        ),
    ],
)
def test_rows_without_the_fields_that_a_score_compares_are_refused(
    score: str, answer: str, reason: str, tmp_path: Path
):
    rows = read(
        tmp_path, {"prompt": "a", "answer": '{"room": 1, "do": "on", "roomm": 2}'}, {"prompt": "a", "answer": answer}
    )
    refuse_unfit(rows[:1], [score_of(score)])
    with pytest.raises(InputError, match=rf"rows\.jsonl:2: its answer .*{reason}"):
        refuse_unfit(rows, [score_of(score)])


def test_choices_follow_the_question_by_the_template_or_after_a_space(tmp_path: Path):
    tokenizer = tiny.build_tokenizer()
    rows = read(tmp_path, {"prompt": "the house", "choices": ["runs", "a red tree"], "answer": 0})
    talk = asked_rows(rows, tokenizer, None, plain=False, name="m")
    text = "<|im_start|>user\nthe house<|im_end|>\n<|im_start|>assistant\n"
    assert [tokenizer.decode(row.tokens) for row in talk.choices] == [text + "runs", text + "a red tree"]
    plain = asked_rows(rows, tokenizer, None, plain=True, name="m")
    assert [tokenizer.decode(row.tokens) for row in plain.choices] == ["the house runs", "the house a red tree"]
    for row, own in zip([*talk.choices, *plain.choices], ("runs", "a red tree", " runs", " a red tree")):
        ((first, end),) = row.spans
        assert end == len(row.tokens)
        assert tokenizer.decode(row.tokens[first:end]) == own
    assert talk.grouped([1.0, 2.0]) == [[1.0, 2.0]]
    with pytest.raises(InputError, match=r"rows.jsonl:1: \d+ tokens leave no room for an answer, because m has 3"):
        asked_rows(rows, tokenizer, 3, plain=True, name="m")
    several = read(tmp_path, {"messages": [{"role": "system", "content": "s"}, USER]})
    with pytest.raises(InputError, match="several messages"):
        asked_rows(several, tokenizer, None, plain=True, name="m")
