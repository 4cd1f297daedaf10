"""`finetune train`: what it starts, with what it ends, and that it is what `accelerate launch` starts."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import scenarios
import yaml
from accelerate.commands.launch import launch_command_parser
from plan_models import config_named
from test_launch import flags_for

from finetune.checkpoint.reader import open_all
from finetune.cli import commands, train_verb
from finetune.cli.planning import asked
from finetune.config.command_line import parse
from finetune.config.strategy_names import SIZES
from finetune.distributed import launcher
from finetune.distributed.launch_environment import launch_environment
from finetune.distributed.launcher import run_together
from finetune.hardware.cards import parse_gpus
from recipes.sft import Config, main

ROOT = Path(__file__).parent.parent
SAMPLE = str(ROOT / "recipes" / "configs" / "sample.yaml")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that holds nothing of ours, without what a shell or another test has set."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launcher, "native_precision", lambda: "bf16")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What is said before a run that is not started."""
    assert commands.main(["train", *map(str, arguments), "--print-command"]) == 0
    return capsys.readouterr().out


def command_in(text: str) -> tuple[dict[str, str], argparse.Namespace]:
    """The environment of the printed command, and its words by Accelerate's own parser."""
    command = shlex.split(text[text.index("OMP_NUM_THREADS") :].replace("\\\n", " "))
    start = command.index("accelerate")
    assert command[start + 1] == "launch"
    return dict(word.split("=") for word in command[:start]), launch_command_parser().parse_args(command[start + 2 :])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert commands.main(["train", *map(str, arguments), "--print-command"]) == 2
    return capsys.readouterr().err


# What is started


def test_a_configuration_alone_becomes_one_process_of_its_recipe(capsys: pytest.CaptureFixture[str]):
    text = printed(capsys, SAMPLE, "--train.epochs", "2", "--data.train", "my file.jsonl")
    assert text.startswith("Strategy single, because there is no GPU to plan for.\n")
    environment, launch = command_in(text)
    assert launch.config_file == str(ROOT / "accelerate_configs" / "single.yaml")
    assert launch.num_processes is None
    assert launch.training_script == str(ROOT / "recipes" / "sft.py")
    config = parse(Config, launch.training_script_args)
    assert (config.train.epochs, config.data.train) == (2, "my file.jsonl")
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert all(len(line) <= 80 or "/" in line for line in text.splitlines())


@pytest.mark.parametrize(("configuration", "recipe"), [("dpo_sample", "dpo"), ("pretrain_tiny", "pretrain")])
def test_recipe_is_the_one_that_the_configuration_is_for(
    configuration: str, recipe: str, capsys: pytest.CaptureFixture[str]
):
    text = printed(capsys, ROOT / "recipes" / "configs" / f"{configuration}.yaml")
    assert command_in(text)[1].training_script == str(ROOT / "recipes" / f"{recipe}.py")


