"""The batch scripts of ``docs/several_machines.md``, with stand-ins for SLURM's commands and for a run.

They show what the scripts do with signals and exit codes, not how SLURM behaves.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "several_machines.md"
ONE, SEVERAL = re.findall(r"^```text\n(#!/bin/bash\n.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
ASKED_TO_STOP = {
    # of several machines SLURM's signal goes to the script alone; of one, to every process but the script
    "one": lambda script, run: os.kill(run, signal.SIGUSR1),
    "several": lambda script, run: os.kill(script, signal.SIGUSR1),
}
RUN = """#!{python} -S
# a run that waits for a signal, and ends with the code that its kind of launcher gives
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit({code}))
print(*sys.argv[1:], file=open("called", "a"), flush=True)
print(os.getpid(), file=open("run.pid", "w"), flush=True)
time.sleep({seconds})
sys.exit({ends})
"""
COMMANDS = {
    "srun": '#!/bin/bash\nexport SLURM_PROCID=1\n"$@"\n',
    "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then printf "node1\\nnode2\\n"; else echo "$@" >> called; fi\n',
    "scancel": '#!/bin/bash\necho "scancel $@" >> called\nkill -USR1 "$(cat run.pid)"\n',
}


def outcome(folder: Path, script: str, kind: str, *, ends: int | None = None) -> tuple[int, list[str]]:
    """Exit code of a script, and what it called; without ``ends`` its run is asked to stop."""
    code = {"one": 75, "several": 1}[kind]
    run = RUN.format(python=sys.executable, code=code, ends=ends, seconds=20 if ends is None else 0)
    commands = COMMANDS | dict.fromkeys(("finetune", "accelerate"), run)
    for name, body in commands.items():
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": ""}
    started = subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment)
    if ends is None:
        while not (folder / "run.pid").exists() or not (folder / "run.pid").read_text().strip():
            time.sleep(0.01)
        ASKED_TO_STOP[kind](started.pid, int((folder / "run.pid").read_text()))
    return started.wait(timeout=30), (folder / "called").read_text().splitlines()


SCRIPTS = [pytest.param(ONE, "one", id="one machine"), pytest.param(SEVERAL, "several", id="several machines")]


@pytest.mark.parametrize(("script", "kind"), SCRIPTS)
def test_job_whose_run_was_asked_to_stop_goes_back_into_the_queue(script: str, kind: str, tmp_path: Path):
    code, called = outcome(tmp_path, script, kind)
    assert code == 0
    assert called[1:] == [*(["scancel --signal=USR1 7"] if kind == "several" else []), "requeue 7"]


@pytest.mark.parametrize("ends", [0, 2])
@pytest.mark.parametrize(("script", "kind"), SCRIPTS)
def test_job_whose_run_ended_by_itself_keeps_its_exit_code(script: str, kind: str, ends: int, tmp_path: Path):
    code, called = outcome(tmp_path, script, kind, ends=ends)
    assert code == ends
    assert len(called) == 1


def test_each_machine_is_told_its_rank_and_the_address_of_the_first(tmp_path: Path):
    _, [called] = outcome(tmp_path, SEVERAL, "several", ends=0)
    assert "--machine_rank 1 --main_process_ip node1 --main_process_port 29500" in called
