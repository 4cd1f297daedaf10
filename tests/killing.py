"""Runs of the recipe that are killed and started again, held against one that nobody disturbed.

``Trial`` starts a run, kills it at instants that its own progress gives, and starts it again until it ends. After every
kill no process of the launch may be left, and what stands under the name of a checkpoint must be whole. At the end,
each step must stand in metrics.jsonl once, with the numbers of the undisturbed run, each process must have been given
the rows that seed and step say, and the results must be the same.
"""

import contextlib
import json
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from launching import Launch, LaunchServer
from parity import data_processes
from safetensors.torch import load_file

from finetune import checkpoint
from finetune.checkpoint import folder
from finetune.data.sampler import global_batch

EVERY, KEEP, STEPS, ROWS_PER_STEP, SEED = 3, 2, 30, 8, 42
GONE_WITHIN = 10.0
"""Seconds in which no process may be left after one was lost."""
SAVED_WITHIN = 60.0
"""Seconds in which a run that was asked to end has to."""
LONGEST = 120.0
"""Seconds of a whole run."""
COMPLETING = 0.06
"""Seconds in which a checkpoint is completed when its files are written, about."""
SAVED_AND_ENDED = 75
COMPARED = ("loss", "grad_norm", "learning_rate", "tokens", "total_tokens")
STARTING, STEPPING, SAVING, ENDING = "starting", "in a step", "in a save", "ending"


@dataclass(frozen=True)
class Kill:
    """A signal, and when it comes."""

    number: int
    to: str
    """``one rank``, ``all ranks``, ``launcher`` or ``everyone``."""
    when: str
    """While ``starting``, in a ``step``, while files are ``written``, or while the checkpoint is ``completed``."""
    after: int = 1
    """Steps or files that were begun, or files that were written, in this start."""
    fraction: float = 0.5
    """Of the time that this part of a run takes."""
    victim: int = 0
    """The rank, where it is one."""

    @property
    def name(self) -> str:
        return f"{signal.Signals(self.number).name} to {self.to}"


KINDS = (
    *((signal.SIGKILL, to) for to in ("one rank", "all ranks", "launcher", "everyone")),
    *((signal.SIGTERM, to) for to in ("one rank", "all ranks", "launcher")),
    (signal.SIGUSR1, "one rank"),
    (signal.SIGINT, "everyone"),
)
MOMENTS = ("starting", "step", "written", "completed")


@dataclass(frozen=True)
class Killed:
    """What became of a kill."""

    kill: str
    strategy: str
    processes: int
    phase: str
    """What the run was doing, by what stood on the disk and what its ranks had told."""
    gone_seconds: float
    """Until no process was left."""
    code: int
    """The launcher's exit code."""
    last_step: int
    """That any rank had begun."""
    resumes_after: int
    """Step of the newest checkpoint."""


def a_kill(draw: random.Random, processes: int, number: int, to: str, when: str) -> Kill:
    after = draw.randint(1, 6 if when == "step" else 3)
    return Kill(number, to, when, after, draw.random(), draw.randrange(processes))


