"""Checkpoints of a model with 0.5 billion weights: this toolkit beside Accelerate's save_state and load_state.

  python -m benchmarks.checkpoint_speed

The model has the shapes of Qwen2-0.5B with random weights in fp32 and AdamW's state, which is 6 GB, on the CPU. Each
measurement has processes of its own, one after the other on the same disk. Timed is a save until the disk holds it
(Accelerate's followed by ``sync``) and of ours the time that training stands still; and a restore from files that the
kernel no longer keeps in memory, of ours with the checksums of all files before it, as a resumed run looks at them.

Memory is what each process takes more than before, at its most: resident, and of that anonymous, which is without
mapped files that the kernel may drop at any time. On a machine without a GPU the copy that is written in the background
lies beside the state itself; on a GPU it is the only one in host memory.

The result is written to benchmarks/results/checkpoint_speed.json; a bound that is broken ends the script with a
sentence. Needs Linux. Limits: other work on the machine and on its disk shows in the seconds, so the load is written
down, and the two take turns.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measuring import Memory, gathered
from finetune.errors import InputError, refuse_if_any
from finetune.output import run_files
from finetune.units import GIB

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "checkpoint_speed.json"
LAUNCHES = [("single", 1), ("fsdp2", 2)]
OURS, THEIRS = "finetune", "Accelerate"
SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
"""Of Qwen2-0.5B."""
SLOWER = 1.0
"""How many times as long as Accelerate's ours may take."""
BESIDE = 256 * 2**20
"""Bytes of memory that a process may take beside its share of the state."""
PATIENCE = 1800.0


def prepared_run(model_folder: Path, folder: Path, *, seed: int) -> tuple[Any, Any, Any, Any]:
    """Accelerator, strategy, and a prepared model with its optimizer, whose state is made.

    Args:
        seed: of the random weights.
    """
    import torch

    from finetune import distributed
    from finetune.models import loading
    from finetune.optim import optimizer

    strategy = distributed.Strategy.from_environment()
    config = loading.load_config(str(model_folder), revision=None, trust_remote_code=False)
    accelerator = distributed.start(
        strategy,
        accumulation=1,
        micro_batch_size=1,
        max_grad_norm=1.0,
        optimizer="adamw",
        weights="fp32_master",
        largest_parameter=lambda: max(p.numel() for p in loading.without_weights(config, False).parameters()),
        offload_folder=folder,
    )
    with distributed.loading(accelerator, strategy, whole=True, by_every_process=False):
        bare = loading.load_model(
            str(model_folder),
            config,
            revision=None,
            trust_remote_code=False,
            attention="auto",
            dtype=torch.float32,
            seed=seed,
            bits=None,
            device=accelerator.device,
            random_weights=True,
        )
    bare_optimizer = optimizer.build_optimizer(
        bare,
        name="adamw",
        learning_rate=1e-5,
        weight_decay=0.0,
        weights="fp32_master",
        fused=distributed.fuses(accelerator),
        rounding_seed=0,
    )
    prepared, stepped = distributed.prepare(accelerator, strategy, bare, bare_optimizer, weights="fp32_master")
    distributed.make_optimizer_state(prepared, stepped)
    return accelerator, strategy, prepared, stepped


def work(name: str, what: str, model_folder: Path, folder: Path) -> dict[str, Any]:
    """What one process of a measurement does: two saves, or a restore."""
    import torch

    from finetune import checkpoint, distributed

    # a restore begins with other weights than were saved
    accelerator, strategy, prepared, stepped = prepared_run(model_folder, folder, seed=len(what))
    pieces = partial(distributed.pieces, strategy, prepared, stepped)
    if what == "save":
        values = torch.empty(0)
        for piece in pieces():
            values = piece.values if piece.name.startswith("weights/") else values
            piece.values.copy_(values)
    saver = checkpoint.Saver(
        folder / OURS,
        rank=strategy.rank,
        world_size=strategy.world_size,
        keep=1,
        gather=partial(gathered, strategy.world_size),
        expected_bytes=0,
    )

    def save(number: int) -> float:
        """Returns the seconds after which training could have gone on."""
        begun = time.perf_counter()
        if name == OURS:
            checkpoint.save(
                saver, strategy, accelerator, prepared, stepped, run={"config": {}}, progress={"step": number}
            )
            stalled = time.perf_counter() - begun
            saver.finish()
            assert not saver.problems(), saver.problems()
            return stalled
        accelerator.save_state(str(folder / THEIRS / str(number)))
        os.sync()
        return time.perf_counter() - begun

    def restore(_: int) -> float:
        if name == THEIRS:
            accelerator.load_state(str(folder / THEIRS / "2"))
            return 0.0
        begun = time.perf_counter()
        found = checkpoint.open_checkpoint(folder / OURS)
        assert found.damaged(strategy.rank, strategy.world_size) == []
        accelerator.wait_for_everyone()
        looked = time.perf_counter() - begun
        checkpoint.restore(found, strategy, accelerator, prepared, stepped, weights_only=False)
        return looked

    runs = []
    for number in (1, 2) if what == "save" else (1,):
        if accelerator.is_main_process:
            os.sync()
            _forget_files(folder)
        accelerator.wait_for_everyone()
        with Memory() as memory:
            begun = time.perf_counter()
            part = save(number) if what == "save" else restore(number)
            accelerator.wait_for_everyone()
            seconds = time.perf_counter() - begun
        runs.append({"seconds": seconds, "part_seconds": part} | memory.measured())
        if what == "save" and name == THEIRS and number == 1 and accelerator.is_main_process:
            shutil.rmtree(folder / THEIRS / "1")
    written = sum((piece.written[1] - piece.written[0]) * piece.values.itemsize for piece in pieces())
    sums = [float(piece.values.sum(dtype=torch.float64)) for piece in pieces()]
    distributed.finish(accelerator, strategy, folder)
    return {"runs": runs, "own_bytes": written, "sums": sums, "processes": strategy.world_size}


