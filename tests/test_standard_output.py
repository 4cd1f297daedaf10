"""What a run prints: nobody need read it, and no disk need have room for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import sys
from finetune.run.standard_output import console
printing = console(shown=True)
for number in range(20_000):
    printing.print(f"line {number} of a run that goes on")
sys.stderr.write("finished")
"""


def test_a_run_goes_on_when_nobody_reads_it_any_more():
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "line 0 of a run that goes on\n"
    process.stdout.close()
    assert process.stderr.read() == "finished"
    assert process.wait() == 0


def test_a_run_goes_on_when_its_terminal_is_closed():
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS], stdout=theirs, stdin=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    assert b"line 0" in os.read(ours, 4096)
    os.close(ours)
    assert process.stderr is not None
    assert process.stderr.read() == "finished"
    assert process.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_goes_on_when_the_disk_of_its_log_is_full():
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", PRINTS], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.stderr.startswith("finished")


def test_what_an_encoding_lacks_is_printed_as_escapes():
    prints = "from finetune.run.standard_output import console; console(shown=True).print('Grüße 日本')"
    found = subprocess.run(
        [sys.executable, "-c", prints], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"}
    )
    assert (found.returncode, found.stdout.decode("latin-1")) == (0, "Grüße \\u65e5\\u672c\n")


ENDS = """
import contextlib
import sys
from finetune.errors import InputError, RunInterrupted
from finetune.run import entry
from recipes import sft

def main(cfg):
    with contextlib.suppress(OSError):
        print("a line that may be kept in a buffer")
    if {error!r}:
        raise {error}

sys.argv = ["sft.py", "--model.path", "m", "--data.train", "d", "--train.output_dir", "o"]
entry.run(main, sft.Config)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("error", "code", "unbuffered"),
    [("", 0, ""), ("RunInterrupted('saved')", 75, "1"), ("InputError('wrong')", 2, "")],
    ids=str,
)
def test_exit_code_of_a_run_is_kept_where_nothing_can_be_printed(error: str, code: int, unbuffered: str):
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", ENDS.format(error=error)]
        assert subprocess.run(command, stdout=full, stderr=full, env=environment).returncode == code
