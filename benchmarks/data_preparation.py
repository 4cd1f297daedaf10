"""Rows from a file to packed rows: this toolkit against TRL's SFTTrainer, and the memory that it needs.

  python -m benchmarks.data_preparation --tokenizer qwen2.5 --rows-file mine.jsonl

Each preparation runs in a process of its own, one after the other on the same cores, from the same JSONL file to rows
on disk with every cache empty, and then once more with the cache that it left. Timed is what follows the imports and
the loading of the tokenizer: reading, rendering, tokenising, masking, packing. TRL runs as it stands by default (every
token trained, one process), on two processes, and with the assistant's tokens alone trained, which is what ours does,
if TRL has a template with generation marks for the tokenizer. TRL writes packed copies of the rows; ours writes rows,
and which of them share a pack lies in memory.

Memory is sampled over the whole tree of processes: resident, and of that anonymous, which is without the mapped files
that the kernel may drop at any time. Forked processes share pages, which count in each of them.

The result is written to benchmarks/results/data_preparation.json; a bound that is broken ends the script with a
sentence. Needs `trl` and Linux. Limits: other work on the machine shows in the seconds, so the load is written down,
and the seconds that cores worked, which tell less of what waits and more of what is done.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.made_up_rows import SEED, made_up_conversations, repeated, write_rows
from benchmarks.measuring import Stopwatch, growth, measured_in, median, peak_memory
from finetune.errors import InputError, refuse_if_any
from finetune.units import GIB

RESULTS = Path(__file__).parent / "results" / "data_preparation.json"
FASTER = 2.0
"""How many times as fast as TRL on one process ours must be; two of its processes are shown beside, without a bound."""
BYTES_PER_ROW = 64
"""Memory that a further row may take: a few numbers of each row are held, its tokens are not."""
DISK_PER_BYTE = 20
"""Free bytes on disk per byte of the rows' file: TRL's preparation leaves a copy of its tokens after each step."""
DISK_PER_SHORT_ROW = 2000
NAMES = {
    "ours": "finetune",
    "trl": "TRL",
    "trl_2": "TRL, 2 processes",
    "trl_masked": "TRL, assistant only",
}
FIRST, SECOND = "cold cache", "second start"


def prepare_ours(file: str, tokenizer_folder: str, max_length: int) -> dict[str, Any]:
    """One preparation by this toolkit, timed."""
    from finetune.data import dataset
    from finetune.data.batches import Batches
    from finetune.data.encoding import Settings
    from finetune.data.sources import named_sources
    from finetune.models import loading

    tokenizer = loading.load_tokenizer(tokenizer_folder, revision=None, trust_remote_code=False, chat_template=None)
    stopwatch = Stopwatch()
    rows = dataset.read_rows(named_sources(file), tokenizer, Settings(max_length))
    batches = Batches(
        rows,
        packing=True,
        flat=True,
        max_length=max_length,
        steps=None,
        epochs=1,
        global_batch_size=8,
        micro_batch_size=1,
        seed=SEED,
    )
    batches.documents(batches.step(1).places[0])
    stopwatch.stop()
    return stopwatch.measured | {"tokens": int(rows.lengths.sum()), "packed_rows": batches.rows_in_epoch}


def prepare_with_trl(
    file: str, tokenizer_folder: str, max_length: int, *, folder: str, processes: int | None, masked: bool
) -> dict[str, Any]:
    """One preparation by TRL's trainer, timed without the rest of the trainer; its model is a stand-in."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
    from trl import SFTConfig, SFTTrainer

    class TimedTrainer(SFTTrainer):
        def _prepare_dataset(self, *values: Any, **named: Any) -> Any:
            stopwatch.start()
            dataset = super()._prepare_dataset(*values, **named)
            stopwatch.stop()
            return dataset

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_attention_heads=1, num_hidden_layers=1
        )
    )
    args = SFTConfig(
        output_dir=folder,
        max_length=max_length,
        packing=True,
        assistant_only_loss=masked,
        dataset_num_proc=processes,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    stopwatch = Stopwatch()
    dataset = load_dataset("json", data_files=file, split="train")
    stopwatch.stop()
    trainer = TimedTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer)
    packed: Any = trainer.train_dataset
    return stopwatch.measured | {"tokens": sum(map(sum, packed["seq_lengths"])), "packed_rows": len(packed)}


