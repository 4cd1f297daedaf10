"""Runs of the recipe in processes of their own, and what they took; the predictions are held against them elsewhere.

While one run goes on, the processes of the next already import what they need. A run at the edge of the memory has the
GPU to itself. A process is ``python -m benchmarks.plan_runs work``, told what to do on its standard input.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune.units import GIB

from . import plan_cases
from .plan_cases import Case

ROOT = Path(__file__).parent.parent
STEPS = 4
"""Of the optimizer; the speed is that of the steps after the first."""
PATIENCE_SECONDS = 240.0
LAST_WORDS_SECONDS = 5.0
"""Of other processes, after one has failed."""
KINDS = ("allocated", "reserved", "requested")
"""Peaks of PyTorch's allocator: in blocks, from the driver, and as it was asked for."""


@dataclass(frozen=True)
class Waiting:
    """The processes of a run that has not begun."""

    case: Case
    processes: list[subprocess.Popen[str]]
    logs: list[Path]


class Bench:
    """A folder with models, and processes that wait in it for their run.

    Args:
        memory_for_rehearsal: bytes of each of ``KINDS`` that a run without a GPU shall have taken. None: on GPUs.
    """

    def __init__(
        self, folder: Path, cases: Sequence[Case], *, memory_for_rehearsal: dict[str, int] | None = None
    ) -> None:
        self.folder, self.cases = folder, list(cases)
        self.memory_for_rehearsal = memory_for_rehearsal
        self.waiting: Waiting | None = None
        self.started = 0
        models = [str(plan_cases.write_model(folder / name, name)) for name in sorted({c.model for c in cases})]
        subprocess.run([*_command("draw"), *models], cwd=ROOT, env=self._environment(), check=True)

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *error: object) -> None:
        if self.waiting is not None:
            _end(self.waiting.processes)

    def _environment(self) -> dict[str, str]:
        hidden = {} if self.memory_for_rehearsal is None else {"CUDA_VISIBLE_DEVICES": ""}
        return os.environ | {"FINETUNE_DATA_CACHE": str(self.folder / "cache")} | hidden

    def start(self, case: Case) -> Waiting:
        """Start the processes of a run."""
        from finetune.distributed.launch_environment import launch_environment

        setting, n = case.setting, case.setting.world_size
        file = ROOT / "accelerate_configs" / f"{setting.strategy}.yaml"
        launched = launch_environment(file, n, setting.precision)
        launched |= {size.key.upper(): str(number) for size, number in setting.sizes.items()}
        port, processes, logs = _free_port(), [], []
        self.started += 1
        for rank in range(n):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_PORT": port}
            group = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
            logs.append(self.folder / f"said-{self.started}-{rank}.txt")
            with logs[-1].open("w") as log:
                processes.append(
                    subprocess.Popen(
                        _command("work"),
                        cwd=ROOT,
                        env=self._environment() | launched | (group if n > 1 else {}),
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        text=True,
                    )
                )
        return Waiting(case, processes, logs)

    def measure(self, case: Case) -> dict[str, Any]:
        """Run a case.

        Raises:
            RuntimeError: if a process fails or takes too long, with the end of what it said.
        """
        ready, self.waiting = self.waiting, None
        if ready is None or ready.case != case:
            _end(ready.processes if ready is not None else [])
            ready = self.start(case)
        output, rows = self.folder / "run", self.folder / "rows.jsonl"
        plan_cases.write_rows(rows, case)
        config = plan_cases.configuration(case, self.folder / case.model, rows, output, steps=STEPS)
        answers = [self.folder / f"answer-{rank}.json" for rank in range(len(ready.processes))]
        try:
            for process, answer in zip(ready.processes, answers):
                answer.unlink(missing_ok=True)  # of another run
                told = {"config": config, "answer": str(answer), "memory_for_rehearsal": self.memory_for_rehearsal}
                assert process.stdin is not None
                process.stdin.write(json.dumps(told) + "\n")
                process.stdin.close()
            after = self.cases[self.cases.index(case) + 1 :][:1]
            if after and case.edge is None and after[0].edge is None:
                self.waiting = self.start(after[0])
            found = together(_answered(ready, answers))
            return found | (of_the_run(output) if found["outcome"] == "finished" else {})
        finally:
            _end(ready.processes)
            shutil.rmtree(output, ignore_errors=True)


