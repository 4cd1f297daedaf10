"""Runs on two machines, with a network of their own between them: see ``machines``."""

import json
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import machines
import pytest
import scenarios
import tiny
from machines import Machine
from scenarios import read_metrics

from finetune.cli import commands
from finetune.cli.links.links_file import read_links
from recipes import sft

WITHOUT = machines.problem()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(WITHOUT is not None, reason=f"{WITHOUT}")]
SOON = """
import runpy
from finetune.distributed import heartbeat
heartbeat.BEAT_SECONDS, heartbeat.SILENCE_SECONDS, heartbeat.GRACE_SECONDS = 0.5, 4.0, 1.0
runpy.run_path({recipe!r}, run_name="__main__")
"""
"""The recipe, which takes another machine for lost after seconds instead of minutes."""
LINKS = ["-m", "finetune.cli", "links", "--seconds", "0.2", "--output"]
STEPS = 12


@pytest.fixture
def two() -> Iterator[tuple[Machine, Machine]]:
    with machines.two_machines() as found:
        yield found


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "soon.py"
    path.write_text(SOON.format(recipe=str(machines.ROOT / "recipes" / "sft.py")))
    return path


def flags(model: Path, train: Path, output: Path, *more: str) -> list[str]:
    """Of a run on the tiny model."""
    values = ["--model.path", model, "--model.random_weights", "true", "--data.train", train, "--data.max_length", "64"]
    values += ["--train.output_dir", output, "--train.steps", STEPS, "--train.global_batch_size", "8"]
    values += ["--train.learning_rate", "1e-3", "--train.warmup_ratio", "0.1", "--train.weight_decay", "0.1"]
    values += ["--log.report", "false", "--checkpoint.every", "2", *more]
    return [str(value) for value in values]


def steps_of(output: Path) -> int:
    """Steps that a run has written down."""
    file = output / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def wait_for_step(step: int, output: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while steps_of(output) < step:
        assert time.monotonic() < deadline, f"no step {step} in {seconds:.0f} s"
        time.sleep(0.05)


def torchrun(machine: Machine, processes: int) -> list[str]:
    """Starts so many processes on a machine, of two."""
    first = ["--master_addr", "10.77.0.1", "--master_port", str(machines.PORT)]
    number = ["--nnodes", "2", "--node_rank", str(machine.number), "--nproc_per_node", str(processes)]
    return [sys.executable, "-m", "torch.distributed.run", *number, *first]


def said(folder: Path, machine: Machine) -> str:
    """The output of a machine's launcher."""
    return (folder / f"{machine.host}.log").read_text()


def losses(output: Path) -> list[float]:
    return [metrics["loss"] for metrics in read_metrics(output)]


def test_run_whose_second_machine_is_lost_ends_and_goes_on_from_its_checkpoint_on_the_first_alone(
    two: tuple[Machine, Machine],
    recipe: Path,
    model_folder: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    output = tmp_path / "run"
    its = flags(model_folder, conversations, output, "--checkpoint.resume", "auto")
    for machine in two:
        machine.limit(megabits_per_second=30)  # a step takes long enough to be hit
    first, second = started = machines.launch(two, "fsdp2", 2, recipe, [its, its], tmp_path)
    try:
        wait_for_step(5, output)
        assert said(tmp_path, two[0]).count("fsdp2 on 2 processes") == 1
        assert "step" not in said(tmp_path, two[1])
        two[1].unplug()
        second.kill()
        began = time.monotonic()
        assert first.wait(timeout=60) != 0
    finally:
        machines.end(started)
    assert time.monotonic() - began < 20
    where = r"last seen in step \d+, at finetune/\S+, line \d+ \(\w+\)"
    told = f"error: nothing was heard of process 1 on node2 for 4 s, {where}: the machine or the network is lost, so"
    assert re.search(told + " process 0 exits too", said(tmp_path, two[0]))
    done = steps_of(output)
    assert 5 <= done < STEPS

    [alone] = machines.launch(two[:1], "fsdp2", 1, recipe, [its], tmp_path)
    assert alone.wait(timeout=120) == 0, said(tmp_path, two[0])
    undisturbed = tmp_path / "undisturbed"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as on the machines; this CPU may compute in bf16
    sft.main(
        scenarios.configuration(
            model_folder, conversations, undisturbed, train__steps=STEPS, train__global_batch_size=8
        )
    )
    assert losses(output) == pytest.approx(losses(undisturbed), abs=1e-5)


@pytest.mark.prove
@pytest.mark.parametrize("rank", [3, 0], ids=["of the second machine", "of the first"])
def test_process_that_stops_answering_is_named_by_the_other_machine_which_ends(
    rank: int,
    two: tuple[Machine, Machine],
    recipe: Path,
    model_folder: Path,
    conversations: Path,
    tmp_path: Path,
):
    output = tmp_path / "run"
    its = flags(model_folder, conversations, output)
    for machine in two:
        machine.limit(megabits_per_second=30)
    started = machines.launch(two, "ddp", 4, recipe, [its, its], tmp_path)
    other = 1 if rank == 0 else 0
    try:
        wait_for_step(2, output)
        machines.send(signal.SIGSTOP, rank, recipe)
        began = time.monotonic()
        assert started[other].wait(timeout=60) != 0
    finally:
        machines.end(started)
    assert time.monotonic() - began < 20
    told = f"nothing was heard of process {rank} on {two[1 - other].host} for 4 s, last seen in step "
    assert told in said(tmp_path, two[other])


@pytest.mark.prove
def test_over_a_slow_cable_hsdp_takes_less_time_a_step_than_fsdp2(
    two: tuple[Machine, Machine],
    recipe: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """And so it is planned with what ``finetune links`` measures there."""
    model = tiny.build_model_folder(tmp_path / "model", hidden_size=128, intermediate_size=256)
    seconds = {}
    for machine in two:
        machine.limit(megabits_per_second=20)
    for strategy in ("fsdp2", "hsdp"):
        output = tmp_path / strategy
        its = flags(model, conversations, output)
        started = machines.launch(two, strategy, 4, recipe, [its, its], tmp_path)
        try:
            assert [process.wait(timeout=240) for process in started] == [0, 0], said(tmp_path, two[0])
        finally:
            machines.end(started)
        seconds[strategy] = statistics.median(metrics["step_seconds"] for metrics in read_metrics(output))
    assert seconds["hsdp"] < 0.8 * seconds["fsdp2"]

    links = tmp_path / "links.json"
    began = time.monotonic()
    started = [machine.start([*torchrun(machine, 2), *LINKS, str(links)], tmp_path / machine.host) for machine in two]
    try:
        assert [process.wait(timeout=240) for process in started] == [0, 0], (tmp_path / two[0].host).read_text()
    finally:
        machines.end(started)
    assert time.monotonic() - began < 90
    between = read_links(links).between
    assert between is not None
    assert between.gb_per_second == pytest.approx(20e6 / 8 / 1e9, rel=0.2)
    options = ["--model", str(model), "--method", "full", "--gpus", "2x2xH100", "--links", str(links), "--json"]
    assert commands.main(["plan", *options]) == 0
    planned = {row["strategy"]: row["tokens_per_second"] for row in json.loads(capsys.readouterr().out)["rows"]}
    assert planned["hsdp"] > 1.2 * planned["fsdp2"]
