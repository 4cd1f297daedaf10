"""``data.columns``: rows with other names are read as if they had those of their format, and a typo is refused."""

import json
from pathlib import Path
from typing import Any

import preferences
import pytest
import scenarios
import tiny
import yaml
from test_formats import ROWS

from finetune.cli import commands
from finetune.config import command_line
from finetune.data import dataset, encoding_workers, streaming
from finetune.data.columns import FIELDS, Columns, problems, renamed
from finetune.data.encoding import Settings
from finetune.data.formats import Example
from finetune.data.rows import Rows
from finetune.data.sources import Source
from finetune.data.streaming import Stream
from finetune.errors import InputError
from finetune.generation.prompts import read_prompts
from finetune.generation.speaker_loading import columns_of
from recipes import sft

TOKENIZER = tiny.build_tokenizer()
ASKED: Columns = (("prompt", "question"), ("completion", "answer"))
QUESTION = {"question": "the tree", "answer": " walks", "id": 7}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, columns: Columns, **settings: Any) -> Rows:
    return dataset.read_rows([Source(str(path))], TOKENIZER, Settings(64, columns=columns, **settings))


def contents(rows: Rows) -> list[Any]:
    return [(row.tokens.tolist(), row.spans) for row in rows]


@pytest.mark.parametrize("format", ROWS)
def test_rows_of_every_format_are_read_by_the_names_of_their_columns(format: str, tmp_path: Path):
    named = {f"my_{key}" if key in FIELDS else key: value for key, value in ROWS[format].items()}
    columns = tuple((key, f"my_{key}") for key in ROWS[format] if key in FIELDS)
    assert columns
    expected = read(write(tmp_path / "own.jsonl", ROWS[format]), ())
    found = read(write(tmp_path / "named.jsonl", named), columns)
    assert contents(found) == contents(expected)
    assert found.summary["formats"] == expected.summary["formats"] == {format: 1}


def test_pairs_and_judged_answers_are_read_by_the_names_of_their_columns(tmp_path: Path):
    for write_rows, keys in (
        (preferences.write_pairs, ("prompt", "chosen", "rejected")),
        (preferences.write_judged, ("prompt", "completion", "label")),
    ):
        own = write_rows(tmp_path / "own.jsonl", 4)
        rows = [json.loads(line) for line in own.read_text().splitlines()]
        columns = tuple((key, f"my {key}") for key in keys)
        named = write(tmp_path / "named.jsonl", *({f"my {key}": row[key] for key in keys} for row in rows))
        assert contents(read(named, columns, paired=True)) == contents(read(own, (), paired=True))


def test_a_named_column_decides_the_format_whatever_else_a_row_has():
    row = {"messages": [], "text": "x", "prompt": "y", **QUESTION}
    assert renamed(row, ASKED) == {"prompt": "the tree", "completion": " walks", "id": 7}
    for other in ({"text": "x"}, {"prompt": "x", "question": None}):  # of another source
        assert renamed(other, ASKED) == other
    assert renamed({"prompt": "a", "completion": "b"}, (("prompt", "completion"), ("completion", "prompt"))) == {
        "prompt": "b",
        "completion": "a",
    }


def test_a_column_that_no_row_has_is_refused_with_the_nearest_and_what_the_rows_have(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", QUESTION, QUESTION)
    expected = (
        "data.columns takes prompt from the column 'Questoin', but no row has it; did you mean 'question'? Otherwise: "
        "the first row has 'question', 'answer', 'id'."
    )
    wrong = (("prompt", "Questoin"), ("completion", "answer"))
    with pytest.raises(InputError) as error:
        read(path, wrong)
    assert error.value.problems == [expected]
    lacking = "takes system from the column 'Persona', but no row has it; the first row has"  # they are read without it
    with pytest.raises(InputError, match=lacking):
        read(path, (*ASKED, ("system", "Persona")))
    with pytest.raises(InputError) as error:
        stream(path, (*ASKED, ("system", "Questoin")))
    assert error.value.problems == [expected.replace("prompt", "system")]


def test_an_optional_column_of_a_stream_may_begin_behind_the_first_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streaming, "WINDOW", 2)
    monkeypatch.setattr(encoding_workers, "RECORDS_AT_ONCE", 1)
    chat = {"messages": [{"role": "user", "content": "the tree"}, {"role": "assistant", "content": "walks"}]}
    path = write(tmp_path / "rows.jsonl", *[chat] * 4, chat | {"sys": "the stone"})
    first, *_ = stream(path, (("system", "sys"),)).describe()
    assert first == (
        "data.columns takes system from the column 'sys', but none of the first 2 documents has it; the first row has "
        "'messages'."
    )
    with pytest.raises(
        InputError, match="takes messages from the column 'talk', but none of the first 2 documents has it"
    ):
        stream(path, (("messages", "talk"),))
    monkeypatch.setattr(streaming, "WINDOW", 6)  # which all rows are in
    assert "streaming" in stream(path, (("system", "sys"),)).describe()[0]
    with pytest.raises(InputError, match="from the column 'system prompt', but no row has it"):
        stream(path, (("system", "system prompt"),))


