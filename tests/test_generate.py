"""``finetune generate`` and ``finetune chat``: a result answers as transformers and PEFT make it answer."""

import contextlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pyarrow as pa
import pytest
import tiny
import torch
import yaml
from peft import PeftModel
from pyarrow import parquet
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from finetune.cli.commands import main
from finetune.cli.generate_verb import opened, write_line
from finetune.data.formats import Example, convert_prompt
from finetune.data.prompt_texts import Prompt
from finetune.errors import BadRow, InputError
from finetune.export import adapted_model, adapter_source
from finetune.generation.dialogue import Dialogue
from finetune.generation.manner import Manner
from finetune.generation.prompts import prompt_of, read_prompts
from finetune.generation.speaker import Answer, Speaker
from finetune.generation.speaker_loading import Request, read_speakers
from finetune.models import loading as models
from finetune.models import weights
from recipes import sft

TWELVE = Manner(max_new_tokens=12)
HELLO = "the red house"


def build_model(folder: Path) -> Path:
    """With weights that are so large that each prompt has an answer of its own."""
    tiny.build_model_folder(folder)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.2
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def trained(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The output folder of a run of full weights, of an adapter, or of an adapter on 4 bits; each is trained once."""
    folder = tmp_path_factory.mktemp("runs")
    rows = tiny.write_conversations(folder / "rows.jsonl", rows=40)
    sections: dict[str, dict[str, Any]] = {
        "full": {},
        "lora": {"adapter": {"type": "lora", "rank": 4}},
        "qlora": {"adapter": {"type": "lora", "rank": 4}, "quantization": {"bits": 4}},
        "lora_8bit": {"adapter": {"type": "lora", "rank": 4}, "quantization": {"bits": 8}},
        **{
            names: {"adapter": {"type": "lora", "rank": 4, "modules_to_save": names.split()}}
            for names in ("lm_head", "embed_tokens", "embed_tokens lm_head")
        },
    }

    def run(method: str) -> Path:
        output = folder / method
        if not output.exists():
            train = {"output_dir": str(output), "steps": 4, "global_batch_size": 8, "learning_rate": 1e-2}
            values = {"model": {"path": str(base)}, "data": {"train": str(rows), "max_length": 64}, "train": train}
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("ACCELERATE_MIXED_PRECISION", "no")
                sft.main(sft.Config.model_validate(values | sections[method]))
        return output

    return run


def load(path: Path, **changes: Any) -> list[Speaker]:
    return read_speakers(Request(str(path), **changes)).load()


def quantised_layers(speaker: Speaker) -> set[int]:
    """The bits of those that are."""
    kinds = {bnb.nn.Linear4bit: 4, bnb.nn.Linear8bitLt: 8}
    return {bits for module in speaker.model.modules() for kind, bits in kinds.items() if isinstance(module, kind)}


def ids_of(tokenizer: Any, *said: str) -> torch.Tensor:
    """A conversation of questions and answers by turns, as transformers renders it."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def expected(model: Any, tokenizer: Any, *said: str, tokens: int = 12) -> str:
    """The most likely answer, by transformers alone."""
    prompt = ids_of(tokenizer, *said)
    output = model.generate(**prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=1)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def asked(speaker: Speaker, *texts: str) -> list[list[int]]:
    return speaker.prompt_tokens([prompt_of(text, system=None, plain=False) for text in texts])


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "lora_8bit"])
def test_a_run_answers_as_transformers_and_peft_do(method: str, trained: Any, base: Path):
    final = trained(method) / "final"
    tokenizer = AutoTokenizer.from_pretrained(final)
    if method == "full":
        reference = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    else:
        own = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
        quantised = {
            "qlora": BitsAndBytesConfig(load_in_4bit=True, **own),
            "lora_8bit": BitsAndBytesConfig(load_in_8bit=True),
        }
        how = {"dtype": torch.float32, "quantization_config": quantised.get(method)}
        model = AutoModelForCausalLM.from_pretrained(base, **how)
        reference = PeftModel.from_pretrained(model, final).eval()
    texts = [HELLO, "a", "tree river under blue stone walks over the green house"]
    for path in (trained(method), final):
        (speaker,) = load(path)
        assert quantised_layers(speaker) == {"qlora": {4}, "lora_8bit": {8}}.get(method, set())
        answers = [speaker.answers([prompt], TWELVE)[0] for prompt in asked(speaker, *texts)]
        assert [answer.text for answer in answers] == [expected(reference, tokenizer, text) for text in texts]
        assert len({answer.text for answer in answers}) > 1