def _command(what: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.plan_runs", what]


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _answered(ready: Waiting, answers: Sequence[Path]) -> list[dict[str, Any]]:
    """What all processes of a run tell, or those that had no memory for it: the others end badly then, or wait on.

    Raises:
        RuntimeError: if a process fails for another reason, or all take too long, with the end of what it said.
    """
    deadline, failed = time.monotonic() + PATIENCE_SECONDS, ""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ready.processes]
        found = [json.loads(answer.read_text()) for answer, code in zip(answers, codes) if code == 0]
        if len(found) == len(answers):
            return found
        if short := [each for each in found if each["outcome"] != "finished"]:
            return short
        for code, log in zip(codes, ready.logs):
            if code and not failed:  # one that had no memory may be about to say so
                failed = f"A process ended with {code}: {log.read_text(errors='replace')[-2000:]}"
                deadline = min(deadline, time.monotonic() + LAST_WORDS_SECONDS)
        time.sleep(0.1)
    raise RuntimeError(failed or f"There was no answer within {PATIENCE_SECONDS:.0f} seconds.")


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all processes of a run took: the most of any."""
    finished = all(part["outcome"] == "finished" for part in parts)
    free = [part["free_bytes_at_start"] for part in parts if part["free_bytes_at_start"] is not None]
    return {
        "outcome": "finished" if finished else "out of memory",
        **{f"{kind}_gib": max(part["memory"][kind] for part in parts) / GIB for kind in KINDS},
        "free_gib_at_start": min(free) / GIB if free else None,
    }


def of_the_run(output: Path) -> dict[str, Any]:
    """The speed of a run's steps after the first, their positions, and the peak that the run itself predicted."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    planned = yaml.safe_load((output / "run.yaml").read_text())["plan"]
    return {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines[1:]),
        "tokens_of_a_step": lines[-1]["total_tokens"],
        "peak_gib_predicted_by_the_run": planned["peak_memory_gib"],
    }


def work() -> None:
    """One process of a run: waits to be told what to do, trains, and writes down what it took."""
    import torch

    from finetune.errors import InputError
    from recipes.sft import Config, main

    request = json.loads(sys.stdin.readline())
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    found: dict[str, Any] = {
        "outcome": "finished",
        "free_bytes_at_start": torch.cuda.mem_get_info()[0] if on_gpu else None,
    }
    try:
        main(Config.model_validate(request["config"]))
    except (RuntimeError, InputError) as error:
        if not ran_out_of_memory(error):
            raise
        found["outcome"] = "out of memory"
    if on_gpu:
        stats = torch.cuda.memory_stats()
        found["memory"] = {kind: stats[f"{kind}_bytes.all.peak"] for kind in KINDS}
    else:
        found["memory"] = request["memory_for_rehearsal"]
    Path(request["answer"]).write_text(json.dumps(found))


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether a GPU's memory was too small, by an error or by one that led to it."""
    said = ("out of memory", "ALLOC_FAILED")  # of PyTorch and CUDA; of cuBLAS and cuDNN
    while error is not None:
        if any(each in str(error) for each in said):
            return True
        error = error.__cause__
    return False


def draw(folders: Sequence[str]) -> None:
    """Give models random weights: on a GPU in seconds, where the CPU would take a minute for each run of 8 billion."""
    import torch
    from safetensors.torch import save_file

    from finetune.models import loading

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    for folder in folders:
        config = loading.load_config(folder, revision=None, trust_remote_code=False)
        weights = {}
        for name, weight in loading.without_weights(config, trust_remote_code=False).named_parameters():
            drawn = torch.ones(weight.shape, dtype=torch.bfloat16, device=device)
            weights[name] = (drawn.normal_(std=0.02) if weight.ndim > 1 else drawn).cpu()
        save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work()
    else:
        draw(sys.argv[2:])
