"""What every verb of the `finetune` command does alike."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from finetune.checkpoint.folder import name_of
from finetune.cli import commands
from finetune.cli.health import gpu_state, host_state, hub_state, installed_libraries
from finetune.cli.health.finding import Finding

SAMPLE = Path(__file__).parent.parent / "recipes" / "configs" / "sample.yaml"

VERBS = (
    "init",
    "doctor",
    "train",
    "merge",
    "export",
    "generate",
    "chat",
    "evaluate",
    "report",
    "data",
    "plan",
    "links",
    "checkpoint",
)
ACTIONS = ("checkpoint ls", "checkpoint verify", "checkpoint export")
SLOW = {"torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "numpy", "rich", "pydantic"}


def test_help_of_every_verb_imports_nothing_slow():
    code = f"""
import sys
from finetune.cli import commands
for verb in {VERBS}:
    try:
        commands.main([verb, "--help"])
    except SystemExit as ended:
        assert ended.code == 0, verb
print("imported:", {SLOW} & set(sys.modules))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.count("usage: finetune ") == len(VERBS)
    assert printed.stdout.endswith("imported: set()\n")


def test_every_verb_is_known_to_these_tests(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        commands.main(["no-verb"])
    listed = capsys.readouterr().err.partition("choose from ")[2]
    assert re.findall(r"[\w-]+", listed.partition(")")[0]) == [*VERBS]


@pytest.mark.parametrize("words", [*(verb for verb in VERBS if verb != "checkpoint"), *ACTIONS])
def test_every_verb_answers_a_program_in_json(words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        commands.main([*words.split(), "--help"])
    assert re.search(r"^  --json ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("words", [*VERBS, *ACTIONS])
def test_help_writes_percent_as_it_is_read(words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        commands.main([*words.split(), "--help"])
    assert "%%" not in capsys.readouterr().out


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, an adapter of it, rows, a run at work with an incomplete checkpoint, and a folder that holds nothing."""
    folder = tmp_path_factory.mktemp("here")
    tiny.write_weights(tiny.build_model_folder(folder / "model"))
    tiny.write_conversations(folder / "rows.jsonl", rows=2)
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    (folder / "run" / "checkpoints" / name_of(1)).mkdir(parents=True)
    (folder / "empty").mkdir()
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model"), LoraConfig(r=2))
    model.save_pretrained(folder / "adapter")
    return folder


REFUSED = {
    # a typo
    "doctor --jsno": "unrecognized arguments: --jsno",
    "train {sample} --train.epoch 2": "Unknown flag --train.epoch; did you mean train.epochs?",
    "train {sample} --strategy fdsp2": "unknown strategy fdsp2; did you mean fsdp2?",
    "export {here}/model --gguf {here}/x.gguf --dtype fp16": "did you mean f16?",
    "evaluate {here}/model --data {here}/rows.jsonl --score exactmatch": "did you mean exact_match?",
    "evaluate {here}/model --dta {here}/rows.jsonl": "unrecognized arguments: --dta",
    "report {here}/run --jsno": "unrecognized arguments: --jsno",
    "merge {here}/run --output {here}/x --dtype fp16": "did you mean bf16?",
    "generate {here}/model a --temprature 1": "unrecognized arguments: --temprature",
    "checkpoint lst {here}/run": "did you mean ls?",
    "init {here}/new --jsn": "unrecognized arguments: --jsn; did you mean --json?",
    "chat {here}/model --temprature 1": "unrecognized arguments: --temprature 1; did you mean --temperature?",
    "data --config {sample} --rws 3": "Unknown flag --rws; did you mean --rows?",
    "data --config {sample} --data.max_lenght 8": "Unknown flag --data.max_lenght; did you mean data.max_length?",
    "data {sample} --config={sample}": "does not follow a flag; write --section.key VALUE",
    "plan a b --gpus 1xH100": "'b' does not follow a flag",
    "plan --modl {here}/model": "Unknown flag --modl; did you mean --model?",
    "plan --model {here}/model --gpus 1xH100 --train.epoch 2": "Unknown flag --train.epoch; did you mean train.epochs?",
    "links --prosesses 2": "unrecognized arguments: --prosesses 2; did you mean --processes?",
    # nothing of that name
    "doctor {here}/none": "unrecognized arguments",
    "train {here}/none.yaml": "none.yaml is not a file; give the configuration first",
    "export {here}/none --gguf {here}/x.gguf --json": "There is no folder {here}/none; check its name.",
    "evaluate {here}/none --data {here}/rows.jsonl --json": "There is no folder {here}/none; check its name.",
    "evaluate {here}/model --data {here}/none.jsonl --json": "none.jsonl: there is no such data file or folder",
    "report {here}/none --json": "{here}/none has neither run.yaml nor metrics.jsonl; give the output folder of a run.",
    "merge {here}/none --output {here}/x --json": "There is no folder {here}/none; check its name.",
    "generate {here}/none a --json": "There is no folder {here}/none; check its name.",
    "chat {here}/none": "There is no folder {here}/none; check its name.",
    "data --config {here}/none.yaml --json": "{here}/none.yaml: the file cannot be read (No such file or directory)",
    "plan --model {here}/none --gpus 1xH100 --json": "{here}/none",
    "links --processes 2 --output {here}/none/links.json": "there is no folder {here}/none; create it first",
    "checkpoint ls {here}/none --json": "There is no folder {here}/none; give the output folder of a run.",
    # something else than what is asked for
    "init {here}/rows.jsonl": "{here}/rows.jsonl already exists; choose another folder.",
    "init {here}/rows.jsonl/new": "{here}/rows.jsonl/new cannot be written (",
    "train {here}/empty": "empty is not a file; give the configuration first",
    "train {here}/model/model.safetensors": "not valid YAML",
    "export {here}/empty --gguf {here}/x.gguf --json": "{here}/empty has neither run.yaml nor",
    "export {here}/rows.jsonl --gguf {here}/x.gguf": "There is no folder {here}/rows.jsonl",
    "export {here}/run --push owner/name": "{here}/run has neither run.yaml nor",
    "evaluate {here}/empty --data {here}/rows.jsonl --json": "{here}/empty has neither run.yaml nor",
    "evaluate {here}/rows.jsonl --data {here}/rows.jsonl": "There is no folder {here}/rows.jsonl",
    "evaluate {here}/model --data {here}/model/model.safetensors": "unknown kind of data file",
    "report {here}/empty --json": "{here}/empty has neither run.yaml nor metrics.jsonl",
    "report {here}/rows.jsonl": "{here}/rows.jsonl has neither run.yaml nor metrics.jsonl",
    "report {here}/run --output {here}/rows.jsonl/report.html": "report.html cannot be written",
    "merge {here}/empty --output {here}/x --json": "{here}/empty has neither run.yaml nor",
    "generate {here}/empty a --json": "{here}/empty has neither run.yaml nor",
    "chat {here}/rows.jsonl": "There is no folder {here}/rows.jsonl; check its name.",
    "chat {here}/empty": "{here}/empty has neither run.yaml nor",
    "data --config {here}/empty --json": "{here}/empty: the file cannot be read (Is a directory)",
    "plan --model {here}/empty --gpus 1xH100 --json": "The folder {here}/empty has no config.json",
    "links --processes 1": "--processes 1: a link needs two processes at least",
    "checkpoint ls {here}/empty --json": "{here}/empty has no checkpoint; give the output folder of a run",
}
"""Commands, with a part of the sentence that refuses them."""


def test_wrong_commands_of_every_verb_are_known():
    assert {words.split()[0] for words in REFUSED} == {*VERBS}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_command_is_answered_with_one_sentence_within_seconds(
    words: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.models.loading.load_model", None)
    names = {"here": here, "sample": SAMPLE}
    start = time.process_time()
    try:
        code: Any = commands.main(words.format(**names).split())
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert time.process_time() - start < 5
    assert code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    sentence = printed.err.splitlines()[-1]
    assert "error: " in sentence
    assert REFUSED[words].format(**names) in sentence
    assert printed.err.count("error: ") == 1
    assert "usage: " in printed.err or printed.err == f"{sentence}\n"


@pytest.mark.parametrize(
    ("runs", "words", "taken"),
    [
        ("talk_options._generate", "generate R --json Hello", {"prompt": "Hello", "json": True}),
        ("talk_options._generate", "generate --bits 4 R -", {"prompt": "-", "bits": 4}),
        ("talk_options._generate", "generate R Hello --json", {"prompt": "Hello", "json": True}),
        ("evaluate_options._evaluate", "evaluate R --data rows other", {"other": "other", "data": "rows"}),
        ("report_verb._report", "report R --json S T", {"runs": [Path("R"), Path("S"), Path("T")], "json": True}),
        (
            "commands._data",
            "data --json a.yaml --train.steps 3",
            {"others": ["--config", "a.yaml", "--train.steps", "3"]},
        ),
        ("commands._plan", "plan --gpus 8xH100 a.yaml", {"others": ["--config", "a.yaml"], "model": None}),
        ("commands._plan", "plan a/b --train.steps 3 --json", {"others": ["--train.steps", "3"], "model": "a/b"}),
    ],
)
def test_words_are_taken_before_and_behind_options(
    runs: str, words: str, taken: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    found: dict[str, Any] = {}
    monkeypatch.setattr(f"finetune.cli.{runs}", lambda options: found.update(vars(options)) or 0)
    assert commands.main(words.split()) == 0
    assert {key: found[key] for key in taken} == taken


@pytest.mark.parametrize("words", ["generate R Hello --json there", "generate R --json one two", "chat R --json Hello"])
def test_a_word_that_nothing_takes_is_refused(words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        commands.main(words.split())
    assert "unrecognized arguments" in capsys.readouterr().err


def test_init_says_where_it_has_copied_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my project").mkdir()
    monkeypatch.chdir(tmp_path / "my project")
    Path("README.md").write_text("mine")
    assert commands.main(["init", "."]) == 0
    first, kept, following, *_ = capsys.readouterr().out.splitlines()
    assert first == "Copied recipes, accelerate_configs, notebooks and constraints.txt to this folder."
    assert kept == "README.md was there before, and stays as it was."
    assert following == "Next steps:"
    assert Path("README.md").read_text() == "mine"
    monkeypatch.chdir(tmp_path)
    assert commands.main(["init", "my other"]) == 0
    assert "  cd 'my other'\n" in capsys.readouterr().out
    assert commands.main(["init", "third", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["folder"], told["kept"]) == ("third", [])
    assert sorted(told["copied"]) == sorted(path.name for path in Path("third").iterdir())


@pytest.mark.parametrize("first_lost", ["accelerate_config", "constraints.txt"])
def test_init_on_a_full_disk_leaves_no_half_of_a_project(
    first_lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    copy, lost = shutil.copyfile, OSError(errno.ENOSPC, "No space left on device")

    def filling(source: Any, file: Any, **kwargs: Any) -> Any:
        if first_lost in str(file):
            raise lost
        return copy(source, file, **kwargs)

    (tmp_path / "README.md").write_text("mine")
    monkeypatch.setattr(shutil, "copyfile", filling)
    assert commands.main(["init", str(tmp_path)]) == 2
    assert f"{tmp_path} cannot be written (" in (said := capsys.readouterr().err)
    assert "No space left on device" in said
    assert len(said.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    monkeypatch.undo()
    assert commands.main(["init", str(tmp_path)]) == 0


@pytest.mark.usefixtures("arithmetic_steps")
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "plan --help",
        "init {new}",
        "plan --model {here}/model --gpus 1xH100 --json",
        "doctor",
        "doctor --json",
        "train {sample} --print-command",
        "export {here}/model --gguf {new} --json",
        "evaluate {here}/model --data {here}/rows.jsonl --score loss",
        "evaluate {here}/model --data {here}/rows.jsonl --score loss --json",
        "report {here}/run --json",
        "report {here}/run --output {new}.html",
        "data --config {sample} --model.path {here}/model --data.train {here}/rows.jsonl",
        "data --config {sample} --model.path {here}/model --data.train {here}/rows.jsonl --json",
        "merge {here}/adapter --output {new} --text {here}/rows.jsonl",
        "merge {here}/adapter --output {new} --text {here}/rows.jsonl --json",
        "generate {here}/model a --max-new-tokens 2",
        "generate {here}/model --prompts {here}/rows.jsonl --max-new-tokens 2",
        "chat {here}/model --max-new-tokens 2",
        "chat {here}/model --max-new-tokens 2 --json",
        "checkpoint ls {here}/run",
        "checkpoint verify {here}/run --json",
    ],
)
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(
    words: str, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Standard output is a pipe, as to `head`, that nobody reads any more."""
    for module in (gpu_state, host_state, hub_state, installed_libraries):  # which take seconds
        monkeypatch.setattr(module, "examine", lambda: iter([Finding("Python", "ok", "Python 3")]))
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, monkeypatch.context() as patch:  # closing flushes, as the interpreter's end does
        patch.setattr("sys.stdout", pipe)
        try:
            code: Any = commands.main(words.format(here=here, new=tmp_path / "new", sample=SAMPLE).split())
        except SystemExit as ended:  # of Rich
            code = ended.code
        assert code == 1