def test_a_row_that_lacks_a_column_is_refused_by_its_line_with_the_columns_name(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", QUESTION, {"question": "the house"})
    with pytest.raises(InputError, match=r"rows\.jsonl:2: .*; of data\.columns it lacks 'answer'\."):
        read(path, ASKED)


def test_fields_that_no_format_has_are_refused_with_the_nearest(tmp_path: Path, model_folder: Path):
    assert problems(dict(ASKED)) == []
    config = scenarios.configuration(
        *(model_folder, write(tmp_path / "rows.jsonl", QUESTION), tmp_path / "out"), data__columns={"promt": "question"}
    )
    with pytest.raises(InputError, match=r"data\.columns: no format has a field 'promt'; did you mean 'prompt'\?"):
        sft.main(config)


def stream(path: Path, columns: Columns) -> Stream:
    form: dict[str, Any] = {"packing": False, "flat": False, "global_batch_size": 2, "micro_batch_size": 2, "seed": 0}
    settings = Settings(64, columns=columns)
    return Stream([Source(str(path))], TOKENIZER, settings, steps=2, vocabulary=512, skip_bad_rows=False, **form)


def test_streamed_rows_are_those_of_the_cache(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", QUESTION)
    (row,) = stream(path, ASKED).first_window
    assert [(row.tokens.tolist(), row.spans)] == contents(read(path, ASKED))


def test_other_columns_are_other_prepared_rows(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"text": "the tree", "body": "the house"})
    rows = [read(path, columns) for columns in ((), (("text", "body"),))]
    assert rows[0].folder != rows[1].folder
    assert rows[0].fingerprint != rows[1].fingerprint


def test_columns_are_read_from_a_flag_and_shown(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path / "rows.jsonl", QUESTION)
    flags = ["--model.path", str(model_folder), "--data.train", str(path), "--train.output_dir", str(tmp_path / "out")]
    flags += ["--data.columns", "{prompt: question, completion: answer}", "--train.global_batch_size", "1"]
    assert command_line.parse(sft.Config, flags).data.columns == dict(ASKED)
    assert commands.main(["data", *flags]) == 0
    assert "prompt from question, completion from answer" in capsys.readouterr().out
    assert commands.main(["data", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["columns"] == dict(ASKED)


def test_prompts_of_a_file_are_asked_by_the_columns_of_the_run(tmp_path: Path):
    (tmp_path / "run" / "final").mkdir(parents=True)
    (tmp_path / "run" / "final" / "config.json").write_text("{}")
    assert columns_of(str(tmp_path / "run" / "final")) == ()
    (tmp_path / "run" / "run.yaml").write_text(yaml.safe_dump({"config": {"data": {"columns": dict(ASKED)}}}))
    columns = columns_of(str(tmp_path / "run"))
    assert dict(columns) == dict(ASKED)
    path = write(tmp_path / "prompts.jsonl", QUESTION, {"prompt": "the house"})
    asked = [(prompt.asked, prompt.record) for prompt in read_prompts(str(path), columns)]
    assert asked == [
        (Example(None, prompt="the tree"), QUESTION),
        (Example([{"role": "user", "content": "the house"}]), {"prompt": "the house"}),
    ]