def test_processes_share_the_cores_and_find_a_free_port(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(train_verb.cores, "usable", lambda: 9)
    environment, launch = command_in(printed(capsys, SAMPLE, "--strategy", "fsdp2", "--processes", "4"))
    assert environment == {"OMP_NUM_THREADS": "2"}
    assert (launch.num_processes, launch.main_process_port) == (4, 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # chosen by the user
    assert "OMP_NUM_THREADS" not in printed(capsys, SAMPLE, "--processes", "2")


def test_files_in_the_current_folder_count_more_than_those_of_the_package(capsys: pytest.CaptureFixture[str]):
    for folder, file in (("accelerate_configs", "zero2.yaml"), ("recipes", "sft.py")):
        Path(folder).mkdir()
        (Path(folder) / file).write_text((ROOT / folder / file).read_text())
    launch = command_in(printed(capsys, SAMPLE, "--strategy", "zero2", "--processes", "2"))[1]
    assert (launch.config_file, launch.training_script) == ("accelerate_configs/zero2.yaml", "recipes/sft.py")
    Path("accelerate_configs/mine.yaml").write_text("distributed_type: MULTI_GPU\nmixed_precision: 'no'\n")
    for named in ("mine", "accelerate_configs/mine.yaml"):
        launch = command_in(printed(capsys, SAMPLE, "--strategy", named))[1]
        assert (launch.config_file, launch.num_processes) == ("accelerate_configs/mine.yaml", 1)


@pytest.mark.parametrize(
    ("strategy", "flag"),
    [("pp", "megatron_lm_pp_degree"), ("tp", "megatron_lm_tp_degree"), ("cp", "parallelism_config_cp_size")],
)
def test_stages_and_other_sizes_of_a_strategy_are_told_to_accelerate(
    strategy: str, flag: str, capsys: pytest.CaptureFixture[str]
):
    asked = SAMPLE, "--strategy", strategy, "--processes", "4"
    launch = command_in(printed(capsys, *asked, "--size", "4"))[1]
    assert getattr(launch, flag) == 4
    assert f"--{flag}" not in printed(capsys, *asked)
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    environment = launch_environment(file, 4, None, [f"--{flag}", "4"])
    assert environment[flag.upper()] == "4"


def test_both_sizes_of_a_pipeline_of_split_layers_are_told_to_accelerate(capsys: pytest.CaptureFixture[str]):
    asked = SAMPLE, "--strategy", "tp_pp", "--processes", "8", "--size"
    launch = command_in(printed(capsys, *asked, "4x2"))[1]
    assert (launch.megatron_lm_tp_degree, launch.megatron_lm_pp_degree) == (4, 2)
    said = refused(capsys, *asked, "4")
    assert "--size 4: " in said
    assert "has a number of GPUs for each layer and stages; give --size 2x2, for example, or leave it out." in said


def test_sizes_that_a_strategy_does_not_have_are_refused(capsys: pytest.CaptureFixture[str]):
    said = refused(capsys, SAMPLE, "--strategy", "ddp", "--processes", "2", "--size", "2")
    assert f"--size 2 is for the strategy files {', '.join(SIZES)}; leave it out, as " in said
    assert "--size 1: must be at least 2" in refused(capsys, SAMPLE, "--strategy", "pp", "--size", "1")
    assert "--size 2 is that of a strategy; name it with --strategy." in refused(capsys, SAMPLE, "--size", "2")
    asked = SAMPLE, "--strategy", "pp", "--processes", "4", "--size", "3"
    assert "--size 3: 4 processes cannot be divided into groups of it" in refused(capsys, *asked)


def test_a_file_of_ones_own_has_the_size_of_what_it_asks_for(capsys: pytest.CaptureFixture[str]):
    for strategy, name in (("pp", "mine"), ("ddp", "pp")):
        text = (ROOT / "accelerate_configs" / f"{strategy}.yaml").read_text()
        Path(f"{name}.yaml").write_text(text)
    asked = SAMPLE, "--processes", "4", "--size", "4", "--strategy"
    assert command_in(printed(capsys, *asked, "mine.yaml"))[1].megatron_lm_pp_degree == 4
    assert "leave it out, as pp.yaml has no size." in refused(capsys, *asked, "pp.yaml")


def test_precision_is_that_of_the_file_but_on_a_cpu_without_units_for_bf16(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert "--mixed_precision" not in printed(capsys, SAMPLE)
    assert command_in(printed(capsys, SAMPLE, "--mixed-precision", "no"))[1].mixed_precision == "no"
    monkeypatch.setattr(launcher, "native_precision", lambda: "no")
    assert command_in(printed(capsys, SAMPLE))[1].mixed_precision == "no"
    assert "--mixed_precision" not in printed(capsys, SAMPLE, "--mixed-precision", "bf16")


def test_command_as_json_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]):
    told = json.loads(printed(capsys, SAMPLE, "--processes", "2", "--json", "--data.train", "my file.jsonl"))
    text = printed(capsys, SAMPLE, "--processes", "2", "--data.train", "my file.jsonl")
    strategy, _, command = text.partition("\n")
    assert strategy == f"Strategy {told['strategy']}, {told['why']}."
    assert told["command"] == shlex.split(command.replace("\\\n", " "))
    assert (told["processes"], told["mixed_precision"]) == (2, "bf16")
    named = json.loads(printed(capsys, SAMPLE, "--strategy", "zero2", "--json"))
    assert (Path(named["strategy"]).stem, named["why"]) == ("zero2", None)


def test_recipe_of_the_users_own_is_started_with_its_own_keys(capsys: pytest.CaptureFixture[str]):
    Path("mine.py").write_text("")
    launch = command_in(printed(capsys, SAMPLE, "--recipe", "mine.py", "--mine.weight", "2"))[1]
    assert launch.training_script == "mine.py"
    assert launch.training_script_args[-2:] == ["--mine.weight", "2"]


@pytest.fixture
def eight_gpus(arithmetic_steps: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with GPUs, whose planner answers in this process; returns a configuration of an 8B model."""

    def plan(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:3] == ["-m", "finetune.cli"]
        with (tmp_path / "answer").open("w") as file, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", file)
            code = commands.main(command[3:])
        return subprocess.CompletedProcess(command, code, (tmp_path / "answer").read_text())

    monkeypatch.setattr(launcher, "gpu_count", lambda: 8)
    monkeypatch.setattr(train_verb.subprocess, "run", plan)
    monkeypatch.setattr(asked, "gpus_here", lambda: parse_gpus("8xH100"))
    monkeypatch.setattr(asked, "host_memory_here", lambda: 2**40)
    monkeypatch.setattr(asked, "free_disk", lambda folder: 2**42)
    (tmp_path / "config.json").write_text(json.dumps(config_named("llama-3.1-8b")))
    (tmp_path / "config.yaml").write_text(
        f"model: {{path: {tmp_path}}}\ndata: {{train: rows.jsonl, max_length: 2048}}\ntrain: {{output_dir: out}}\n"
    )
    return str(tmp_path / "config.yaml")


def test_strategy_on_gpus_is_the_planners_for_as_many_as_are_used(
    eight_gpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    text = printed(capsys, eight_gpus)
    launch = command_in(text)[1]
    assert text.startswith(f"Strategy {Path(launch.config_file).stem}, by the plan: Full fine-tuning under ")
    assert launch.num_processes == 8
    one = command_in(printed(capsys, eight_gpus, "--gpus", "1", "--adapter.type", "lora"))[1]
    assert Path(one.config_file).stem == "single"
    offloaded = command_in(printed(capsys, eight_gpus, "--gpus", "1"))[1]  # 16 bytes a weight are more than 80 GB
    assert Path(offloaded.config_file).stem.endswith("_offload")
    monkeypatch.setattr(asked, "gpus_here", lambda: parse_gpus("8xV100-32GB"))
    assert command_in(printed(capsys, eight_gpus, "--adapter.type", "lora"))[1].mixed_precision == "fp16"


def test_stages_that_the_planner_recommends_are_those_that_are_started(
    eight_gpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    row = {"strategy": "pp", "stages": 4}
    answer = {"recommended": 0, "reason": "It is fast.", "rows": [row], "machines": {"gpu": {"bf16": True}}}
    done = subprocess.CompletedProcess([], 0, json.dumps(answer))
    monkeypatch.setattr(train_verb.subprocess, "run", lambda *_, **__: done)
    launch = command_in(printed(capsys, eight_gpus))[1]
    assert (Path(launch.config_file).stem, launch.megatron_lm_pp_degree) == ("pp", 4)


def test_flags_of_a_section_that_only_a_recipe_of_ones_own_has_are_not_the_planners(
    eight_gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "mine.py").touch()
    own = ["--recipe", str(tmp_path / "mine.py"), "--mine.temperature", "3", "--gpus", "1"]
    text = printed(capsys, eight_gpus, *own, "--adapter.type", "lora")
    assert "Strategy single" in text
    assert "--mine.temperature 3" in text


def test_what_a_run_was_told_is_told_of_it_whatever_became_of_its_file(
    eight_gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Who starts a run writes the next one into the same file while it trains."""
    monkeypatch.chdir(tmp_path)

    def launch(*_: Any, **__: Any) -> int:
        Path(eight_gpus).write_text("train: {output_dir: [half")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "run.yaml").write_text("eval_loss: {before: 2.0, after: 1.0}")
        return 0

    monkeypatch.setattr(launcher, "launch", launch)
    assert commands.main(["train", eight_gpus, "--strategy", "single", "--gpus", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"exit_code": 0, "output_dir": "out", "eval_loss": {"before": 2.0, "after": 1.0}}


def test_what_cannot_fit_is_not_started_unless_a_strategy_is_named(
    eight_gpus: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(asked, "gpus_here", lambda: parse_gpus("1x8GB"))
    monkeypatch.setattr(asked, "host_memory_here", lambda: 2**33)
    sentence = refused(capsys, eight_gpus, "--gpus", "1")
    assert f"nothing fits on 1 of these GPUs; run finetune plan --config {eight_gpus}" in sentence
    assert "Strategy" not in printed(capsys, eight_gpus, "--strategy", "single", "--gpus", "1")


# What is wrong


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nope.yaml", "nope.yaml is not a file; give the configuration first"),
        ("--config {sample}", "Give the configuration first, without --config"),
        ("{sample} --config={sample}", "Give the configuration first, without --config"),
        ("{sample} --train.epoch 2", "Unknown flag --train.epoch; did you mean train.epochs?"),
        ("{sample} --strategy fdsp2", "unknown strategy fdsp2; did you mean fsdp2?"),
        ("{sample} --strategy none.yaml", "unknown strategy none.yaml"),
        ("{sample} --strategy {sample}", "is not a strategy file"),
        ("{sample} --strategy two.yaml", "two.yaml asks for 2 machines"),
        ("{sample} --gpus 2", "--gpus 2: no GPU was found; see finetune doctor, or use --processes 2"),
        ("{sample} --processes 0", "--processes 0: must be at least 1"),
        ("{sample} --recipe none.py", "--recipe: there is no file none.py"),
    ],
)
def test_wrong_input_is_a_sentence_before_anything_starts(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str]
):
    Path("two.yaml").write_text("distributed_type: MULTI_GPU\nnum_machines: 2\n")
    assert sentence in refused(capsys, *words.format(sample=SAMPLE).split())