class Trial:
    """One run, over all its starts.

    Args:
        folder: its own, which does not exist.
        settings: further flags of the recipe.
        sources: ``file:line`` of every training row, in order.
    """

    def __init__(self, server: LaunchServer, folder: Path, settings: list[str], sources: list[str]) -> None:
        self.server, self.folder, self.sources = server, folder, sources
        self.output = folder / "run"
        self.starts: list[Launch] = []
        self.starting_seconds, self.step_seconds = 1.0, 0.05
        own = {
            "train.output_dir": self.output,
            "train.steps": STEPS,
            "train.global_batch_size": ROWS_PER_STEP,
            "train.seed": SEED,
            "train.learning_rate": "1e-3",
            "checkpoint.every": EVERY,
            "checkpoint.keep": KEEP,
            "checkpoint.resume": "auto",
        }
        self.flags = (*settings, *(str(text) for key, value in own.items() for text in (f"--{key}", value)))

    def start(self, strategy: str, processes: int, **how: Any) -> tuple[Launch, int]:
        """Start the run, or start it again; returns the launch and its launcher's process id."""
        launch = Launch(strategy, processes, self.flags, self.folder / f"start-{len(self.starts)}", **how)
        self.starts.append(launch)
        return launch, self.server.start(launch)

    def finish(self, strategy: str, processes: int) -> None:
        """Start it and let it come to its end; what it did before the first step, and a step, are timed."""
        begun = time.time()
        launch, _ = self.start(strategy, processes)
        code = self.server.wait(LONGEST)
        assert code == 0, f"{strategy} on {processes}: exit code {code}\n{launch.output()}"
        at = [event["at"] for event in launch.events() if "step" in event]
        if len(at) > processes:
            self.starting_seconds, self.step_seconds = min(at) - begun, (max(at) - min(at)) / (len(at) / processes)

    def kill(
        self, strategy: str, processes: int, kill: Kill, write_seconds: float = 0.2, begin_seconds: float = 0.0
    ) -> Killed | None:
        """Start it and send a signal; None if it had ended before."""
        before = self._newest()
        launch, launcher = self.start(strategy, processes, write_seconds=write_seconds, begin_seconds=begin_seconds)
        if not self._await(launch, kill, write_seconds):
            code = self.server.wait(LONGEST)
            assert code == 0, f"exit code {code} before it was killed\n{launch.output()}"
            return None
        ranks = [event["pid"] for event in launch.events() if "pid" in event]
        pids = {"one rank": [ranks[kill.victim]], "all ranks": ranks, "launcher": [launcher]}
        phase = self._phase(launch)
        sent = time.monotonic()
        for pid in pids.get(kill.to, [launcher, *ranks]):
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, kill.number)
        lost = kill.number == signal.SIGKILL and kill.to != "launcher"
        return self._after(launch, kill.name, phase, sent, GONE_WITHIN if lost else SAVED_WITHIN, before)

    def kill_before_change(self, strategy: str, processes: int, rank: int, number: int) -> Killed | None:
        """Start it, and have a rank kill itself before the change of that number (from 1) to files of checkpoints.

        None if there are not so many.
        """
        before = self._newest()
        launch, _ = self.start(strategy, processes, dies_before=(rank, number))
        while not any("dies_before" in event for event in launch.events()):
            if (code := self.server.wait(0.01)) is not None:
                assert code == 0, f"it ended by itself with exit code {code}\n{launch.output()}"
                return None
        return self._after(
            launch, "SIGKILL between two changes of files", SAVING, time.monotonic(), GONE_WITHIN, before
        )

    def _after(self, launch: Launch, name: str, phase: str, sent: float, within: float, newest_before: int) -> Killed:
        code = self.server.wait(within)
        seconds = time.monotonic() - sent
        told = f"{name} ({phase}) under {launch.strategy} on {launch.processes}"
        assert code is not None, f"{told}: processes are left after {within} s\n{launch.output()}"
        self._stands(told, newest_before)
        last, newest = _last_step(launch), self._newest()
        asked = "SIGKILL" not in name or "launcher" in name
        if asked and phase in (STEPPING, SAVING) and last < STEPS:
            assert newest == last, f"{told}: ended after step {last}, saved after {newest}\n{launch.output()}"
            assert code in (SAVED_AND_ENDED, -signal.SIGKILL), f"{told}: exit code {code}\n{launch.output()}"
        elif asked and last == STEPS:
            phase = ENDING
        return Killed(name, launch.strategy, launch.processes, phase, seconds, code, last, newest)

    def _await(self, launch: Launch, kill: Kill, write_seconds: float) -> bool:
        """Until the instant of a kill; False if the run ends before it."""
        key = {"starting": "pid", "step": "step", "written": "writing", "completed": "written"}[kill.when]
        seconds = {
            "starting": self.starting_seconds,
            "step": self.step_seconds,
            "written": write_seconds,
            "completed": COMPLETING,
        }[kill.when]
        while True:
            events = launch.events()
            pids = {event["rank"] for event in events if "pid" in event}
            reached = [event for event in events if key in event]
            by_rank = max(sum(event["rank"] == rank for event in reached) for rank in range(launch.processes))
            if len(pids) == launch.processes and (kill.when == "starting" or by_rank >= kill.after):
                break
            if self._has_ended():
                return False
            time.sleep(0.003)
        until = time.monotonic() + kill.fraction * seconds
        while time.monotonic() < until:
            if kill.when == "starting" and _last_step(launch):
                break  # the undisturbed run was timed while more went on
            time.sleep(0.003)
        return not self._has_ended()

    def _has_ended(self) -> bool:
        return self.server.wait(0.0) is not None

    def _phase(self, launch: Launch) -> str:
        if not (last := _last_step(launch)):
            return STARTING
        if folder.unfinished(folder.checkpoints_of(self.output)):
            return SAVING
        done = any(event.get("written") == folder.name_of(STEPS) + ".tmp" for event in launch.events())
        return ENDING if last == STEPS and done else STEPPING

    def _newest(self) -> int:
        found, _ = checkpoint.newest(self.output)
        return found.step if found else 0

    def _stands(self, told: str, newest_before: int) -> None:
        """What has the name of a checkpoint is whole, none was lost, and there are not too many."""
        paths = folder.in_place(folder.checkpoints_of(self.output))
        for path in paths:
            assert checkpoint.open_checkpoint(path).damaged() == [], f"{told}: {path}"
        assert self._newest() >= newest_before, f"{told}: the newest checkpoint was lost"
        assert len(paths) <= KEEP + 1, f"{told}: {paths}"  # an older one goes when a newer one has come

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.output / "metrics.jsonl").read_text().splitlines()]

    def weights(self) -> dict[str, torch.Tensor]:
        (file,) = (self.output / "final").glob("*.safetensors")
        return load_file(file)

    def check(self, reference: "Trial", tolerance: float = 0.0) -> None:
        """Hold a finished run against the undisturbed one.

        Args:
            tolerance: allowed difference of losses, norms and weights; 0 for the same bits.
        """
        found, expected = self.metrics(), reference.metrics()
        assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, STEPS + 1))
        for line, other in zip(found, expected):
            for key in COMPARED:
                assert abs(line[key] - other[key]) <= tolerance, f"{key} of step {line['step']}: {line} and {other}"
        weights, others = self.weights(), reference.weights()
        assert weights.keys() == others.keys()
        assert len(weights) > 1
        for name, weight in weights.items():
            same = torch.equal(weight, others[name]) if not tolerance else (weight - others[name]).abs().max() < 1e-4
            assert same, f"{name} is not what the undisturbed run made of it"
        assert list(self.output.rglob("*.tmp*")) == []
        steps = [checkpoint.open_checkpoint(path).step for path in folder.in_place(self.output / "checkpoints")]
        assert steps[0] == STEPS, f"checkpoints after steps {steps}"
        assert len(steps) <= KEEP, f"checkpoints after steps {steps}"
        self.check_rows()

    def check_rows(self) -> None:
        """Every step was given the rows that seed and step say, whenever it was trained, and whole the last time."""
        order = {"rows": len(self.sources), "rows_in_run": STEPS * ROWS_PER_STEP, "seed": SEED}
        last: dict[int, list[str]] = {}
        for launch in self.starts:
            trained: dict[int, list[str]] = defaultdict(list)
            sharing = data_processes(launch.strategy, launch.processes)  # the first stage of a pipeline, if it is one
            for event in launch.events():
                if "trains" in event and event["rank"] < sharing:
                    trained[event["during"]] += event["trains"]
            for step, rows in trained.items():
                places = global_batch(step, global_batch_size=ROWS_PER_STEP, **order)
                assert not set(rows) - {self.sources[place] for place in places}, f"step {step} was given other rows"
                assert len(set(rows)) == len(rows), f"step {step} was given a row twice"
            last |= trained
        assert sorted(last) == list(range(1, STEPS + 1))
        steps_of_epoch = len(self.sources) // ROWS_PER_STEP
        for first in range(1, STEPS + 1, steps_of_epoch):
            epoch = [row for step in range(first, first + steps_of_epoch) for row in last[step]]
            assert sorted(epoch) == sorted(self.sources), "an epoch did not train every row once"


def _last_step(launch: Launch) -> int:
    """The last step that any rank has begun."""
    return max((event["step"] for event in launch.events() if "step" in event), default=0)


def undisturbed(
    server: LaunchServer, folder: Path, settings: list[str], sources: list[str]
) -> Callable[[str, int], Trial]:
    """Tells the run of a launch that was left alone, which is made at the first question."""
    made: dict[tuple[str, int], Trial] = {}

    def reference(strategy: str, processes: int) -> Trial:
        if (strategy, processes) not in made:
            trial = Trial(server, folder / f"{strategy}-{processes}", settings, sources)
            trial.finish(strategy, processes)
            made[strategy, processes] = trial
        return made[strategy, processes]

    return reference


def in_turn(draw: random.Random, processes: int) -> Iterator[Kill]:
    """Kills of every kind at every moment, in random order, over and over."""
    while True:
        every = [(number, to, when) for number, to in KINDS for when in MOMENTS]
        for number, to, when in draw.sample(every, len(every)):
            yield a_kill(draw, processes, number, to, when)
