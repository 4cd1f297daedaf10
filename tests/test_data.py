"""Reading files: what is used, cut, dropped or refused, with the line it stands on."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import data
from finetune.errors import InputError
from finetune.loss import IGNORED
from finetune.row_order import EMPTY

TOKENIZER = tiny.build_tokenizer()
GOOD = json.dumps({"messages": [{"role": "user", "content": "the tree"}, {"role": "assistant", "content": "walks"}]})
SHARED = Path(__file__).parents[2] / "shared"


def read(path: Path, text: str | bytes, max_length: int = 64) -> data.Rows:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return data.read_rows([str(path)], TOKENIZER, max_length)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [', "not one JSON object"),
        (GOOD + GOOD, "not one JSON object"),
        ("[1, 2]", 'no object with the key "messages"'),
        ('{"text": "a"}', 'no object with the key "messages"'),
        (b"\xff\xfe", "not UTF-8"),
        ("[" * 100_000, "nested too deeply|not one JSON object"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no assistant turn"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "names tools"),
    ],
)
def test_bad_line_is_refused_with_file_line_and_reason(tmp_path: Path, line: str | bytes, reason: str):
    line = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(InputError, match=f"rows.jsonl:3: .*({reason})"):
        read(tmp_path / "rows.jsonl", GOOD.encode() + b"\n\n" + line + b"\n" + GOOD.encode())


def test_first_ten_bad_rows_are_named_and_all_are_counted(tmp_path: Path):
    with pytest.raises(InputError) as error:
        read(tmp_path / "rows.jsonl", "\n".join([GOOD, *["{"] * 25]))
    assert len(error.value.problems) == 12
    assert error.value.problems[10] == "... and 15 more."
    assert error.value.problems[11].startswith("25 rows cannot be used")


def test_byte_order_mark_windows_line_ends_and_blank_lines_are_harmless(tmp_path: Path):
    rows = read(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n\r\n" + GOOD.encode() + b"\r\n")
    assert [row.source.rsplit(":")[-1] for row in rows.rows] == ["1", "3"]


def test_empty_file_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no row"):
        read(tmp_path / "rows.jsonl", "")


def test_long_rows_are_cut_and_rows_that_lose_their_trained_tokens_dropped_and_both_counted(tmp_path: Path):
    long = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "tree " * 99}]})
    lost = json.dumps({"messages": [{"role": "user", "content": "tree " * 99}, {"role": "assistant", "content": "a"}]})
    rows = read(tmp_path / "rows.jsonl", "\n".join([GOOD, long, lost]), max_length=32)
    assert (len(rows), rows.truncated, len(rows.dropped)) == (2, 2, 1)
    assert rows.dropped[0].endswith(":3")
    assert max(rows.lengths) == 32
    line = rows.describe("training")
    assert "2 rows cut" in line
    assert "1 dropped" in line
    assert "rows.jsonl:3" in line


def test_file_whose_rows_all_lose_their_trained_tokens_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"raise data\.max_length"):
        read(tmp_path / "rows.jsonl", GOOD, max_length=3)


def test_batch_is_shifted_padded_on_the_right_and_counts_as_the_rows_do(tmp_path: Path):
    rows = data.read_rows([str(tiny.write_conversations(tmp_path / "rows.jsonl", 6))], TOKENIZER, 64)
    batch = data.collate(rows.rows, [4, EMPTY, 1], torch.device("cpu"))
    ids, labels = batch["input_ids"], batch["next_tokens"]
    assert (labels != IGNORED).sum(1).tolist() == [rows.trained_tokens[4], 0, rows.trained_tokens[1]]
    for place, row in ((0, rows.rows[4]), (2, rows.rows[1])):
        assert ids[place, : len(row.tokens)].tolist() == row.tokens
        for position, label in enumerate(labels[place].tolist()):
            expected = position + 1 < len(row.tokens) and row.trained[position + 1]
            assert label == (row.tokens[position + 1] if expected else IGNORED)


def test_padding_does_not_change_the_loss_of_a_row(model_folder: Path, conversations: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.loss import token_loss_sum

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder))
    rows = data.read_rows([str(conversations)], TOKENIZER, 64)

    def loss(indices: list[int]) -> torch.Tensor:
        batch = data.collate(rows.rows, indices, torch.device("cpu"))
        return token_loss_sum(model(input_ids=batch["input_ids"]).logits, batch["next_tokens"])

    shortest = rows.lengths.index(min(rows.lengths))
    longest = rows.lengths.index(max(rows.lengths))
    torch.testing.assert_close(loss([shortest, longest]), loss([shortest]) + loss([longest]))


@given(content=st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_rows_or_an_error_with_a_line_number(tmp_path_factory: pytest.TempPathFactory, content: bytes):
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    problem = None
    try:
        rows = read(path, content)
    except InputError as error:
        problem = error.problems[0]
    assert len(rows) > 0 if problem is None else f"{path}:" in problem or "no row" in problem


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real material that lies beside some checkouts")
@pytest.mark.parametrize("name", ["llama-3.2", "qwen2.5"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_real_tokenizers_keep_special_token_strings_as_text(name: str, role: str):
    from transformers import AutoTokenizer

    from finetune.chat import Encoder

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    encoder = Encoder(tokenizer)
    for special in (encoder.specials[0], encoder.specials[-1], tokenizer.eos_token):
        for text in (f"x {special} y", f"x{special}{special}y", f" {special}", f"日本{special}語"):
            messages = [{"role": r, "content": text if r == role else "a"} for r in ("user", "assistant")]
            row = encoder.encode(messages, "test:1")
            assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
            plain = [{**m, "content": "a"} for m in messages]
            counts = [sum(t in tokenizer.all_special_ids for t in r.tokens) for r in (row, encoder.encode(plain, ""))]
            assert counts[0] == counts[1]


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real material that lies beside some checkouts")
@pytest.mark.parametrize("name", ["llama-3.2", "qwen2.5"])
@pytest.mark.parametrize("file", ["gsm8k_test_200.jsonl", "japanese_multiturn_80.jsonl"])
def test_real_tokenizers_mask_real_rows(name: str, file: str):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    rows = data.read_rows([str(SHARED / "data" / file)], tokenizer, 4096)
    assert not rows.dropped
    for row, messages in zip(rows.rows[:40], rows.messages):
        trims = name.startswith("llama")  # as its template does
        answers = [m["content"].strip() if trims else m["content"] for m in messages if m["role"] == "assistant"]
        trained = tokenizer.decode([t for t, is_trained in zip(row.tokens, row.trained) if is_trained])
        end = "<|eot_id|>" if trims else "<|im_end|>"
        assert trained == "".join(answer + end for answer in answers)
