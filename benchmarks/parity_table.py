"""The manual's table of strategies, from what `make prove` measured (benchmarks/results/parity.json)."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "parity.json"


def table(results: dict[str, Any]) -> str:
    """Markdown: for each launch the largest difference of loss and gradient norm, in fp32 and in bf16."""
    lines = [
        "| strategy | processes | loss, fp32 | gradient norm, fp32 | loss, bf16 | gradient norm, bf16 |",
        "|---|---|---|---|---|---|",
    ]
    rows = results["comparisons"]
    for strategy, processes in dict.fromkeys((row["strategy"], row["processes"]) for row in rows):
        own = [row for row in rows if (row["strategy"], row["processes"]) == (strategy, processes)]
        cells = []
        for precision in ("fp32", "bf16"):
            for key in ("loss", "grad_norm"):
                found = [row[key] for row in own if row["precision"] == precision]
                cells.append(f"{max(found):.1e}" if found else "")
        lines.append(f"| `{strategy}` | {processes} | {' | '.join(cells)} |")
    packages = results["environment"]["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "accelerate", "deepspeed"))
    hardware = results["environment"]["hardware"]
    where = ", ".join(hardware["gpus"]) or f"{hardware['cpus']} CPU cores, no GPU"
    return "\n".join([*lines, "", f"Measured on {where}; {versions}."])
