"""`finetune links`: the arithmetic of bandwidth, who is slow, what is measured, and what a plan takes of it."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_models import config_named

from finetune.cli import commands
from finetune.cli.links import measuring
from finetune.cli.links.bus_bandwidth import (
    ALL_GATHER,
    ALL_REDUCE,
    BETWEEN,
    EXCHANGE,
    INSIDE,
    OPERATIONS,
    REDUCE_SCATTER,
    Timing,
    link_of,
    rounds_of,
    seconds_of,
    with_slow_computation,
    with_slow_links,
)
from finetune.cli.links.links_file import LinksFile, Machine, read_links
from finetune.cli.links.links_table import sentences
from finetune.errors import InputError, RunStopped
from finetune.hardware.cards import parse_gpus
from finetune.planner.speed import at_known_speed

ROOT = Path(__file__).parent.parent
MB, MICROSECOND = 10**6, 1e-6


@pytest.mark.parametrize(
    ("operation", "members", "share"),
    [
        (ALL_REDUCE, 2, 1.0),
        (ALL_REDUCE, 8, 1.75),
        (ALL_GATHER, 8, 0.875),
        (REDUCE_SCATTER, 4, 0.75),
        (EXCHANGE, 4, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(operation: str, members: int, share: float):
    """Its factors, by its own document: 2 (n - 1) / n of an all-reduce, (n - 1) / n of the others."""
    one = Timing(INSIDE, operation, 64 * MB, 0.01, members)
    assert one.bus_gb_per_second == pytest.approx(6.4 * share)


@pytest.mark.parametrize("members", [2, 3, 4, 8])
def test_a_ring_of_known_links_is_found_from_its_times(members: int):
    """As the planner computes them: bytes over bandwidth, and the latency of 2 (n - 1) hops."""

    def seconds(size: int) -> float:
        return 2 * (members - 1) / members * size / 25e9 + 2 * (members - 1) * 7e-6

    sizes = (4096, 2**30)
    timings = [Timing(BETWEEN, ALL_REDUCE, size, seconds(size), members) for size in sizes]
    timings.append(Timing(INSIDE, ALL_REDUCE, 2**30, 1e-9, members))
    found = link_of(timings, BETWEEN, side_by_side=4)
    assert found is not None
    assert found.gb_per_second == pytest.approx(4 * 25, rel=0.01)
    assert found.microseconds == pytest.approx(7, rel=0.05)


@given(st.integers(2, 17))
def test_each_link_of_a_ring_is_used_once_and_no_process_twice_in_a_round(members: int):
    rounds = list(rounds_of(members))
    links = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert len(links) == len(set(links)) == (members if members > 2 else 1)
    assert set().union(*links) == set(range(members))
    for pairs in rounds:
        everyone = [place for pair in pairs for place in pair]
        assert len(everyone) == len(set(everyone))


@given(st.integers(3, 16), st.data())
def test_the_slow_process_is_found_and_its_neighbours_are_not(members: int, data: st.DataObject):
    slow = data.draw(st.integers(0, members - 1))
    best = dict.fromkeys(range(members), 0.0)
    for one, other in (pair for pairs in rounds_of(members) for pair in pairs):
        speed = 2.0 if slow in (one, other) else data.draw(st.floats(9.0, 11.0))
        best[one], best[other] = max(best[one], speed), max(best[other], speed)
    assert with_slow_links(best) == [slow]
    assert with_slow_computation({rank: 3.0 if rank == slow else 1.0 for rank in range(members)}) == [slow]
    assert with_slow_links(dict.fromkeys(range(members), 10.0)) == []


def test_of_two_processes_nobody_can_tell_which_is_slow():
    assert with_slow_links({0: 1.0, 1: 10.0}) == with_slow_computation({0: 1.0, 1: 10.0}) == []


def found_of(
    *timings: Timing, machines: int = 2, processes: int = 8, device: str = "NVIDIA H100 80GB HBM3"
) -> LinksFile:
    machine = Machine(device=device, backend="NCCL", torch="2.13.0")
    return LinksFile(machines=machines, processes_per_machine=processes, machine=machine, timings=list(timings))


SLOW_NETWORK = found_of(
    *(Timing(INSIDE, ALL_REDUCE, size, 28e-6 + 1.75 * size / 300e9, 8) for size in (4096, 2**28)),
    *(Timing(BETWEEN, ALL_REDUCE, size, 40e-6 + 1.0 * size / 0.1e9, 2) for size in (4096, 2**28)),
)


def test_links_are_held_against_what_a_plan_assumes():
    inside, between, *_ = sentences(SLOW_NETWORK)
    assert inside.startswith(
        "inside a machine: 295 GB/s, 2.00 us a hop; 82% of the 360 GB/s that a plan assumes for nv"
    )
    assert between.startswith("between machines, of each: 0.80 GB/s")
    assert "of the 360 GB/s that a plan assumes for ndr" in between
    unknown = SLOW_NETWORK.model_copy(update={"machine": Machine(device="CPU", backend="gloo", torch="2")})
    assert not any("assumes" in line for line in sentences(unknown))
    slow = SLOW_NETWORK.model_copy(update={"slow_links": [9]})
    assert "Slower than the others by its links: process 9 (on machine 1)." in list(sentences(slow))


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert commands.main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.slow
def test_a_plan_takes_measured_links_in_place_of_data_sheets(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Over a slow network, replicas of shards are faster than shards over all machines, and without a file they are not
    worth much."""
    (tmp_path / "config.json").write_text(json.dumps(config_named("smollm2-135m")))
    (tmp_path / "links.json").write_text(SLOW_NETWORK.model_dump_json())
    words = ["--model", str(tmp_path / "config.json"), "--gpus", "2x8xH100", "--method", "full"]
    speed = {}
    for name, more in (("sheet", []), ("measured", ["--links", str(tmp_path / "links.json")])):
        found = answer(capsys, *words, *more)
        speed[name] = {row["strategy"]: row["tokens_per_second"] for row in found["rows"]}
        assert any("as measured by finetune links" in note for note in found["notes"]) == bool(more)
    assert speed["measured"]["fsdp2"] < 0.2 * speed["sheet"]["fsdp2"]
    assert speed["measured"]["hsdp"] > 1.5 * speed["measured"]["fsdp2"]


