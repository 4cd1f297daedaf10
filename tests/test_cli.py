"""What every verb of the `finetune` command does alike."""

import os
from pathlib import Path

import pytest
import tiny

from finetune.cli import commands


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
