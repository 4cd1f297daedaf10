"""What every verb of the `finetune` command does alike."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from finetune.cli import commands

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
    "checkpoint",
)
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


@pytest.mark.parametrize("words", ["--help", "plan --help", "init {}/new", "plan --model {} --gpus 1xH100 --json"])
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Standard output is a pipe, as to `head`, that nobody reads any more."""
    tiny.build_model_folder(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe, monkeypatch.context() as patch:  # closing flushes, as the interpreter's end does
        patch.setattr("sys.stdout", pipe)
        assert commands.main(words.format(tmp_path).split()) == 1