def test_more_processes_than_gpus_are_refused(eight_gpus: str, capsys: pytest.CaptureFixture[str]):
    for flag in ("--gpus", "--processes"):
        assert f"{flag} 9: this machine has 8 GPUs; give at most 8." in refused(capsys, eight_gpus, flag, "9")


# With what it ends


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", f"import os, signal, sys, time\n{code}"]


def test_exit_code_is_that_of_the_first_process_that_failed_and_the_others_are_ended():
    start = time.monotonic()
    commands_ = [python("time.sleep(60)"), python("sys.exit(2)"), python("time.sleep(60)")]
    assert run_together(commands_, [dict(os.environ)] * 3) == 2
    assert time.monotonic() - start < 30
    assert run_together([python(""), python("")], [dict(os.environ)] * 2) == 0


def test_process_that_is_killed_is_named(capfd: pytest.CaptureFixture[str]):
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    assert run_together([python("time.sleep(60)"), python(killed)], [dict(os.environ)] * 2) == 128 + signal.SIGKILL
    assert "error: process 1 of the run was ended by SIGKILL; most often the machine's memory was full." in (
        capfd.readouterr().err
    )


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", launcher.PASSED_ON)
def test_signals_reach_every_process_and_the_launcher_waits_for_them(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
):
    saves = f"""
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which the launcher sends once the other one has ended
signal.signal({int(number)}, lambda *_: (time.sleep(0.2), os.write(1, b"saved\\n"), os._exit(75)))
open("ready-" + sys.argv[1], "w").close()
if sys.argv[1] == "1":
    while not os.path.exists("ready-0"):
        time.sleep(0.01)
    os.kill(os.getppid(), {int(number)})
time.sleep(60)
"""
    earlier = signal.getsignal(number)
    assert run_together([[*python(saves), rank] for rank in "01"], [dict(os.environ)] * 2) == 75
    assert signal.getsignal(number) is earlier
    assert capfd.readouterr() == ("saved\nsaved\n", "")