def _forget_files(folder: Path) -> None:
    """Have the kernel drop what it keeps of files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def in_own_processes(
    name: str, what: str, strategy: str, processes: int, model_folder: Path, folder: Path
) -> list[dict[str, Any]]:
    """One measurement; returns what each process found.

    Raises:
        RuntimeError: if one fails, with the end of what it said.
    """
    from finetune.distributed.launch_environment import launch_environment

    launched = launch_environment(ROOT / "accelerate_configs" / f"{strategy}.yaml", processes, "no")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    started = []
    for rank in range(processes):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        grouped = meeting | {key: str(value) for key, value in own.items()} if processes > 1 else {}
        command = [sys.executable, "-m", "benchmarks.checkpoint_speed", "--work", name, what]
        command += [str(model_folder), str(folder), str(folder / f"result-{rank}.json")]
        environment = os.environ | launched | {"CUDA_VISIBLE_DEVICES": ""} | grouped
        log = (folder / f"said-{rank}.txt").open("wb")
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    for rank, process in enumerate(started):
        if process.wait(PATIENCE) != 0:
            for other in started:
                other.kill()
            said = (folder / f"said-{rank}.txt").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{name}, {what}, rank {rank} ended with {process.returncode}:\n{said}")
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]


def measure(layers: int, repeat: int, parent: Path) -> dict[str, Any]:
    """All measurements, with the medians and how many times as long as Accelerate's ours took.

    Raises:
        InputError: if disk or memory have no room.
    """
    from transformers import Qwen2Config

    environment = run_files.environment()
    shape = SHAPE | {"num_hidden_layers": layers}
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(dir=parent) as temporary:
        model_folder = Path(temporary) / "model"
        config = Qwen2Config(**shape, architectures=["Qwen2ForCausalLM"], dtype="float32")  # type: ignore[arg-type]
        config.save_pretrained(model_folder)
        weights = weights_of(shape)
        refuse_if_any(room_problems(Path(temporary), 12 * weights))
        for _ in range(repeat):
            for strategy, processes in LAUNCHES:
                for name in (OURS, THEIRS):
                    folder = Path(temporary) / f"{strategy}-{name}"
                    folder.mkdir()
                    load = os.getloadavg()[0]
                    own = partial(in_own_processes, name, strategy=strategy, processes=processes)
                    saved = own("save", model_folder=model_folder, folder=folder)
                    restored = own("restore", model_folder=model_folder, folder=folder)
                    run = together(saved, restored) | {"load_before": load}
                    runs.setdefault(f"{strategy}, {processes}", {}).setdefault(name, []).append(run)
                    print(f"{name}, {strategy} on {processes}: {described(run)}", flush=True)
                    shutil.rmtree(folder)
    return {
        "environment": environment | {"load_average": os.getloadavg()},
        "setup": {"model": shape, "weights": weights, "repeat": repeat},
        "most_times_theirs": SLOWER,
        "most_bytes_beside_own": BESIDE,
        "summary": {launch: summary(of[OURS], of[THEIRS]) for launch, of in runs.items()},
        "runs": runs,
    }


def weights_of(shape: dict[str, Any]) -> int:
    """Weights of a Qwen2 model with tied embeddings."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + hidden + 2 * (hidden * keys + keys) + 3 * hidden * inner + 2 * hidden
    return shape["vocab_size"] * hidden + shape["num_hidden_layers"] * layer + hidden