def work(name: str, file: str, tokenizer_folder: str, max_length: int, folder: str) -> dict[str, Any]:
    """What one process of the measurement does."""
    if name == "ours":
        return prepare_ours(file, tokenizer_folder, max_length)
    return prepare_with_trl(
        file,
        tokenizer_folder,
        max_length,
        folder=folder,
        processes=2 if name.endswith("_2") else None,
        masked="masked" in name,
    )


def in_own_process(name: str, file: Path, tokenizer_folder: str, max_length: int, folder: Path) -> dict[str, Any]:
    """One preparation in a new process, whose caches lie in ``folder``; with the memory that it took, in MiB.

    Raises:
        RuntimeError: if it fails, with the end of what it said.
    """
    caches = {"FINETUNE_DATA_CACHE": str(folder / "rows"), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    said, result = folder / "said.txt", folder / "result.json"
    command = [sys.executable, "-m", "benchmarks.data_preparation", "--tokenizer", tokenizer_folder]
    command += ["--max-length", str(max_length), "--work", name, str(file), str(folder)]
    load = os.getloadavg()[0]
    start = time.perf_counter()
    with said.open("wb") as log:
        process = psutil.Popen(command, env=inherited | caches, stdout=log, stderr=log)
        resident, anonymous = peak_memory(process)
    wall = time.perf_counter() - start
    if process.wait() != 0:
        raise RuntimeError(f"{NAMES[name]} ended with {process.wait()}:\n{said.read_text(errors='replace')[-3000:]}")
    mib = {"resident_mib": resident / 2**20, "anonymous_mib": anonymous / 2**20}
    measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return measured | {"wall_seconds": wall, "load_before": load} | mib


def compared(
    names: list[str], file: Path, tokenizer_folder: str, max_length: int, repeat: int, folder: Path
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """All preparations, taking turns: per name and per state of the cache, what each run measured."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {name: {FIRST: [], SECOND: []} for name in names}
    for turn in range(repeat):
        for name in names:
            work_folder = folder / name
            work_folder.mkdir()
            for state in (FIRST, SECOND) if turn == 0 or name == "ours" else (FIRST,):
                run = in_own_process(name, file, tokenizer_folder, max_length, work_folder)
                runs[name][state].append(run)
                print(f"{NAMES[name]}, {state}: {run['seconds']:.2f} s of {run['wall_seconds']:.2f} s", flush=True)
            shutil.rmtree(work_folder)
    return runs


def measure_speed(
    tokenizer_folder: str, rows_file: str | None, *, rows: int, max_length: int, repeat: int
) -> dict[str, Any]:
    """All preparations of the same rows, with the medians and how many times as long as ours they took.

    Raises:
        InputError: if the disk has no room.
    """
    environment = measured_in()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = folder / "rows.jsonl"
        if rows_file is None:
            write_rows(file, made_up_conversations(rows, words_question=35, words_answer=45))
        else:
            lines = Path(rows_file).read_text(encoding="utf-8").splitlines()
            write_rows(file, repeated([json.loads(line)["messages"] for line in lines], rows))
        refuse_if_any(room_problems(folder, DISK_PER_BYTE * file.stat().st_size))
        names = [name for name in NAMES if "masked" not in name or trl_masks(tokenizer_folder)]
        runs = compared(names, file, tokenizer_folder, max_length, repeat, folder)
        file_mib = file.stat().st_size / 2**20
    return {
        "environment": environment,
        "setup": {
            "rows_file": Path(rows_file).name if rows_file else "made up",
            "rows": rows,
            "file_mib": file_mib,
            "tokenizer": Path(tokenizer_folder).name,
            "max_length": max_length,
            "repeat": repeat,
            "seed": SEED,
        },
        "least_times_ours": FASTER,
        "summary": {NAMES[name]: summary(states, runs["ours"]) for name, states in runs.items()},
        "runs": {NAMES[name]: states for name, states in runs.items()},
    }


def measure_memory(tokenizer_folder: str, *, rows: list[int], max_length: int) -> dict[str, Any]:
    """Our preparation of ever more short rows, and the memory that each further row took.

    Raises:
        InputError: if the disk has no room.
    """
    environment = measured_in()
    runs = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file, work_folder = folder / "rows.jsonl", folder / "work"
        refuse_if_any(room_problems(folder, DISK_PER_SHORT_ROW * max(rows)))
        for count in rows:
            write_rows(file, made_up_conversations(count, words_question=3, words_answer=3))
            work_folder.mkdir()
            run = in_own_process("ours", file, tokenizer_folder, max_length, work_folder)
            print(f"{count:,} short rows: {run['anonymous_mib']:.0f} MiB anonymous", flush=True)
            stored = sum(path.stat().st_size for path in work_folder.rglob("rows.arrow"))
            runs.append({"rows": count, "stored_mib": stored / 2**20} | run)
            shutil.rmtree(work_folder)
    return {
        "environment": environment,
        "setup": {"tokenizer": Path(tokenizer_folder).name, "max_length": max_length, "seed": SEED},
        "most_bytes_per_row": BYTES_PER_ROW,
        "bytes_per_row": growth(runs),
        "runs": runs,
    }


def room_problems(folder: Path, needed: int) -> list[str]:
    """A sentence if the disk has fewer bytes free than needed."""
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return []
    return [
        f"{folder} has {free / GIB:.1f} GiB left, and the measurement may need {needed / GIB:.1f}; make room, name "
        "another folder with the environment variable TMPDIR, or give fewer rows."
    ]


def problems(tokenizer_folder: str, rows_file: str | None) -> list[str]:
    """Sentences on what is missing."""
    found = []
    if importlib.util.find_spec("trl") is None:
        found.append("The comparison needs trl; install it with: pip install trl.")
    if not Path(tokenizer_folder).is_dir():
        found.append(f"--tokenizer {tokenizer_folder}: there is no such folder; name the folder of a tokenizer.")
    if rows_file is not None and not Path(rows_file).is_file():
        found.append(f"--rows-file {rows_file}: there is no such file; name a JSONL file with messages.")
    return found


def trl_masks(tokenizer_folder: str) -> bool:
    """Whether TRL knows a template with generation marks for this tokenizer; it refuses to mask the others."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import get_training_chat_template

    try:
        get_training_chat_template(AutoTokenizer.from_pretrained(tokenizer_folder))
    except ValueError:
        return False
    return True


def summary(states: dict[str, list[dict[str, Any]]], ours: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Medians of the runs, and how many times as long they took as ours."""
    first = median(states[FIRST], "seconds")
    return {
        "seconds": first,
        "times_ours": first / median(ours[FIRST], "seconds"),
        "core_seconds": median(states[FIRST], "core_seconds"),
        "core_times_ours": median(states[FIRST], "core_seconds") / median(ours[FIRST], "core_seconds"),
        "wall_seconds": median(states[FIRST], "wall_seconds"),
        "wall_times_ours": median(states[FIRST], "wall_seconds") / median(ours[FIRST], "wall_seconds"),
        "second_start_seconds": median(states[SECOND], "seconds"),
        "second_start_wall_seconds": median(states[SECOND], "wall_seconds"),
        "resident_mib": median(states[FIRST], "resident_mib"),
        "anonymous_mib": median(states[FIRST], "anonymous_mib"),
    }


def speed_table(speed: dict[str, Any]) -> str:
    """Markdown: the preparations side by side."""
    lines = [
        f"| {speed['setup']['rows']:,} rows | seconds | times ours | core seconds | times ours | with imports "
        "| second start | peak MiB | of these anonymous |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in speed["summary"].items():
        seconds = f"{found['seconds']:.1f} | {found['times_ours']:.2f} | {found['core_seconds']:.1f}"
        seconds += f" | {found['core_times_ours']:.2f} | {found['wall_seconds']:.1f}"
        mib = f"{found['resident_mib']:.0f} | {found['anonymous_mib']:.0f}"
        lines.append(f"| {name} | {seconds} | {found['second_start_seconds']:.2f} | {mib} |")
    return "\n".join(lines)


def memory_table(memory: dict[str, Any]) -> str:
    """Markdown: the memory of ours."""
    lines = ["| short rows | on disk MiB | peak MiB | of these anonymous |", "|---|---|---|---|"]
    for run in memory["runs"]:
        mib = f"{run['stored_mib']:.0f} | {run['resident_mib']:.0f} | {run['anonymous_mib']:.0f}"
        lines.append(f"| {run['rows']:,} | {mib} |")
    return "\n".join(lines)


def too_slow(speed: dict[str, Any]) -> list[str]:
    """A sentence for each run of TRL on one process that took not much longer than ours, or did other work."""
    broken = [
        f"{name} took only {found['times_ours']:.2f} times as long as ours, and {FASTER:g} times is the bound; profile "
        "finetune.data.rows."
        for name, found in speed["summary"].items()
        if name not in (NAMES["ours"], NAMES["trl_2"]) and not found["times_ours"] >= FASTER
    ]
    tokens = {name: states[FIRST][0]["tokens"] for name, states in speed["runs"].items()}
    if len(set(tokens.values())) > 1:
        broken.append(f"The preparations gave different numbers of tokens ({tokens}); they did not do the same work.")
    return broken


def too_large(memory: dict[str, Any]) -> list[str]:
    """A sentence if memory grows with the rows."""
    if memory["bytes_per_row"] <= BYTES_PER_ROW:
        return []
    return [
        f"Our preparation took {memory['bytes_per_row']:.0f} bytes of memory for each further row, and {BYTES_PER_ROW} "
        "are allowed; look for what holds the rows."
    ]


def write(part: str, measured: dict[str, Any]) -> None:
    """Put one part into the results, and keep the other."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results[part] = measured
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER")
    parser.add_argument("--rows-file", metavar="FILE", help="JSONL with messages (default: made-up rows)")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--max-length", type=int, default=2048, metavar="TOKENS")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory-rows", type=int, nargs="+", default=[100_000, 500_000, 2_000_000])
    parser.add_argument(
        "--only", nargs=1, choices=["speed", "memory"], default=["speed", "memory"], help="leave the other as it was"
    )
    parser.add_argument("--work", nargs=3, metavar=("NAME", "FILE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        name, file, folder = args.work
        result = work(name, file, args.tokenizer, args.max_length, folder)
        (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
        return
    broken = []
    try:
        refuse_if_any(problems(args.tokenizer, args.rows_file))
        if "speed" in args.only:
            speed = measure_speed(
                args.tokenizer, args.rows_file, rows=args.rows, max_length=args.max_length, repeat=args.repeat
            )
            write("speed", speed)
            print(speed_table(speed), flush=True)
            broken += too_slow(speed)
        if "memory" in args.only:
            memory = measure_memory(args.tokenizer, rows=args.memory_rows, max_length=args.max_length)
            write("memory", memory)
            print(memory_table(memory))
            broken += too_large(memory)
    except InputError as error:
        sys.exit("\n".join(f"error: {problem}" for problem in error.problems))
    if broken:
        sys.exit("\n".join(f"error: {sentence}" for sentence in broken))


if __name__ == "__main__":
    main()
