"""Killed at any instant and started again, a run ends as if nobody had touched it."""

import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from killing import KINDS, MOMENTS, STARTING, Kill, Trial, a_kill
from launching import LaunchServer

if sys.platform != "linux":
    pytest.skip("lost processes are seen on Linux only", allow_module_level=True)

FULL: list[str] = []
LORA = ["--adapter.type", "lora", "--adapter.rank", "4", "--adapter.dropout", "0.3"]
LAUNCHES = [("single", 1, LORA), ("ddp", 2, LORA), ("fsdp2", 2, FULL), ("zero2", 2, FULL), ("pp", 2, FULL)]
KILLS = {
    "single": [(signal.SIGKILL, "one rank", "completed"), (signal.SIGINT, "everyone", "step")],
    "ddp": [
        (signal.SIGKILL, "one rank", "step"),
        (signal.SIGTERM, "one rank", "written"),
        (signal.SIGKILL, "launcher", "step"),
    ],
    "fsdp2": [
        (signal.SIGKILL, "all ranks", "written"),
        (signal.SIGTERM, "launcher", "step"),
        (signal.SIGKILL, "one rank", "starting"),
    ],
    "zero2": [
        (signal.SIGKILL, "everyone", "completed"),
        (signal.SIGUSR1, "one rank", "step"),
        (signal.SIGTERM, "all ranks", "written"),
    ],
    "pp": [
        (signal.SIGKILL, "one rank", "step"),
        (signal.SIGTERM, "all ranks", "completed"),
        (signal.SIGKILL, "all ranks", "written"),
    ],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchServer]:
    started = LaunchServer(tmp_path_factory.mktemp("server") / "output.log")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def trial(
    server: LaunchServer, model_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, list[str]], Trial]:
    """``trial(name, settings)``: a run of its own in an empty folder."""
    settings = [
        "--model.path",
        str(model_folder),
        "--model.random_weights",
        "true",
        "--data.train",
        str(conversations),
        "--data.max_length",
        "64",
    ]
    rows = tiny.read_rows(conversations, tiny.build_tokenizer())
    sources = [row.source for row in rows]
    assert len(sources) == 80
    return lambda name, own: Trial(server, tmp_path_factory.mktemp("kills") / name, [*settings, *own], sources)


@pytest.mark.parametrize(("strategy", "processes", "settings"), LAUNCHES, ids=[name for name, *_ in LAUNCHES])
def test_run_that_is_killed_and_started_again_is_the_undisturbed_run_to_the_bit(
    strategy: str, processes: int, settings: list[str], trial: Callable[[str, list[str]], Trial]
):
    draw = random.Random(f"{strategy} {processes}")
    reference, disturbed = trial("undisturbed", settings), trial("disturbed", settings)
    reference.finish(strategy, processes)
    disturbed.starting_seconds, disturbed.step_seconds = reference.starting_seconds, reference.step_seconds
    killed = [
        disturbed.kill(strategy, processes, a_kill(draw, processes, *kind), write_seconds=0.1)
        for kind in KILLS[strategy]
    ]
    if strategy == "single":
        killed.append(disturbed.kill_before_change(strategy, processes, 0, draw.randint(17, 29)))
    assert None not in killed, "the run ended before it was killed"
    disturbed.finish(strategy, processes)
    ranks = {event["rank"] for event in disturbed.starts[-1].events() if "trains" in event}
    assert ranks == set(range(processes))
    disturbed.check(reference)


EVERY_LAUNCH = [*LAUNCHES, ("zero3", 2, FULL), ("fsdp2", 4, LORA)]
in_every_launch = pytest.mark.parametrize(
    ("strategy", "processes", "settings"),
    EVERY_LAUNCH,
    ids=[f"{name}x{processes}" for name, processes, _ in EVERY_LAUNCH],
)


@pytest.fixture(scope="module")
def undisturbed(trial: Callable[[str, list[str]], Trial]) -> Callable[[str, int, list[str]], Trial]:
    """The run of a launch that was left alone."""
    known: dict[tuple[str, int], Trial] = {}

    def reference(strategy: str, processes: int, settings: list[str]) -> Trial:
        if (strategy, processes) not in known:
            known[strategy, processes] = trial("undisturbed", settings)
            known[strategy, processes].finish(strategy, processes)
        return known[strategy, processes]

    return reference


@pytest.mark.prove
@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("kinds", [KINDS[:5], KINDS[5:]], ids=["first kinds", "other kinds"])
@in_every_launch
def test_run_that_gets_every_kind_of_kill_at_a_moment_is_the_undisturbed_run_to_the_bit(
    strategy: str,
    processes: int,
    settings: list[str],
    kinds: Any,
    when: str,
    trial: Callable[[str, list[str]], Trial],
    undisturbed: Callable[[str, int, list[str]], Trial],
):
    draw = random.Random(f"{strategy} {processes} {when}")
    reference, disturbed = undisturbed(strategy, processes, settings), trial("disturbed", settings)
    disturbed.starting_seconds, disturbed.step_seconds = reference.starting_seconds, reference.step_seconds
    for number, to in kinds:
        kill = Kill(number, to, when, after=1, fraction=draw.random(), victim=draw.randrange(processes))
        assert disturbed.kill(strategy, processes, kill) is not None, "the run ended before it was killed"
    disturbed.finish(strategy, processes)
    disturbed.check(reference)


@pytest.mark.prove
@pytest.mark.parametrize("victim", ["first rank", "last rank"])
@in_every_launch
def test_run_whose_process_dies_before_each_change_of_files_is_the_undisturbed_run_to_the_bit(
    strategy: str,
    processes: int,
    settings: list[str],
    victim: str,
    trial: Callable[[str, list[str]], Trial],
    undisturbed: Callable[[str, int, list[str]], Trial],
):
    """Before the first change, in the next start before the second, ... until the run has come to its end."""
    rank = 0 if victim == "first rank" else processes - 1
    reference, disturbed = undisturbed(strategy, processes, settings), trial("disturbed", settings)
    killed = 0
    while disturbed.kill_before_change(strategy, processes, rank, killed + 1) is not None:
        killed += 1
    assert killed >= (10 if rank == 0 else 1)
    disturbed.check(reference)


@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGINT, "everyone"), (signal.SIGUSR1, "one rank"), (signal.SIGKILL, "launcher")],
    ids=["SIGINT", "SIGUSR1", "launcher"],
)
def test_processes_end_at_once_before_the_first_step(number: int, to: str, trial: Callable[[str, list[str]], Trial]):
    disturbed = trial("starting", LORA)
    killed = disturbed.kill("ddp", 2, Kill(number, to, "starting", fraction=0.3), begin_seconds=2.0)
    assert {event["rank"] for event in disturbed.starts[0].events() if "pid" in event} == {0, 1}
    assert killed is not None
    assert (killed.phase, killed.last_step) == (STARTING, 0)
    assert killed.gone_seconds < 5
    assert killed.code not in (0, 75)