# Real runs


def finetune(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "finetune.cli", "train", *map(str, arguments), "--mixed-precision", "no"]
    cleaned = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE", "FSDP", "PYTEST"))}
    cleaned |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cleaned)


@pytest.fixture
def configuration(model_folder: Path, conversations: Path, tmp_path: Path) -> Path:
    flags = [*flags_for(model_folder, conversations, tmp_path / "out"), "--model.random_weights", "true"]
    run = parse(Config, list(map(str, flags)))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run.model_dump()))
    return tmp_path / "config.yaml"


@pytest.mark.prove  # test_launch sees that two processes print it once, and others that the code is passed on
def test_refusal_of_two_processes_is_printed_once_and_ends_with_code_2(configuration: Path):
    process = finetune(configuration, "--processes", "2", "--train.global_batch_size", "7")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 2, errors
    assert errors.count("error: ") == errors.count("error: train.global_batch_size 7 rows cannot be shared") == 1
    assert "Traceback" not in output + errors
    assert "exitcode" not in errors


def test_two_processes_train_with_the_losses_of_one(
    configuration: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    held_out = ["--data.eval", "0.25"]
    process = finetune(configuration, "--processes", "2", "--strategy", "fsdp2", "--json", *held_out)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    told = json.loads(output.splitlines()[-1])
    assert (told["exit_code"], told["output_dir"]) == (0, str(tmp_path / "out"))
    assert output.count("fsdp2 on 2 processes, computing in fp32: rehearsal on CPU") == 1
    flags = ["--config", str(configuration), "--train.output_dir", str(tmp_path / "reference"), *held_out]
    monkeypatch.setattr("finetune.distributed.strategy.native_precision", lambda: "no")
    main(parse(Config, flags))
    found, expected = (scenarios.read_metrics(tmp_path / name) for name in ("out", "reference"))
    assert len(found) == 4
    assert told["eval_loss"]["after"] == pytest.approx(expected[-1]["eval_loss"], abs=1e-5)
    for key in ("loss", "grad_norm", "tokens", "learning_rate"):
        assert [line[key] for line in found] == pytest.approx([line[key] for line in expected], abs=1e-5)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.prove), 2])