@pytest.mark.parametrize("modules", ["lm_head", "embed_tokens", "embed_tokens lm_head"])
def test_modules_that_were_saved_whole_answer_in_the_16_bits_of_their_base(modules: str, trained: Any, base: Path):
    source = adapter_source.read(trained(modules), base_model=None, bits=None)
    narrow = adapted_model.load_to_answer(source, torch.bfloat16)
    trained_ones = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), trained(modules) / "final")
    ids = torch.arange(2, 66)[None]
    with torch.no_grad():
        found, expected = (each(ids).logits.float().log_softmax(-1) for each in (narrow, trained_ones))
        untrained = AutoModelForCausalLM.from_pretrained(base)(ids).logits.log_softmax(-1)
    assert narrow.dtype == torch.bfloat16
    assert (found - expected).abs().mean() < 0.1 * (untrained - expected).abs().mean()


def test_a_model_is_quantised_where_that_is_asked(trained: Any):
    for bits in (4, 8):
        (speaker,) = load(trained("full"), bits=bits)
        assert quantised_layers(speaker) == {bits}
        assert speaker.answers(asked(speaker, HELLO), TWELVE)[0].tokens > 0


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_model_before_training_answers_beside_it_and_leaves_it_as_it_was(method: str, trained: Any, base: Path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    before, after = load(trained(method), compares=True)
    (alone,) = load(trained(method))
    (prompt,) = asked(after, HELLO)
    assert before.name == str(base)
    reference = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert before.answers([prompt], TWELVE)[0].text == expected(reference, tokenizer, HELLO)
    own = alone.answers([prompt], TWELVE)
    assert after.answers([prompt], TWELVE) == own != before.answers([prompt], TWELVE)


def test_the_model_before_training_is_the_revision_that_the_run_names(
    trained: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, asked_for = shutil.copytree(trained("full"), tmp_path / "run"), []
    record = yaml.safe_load((run / "final" / "run.yaml").read_text())
    record["config"]["model"]["revision"] = "v2"
    (run / "final" / "run.yaml").write_text(yaml.safe_dump(record))

    def watch(module: Any, name: str) -> None:
        found = getattr(module, name)

        def watched(path: str, *args: Any, **how: Any) -> Any:
            revision = how["revision"] if "revision" in how else args[-1]
            asked_for.append((name, path == str(base), revision))
            return found(path, *args, **how)

        monkeypatch.setattr(module, name, watched)

    watch(models, "load_config")
    watch(models, "load_model")
    watch(weights, "files")
    load(run, compares=True)
    names = ("load_config", "load_model", "files")
    assert set(asked_for) == {(name, *of) for name in names for of in ((True, "v2"), (False, None))}


def test_prompts_of_a_batch_are_answered_as_each_alone(trained: Any):
    (speaker,) = load(trained("full"))
    prompts = asked(speaker, HELLO, "a", "tree river under blue stone walks over the green house and then runs")
    assert len({len(prompt) for prompt in prompts}) == 3
    assert speaker.answers(prompts, TWELVE) == [speaker.answers([prompt], TWELVE)[0] for prompt in prompts]


def test_rows_are_padded_with_a_token_that_the_model_knows(trained: Any, base: Path, tmp_path: Path):
    folder = shutil.copytree(trained("lora") / "final", tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    known = AutoConfig.from_pretrained(base).vocab_size
    tokenizer.add_tokens([f"<{number}>" for number in range(known - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # as many do without giving the model a row for it
    assert tokenizer.pad_token_id == known
    tokenizer.save_pretrained(folder)
    (speaker,) = load(folder)
    prompts = asked(speaker, "the red stone", "one")
    assert len({len(prompt) for prompt in prompts}) == 2
    assert speaker.answers(prompts, TWELVE) == [speaker.answers([prompt], TWELVE)[0] for prompt in prompts]


def test_a_long_prompt_leaves_the_others_of_its_batch_the_room_that_each_has_alone(trained: Any):
    (speaker,) = load(trained("full"))
    speaker = replace(speaker, positions=64, end_tokens=())
    prompts = [[*range(5, 5 + length)] for length in (9, 43, 12, 30, 43)]
    found = speaker.answers(prompts, Manner(40))
    assert [answer.tokens for answer in found] == [40, 21, 40, 34, 21]
    assert found == [speaker.answers([prompt], Manner(40))[0] for prompt in prompts]


def test_an_answer_ends_at_the_end_of_the_turn_and_says_so(trained: Any):
    (speaker,) = load(trained("full"))
    (prompt,) = asked(speaker, HELLO)
    (whole,) = speaker.answers([prompt], TWELVE)
    assert (whole.tokens, whole.is_cut) == (12, True)
    third = speaker._generate([prompt], TWELVE, None, 0)[0, len(prompt) + 2].item()
    (ended,) = replace(speaker, end_tokens=(int(third),)).answers([prompt], TWELVE)
    assert not ended.is_cut
    assert ended.tokens <= 3
    assert whole.text.startswith(ended.text)


def test_answers_end_at_the_tokens_of_the_model_and_at_that_of_the_tokenizer(base: Path, tmp_path: Path):
    folder = build_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (speaker,) = load(folder)
    assert speaker.end_tokens == (1, 7, 9)


def test_answers_end_where_the_template_ends_a_turn_though_no_file_says_so(base: Path, tmp_path: Path):
    """As in base models whose files name the end of a text alone, and whose template ends turns with another token."""
    folder = shutil.copytree(base, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    of_turn = tokenizer.eos_token
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", f"'{of_turn}'")
    tokenizer.save_pretrained(folder)
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", of_turn)}
    (speaker,) = load(folder)
    assert ends <= set(speaker.end_tokens)


def test_text_is_given_piece_by_piece_as_it_is_made(trained: Any):
    (speaker,) = load(trained("full"))
    (prompt,) = asked(speaker, HELLO)
    pieces: list[str] = []
    answer = speaker.streamed(prompt, TWELVE, pieces.append)
    assert [answer] == speaker.answers([prompt], TWELVE)
    assert "".join(pieces).strip() == answer.text
    assert len(pieces) > 3


def test_an_interrupted_answer_stands_as_far_as_it_came(trained: Any):
    (speaker,) = load(trained("full"))
    (prompt,) = asked(speaker, HELLO)
    whole = speaker.streamed(prompt, TWELVE, lambda piece: None)
    said: list[str] = []

    def interrupted(piece: str) -> None:
        said.append(piece)
        if sum(map(bool, said)) == 1:
            raise KeyboardInterrupt

    answer = speaker.streamed(prompt, TWELVE, interrupted)
    assert answer.is_cut
    assert answer.tokens < 12
    assert answer.text
    assert whole.text.startswith(answer.text)


def test_samples_follow_their_seed(trained: Any):
    (speaker,) = load(trained("full"))
    (prompt,) = asked(speaker, HELLO)
    drawn = [speaker.answers([prompt], Manner(12, temperature=1.0, seed=seed))[0] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] != speaker.answers([prompt], TWELVE)[0]


def test_copies_of_a_prompt_are_sampled_anew_in_each_batch_and_each_turn(trained: Any, tmp_path: Path):
    rows, output = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    rows.write_text(4 * (json.dumps({"prompt": HELLO}) + "\n"))
    asking = ["generate", str(trained("full")), "--prompts", str(rows), "--output", str(output), "--batch-size", "1"]
    assert main([*asking, "--temperature", "1", "--max-new-tokens", "12"]) == 0
    answers = [json.loads(line)["answer"] for line in output.read_text().splitlines()]
    assert len(set(answers)) == 4
    (speaker,) = load(trained("full"))
    (prompt,) = asked(speaker, HELLO)
    turns = [
        speaker.streamed(prompt, Manner(12, temperature=1.0), lambda piece: None, number=number) for number in (0, 2)
    ]
    assert turns[0] != turns[1]


@pytest.mark.parametrize("own", [{"min_p": 0.999}, {"typical_p": 0.01}, {"top_h": 0.01}, {"epsilon_cutoff": 0.9}])
def test_nothing_but_what_is_asked_for_leaves_tokens_out_of_sampling(own: dict[str, Any], tmp_path: Path):
    folder = build_model(tmp_path / "model")
    (first,) = load(folder)
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "stop_strings": ["e"]} | own))
    (second,) = load(folder)
    (prompt,) = asked(first, HELLO)
    manner = Manner(12, temperature=1.0)
    assert second.answers([prompt], manner) == first.answers([prompt], manner)


@pytest.mark.parametrize(
    "own",
    [
        {"do_sample": True, "temperature": 2.0, "top_k": 50, "top_p": 0.9},
        {"repetition_penalty": 5.0},
        {"encoder_repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 4, "num_return_sequences": 2},
        {"min_length": 60},
        {"min_new_tokens": 12},
    ],
    ids=str,
)
def test_what_the_model_says_of_generation_does_not_change_the_most_likely_answer(own: dict[str, Any], tmp_path: Path):
    folder = build_model(tmp_path / "model")
    (first,) = load(folder)
    (prompt,) = asked(first, "the red house the red house")
    (folder / "generation_config.json").write_text(json.dumps(own))
    (second,) = load(folder)
    third = int(first._generate([prompt], TWELVE, None, 0)[0, len(prompt) + 2])
    for ends, manner in (((), Manner(30)), ((third,), TWELVE)):
        before, after = (replace(speaker, end_tokens=ends) for speaker in (first, second))
        assert after.streamed(prompt, manner, lambda piece: None) == before.answers([prompt], manner)[0]


def test_a_model_that_searches_by_beams_is_sampled_token_by_token(tmp_path: Path):
    folder = build_model(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 4}))
    (speaker,) = load(folder)
    (prompt,) = asked(speaker, HELLO)
    manner = Manner(12, temperature=1.0)
    assert speaker.streamed(prompt, manner, lambda piece: None) == speaker.answers([prompt], manner)[0]


def test_a_dialogue_asks_after_all_that_was_said_before_until_it_is_reset(trained: Any):
    final = trained("full") / "final"
    tokenizer, reference = AutoTokenizer.from_pretrained(final), AutoModelForCausalLM.from_pretrained(final)
    (speaker,) = load(final)
    dialogue = Dialogue(speaker, TWELVE)
    first = dialogue.ask(HELLO, lambda piece: None).text
    second = dialogue.ask("a tree", lambda piece: None).text
    assert first == expected(reference, tokenizer, HELLO)
    assert second == expected(reference, tokenizer, HELLO, first, "a tree")
    dialogue.reset(None)
    assert dialogue.ask(HELLO, lambda piece: None).text == first
    dialogue.reset("be brief")
    assert dialogue.ask(HELLO, lambda piece: None).text != first
    assert dialogue.said[0] == {"role": "user", "content": HELLO}


def test_no_answer_goes_beyond_the_models_positions(base: Path, tmp_path: Path):
    folder = build_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    (speaker,) = load(folder)
    (prompt,) = asked(speaker, "a")
    assert len(prompt) + speaker.answers([prompt], Manner(100))[0].tokens <= 16
    with pytest.raises(InputError, match=r"the prompt: \d+ tokens leave no room for an answer"):
        asked(speaker, "the red house " * 10)


def test_a_model_without_a_template_continues_texts_and_holds_no_conversation(tmp_path: Path):
    folder = build_model(tmp_path / "model")
    tiny.build_tokenizer(chat_template=None).save_pretrained(folder)
    (folder / "chat_template.jinja").unlink()
    (speaker,) = load(folder)
    with pytest.raises(InputError, match=r"has no chat template.*--plain"):
        asked(speaker, HELLO)
    with pytest.raises(InputError, match="has no chat template"):
        Dialogue(speaker, TWELVE).check()
    assert speaker.prompt_tokens([prompt_of(HELLO, system=None, plain=True)]) == [speaker.tokenizer(HELLO)["input_ids"]]
    (tmp_path / "own.jinja").write_text(tiny.CHATML)
    (templated,) = load(folder, chat_template=str(tmp_path / "own.jinja"))
    assert asked(templated, HELLO) == ids_of(templated.tokenizer, HELLO)["input_ids"].tolist()


USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "question"),
    [
        ({"prompt": "a"}, Example([USER])),
        ({"prompt": [USER], "completion": [ASSISTANT]}, Example([USER])),
        ({"prompt": "a", "completion": "b"}, Example(None, prompt="a")),
        ({"text": "a"}, Example(None, prompt="a")),
        ({"messages": [USER]}, Example([USER])),
        ({"messages": [USER, ASSISTANT]}, Example([USER])),
        ({"messages": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]}, Example([SYSTEM, USER, ASSISTANT, USER])),
        ({"system": "s", "messages": [USER, ASSISTANT]}, Example([SYSTEM, USER])),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, Example([USER])),
        ({"instruction": "a", "output": "b"}, Example([USER])),
        ({"instruction": "a", "system": "s"}, Example([SYSTEM, USER])),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, Example([USER])),
    ],
    ids=str,
)
def test_a_row_of_any_format_asks_what_stands_before_its_last_answer(row: dict[str, Any], question: Example):
    assert convert_prompt(row) == question


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("a", "not an object"),
        ({}, "no keys.*asks nothing"),
        ({"question": "a"}, "'question'.*asks nothing"),
        ({"prompt": " "}, "`prompt` has no text"),
        ({"messages": [ASSISTANT]}, "no question"),
        ({"messages": [SYSTEM, ASSISTANT]}, "no question"),
        ({"messages": ["a"]}, "list of messages"),
    ],
    ids=str,
)
def test_a_row_that_asks_nothing_is_refused_with_the_reason(row: Any, reason: str):
    with pytest.raises(BadRow, match=reason):
        convert_prompt(row)


