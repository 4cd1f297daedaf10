"""Chat templates are programs: what they may take is bounded, whatever they do, and honest ones never come near it."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
from chat_templates import FAMILIES, TOKENIZERS, encode, tokenizer_for

from finetune.data import template_process
from finetune.data.encoding import Encoder, Settings
from finetune.data.encoding_workers import RECORDS_AT_ONCE, encoded, records_of
from finetune.data.sources import Source
from finetune.data.template_process import Conversation, TemplateProcess
from finetune.errors import BadRow, InputError, RunStopped

PLAIN = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]
ROW = Conversation("rows.jsonl:1", PLAIN, None, "turns")
ENDLESS = {
    "loops within loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "one operation of Python": "{{ 9 ** (9 ** 9) }}",
    "a filter of a filter": "{{ range(99999) | map('string') | map('replace', '', 'a' * 99999) | list | length }}",
    "a constant that is computed when the template is compiled": "{{ [(9 ** 9) ** 9999999] }}",
}
LARGE = {
    "a text that is multiplied": ("{{ 'a' * 10 ** 10 }}", "needs more than 4 GiB of memory"),
    "a text for each message": ("{% for m in messages %}{{ 'a' * 10 ** 6 }}{% endfor %}", "renders more than 1,00"),
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_template_without_an_end_is_refused_and_names_the_row(template: str):
    renders = TemplateProcess(tokenizer_for(template + tiny.CHATML), seconds=0.2)
    with pytest.raises(InputError, match=r"^rows.jsonl:1: .* after 0.3 seconds of CPU time; set data.chat_template to"):
        renders.render([ROW])


@pytest.mark.parametrize(("template", "reason"), LARGE.values(), ids=LARGE)
def test_template_that_grows_without_end_is_refused_and_names_the_row(template: str, reason: str):
    with pytest.raises(InputError, match=rf"^rows.jsonl:1: the chat template {reason}"):
        TemplateProcess(tokenizer_for(template + tiny.CHATML)).render([ROW])


def test_row_is_named_whose_rendering_does_not_end_among_others():
    template = "{% if messages[0].content == 'b' %}" + ENDLESS["loops within loops"] + "{% endif %}" + tiny.CHATML
    renders = TemplateProcess(tokenizer_for(template), seconds=0.2)
    rows = [
        Conversation(f"rows.jsonl:{i}", [{**PLAIN[0], "content": c}, PLAIN[1]], None, "turns")
        for i, c in enumerate("aab")
    ]
    assert len(renders.render(rows[:2])) == 2

    def refused(_: int) -> str:
        with pytest.raises(InputError, match=r"^rows.jsonl:2: ") as error:
            renders.render(rows)
        return str(error.value)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(refused, range(8)))) == 1


def cpu_seconds_of_children() -> float:
    """Of those that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def test_template_after_one_that_was_ended_is_rendered():
    with pytest.raises(InputError):
        TemplateProcess(tokenizer_for(ENDLESS["one operation of Python"]), seconds=0.2).render([ROW])
    ((found,),) = TemplateProcess(TOKENIZERS["chatml"]).render([ROW])
    assert [found.text[first:end] for first, end in found.turns.values()] == ["c d<|im_end|>"]


