"""Before a run trains, a signal or the end of its launcher ends each of its processes at once, wherever it stands."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
IN_A_DESTRUCTOR = """
    class Destroyed:
        def __del__(self):
            print("ready", flush=True)
            time.sleep(60)
    Destroyed()
"""
IN_C_CODE = """
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(60)  # which holds Python's lock, so that no thread runs either
"""
SLOW_IMPORT = """
    import time
    print("ready", flush=True)
    try:
        time.sleep(60)
    except BaseException:
        time.sleep(60)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"


def start(*arguments: str | Path, path: Path = ROOT, **environment: str) -> "subprocess.Popen[str]":
    """A Python process that has printed its first line."""
    own = {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", **environment}
    process = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | own
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def slow_torch(tmp_path: Path) -> Path:
    """A folder with a module in the place of PyTorch, whose import takes long and swallows an interrupt."""
    (tmp_path / "torch.py").write_text(textwrap.dedent(SLOW_IMPORT))
    return tmp_path


@pytest.mark.parametrize("where", [IN_A_DESTRUCTOR, IN_C_CODE], ids=["destructor", "C code"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signal_ends_the_process_in_a_destructor_and_in_c_code(number: signal.Signals, where: str):
    begin = "import ctypes, time\nfrom finetune import start_up\nstart_up.end_at_once()\n"
    process = start("-c", begin + textwrap.dedent(where))
    process.send_signal(number)
    assert process.wait(timeout=10) == -number


def test_signal_ends_the_recipe_while_it_imports(slow_torch: Path):
    process = start(ROOT / "recipes" / "sft.py", path=slow_torch)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


def test_process_whose_launcher_is_killed_while_it_imports_ends_and_says_why(slow_torch: Path):
    recipe = str(ROOT / "recipes" / "sft.py")
    launcher = start("-c", LAUNCHER, recipe, path=slow_torch, ACCELERATE_MIXED_PRECISION="no")
    (process,) = psutil.Process(launcher.pid).children()
    launcher.kill()
    try:
        _, errors = launcher.communicate(timeout=10)  # until the process has closed the pipes
    finally:
        if process.is_running():
            process.kill()
    assert "error: the launcher has ended, so this process exits before its first step." in errors


def test_process_that_no_launcher_started_outlives_its_parent(slow_torch: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    parent = start("-c", LAUNCHER, ROOT / "recipes" / "sft.py", path=slow_torch)
    (process,) = psutil.Process(parent.pid).children()
    parent.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        parent.communicate(timeout=1.0)
    assert process.is_running()
    process.kill()


def test_nothing_that_takes_seconds_or_speaks_is_imported_before_it_is_needed():
    """On CPUs with bf16, bitsandbytes, which PEFT would import, warns of a missing kernel, unless it is told not to."""
    modules = "recipes.sft, recipes.dpo, recipes.pretrain, finetune.cli.data_verb"
    program = f"import sys, {modules}; print({{'peft', 'bitsandbytes', 'deepspeed'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "set()\n", "")
