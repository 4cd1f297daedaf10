"""The README's tables of recipe configurations and of strategy files, from the files and their first sentences."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from benchmarks import configuration_plans
from finetune.config.strategy_names import STRATEGIES

ROOT = Path(__file__).parent.parent


def recipe_table() -> str:
    """Markdown: each configuration of the recipe, what it is for, under which strategy, its data.max_length, and what
    it needs of a GPU by the plan."""
    plans = json.loads(configuration_plans.RESULTS.read_text(encoding="utf-8"))
    lines = ["| configuration | what it trains, and where | strategy | row tokens | by the plan |"]
    lines.append("|---|---|---|---|---|")
    for path in sorted((ROOT / "recipes" / "configs").glob("*.yaml")):
        tokens = yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["max_length"]
        sentence = first_sentence(path)
        named = re.search(r", with accelerate_configs/(\w+)\.yaml", sentence)
        what = sentence.replace(named[0], "") if named else sentence
        strategy = f"`{named[1]}`" if named else "any"
        lines.append(f"| `{path.stem}` | {what} | {strategy} | {tokens:,} | {_verdict(plans.get(path.stem))} |")
    return "\n".join(lines)


def _verdict(plan: dict[str, Any] | None) -> str:
    """In a cell; empty where a configuration names no GPU."""
    return "" if plan is None else f"{plan['verdict']}: {plan['needed']:.1f} of {plan['there']:.1f} GiB"


def strategy_table() -> str:
    """Markdown: each strategy file and what it does."""
    lines = ["| strategy file | what it does |", "|---|---|"]
    for name in STRATEGIES:
        lines.append(f"| `{name}` | {first_sentence(ROOT / 'accelerate_configs' / f'{name}.yaml')} |")
    return "\n".join(lines)


def first_sentence(path: Path) -> str:
    """Of the comment that a YAML file begins with, without its full stop.

    "# One GPU of 24 GB. Or\\n# two." gives "One GPU of 24 GB"; the dots in "Llama 3.2" and in file names end nothing.

    Raises:
        ValueError: if the file begins with no comment, or with one that has no full stop.
    """
    comment = re.match(r"(# .*\n)+", path.read_text(encoding="utf-8"))
    sentence = comment and re.match(r"(.*?)\.(\s|$)", comment[0].replace("\n# ", " ").removeprefix("# "))
    if not sentence:
        raise ValueError(f"{path} should begin with a comment, and that with a sentence; write one.")
    return sentence[1]