def test_answers_left_unread_by_an_interrupted_question_are_not_taken_for_those_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
):
    renders = TemplateProcess(TOKENIZERS["chatml"])

    def interrupted(file: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(template_process.pickle, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            renders.render([ROW])
    other = Conversation("", [PLAIN[0], {"role": "assistant", "content": "other"}], None, "turns")
    ((found,),) = renders.render([other])
    assert "other" in found.text


@pytest.mark.parametrize("family", ["chatml", "mistral"])
def test_long_conversation_is_far_below_the_limit(family: str):
    renders = TemplateProcess(TOKENIZERS[family], seconds=1.0)
    ((found,),) = renders.render([Conversation("", PLAIN * 2_000, None, "turns")])
    assert len(found.turns) == 2_000
    ((found,),) = renders.render(
        [Conversation("", [PLAIN[0], {**PLAIN[1], "content": "日本\t" * 10**6}], None, "turns")]
    )
    assert len(found.text) > 3 * 10**6


def test_refusal_of_a_conversation_is_still_that_of_its_row_alone():
    renders = TemplateProcess(TOKENIZERS["llama3"])
    calls = [{"function": {"name": "f", "arguments": {}}}] * 2
    refused, (found,) = renders.render(
        [Conversation("", [PLAIN[0], {**PLAIN[1], "tool_calls": calls}], None, "turns"), ROW]
    )
    assert isinstance(refused, BadRow)
    assert "one call at a time" in str(refused)
    assert "c d" in found.text


ASKS = """
import os, psutil
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from finetune.data.template_process import Conversation, TemplateProcess

tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.BPE()), chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"
)
row = Conversation("", [{"role": "user", "content": "a"}], None, "text")
renders = TemplateProcess(tokenizer)
assert [[found.text for found in each] for each in renders.render([row])] == [["a"]]
(child,) = psutil.Process().children()
del renders
assert not child.is_running()
renders = TemplateProcess(tokenizer)
renders.render([row])
print(psutil.Process().children()[0].pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_process_ends_with_the_last_that_renders_and_with_the_one_that_asked(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ASKS], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    until = time.monotonic() + 10
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not psutil.pid_exists(int(done.stdout))


def test_data_whose_template_has_no_end_are_refused_at_once_though_every_thread_has_rows_of_them(tmp_path: Path):
    tokenizer = tokenizer_for(ENDLESS["loops within loops"])
    encoder = Encoder(tokenizer, Settings(train_on="assistant", max_length=64))
    encoder.template = TemplateProcess(tokenizer, seconds=0.2)
    path = tiny.write_conversations(tmp_path / "rows.jsonl", rows=10 * RECORDS_AT_ONCE)
    began = cpu_seconds_of_children()
    with pytest.raises(InputError, match="seconds of CPU time"):
        list(encoded(records_of([Source(str(path))]), encoder, Settings(64)))
    assert cpu_seconds_of_children() - began < 4  # of trying in each of the ten batches again, at least 9


def test_child_under_limits_of_a_scheduler_that_prints_at_its_start_renders_and_prints_nothing_to_the_output(
    tmp_path: Path,
):
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    code = ASKS.split("(child,)")[0].replace("import os, psutil", "import resource") + "print('rendered')"
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", limited + code], env=environment, capture_output=True, text=True)
    assert done.stdout == "hello\nrendered\n", done.stderr


def test_child_that_fails_by_itself_is_not_taken_for_a_fault_of_the_template(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_process, "_START", "raise SystemExit(3)")
    with pytest.raises(RunStopped, match="failed with exit code 3"):
        template_process._Child().answers(b"", [(ROW, 1.0)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("eos", [None, "[INST]"])
def test_token_that_ends_a_turn_is_the_last_that_an_answer_trains_whatever_the_tokenizers_own_is(
    family: str, eos: str | None
):
    tokenizer = tokenizer_for(FAMILIES[family].template)
    tokenizer.eos_token = eos or tokenizer.eos_token
    row = encode(tokenizer, PLAIN)
    last = row.tokens[row.spans[-1][1] - 1]
    found = template_process.end_of_turn(tokenizer)
    assert found == last
    assert tokenizer.convert_ids_to_tokens(found) in (FAMILIES[family].end, eos)  # some write the tokenizer's own


@pytest.mark.parametrize("template", [None, "{{ raise_exception('never') }}", "{{ messages[1].content }}"])
def test_no_token_ends_the_turns_of_a_template_that_writes_none(template: str | None):
    tokenizer = tokenizer_for(template or tiny.CHATML)
    tokenizer.chat_template = template
    assert template_process.end_of_turn(tokenizer) is None
