"""The manual's example of an answer, as `finetune plan` prints it, and the lines of the run that it recommends."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from finetune.hardware.cards import parse_gpus
from finetune.planner import Model, Setting, plan_run
from finetune.trace.tracer import Tracer

ROOT = Path(__file__).parent.parent
LLAMA_3_1_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
"""Of its published config.json."""
ROW_TOKENS = 2048
"""The default of ``data.max_length``."""
ARGUMENTS = ("plan", "--model", "llama-3.1-8b.json", "--gpus", "8xH100", "--method", "full")


def example() -> str:
    """The command, its answer and the run's lines in Markdown; blanks at the ends of lines are left out.

    Raises:
        subprocess.CalledProcessError: if nothing fits, or the command fails.
    """
    plain = {name: value for name, value in os.environ.items() if "COLOR" not in name}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "llama-3.1-8b.json").write_text(json.dumps(LLAMA_3_1_8B), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "finetune.cli", *ARGUMENTS],
            cwd=folder,
            env=plain | {"COLUMNS": "80", "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        )
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    answer = ["```console", f"$ finetune {' '.join(ARGUMENTS)}", "", *lines, "```"]
    said = ["```text", *lines_of_the_run(), "```"]
    return "\n".join([*answer, "", "The run prints the same at its start:", "", *said, ""])


def lines_of_the_run() -> list[str]:
    """Of the same question, under fsdp2, with micro-batch and checkpointing left open."""
    with Tracer(LLAMA_3_1_8B, row_tokens=ROW_TOKENS) as tracer:
        planned = plan_run(
            Model(LLAMA_3_1_8B, tracer),
            Setting(strategy="fsdp2", world_size=8, row_tokens=ROW_TOKENS, layout="flat"),  # as rows lie by default
            machines=parse_gpus("8xH100"),
            global_batch_size=16,
            mean_row_tokens=ROW_TOKENS,
            mean_document_tokens=ROW_TOKENS,
            attended_tokens=ROW_TOKENS,
            micro_batch_size=None,
            activation_checkpointing=None,
        )
    return planned.describe()