def test_links_that_were_measured_count_for_a_card_of_unknown_speed_too():
    asked = parse_gpus("2x8x80GB")
    measured = SLOW_NETWORK.given_to(asked).gpu
    found = at_known_speed(SLOW_NETWORK.given_to(asked)).gpu
    assert (found.name, found.node_link, found.network) == ("H100", measured.node_link, measured.network)
    assert at_known_speed(asked) == parse_gpus("2x8xH100")
    known = parse_gpus("2x8xH100")
    assert at_known_speed(known) is known


def test_a_plan_says_where_what_was_measured_is_not_what_is_planned():
    alone = found_of(*SLOW_NETWORK.timings[:2], machines=1, processes=4)
    notes = alone.notes(parse_gpus("2x8xH100"))
    assert any("between machines were not measured" in note for note in notes)
    assert any("measured with 4 GPUs of a machine, and 8 are planned for" in note for note in notes)
    machines = alone.given_to(parse_gpus("2x8xH100"))
    assert machines.gpu.network == parse_gpus("2x8xH100").gpu.network
    assert machines.gpu.node_link.gb_per_second == pytest.approx(295, rel=0.01)
    assert len(SLOW_NETWORK.notes(parse_gpus("2x8xH100"))) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("not json", "not such a file"),
        ('{"machines": 1}', "not such a file"),
        (SLOW_NETWORK.model_dump_json().replace('"seconds":', '"seconds":-', 1), "times that cannot be"),
    ],
)
def test_what_is_no_file_of_links_is_refused(
    content: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "links.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=said):
        read_links(file)
    assert commands.main(["plan", "--model", "nothing", "--gpus", "8xH100", "--links", str(file)]) == 2
    assert "--links" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "1"], "--processes 1: a link needs two processes"),
        (["--gpus", "2"], "--gpus 2: this machine has no GPU; use --processes 2 to rehearse on the CPU."),
        ([], "This machine has no GPU: a link needs two"),
        (["--processes", "2", "--seconds", "0"], "--seconds 0: must be above 0"),
        (["--processes", "2", "--output", "/nowhere/at/all.json"], "no folder /nowhere/at"),
    ],
)
def test_wrong_input_is_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.distributed.launcher.gpu_count", lambda: 0)
    assert commands.main(["links", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpus", "words", "said"),
    [
        (4, ["--gpus", "8"], "--gpus 8: this machine has 4; give at most that."),
        (1, ["--gpus", "2"], "one GPU, and a link needs two processes at least; start it on several machines"),
        (1, [], "This machine has one GPU: a link needs two processes at least; start it on several machines"),
    ],
)
def test_a_machine_with_gpus_is_not_told_to_rehearse_on_the_cpu_which_it_refuses(
    gpus: int, words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("finetune.distributed.launcher.gpu_count", lambda: gpus)
    assert commands.main(["links", *words]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "--processes" not in told


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RunStopped("The machines have 2, 1 processes; start as many on each."), "^The machines have 2, 1 processes"),
        (
            RuntimeError("Timed out after 120 s\nmore"),
            r"could not be measured \(Timed out after 120 s\)\. If",
        ),
    ],
)
def test_a_measurement_that_fails_says_why(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(measuring.dist, "init_process_group", fails)
    with pytest.raises(RunStopped, match=said):
        measuring.measure(0.1)


def environment() -> dict[str, str]:
    launch = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in os.environ.items() if key not in launch} | {"OMP_NUM_THREADS": "1"}


