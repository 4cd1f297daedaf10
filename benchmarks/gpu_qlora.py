"""Peak memory and speed of a QLoRA run of a published shape with random weights, through the recipe itself.

``python -m benchmarks.gpu_qlora`` runs Llama 3.1 8B's shape on a GPU, with and without activation checkpointing, and
writes ``benchmarks/results/gpu_qlora.json`` with hardware and versions. ``--shape tiny`` rehearses it anywhere.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from finetune.output.run_files import environment
from recipes.sft import Config, main

RESULTS = Path(__file__).parent / "results" / "gpu_qlora.json"
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
    },
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def build(folder: Path, shape: str, tokens: int, rows: int) -> Path:
    """A model folder without weights, a tokenizer of a few words, and conversations of about ``tokens`` tokens."""
    LlamaConfig(
        **SHAPES[shape],
        tie_word_embeddings=False,
        dtype="bfloat16",
        max_position_embeddings=max(tokens, 2048),
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    words = ["<user>", "<assistant>", "<end>", "<unknown>", "word", "other"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    text = " ".join(["word", "other"] * ((tokens - 8) // 2))
    row = {"messages": [{"role": "user", "content": "word"}, {"role": "assistant", "content": text}]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n" + (json.dumps(row) + "\n") * (rows - 1))
    return folder


def measure(shape: str, *, tokens: int, steps: int, checkpointing: str, micro_batch_size: int) -> dict[str, Any]:
    """One run; the figures are those of its last step."""
    with tempfile.TemporaryDirectory() as work:
        folder = build(Path(work) / "model", shape, tokens, rows=micro_batch_size * steps)
        config = {
            "model": {"path": str(folder), "random_weights": True},
            "quantization": {"bits": 4},
            "adapter": {"type": "lora", "rank": 16},
            "data": {"train": str(folder / "rows.jsonl"), "max_length": tokens},
            "train": {
                "output_dir": str(Path(work) / "run"),
                "steps": steps,
                "global_batch_size": micro_batch_size,
                "micro_batch_size": micro_batch_size,
                "activation_checkpointing": checkpointing,
            },
        }
        main(Config.model_validate(config))
        lines = (Path(work) / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    setting = {"shape": shape, "row_tokens": tokens, "micro_batch_size": micro_batch_size}
    kept = ("tokens_per_second", "peak_memory_gib", "mfu", "step_seconds")
    return setting | {"activation_checkpointing": checkpointing} | {key: last[key] for key in kept if key in last}


def run(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and record; returns the measurements.

    Raises:
        SystemExit: if there is no GPU for the large shape.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.shape == "8b" and not torch.cuda.is_available():
        raise SystemExit("The shape 8b needs a GPU; rehearse with --shape tiny.")
    found = []
    for checkpointing, micro_batch_size in (("full", 1), ("full", 4), ("none", 1)):
        found.append(
            measure(
                options.shape,
                tokens=options.tokens,
                steps=options.steps,
                checkpointing=checkpointing,
                micro_batch_size=micro_batch_size,
            )
        )
        print(json.dumps(found[-1]))
    known = environment()
    where = {"python": known["python"], "packages": known["packages"], "gpus": known["hardware"]["gpus"]}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps({"environment": where, "measurements": found}, indent=1) + "\n")
    return found


if __name__ == "__main__":
    run()