def room_problems(folder: Path, state_bytes: int) -> list[str]:
    """Sentences if the state, its copy and two checkpoints do not fit."""
    free, memory = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    found = []
    if free < 2.5 * state_bytes:
        found.append(
            f"{folder} has {free / GIB:.1f} GiB left, and two checkpoints take {2.5 * state_bytes / GIB:.1f}; make "
            "room, name another folder with --folder, or give fewer --layers."
        )
    if memory < 2.2 * state_bytes:
        found.append(
            f"{memory / GIB:.1f} GiB of memory are free, and the state and its copy take "
            f"{2.2 * state_bytes / GIB:.1f}; end other programs, or give fewer --layers."
        )
    return found


def together(saved: list[dict[str, Any]], restored: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of all processes: the slowest, and the most memory of any.

    Raises:
        RuntimeError: if what was restored is not what was saved.
    """
    if [part["sums"] for part in saved] != [part["sums"] for part in restored]:
        raise RuntimeError("What was restored is not what was saved; nothing was measured.")
    first, second, back = ([part["runs"][i] for part in parts] for parts, i in ((saved, 0), (saved, 1), (restored, 0)))
    return {
        "save_seconds": most(first, "seconds"),
        "stall_seconds": most(first, "part_seconds"),
        "second_save_seconds": most(second, "seconds"),
        "second_stall_seconds": most(second, "part_seconds"),
        "restore_seconds": most(back, "seconds"),
        "checksum_seconds": most(back, "part_seconds"),
        "own_bytes": most(saved, "own_bytes"),
        "save_bytes": most(first, "anonymous_bytes"),
        "save_resident_bytes": most(first, "resident_bytes"),
        "restore_bytes": most(back, "anonymous_bytes"),
        "restore_resident_bytes": most(back, "resident_bytes"),
    }


def most(parts: list[dict[str, Any]], key: str) -> Any:
    return max(part[key] for part in parts)


def summary(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians of the runs of each, and ours over theirs."""
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in ((OURS, ours), (THEIRS, theirs))
    }
    keys = ("save_seconds", "second_save_seconds", "second_stall_seconds", "restore_seconds")
    return medians | {"times_theirs": {key: medians[OURS][key] / medians[THEIRS][key] for key in keys}}


def described(run: dict[str, Any]) -> str:
    return (
        f"saved in {run['save_seconds']:.1f} and {run['second_save_seconds']:.1f} s, of which training stood still "
        f"{run['stall_seconds']:.1f} and {run['second_stall_seconds']:.1f} s, with {run['save_bytes'] / GIB:.2f} GiB "
        f"more memory; restored in {run['restore_seconds']:.1f} s with {run['restore_bytes'] / GIB:.2f} GiB more"
    )


def table(measured: dict[str, Any]) -> str:
    """Markdown: the two side by side."""
    lines = [
        "| launch | by | save, s | next save, s | training stands still, s | restore, s | own share, GiB "
        "| memory more at save | at restore |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for launch, found in measured["summary"].items():
        for name in (OURS, THEIRS):
            own = found[name]
            keys = ("save_seconds", "second_save_seconds", "second_stall_seconds", "restore_seconds")
            seconds = " | ".join(f"{own[key]:.1f}" for key in keys)
            gib = " | ".join(f"{own[key] / GIB:.2f}" for key in ("own_bytes", "save_bytes", "restore_bytes"))
            lines.append(f"| {launch} | {name} | {seconds} | {gib} |")
        ratios = " | ".join(f"{found['times_theirs'][key]:.2f}" for key in keys)
        lines.append(f"| {launch} | ours / theirs | {ratios} | | | |")
    return "\n".join(lines)


def broken_bounds(measured: dict[str, Any]) -> list[str]:
    """A sentence for each bound that does not hold."""
    found = []
    for launch, of in measured["summary"].items():
        found += [
            f"{launch}: {key} of ours was {times:.2f} times that of Accelerate, and {SLOWER:g} is the bound; "
            "measure on a quiet machine, and then profile finetune.checkpoint."
            for key, times in of["times_theirs"].items()
            if not times <= SLOWER
        ]
        found += [
            f"{launch}: a process took {of[OURS][key] / GIB:.2f} GiB more memory to {what}, and its share of the "
            f"state is {of[OURS]['own_bytes'] / GIB:.2f} GiB; look for what is held twice."
            for key, what in (("save_bytes", "save"), ("restore_bytes", "restore"))
            if of[OURS][key] > of[OURS]["own_bytes"] + BESIDE
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, what, model_folder, folder, result = args.work
        Path(result).write_text(json.dumps(work(name, what, Path(model_folder), Path(folder))), encoding="utf-8")
        return
    try:
        measured = measure(args.layers, args.repeat, args.folder)
    except InputError as error:
        sys.exit("\n".join(f"error: {problem}" for problem in error.problems))
    RESULTS.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(table(measured))
    if broken := broken_bounds(measured):
        sys.exit("\n".join(f"error: {sentence}" for sentence in broken))


if __name__ == "__main__":
    main()