def test_the_time_of_a_size_is_that_of_the_slowest_operation_at_the_last_size():
    known = [(ALL_REDUCE, 2**10, 9.0), (ALL_REDUCE, 2**20, 0.5), (EXCHANGE, 2**20, 0.25)]
    timings = [Timing(BETWEEN, operation, size, seconds, 2) for operation, size, seconds in known]
    assert seconds_of(2**24, timings) == 8.0


@pytest.mark.slow
def test_links_of_one_machine_are_measured_and_written(tmp_path: Path):
    command = [sys.executable, "-m", "finetune.cli", "links", "--processes", "3", "--seconds", "0.01"]
    done = subprocess.run(
        [*command, "--output", "links.json"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "inside a machine: " in done.stdout
    found = read_links(tmp_path / "links.json")
    assert (found.machines, found.processes_per_machine, found.machine.backend) == (1, 3, "gloo")
    assert {each.operation for each in found.timings} == set(OPERATIONS)
    assert {each.members for each in found.timings} == {3}
    assert all(math.isfinite(each.bus_gb_per_second) for each in found.timings)
    assert found.inside is not None
    assert found.between is None


@pytest.mark.slow
def test_links_between_machines_are_told_from_those_inside(tmp_path: Path):
    """Two launchers on this machine, each of which starts the processes of one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    launch = f"torch.distributed.run --nnodes 2 --nproc_per_node 2 --master_addr 127.0.0.1 --master_port {port}".split()
    program = ["-m", "finetune.cli", "links", "--seconds", "0.01", "--json"]
    launchers = [
        subprocess.Popen(
            [sys.executable, "-m", *launch, "--node_rank", str(number), *program],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    said = [launcher.communicate(timeout=120)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert not said[1].strip()
    found = LinksFile.model_validate_json(said[0])
    assert (found.machines, found.processes_per_machine) == (2, 2)
    assert found.inside is not None
    assert found.between is not None
    assert {each.scope for each in found.timings} == {INSIDE, BETWEEN}