def test_run_that_is_asked_to_stop_saves_and_ends_with_code_75(processes: int, configuration: Path, tmp_path: Path):
    process = finetune(configuration, "--train.steps", "5000", "--processes", str(processes), "--json")
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 75, errors
    assert errors.count("SIGTERM ended the run after step") == 1
    assert json.loads(output.splitlines()[-1])["exit_code"] == 75
    (checkpoint,) = open_all(tmp_path / "out")[0]
    assert (checkpoint.manifest.processes, checkpoint.damaged()) == (processes, [])


PRINTS_ITS_ENVIRONMENT = """
import json, os
from pathlib import Path

Path(f"environment-{os.environ.get('RANK')}.json").write_text(json.dumps(dict(os.environ)))
"""
OF_THE_LAUNCHER = {"GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"}
"""What PyTorch's elastic launcher tells its processes of groups of processes that there are none of."""
SET_WHEN_IMPORTED = {"PYTORCH_NVML_BASED_CUDA_CHECK"}
"""By DeepSpeed, which Accelerate's launcher imports, and the recipe."""


@pytest.mark.parametrize("strategy", ["single", "zero3"])
def test_processes_have_the_environment_that_the_printed_command_gives_them(
    strategy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for key in [key for key in os.environ if key.startswith(("ACCELERATE", "FSDP"))]:
        monkeypatch.delenv(key)
    Path("mine.py").write_text(PRINTS_ITS_ENVIRONMENT)
    asked = [SAMPLE, "--recipe", "mine.py", "--strategy", strategy]
    assert commands.main(["train", *asked]) == 0
    text = capsys.readouterr().out
    [file] = Path().glob("environment-*.json")
    started = json.loads(file.read_text())
    file.unlink()
    environment, _ = command_in(text)
    words = shlex.split(text[text.index("--config_file") :].replace("\\\n", " "))
    command = [sys.executable, "-m", "accelerate.commands.launch", *words]
    subprocess.run(command, env=os.environ | environment, check=True, timeout=120)
    expected = json.loads(file.read_text())
    differing = {key for key in started.keys() | expected.keys() if started.get(key) != expected.get(key)}
    assert {key for key in differing if "TORCHELASTIC" not in key} <= OF_THE_LAUNCHER | SET_WHEN_IMPORTED
