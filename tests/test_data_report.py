"""`finetune data` shows what a run would see: its figures are right, its marks are the masks, and rows stay inert."""

import dataclasses
import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import preferences
import pytest
import tiny
import yaml
from chat_templates import QWEN3
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from finetune.cli import commands
from finetune.cli.data_report import figures
from finetune.cli.data_report.figures import LeftOut, Report
from finetune.cli.data_report.lengths import MOST_BINS, length_figures
from finetune.cli.data_report.page import to_html, to_json
from finetune.cli.data_report.report_tables import print_report
from finetune.cli.data_report.row_text import TextSpan, shorten, shown_row, spread, stretches, visible
from finetune.cli.data_verb import measured_speed
from finetune.config import command_line
from finetune.data import formats
from finetune.data.batches import Batches
from finetune.data.dataset import Rows, read_rows
from finetune.data.encoding import Encoder, Row, Settings
from finetune.data.sampler import EMPTY, dealt_batch, global_batch, positions_in
from finetune.data.sources import Source
from finetune.errors import InputError
from recipes import sft

SHARED = Path(__file__).parents[2] / "shared"
TOKENIZER = tiny.build_tokenizer()
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Co"], exclude_characters="\0"), min_size=1, max_size=60)
HOSTILE = [
    "</pre>",
    "<script>alert(1)</script>",
    "</style>",
    "&amp;",
    "<!--",
    '" onload="x',
    "\x1b[31m",
    "\x9b2J",
    "\r",
]
FRAGMENTS = st.lists(
    st.sampled_from([*HOSTILE, "\u202eevil", "\u2028", "«", "🙂👩‍🚀", "木", "long " * 20]) | TEXTS,
    min_size=1,
    max_size=4,
).map("".join)


