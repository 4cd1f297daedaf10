"""The manual's table of resumed runs, from what `make prove` measured (benchmarks/results/resume.json)."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "resume.json"


def table(results: dict[str, Any]) -> str:
    """Markdown: for each pair of launches the largest difference of a loss from that of the uninterrupted run."""
    rows = [row for row in results["comparisons"] if row["method"] == "full"]
    launches = list(dict.fromkeys(row["before"] for row in rows))
    known = {(row["before"], row["after"]): row["loss"] for row in rows}
    lines = [f"| from \\ to | {' | '.join(launches)} |", "|---" * (len(launches) + 1) + "|"]
    for before in launches:
        cells = [f"{known[before, after]:.0e}" if known[before, after] else "0" for after in launches]
        lines.append(f"| {before} | {' | '.join(cells)} |")
    others = [row for row in results["comparisons"] if row["method"] != "full"]
    most = {method: max(row["loss"] for row in others if row["method"] == method) for method in ("lora", "qlora")}
    told = ", ".join(f"{name} {difference:.0e}" for name, difference in most.items())
    packages, hardware = results["environment"]["packages"], results["environment"]["hardware"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "accelerate", "deepspeed"))
    where = ", ".join(hardware["gpus"]) or f"{hardware['cpus']} CPU cores, no GPU"
    lines += ["", f"Largest difference with adapters, over {len(others)} pairs: {told}. On {where}; {versions}."]
    return "\n".join(lines)