def test_rows_that_cannot_be_asked_are_named_by_file_and_line_and_the_first_ones_alone(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n' + '{"x": 1}\n' * 7 + "{\n")
    with pytest.raises(InputError) as refused:
        read_prompts(str(file))
    assert len(refused.value.problems) == 6
    assert refused.value.problems[0].startswith(f"{file}:2: the row has the keys 'x', and asks nothing")
    assert refused.value.problems[-1] == "3 more rows cannot be asked."
    file.write_text("\n")
    with pytest.raises(InputError, match="no rows"):
        read_prompts(str(file))


def test_a_prompt_that_is_refused_by_the_template_is_named(trained: Any):
    (speaker,) = load(trained("full"), chat_template=None)
    speaker.tokenizer.chat_template = "{{ raise_exception('no') if messages|length > 1 }}x"
    prompts = [Prompt(f"file:{i}", Example([USER] * i), {}) for i in (1, 2)]
    with pytest.raises(InputError, match=r"file:2: .*leave it out"):
        speaker.prompt_tokens(prompts)


def test_rows_of_a_file_come_back_in_their_order_with_their_answers(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (speaker,) = load(trained("lora"))
    capsys.readouterr()
    texts = ["a", "the red house", "tree", "river under the stone", "blue"]
    rows = [{"id": i, "messages": [{"role": "user", "content": text}, ASSISTANT]} for i, text in enumerate(texts)]
    file, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["generate", str(trained("lora")), "--prompts", str(file), "--max-new-tokens", "12", "--batch-size", "2"]
    assert main([*command, "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"5 rows with their answers are in {output}\n"
    assert printed.err == ""
    found = [json.loads(line) for line in output.read_text().splitlines()]
    own = [speaker.answers([prompt], TWELVE)[0].text for prompt in asked(speaker, *texts)]
    assert found == [row | {"answer": text} for row, text in zip(rows, own)]

    assert main([*command, "--compare"]) == 0
    both = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["answer"] for row in both] == own
    assert [row["base_answer"] for row in both] != own

    assert main([*command, "--output", str(output)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert len(output.read_text().splitlines()) == 5


def test_a_row_with_half_a_surrogate_pair_comes_back_as_it_was(
    trained: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """As a text that was cut within an emoji has it, in a column that nobody asks."""
    file, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    file.write_text(json.dumps({"prompt": "a", "note": "\ud83d"}) + "\n")
    command = ["generate", str(trained("lora")), "--prompts", str(file), "--max-new-tokens", "2"]
    assert main([*command, "--output", str(output)]) == 0
    assert json.loads(output.read_text())["note"] == "\ud83d"
    capfd.readouterr()
    program = f"from finetune.cli.commands import main; main({command!r})"
    assert json.loads(subprocess.check_output([sys.executable, "-c", program]))["note"] == "\ud83d"


def test_an_answer_that_is_no_number_of_json_is_null_and_its_line_is_utf8_whatever_the_locale(tmp_path: Path):
    with opened(tmp_path / "answers.jsonl") as file:
        write_line(file, {"log_probabilities": [math.nan, -math.inf]})
    assert (tmp_path / "answers.jsonl").read_text() == '{"log_probabilities": [null, null]}\n'
    program = (
        "from finetune.cli import generate_verb as verb\nwith verb.opened(None) as file: verb.write_line(file, %r)"
    )
    row = {"answer": "caf\u00e9 \U0001f600", "note": "\ud83d"}
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    found = subprocess.check_output([sys.executable, "-c", program % row], env=environment)
    assert json.loads(found.decode()) == row


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_sentence_and_a_file_that_does_not_become_whole_is_removed_where_that_is_asked(tmp_path: Path):
    told = ""
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # whose end is refused too
        try:
            write_line(full, {"a": 1})
        except InputError as error:
            told = str(error)
    assert told.startswith("/dev/full could not be written (No space left on device)")

    def write(*, whole: bool) -> None:
        with opened(tmp_path / "answers.jsonl", whole=whole) as file:
            write_line(file, {"a": 1})
            raise OSError("another disk is full")

    for whole in (True, False):
        with pytest.raises(OSError, match="another disk"):
            write(whole=whole)
        assert (tmp_path / "answers.jsonl").exists() != whole


def test_a_row_keeps_its_own_answer_beside_that_of_the_model(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lora, file = str(trained("lora")), tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "a", "answer": 4, "base_answer": 5}, {"prompt": "a", "own_answer": 6}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(Speaker, "answers", lambda self, prompts, *_, **__: [Answer("b", 1, False)] * len(prompts))
    capsys.readouterr()
    assert main(["generate", lora, "--prompts", str(file)]) == 0
    own = [{**rows[0], "own_answer": 4, "answer": "b"}, {**rows[1], "answer": "b"}]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == own
    assert main(["generate", lora, "--prompts", str(file), "--compare"]) == 0
    both = [own[0] | {"own_base_answer": 5, "base_answer": "b"}, own[1] | {"base_answer": "b"}]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == both


def test_a_row_that_has_no_key_left_for_its_own_answer_is_refused_before_weights_load(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a", "answer": 4, "own_answer": 5}) + "\n")
    assert main(["generate", str(base), "--prompts", str(file)]) == 2
    assert f"{file}:1: the row has the keys `answer` and `own_answer`" in capsys.readouterr().err


def test_an_output_that_cannot_be_created_is_refused_before_weights_load_and_an_empty_one_does_not_stay(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def load(*arguments: Any, **settings: Any) -> None:
        raise InputError("the weights are wrong")

    monkeypatch.setattr("finetune.models.loading.load_model", load)
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n")
    for output, said in ((tmp_path / "no" / "a.jsonl", "cannot be created"), (tmp_path / "a.jsonl", "are wrong")):
        assert main(["generate", str(base), "--prompts", str(file), "--output", str(output)]) == 2
        assert said in capsys.readouterr().err
        assert not output.exists()


def test_one_prompt_is_answered_as_text_as_json_and_side_by_side(
    trained: Any, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (speaker,) = load(trained("lora"))
    capsys.readouterr()
    (own,) = speaker.answers(asked(speaker, HELLO), TWELVE)
    command = ["generate", str(trained("lora")), HELLO, "--max-new-tokens", "12"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == own.text
    assert printed.err == ("(cut after 12 tokens; --max-new-tokens N for more)\n" if own.is_cut else "")
    monkeypatch.setattr("sys.stdin", io.StringIO(HELLO))
    assert main([*command[:2], "-", *command[3:], "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == {"prompt": HELLO, "answer": own.text, "tokens": own.tokens, "is_cut": own.is_cut}
    assert main([*command, "--compare"]) == 0
    table = capsys.readouterr().out
    assert table.count("┃") == 3
    assert max(map(len, table.splitlines())) <= 80


def test_another_base_than_that_of_the_run_is_said_by_all_verbs_that_ask(
    trained: Any, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def said(folder: Path) -> list[str]:
        model = [str(trained("lora")), "--base-model", str(folder), "--max-new-tokens", "1"]
        rows = tmp_path / "rows.jsonl"
        rows.write_text(json.dumps({"prompt": "Hello", "completion": "there"}) + "\n")
        errors = []
        for verb in (["generate", *model, "Hello"], ["evaluate", *model, "--data", str(rows)]):
            assert main(verb) == 0
            errors.append(capsys.readouterr().err)
        return errors

    shutil.copytree(base, tmp_path / "moved")
    assert not any("the one that the run recorded" in error for error in said(tmp_path / "moved"))
    other = load_file(tmp_path / "moved" / "model.safetensors")
    save_file({name: weight + 0.01 for name, weight in other.items()}, tmp_path / "moved" / "model.safetensors")
    assert all("is not the one that the run recorded" in error for error in said(tmp_path / "moved"))


@pytest.mark.parametrize(
    ("most", "positions", "more", "said"),
    [
        (12, None, [], "(cut after 12 tokens; --max-new-tokens N for more)\n"),
        (12, 20, [], "(cut after 5 tokens, where the 20 positions of the model end; a shorter prompt leaves more)\n"),
        (12, 20, ["--compare"], "(cut after 5 tokens, where the 20 positions"),
        (5, 20, [], "(cut after 5 tokens, where the 20 positions"),
    ],
)
def test_what_cut_an_answer_is_said(
    most: int,
    positions: int | None,
    more: list[str],
    said: str,
    trained: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    lora = str(trained("lora"))
    monkeypatch.setattr(models, "most_positions", lambda config: positions)
    monkeypatch.setattr("finetune.generation.speaker_loading.end_tokens_of", lambda *of, **how: ())
    monkeypatch.setattr(Speaker, "_answer", lambda self, row: Answer("a", len(row), True))
    capsys.readouterr()
    assert main(["generate", lora, HELLO, *more, "--max-new-tokens", str(most)]) == 0
    assert capsys.readouterr().err.startswith(said)


def test_brackets_in_an_answer_are_no_markup_of_the_table(
    trained: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lora = str(trained("lora"))
    capsys.readouterr()
    monkeypatch.setattr(Speaker, "answers", lambda self, prompts, manner: [Answer("[red]x[/red] [/]", 3, False)])
    assert main(["generate", lora, HELLO, "--compare"]) == 0
    assert capsys.readouterr().out.count("[red]x[/red] [/]") == 2


def test_a_row_with_a_date_comes_back(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parquet.write_table(pa.table({"prompt": ["a"], "day": [date(2026, 1, 2)]}), tmp_path / "prompts.parquet")
    lora = str(trained("lora"))
    capsys.readouterr()
    assert main(["generate", lora, "--prompts", str(tmp_path / "prompts.parquet"), "--max-new-tokens", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["day"] == "2026-01-02"


def test_a_conversation_in_the_terminal(
    trained: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (speaker,) = load(trained("lora"))
    capsys.readouterr()
    lines = [HELLO, "", "/help", "/reset", HELLO, "a", "/system be brief", HELLO, "/exit", "never read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert main(["chat", str(trained("lora")), "--max-new-tokens", "12"]) == 0
    help_line, *rest = capsys.readouterr().out.split("> ")
    assert help_line.startswith("/reset begins again")
    first, _, helped, _, again, further, _, brief, _ = (each.strip() for each in rest)
    assert first == again
    assert helped == help_line.strip()
    assert further
    assert brief
    assert speaker.answers(asked(speaker, HELLO), TWELVE)[0].text in first


def test_a_conversation_of_a_program_is_a_line_of_json_for_each_answer(
    trained: Any, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (speaker,) = load(trained("lora"))
    capsys.readouterr()
    lines = [HELLO, "/system be brief", HELLO, "the red house " * 2000, "/unknown"]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert main(["chat", str(trained("lora")), "--compare", "--json", "--max-new-tokens", "12"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["model"] for line in told] == [str(base), str(trained("lora"))] * 3
    assert [line["user"] for line in told[::2]] == [HELLO, HELLO, lines[3].strip()]
    answer = speaker.answers(asked(speaker, HELLO), TWELVE)[0]
    assert (told[1]["answer"], told[1]["tokens"], told[1]["is_cut"]) == (answer.text, answer.tokens, answer.is_cut)
    assert all("error" in line and "answer" not in line for line in told[4:])


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_of_standard_input_that_is_not_utf8_is_refused_before_weights_load(
    errors: str, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors))
    assert main(["generate", str(base), "-"]) == 2
    assert "The prompt is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_ends_no_conversation(
    errors: str, trained: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n" + HELLO.encode() + b"\ncaf\xc3"), "utf-8", errors)
    monkeypatch.setattr("sys.stdin", lines)
    assert main(["chat", str(trained("lora")), "--json", "--max-new-tokens", "2"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["answer" in line for line in told] == [False, True, False]
    assert told[0] == told[2] == {"error": "That is not UTF-8; convert it, for example with iconv -t UTF-8."}


def test_a_conversation_ends_with_its_input_and_compares(
    trained: Any, base: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO(HELLO + "\n" + "the red house " * 2000 + "\n"))
    assert main(["chat", str(trained("lora")), "--compare", "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count(f"[{base}]") == printed.out.count(f"[{trained('lora')}]") == 2
    assert printed.err.count("error: the conversation: ") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give one of both"),
        (["a", "--prompts", "b.jsonl"], "Give one of both"),
        (["a", "--output", "c.jsonl"], "--output is for the answers to a file"),
        (["--prompts", "b.jsonl", "--json"], "--json is for one prompt"),
        (["--prompts", "b.jsonl", "--system", "s"], "--system is for one prompt"),
        (["--prompts", "b.jsonl", "--plain"], "--plain is for one prompt"),
        (["a", "--plain", "--system", "s"], "leave one of them out"),
        (["a", "--batch-size", "0"], "--batch-size 0"),
        (["a", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["a", "--temperature", "-1"], "--temperature -1.0"),
        (["a", "--temperature", "nan"], "--temperature nan"),
        (["a", "--top-p", "0.9"], "add --temperature"),
        (["a", "--seed", "-1"], "--seed -1: give 0"),
        (["caf\udce9"], "The prompt is not UTF-8"),
        (["a", "--system", "caf\udce9"], "--system is not UTF-8"),
        ([" "], "The prompt is empty"),
        (["--prompts", "missing.jsonl"], "missing.jsonl: there is no such data file"),
        (["a", "--chat-template", "missing.jinja"], "--chat-template: there is no file missing.jinja"),
        (["a", "--base-model", "b"], "is a model and not an adapter"),
        (["a", "--compare"], "nothing says what"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_are_refused_before_weights_load(
    arguments: list[str],
    said: str,
    base: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    assert main(["generate", str(base), *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.startswith("error: ")
    assert "Traceback" not in printed.err


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", str(tmp_path / "missing"), "a"]) == 2
    assert "There is no folder" in capsys.readouterr().err
    assert main(["generate", str(tmp_path), "a"]) == 2
    assert "neither run.yaml nor adapter_config.json nor config.json" in capsys.readouterr().err
    tiny.build_model_folder(tmp_path / "bare")
    assert main(["generate", str(tmp_path / "bare"), "a"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    (tmp_path / "bare" / "config.json").write_text("{")
    assert main(["generate", str(tmp_path / "bare"), "a"]) == 2
    assert "model.path" not in capsys.readouterr().err
    (build_model(tmp_path / "mute") / "tokenizer.json").unlink()
    (tmp_path / "mute" / "tokenizer_config.json").unlink()
    assert main(["generate", str(tmp_path / "mute"), "a"]) == 2
    assert "copy the files of a fast tokenizer to that folder" in capsys.readouterr().err