def conversation(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def encode(*contents: str, max_length: int = 4096, tokenizer: Any = TOKENIZER) -> Row:
    [result] = Encoder(tokenizer, Settings(train_on="assistant", max_length=max_length)).encode(
        [("rows.jsonl:1", formats.convert(conversation(*contents), "auto"))]
    )
    assert isinstance(result, list)
    return result[0]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def configure(tmp_path: Path, model_folder: Path) -> Callable[..., list[str]]:
    """Arguments of the verb for training rows, with other keys as ``section__name``."""

    def arguments(train: Any, **keys: Any) -> list[str]:
        values: dict[str, Any] = {"model": {"path": str(model_folder)}, "adapter": {"type": "lora"}, "data": {}}
        values["train"] = {"output_dir": str(tmp_path / "run"), "global_batch_size": 4, "micro_batch_size": 2}
        for key, value in {"data__train": train, **keys}.items():
            section, name = key.split("__")
            values[section][name] = value
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        return ["data", "--config", str(tmp_path / "config.yaml")]

    return arguments


def as_json(arguments: list[str], capsys: pytest.CaptureFixture[str], exit_code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert commands.main([*arguments, "--json"]) == exit_code
    return json.loads(capsys.readouterr().out)  # which would fail if there were anything else


def report_of(path: Path, **changes: Any) -> tuple[Report, Rows]:
    """A report on the rows of one file, and these rows."""
    rows = read_rows([Source(str(path))], TOKENIZER, Settings(max_length=128))
    form = {"max_length": 128, "packing": False, "flat": False, "skips_bad_rows": False, "problems": []}
    form |= {"paired": False, "tokens_per_second": None, "speed_from": None, "columns": {}}
    form |= {"global_batch_size": 4, "micro_batch_size": 2, "epochs": 1.0, "steps": None, "seed": 0}
    form |= {"train_sources": [Source(str(path))], "held_out_sources": [], "shown_rows": 0, "shown_left_out": 0}
    return figures.report(rows, None, TOKENIZER, **form | changes), rows


@pytest.fixture(scope="module")
def bare(conversations: Path) -> Report:
    """A report that shows no row yet."""
    return report_of(conversations)[0]


def printed(report: Report, *, width: int = 80, colour: bool = False) -> str:
    file = io.StringIO()
    form: dict[str, Any] = {"force_terminal": True, "color_system": "standard"} if colour else {}
    print_report(report, Console(file=file, width=width, highlight=False, emoji=False, markup=False, **form))
    return file.getvalue()


def shown_part(output: str) -> str:
    """The output from the first shown row to the rows that are left out."""
    return output[output.index("rows.jsonl:1") : output.index("Unused rows")]


class TestPairs:
    def test_both_sides_of_a_pair_are_shown_and_a_row_is_two_answers(
        self, tmp_path: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        path = preferences.write_pairs(tmp_path / "pairs.jsonl", 9)
        arguments = [*configure(str(path)), "--dpo.loss", "ipo"]
        result = as_json(arguments, capsys)
        assert [row["side"] for row in result["examples"]] == ["chosen", "rejected"] * 3
        assert result["packed"] is None
        assert result["unpacked"]["rows_per_epoch"] == 9
        assert result["unpacked"]["steps"] == 3
        assert commands.main(arguments) == 0
        shown = capsys.readouterr().out
        assert "18 from 9 records: chosen and rejected answers" in shown
        assert "3 pairs, from the shortest to the longest" in shown
        # a long path is folded
        assert re.search(r"pairs\.jsonl:\d, rejected: \d+ tokens, \d+ trained", shown.replace("\n", ""))
        assert max(map(len, shown.splitlines())) <= 80

    def test_what_the_recipe_would_refuse_is_refused(
        self, tmp_path: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        path = preferences.write_pairs(tmp_path / "pairs.jsonl", 9)
        arguments = [*configure(str(path), data__packing=True), "--dpo.loss", "ipo"]
        assert commands.main(arguments) == 2
        assert "data.packing: the answers of a micro-batch lie end to end as they are" in capsys.readouterr().err


class TestFigures:
    def test_rows_tokens_and_cuts_agree_with_a_count_by_hand(
        self, tmp_path: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        rows = [json.loads(line) for line in tiny.write_conversations(tmp_path / "all", 60).read_text().splitlines()]
        rows += [*rows[:5], conversation("the " * 60, "tree")]
        held_out = [*rows[3:6], conversation("one", "two"), conversation("two", "one")]
        train = write_rows(tmp_path / "train.jsonl", [*rows, "{", conversation("no answer")])
        eval = write_rows(tmp_path / "eval.jsonl", held_out)
        result = as_json(configure(str(train), data__eval=str(eval), data__max_length=40), capsys, exit_code=2)

        total, trained, cut, uncut, seen = 0, 0, 0, [], set()
        for row in rows[:-1]:
            ids = TOKENIZER(TOKENIZER.apply_chat_template(row["messages"], tokenize=False))["input_ids"]
            answer_ids, inside = 0, False
            for i, token in enumerate(ids[:40]):
                if token == TOKENIZER.convert_tokens_to_ids("<|im_start|>"):
                    header = TOKENIZER.decode(ids[i : i + 10]).startswith("<|im_start|>assistant\n")
                    header_length = len(TOKENIZER("<|im_start|>assistant\n")["input_ids"])
                    inside, begin = header, i + header_length
                answer_ids += inside and i >= begin
                inside = inside and token != TOKENIZER.eos_token_id
            total += len(ids[:40])
            trained += answer_ids
            cut += len(ids) - len(ids[:40])
            uncut.append(len(ids))
            seen.add(tuple(ids[:40]))
        assert result["rows"] == {
            "training": 65,
            "held_out": 5,
            "per_epoch": 65,
            "rejected": 2,
            "dropped": 1,
            "truncated": sum(length > 40 for length in uncut),
            "tokens_cut": cut,
            "duplicates": 65 - len(seen),
            "shared_with_held_out": 3,
        }
        assert result["tokens"] == {
            "total": total,
            "trained": trained,
            "per_epoch": total,
            "trained_per_epoch": trained,
        }
        assert (result["lengths"]["shortest"], result["lengths"]["longest"]) == (min(uncut), max(uncut))
        assert result["lengths"]["median"] == sorted(uncut)[(len(uncut) - 1) // 2]
        assert result["lengths"]["mean"] == pytest.approx(sum(uncut) / len(uncut))

    @given(
        seed=st.integers(0, 99), micro_batch_size=st.sampled_from([1, 2, 4]), epochs=st.sampled_from([0.5, 1.0, 2.6])
    )
    @settings(max_examples=8, deadline=None)
    def test_padding_and_steps_are_those_of_the_runs_own_batches(
        self,
        tmp_path_factory: pytest.TempPathFactory,
        seed: int,
        micro_batch_size: int,
        epochs: float,
    ):
        path = tiny.write_conversations(tmp_path_factory.mktemp("rows") / "rows.jsonl", 24, seed=seed)
        form: dict[str, Any] = {"micro_batch_size": micro_batch_size, "epochs": epochs, "seed": seed}
        result, rows = report_of(path, tokens_per_second=100.0, speed_from="", **form)
        form |= {"max_length": 128, "global_batch_size": 4, "steps": None}
        batches = [global_batch(step, rows=24, rows_in_run=24, global_batch_size=4, seed=seed) for step in range(1, 7)]
        assert not any(EMPTY in batch for batch in batches)
        dealt = [dealt_batch(batch, rows.lengths, micro_batch_size, flat=False) for batch in batches]
        positions = sum(positions_in(batch, rows.lengths, micro_batch_size, flat=False) for batch in dealt)
        tokens = int(rows.lengths.sum())
        assert result.unpacked.positions_per_epoch == positions
        assert result.unpacked.padding == pytest.approx(1 - tokens / positions)
        assert result.unpacked.seconds_per_epoch == pytest.approx(positions / 100)
        assert result.packed.positions_per_epoch == tokens
        assert result.packed.room_used == pytest.approx(tokens / result.packed.rows_per_epoch / 128)
        for of_input, packing in ((result.unpacked, False), (result.packed, True)):
            assert of_input.steps == Batches(rows, packing=packing, flat=False, **form).steps
            assert of_input.steps_per_epoch == of_input.rows_per_epoch / 4

    def test_weights_decide_on_an_epoch_and_rows_are_counted_once(
        self,
        conversations: Path,
        held_out: Path,
        configure: Callable[..., list[str]],
        capsys: pytest.CaptureFixture[str],
    ):
        plain = as_json(configure([str(conversations), str(held_out)]), capsys)
        sources = [{"path": str(conversations), "weight": 3.0}, {"path": str(held_out)}]
        weighted = as_json(configure(sources), capsys)
        assert [source["training_rows"] for source in weighted["sources"]] == [240, 11]
        assert weighted["rows"] == plain["rows"] | {"per_epoch": 251}
        assert weighted["lengths"] == plain["lengths"]
        assert weighted["tokens"]["total"] == plain["tokens"]["total"] < weighted["tokens"]["per_epoch"]

    def test_rows_split_off_are_held_out_and_not_among_the_training_rows(
        self, conversations: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        result = as_json(configure(str(conversations), data__eval=0.25), capsys)
        assert result["rows"]["training"] + result["rows"]["held_out"] == 80
        assert 5 < result["rows"]["held_out"] < 40
        assert result["sources"][0]["rows"] == 80
        assert result["sources"][0]["training_rows"] == result["rows"]["training"]

    def test_rows_of_their_own_and_what_the_template_leaves_out_are_counted(
        self, tmp_path: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        (tmp_path / "template.jinja").write_text(QWEN3)
        rows = [conversation("a", "b"), conversation("a", "b", "c", "d"), conversation("a", "b", "c", "d", "e", "f")]
        rows[0]["tools"] = rows[1]["tools"] = [{"type": "function", "function": {"name": "find"}}]
        path = write_rows(tmp_path / "rows.jsonl", rows)
        arguments = configure(str(path), data__chat_template=str(tmp_path / "template.jinja"), data__on_dropped="warn")
        result = as_json(arguments, capsys)
        assert (result["formats"], result["rows"]["training"]) == ({"messages": 3}, 6)
        assert result["dropped_by_template"] == {"the definitions of tools": 2}
        assert commands.main(arguments) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "all rows 6 from 3 records: some need several" in shown
        assert "left out the definitions of tools of 2 records, by the chat template" in shown
        refused = as_json([*arguments, "--data.on_dropped", "error"], capsys, exit_code=2)
        assert (refused["rows"]["rejected"], refused["dropped_by_template"]) == (2, {})

    @given(
        lengths=st.lists(st.integers(1, 300) | st.integers(1, 300_000), min_size=1, max_size=80),
        max_length=st.integers(1, 5000) | st.sampled_from([256, 1024, 4096]),
    )
    @settings(max_examples=300, deadline=None)
    def test_histogram_covers_every_length_once_with_round_bins_and_an_edge_at_max_length(
        self, lengths: list[int], max_length: int
    ):
        result = length_figures(np.array(lengths), max_length)
        bins = result.histogram
        assert [each.first for each in bins[1:]] == [each.last + 1 for each in bins[:-1]]
        assert [each.rows for each in bins] == [sum(b.first <= n <= b.last for n in lengths) for b in bins]
        assert sum(each.rows for each in bins) == len(lengths)
        assert len(bins) <= MOST_BINS + 2
        if bins[0].first <= max_length < max(lengths):
            assert max_length in {each.last for each in bins}
        assert sum(n <= result.percentile_90 for n in lengths) >= 0.9 * len(lengths)
        assert sum(n < result.percentile_90 for n in lengths) < 0.9 * len(lengths)


class TestSpeed:
    def test_speed_is_the_median_of_an_earlier_runs_steps_but_the_first(self, tmp_path: Path):
        steps = [(100, 50.0), (100, 1.0), (300, 1.0), (200, 1.0)]
        lines = [
            json.dumps({"step": step, "total_tokens": tokens, "step_seconds": seconds})
            for step, (tokens, seconds) in enumerate(steps, start=1)
        ]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"total_tok')
        assert measured_speed(tmp_path) == 200

    def test_speed_is_not_guessed_from_one_step_or_none(self, tmp_path: Path):
        assert measured_speed(tmp_path) is None
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "total_tokens": 1, "step_seconds": 1}\n')
        assert measured_speed(tmp_path) is None

    @pytest.mark.parametrize(
        "line", [b'{"step": 2, "total_tok\n', b"\x00\xff\n", b"[]\n", b'{"step": 2, "total_tokens": 50}\n', b"\n"]
    )
    def test_a_line_that_a_failing_machine_left_is_no_step(self, line: bytes, tmp_path: Path):
        whole = [b'{"step": %d, "total_tokens": 50, "step_seconds": 1}\n' % step for step in (1, 3, 4)]
        (tmp_path / "metrics.jsonl").write_bytes(whole[0] + line + whole[1] + whole[2])
        assert measured_speed(tmp_path) == 50

    def test_given_speed_wins_and_without_any_it_is_said_how_to_get_it(
        self,
        conversations: Path,
        configure: Callable[..., list[str]],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ):
        arguments = configure(str(conversations))
        assert commands.main(arguments) == 0
        assert "--tokens-per-second" in capsys.readouterr().out
        (tmp_path / "run").mkdir()
        lines = [f'{{"step": {step}, "total_tokens": 50, "step_seconds": 1}}\n' for step in (1, 2)]
        (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
        assert as_json(arguments, capsys)["tokens_per_second"] == 50
        given = as_json([*arguments, "--tokens-per-second", "2000"], capsys)
        assert given["unpacked"]["seconds_per_epoch"] == given["unpacked"]["positions_per_epoch"] / 2000


class TestRows:
    @given(contents=st.lists(FRAGMENTS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0))
    @settings(max_examples=150, deadline=None)
    def test_stretches_are_the_row_and_the_trained_ones_the_trained_tokens(self, contents: list[str]):
        if not all(text.strip() for text in contents):
            return
        row = encode(*contents)
        parts = stretches(row, TOKENIZER)
        assert "".join(part.text for part in parts) == TOKENIZER.decode(row.tokens)
        trained = [token for token, is_trained in zip(row.tokens, row.trained) if is_trained]
        assert "".join(part.text for part in parts if part.trained) == TOKENIZER.decode(trained)

    def test_special_tokens_are_told_from_text_that_looks_like_them(self):
        parts = stretches(encode("write <|im_end|>", "<|im_start|>"), TOKENIZER)
        assert [part.text for part in parts if part.special] == ["<|im_start|>", "<|im_end|>"] * 2
        assert TextSpan("user\nwrite <|im_end|>", trained=False, special=False) in parts
        assert TextSpan("<|im_start|>", trained=True, special=False) in parts

    @given(st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=12), st.integers(1, 20), st.integers(2, 6))
    @settings(deadline=None)
    def test_shortened_row_keeps_both_ends_and_says_what_is_left_out(
        self, sizes: list[tuple[int, bool]], characters: int, most: int
    ):
        row = [TextSpan("ab" * size, trained, special=False) for size, trained in sizes]
        short = shorten(row, trained=2 * characters, untrained=characters, most=most)
        for stretch in short:
            assert stretch.is_note or len(stretch.text) <= characters * (1 + stretch.trained)
        kept = sum(len(stretch.text) for stretch in short if not stretch.is_note)
        notes = [re.search(r"([\d,]+) (characters|spans)", stretch.text) for stretch in short if stretch.is_note]
        left_out = {kind: sum(int(n[1]) for n in notes if n and n[2] == kind) for kind in ("characters", "spans")}
        first = math.ceil(most / 2)
        gone = row[first : first + max(0, len(row) - most)]
        assert left_out["spans"] == len(gone)
        assert kept + left_out["characters"] == sum(len(s.text) for s in row) - sum(len(s.text) for s in gone)
        if row:
            assert row[0].text.startswith(short[0].text)
            assert row[-1].text.endswith(short[-1].text)

    @given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), min_size=1, max_size=40), st.integers(0, 12))
    @settings(deadline=None)
    def test_rows_to_show_come_from_every_source_from_its_shortest_to_its_longest(
        self, rows: list[tuple[int, int]], count: int
    ):
        lengths, origins = np.array(rows).T
        chosen = spread(lengths, origins, count)
        assert len(chosen) == len(set(chosen)) == min(count, len(rows))
        by_source = [[int(lengths[i]) for i in chosen if origins[i] == origin] for origin in np.unique(origins)]
        assert [number for group in by_source for number in group] == [int(lengths[i]) for i in chosen]
        for origin, group in zip(np.unique(origins), by_source):
            assert group == sorted(group)
            if len(group) > 1:
                assert (group[0], group[-1]) == (lengths[origins == origin].min(), lengths[origins == origin].max())
        if count >= len(by_source):
            assert all(by_source)

    @pytest.mark.skipif(not SHARED.exists(), reason="needs the real material that lies beside some checkouts")
    @pytest.mark.parametrize("name", ["llama-3.2", "qwen2.5"])
    def test_characters_of_several_tokens_are_whole_with_real_tokenizers(self, name: str):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
        texts = ("鰯の頭も信心から 👩‍🚀", "𓀀 is a man; 🫠🫠 𠮷野家")
        parts = stretches(encode(*texts, tokenizer=tokenizer), tokenizer)
        assert len(tokenizer(texts[1])["input_ids"]) > len(texts[1]) * 0.8
        assert any(texts[0] in part.text and not part.trained for part in parts)
        assert texts[1] in [part.text for part in parts if part.trained]


class TestTerminal:
    @given(question=FRAGMENTS, answer=FRAGMENTS)
    @settings(max_examples=60, deadline=None)
    def test_marks_and_colour_cover_exactly_the_trained_tokens(self, bare: Report, question: str, answer: str):
        if not (question.strip() and answer.strip()):
            return
        row = shown_row(encode(question, answer), TOKENIZER)
        expected = visible(answer).expandtabs(1) + "<|im_end|>"
        report = dataclasses.replace(bare, examples=[row])

        output = printed(report)
        opening, closing = re.search(r"trained tokens\s+(.)are\s+marked\s+like\s+this(.)", output).groups()
        [marked] = re.findall(f"{opening}(.*?){closing}", shown_part(output), re.DOTALL)
        assert squeezed(marked) == squeezed(expected)
        coloured = Text.from_ansi(shown_part(printed(report, colour=True)).replace("\r", ""))
        green = "".join(coloured.plain[span.start : span.end] for span in coloured.spans if is_green(span.style))
        assert squeezed(green) == squeezed(expected)

    @given(contents=st.tuples(FRAGMENTS, FRAGMENTS), source=TEXTS)
    @settings(max_examples=60, deadline=None)
    def test_no_line_is_wider_than_the_terminal_and_nothing_in_it_steers_the_terminal(
        self, bare: Report, contents: tuple[str, str], source: str
    ):
        if not all(text.strip() for text in contents):
            return
        row = dataclasses.replace(shown_row(encode(*contents), TOKENIZER), source=source * 3)
        left_out = [LeftOut(source * 5, f"what it holds {source}")]
        report = dataclasses.replace(
            bare,
            examples=[row],
            left_out=left_out,
            left_out_files=["folder/" * 20 + source],
            refusal=f"it has {source}",
        )
        for width in (60, 80):
            output = printed(report, width=width)
            assert max(cell_len(line) for line in output.split("\n")) <= width
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", output)

    def test_report_of_long_paths_and_large_numbers_fits_80_columns(self, bare: Report):
        large = {"rows_per_epoch": 2_000_000_000, "positions_per_epoch": 4_000_000_000_000, "steps": 10**9}
        report = dataclasses.replace(
            bare,
            sources=[dataclasses.replace(bare.sources[0], path="a/folder/" * 20, weight=0.125, rows=10**9)] * 2,
            unpacked=dataclasses.replace(bare.unpacked, seconds_per_epoch=1e7, **large),
            packed=dataclasses.replace(bare.packed, **large),
        )
        assert max(map(cell_len, printed(report).split("\n"))) <= 80

    def test_lone_surrogates_of_a_rejected_row_can_be_written(self, bare: Report):
        report = dataclasses.replace(bare, left_out=[LeftOut("rows.jsonl:1", "unknown role \ud800")])
        for output in (printed(report), to_html(report), to_json(report)):
            output.encode()
            assert "ud800" in output

    def test_marks_are_signs_that_the_rows_do_not_hold(self, bare: Report):
        row = shown_row(encode("«one»", "⟦two⟧"), TOKENIZER)
        assert "⟪⟦two⟧<|im_end|>⟫" in printed(dataclasses.replace(bare, examples=[row]))

    def test_sections_come_in_the_order_in_which_one_asks(self, bare: Report):
        titles = [
            "Sources",
            "Rows",
            "Tokens",
            "Packing and steps",
            "Rows as the model sees them",
            "Unused rows",
        ]
        lines = printed(bare).splitlines()
        assert [line for line in lines if line in titles] == titles
        assert lines[-1] == "A run would accept these data."


class TestPage:
    @given(question=FRAGMENTS, answer=FRAGMENTS, source=FRAGMENTS)
    @settings(max_examples=60, deadline=None)
    def test_page_holds_no_element_of_the_data_and_marks_exactly_the_trained_tokens(
        self, bare: Report, question: str, answer: str, source: str
    ):
        if not (question.strip() and answer.strip()):
            return
        row = dataclasses.replace(shown_row(encode(question, answer), TOKENIZER), source=source)
        sources = [dataclasses.replace(bare.sources[0], path=source)]
        report = dataclasses.replace(bare, examples=[row], sources=sources, left_out=[LeftOut(source, source)])
        page, plain = (
            Elements(to_html(report)),
            Elements(to_html(dataclasses.replace(bare, examples=[shown_row(encode("a", "b"), TOKENIZER)]))),
        )
        assert page.tags <= plain.tags | {("li", ()), ("ol", ())}
        assert "script" not in {tag for tag, _ in page.tags}
        assert page.marked == visible(answer) + "<|im_end|>"
        assert visible(source) in page.text

    def test_page_needs_no_network_and_no_script(self, bare: Report):
        page = to_html(bare)
        assert not re.search(r"(src|href|action)\s*=|url\(|@import|https?:|<script", page)
        assert "default-src 'none'" in page
        assert "prefers-color-scheme: dark" in page

    def test_page_tells_the_figures_of_the_terminal(self, bare: Report):
        shown = printed(bare).split("Rows as")[0].replace(bare.sources[0].path, "")
        assert numbers(shown) <= numbers(" ".join(Elements(to_html(bare)).pieces))


def numbers(text: str) -> Counter[str]:
    """Whole numbers, with how often each is told."""
    return Counter(found.rstrip(",.") for found in re.findall(r"\d[\d,.]*", text))


class Elements(HTMLParser):
    """Elements of a page, its text, in pieces too, and the text in its marks."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[tuple[str, tuple[str, ...]]] = set()
        self.pieces: list[str] = []
        self.marked, self.text, self.open, self.in_rows = "", "", [""], False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add((tag, tuple(sorted(name for name, _ in attributes))))
        self.in_rows |= tag == "pre"
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open[-1] != "style":
            self.pieces.append(data)
        if self.open[-1] == "mark" and self.in_rows:
            self.marked += data


class TestVerb:
    def test_every_rejected_row_is_listed_in_page_and_json_and_ten_with_the_count_in_a_terminal(
        self, tmp_path: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        rows = [conversation("the tree", "walks"), *[conversation(f"no answer {i}") for i in range(25)]]
        path = write_rows(tmp_path / "rows.jsonl", rows)
        arguments = configure(str(path))
        assert commands.main(arguments) == 2
        shown = squeezed(capsys.readouterr().out)
        named = [f"{path}:{line}: there is no assistant turn" for line in range(2, 27)]
        assert [squeezed(name) in shown for name in named] == [True] * 10 + [False] * 15
        assert squeezed("25 in total: 25 rejected and 0 dropped; see") in shown
        assert shown.endswith(squeezed("--data.on_bad_row skip."))
        assert squeezed("would refuse these data: 25 rows cannot be used") in shown
        listed = as_json(arguments, capsys, exit_code=2)
        assert [f"{entry['source']}: {entry['reason']}"[: len(named[0])] for entry in listed["left_out"][:8]] == named[
            :8
        ]
        assert len(listed["left_out"]) == 25
        [file] = listed["left_out_files"]
        assert len(Path(file).read_text().splitlines()) == 25
        assert commands.main([*arguments, "--html", str(tmp_path / "page.html")]) == 2
        page = Elements((tmp_path / "page.html").read_text(encoding="utf-8")).text
        assert all(name in page for name in named)

    def test_exit_code_is_0_where_bad_rows_are_skipped(
        self, tmp_path: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        path = write_rows(tmp_path / "rows.jsonl", [conversation("the tree", "walks"), "{"])
        assert commands.main([*configure(str(path)), "--data.on_bad_row", "skip"]) == 0
        assert capsys.readouterr().out.endswith("A run would accept these data.\n")

    @pytest.mark.parametrize(
        ("model", "keys", "sentence"),
        [
            ({"vocab_size": 100}, {}, "the model's vocabulary has only 100 tokens"),
            ({"max_position_embeddings": 8}, {}, "the model has 8 positions; set data.max_length to 8"),
            (
                {"max_position_embeddings": 512},
                {"data__streaming": True, "data__max_length": 600, "train__steps": 1},
                "Rows have up to 600 tokens",
            ),
            ({}, {"data__eval": [{"path": "DATA", "weight": 2}]}, "held-out rows count once each"),
        ],
        ids=["vocabulary", "positions", "positions of a stream", "weight of held-out rows"],
    )
    def test_data_that_a_run_refuses_are_refused_with_the_runs_own_sentence(
        self,
        model: dict[str, int],
        keys: dict[str, Any],
        sentence: str,
        tmp_path: Path,
        model_folder: Path,
        conversations: Path,
        configure: Callable[..., list[str]],
        capsys: pytest.CaptureFixture[str],
    ):
        folder = shutil.copytree(model_folder, tmp_path / "model")
        described = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(described | model))
        for entry in keys.get("data__eval", []):
            entry["path"] = str(conversations)
        arguments = configure(str(conversations), model__path=str(folder), model__random_weights=True, **keys)
        with pytest.raises(InputError) as refused:
            sft.main(command_line.parse(sft.Config, arguments[1:]))
        (problem,) = refused.value.problems
        assert sentence in problem
        assert commands.main(arguments) == 2
        said = capsys.readouterr()
        verdict = f"A run would refuse these data: {problem}"
        assert said.err == f"error: {problem}\n" or squeezed(said.out).endswith(squeezed(verdict))

    def test_flags_of_the_recipe_win_over_the_file(
        self, conversations: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        result = as_json([*configure(str(conversations)), "--data.max_length", "30", "--train.steps", "7"], capsys)
        assert result["max_length"] == 30
        assert result["rows"]["truncated"] > 0
        assert (result["unpacked"]["steps"], result["packed"]["steps"]) == (7, 7)

    def test_number_of_rows_is_3_in_a_terminal_20_on_a_page_or_as_asked(
        self,
        conversations: Path,
        configure: Callable[..., list[str]],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ):
        arguments, page = configure(str(conversations)), tmp_path / "page.html"
        assert len(as_json(arguments, capsys)["examples"]) == 3
        assert len(as_json([*arguments, "--rows", "7"], capsys)["examples"]) == 7
        commands.main([*arguments, "--html", str(page)])
        assert page.read_text(encoding="utf-8").count("<pre") == 20

    def test_json_holds_the_figures_that_the_terminal_shows(
        self, conversations: Path, configure: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
    ):
        arguments = configure(str(conversations))
        result = as_json(arguments, capsys)
        commands.main(arguments)
        shown = capsys.readouterr().out
        for name in ("tokens", "unpacked", "packed"):
            for key in ("total", "trained", "rows_per_epoch", "positions_per_epoch", "steps"):
                if key in result[name]:
                    assert f"{result[name][key]:,}" in shown
        for row in result["examples"]:
            assert f"{row['tokens']:,} tokens, {row['trained_tokens']:,} trained" in re.sub(r"\s+", " ", shown)

    @pytest.mark.parametrize(
        ("more", "problem"),
        [
            (["--data.max_lenght", "8"], "data.max_length"),
            (["--data.train", "no/such.jsonl"], "no/such.jsonl"),
            (["--model.tokenizer", "./nowhere"], "model.tokenizer"),
            (["--rows", "-1"], "--rows -1"),
            (["--tokens-per-second", "0"], "--tokens-per-second 0"),
            (["--json", "--html", "page.html"], "one of them"),
            (["--html", "no/such/folder/page.html"], "--html no/such/folder/page.html"),
        ],
    )
    def test_wrong_input_is_a_sentence_and_exit_code_2(
        self,
        more: list[str],
        problem: str,
        conversations: Path,
        configure: Callable[..., list[str]],
        capsys: pytest.CaptureFixture[str],
    ):
        assert commands.main([*configure(str(conversations)), *more]) == 2
        output = capsys.readouterr()
        assert output.err.startswith("error: ")
        assert problem in output.err
        assert output.out == ""

    def test_other_verbs_take_no_flags_of_recipes(self, capsys: pytest.CaptureFixture[str]):
        with pytest.raises(SystemExit) as stopped:
            commands.main(["init", "folder", "--data.max_length", "8"])
        assert stopped.value.code == 2
        assert "unrecognized arguments: --data.max_length 8" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("words", "meant"),
        [
            (["dta"], "data"),
            (["chekpoint", "ls", "x"], "checkpoint"),
            (["checkpoint", "verfy", "x"], "verify"),
            (["x"], ""),
        ],
    )
    def test_typo_of_a_verb_gets_the_verb_that_was_meant(
        self, words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
    ):
        with pytest.raises(SystemExit) as stopped:
            commands.main(words)
        assert stopped.value.code == 2
        said = capsys.readouterr().err
        assert said.endswith(f"; did you mean {meant}?\n") if meant else "did you mean" not in said

    def test_help_imports_nothing_heavy(self):
        program = (
            "import sys\nfrom finetune.cli import commands\n"
            "try: commands.main(['data', '--help'])\n"
            "except SystemExit: pass\n"
            "assert not {'torch', 'transformers', 'rich', 'numpy', 'pyarrow'} & sys.modules.keys()"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert "--tokens-per-second" in result.stdout


def squeezed(text: str) -> str:
    """Without spaces, tabs and the line ends at which a terminal breaks its lines."""
    return re.sub(r"[ \n\t]", "", text)


def is_green(style: Any) -> bool:
    return style.color is not None and style.color.number == 2
