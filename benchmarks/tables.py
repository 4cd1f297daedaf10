"""Writes what the README and the manual (docs/) show from code and from recorded measurements.

  python -m benchmarks.tables

Each part stands in one page, between two comments that name it:

    <!-- parity table: written by `make prove` -->
    | strategy | ...
    <!-- end of parity table -->

``PARTS`` says which page that is and what writes the part. Nothing is measured here: the benchmarks and `make prove`
leave their measurements in benchmarks/results.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import (
    chat_templates,
    checkpoint_speed,
    compatibility_table,
    configuration_tables,
    data_preparation,
    dpo_reference,
    kills,
    lm_eval_reference,
    parity_table,
    plan_example,
    preference_run,
    pretrain_tiny,
    resume_table,
    step_report,
    template_table,
    trl_reference,
)

ROOT = Path(__file__).parent.parent
OWN_RECIPE = ROOT / "tests" / "distillation.py"


@dataclass(frozen=True)
class Part:
    """A generated part of a document."""

    page: str
    """Path in the repository."""
    text: Callable[[], str]
    """Markdown, without the two comments."""


def recorded(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


PARTS = {
    "own recipe": Part("docs/your_own_recipe.md", lambda: f"```python\n{OWN_RECIPE.read_text(encoding='utf-8')}```"),
    "recipe configurations": Part("README.md", configuration_tables.recipe_table),
    "strategy files": Part("README.md", configuration_tables.strategy_table),
    "plan example": Part("docs/planner.md", plan_example.example),
    "compatibility table": Part("docs/compatibility.md", compatibility_table.table),
    "template table": Part("docs/data.md", template_table.table),
    "template sweep": Part("docs/data.md", lambda: chat_templates.sentence(recorded(chat_templates.RESULTS))),
    "parity table": Part("docs/strategies.md", lambda: parity_table.table(recorded(parity_table.RESULTS))),
    "resume table": Part("docs/checkpoints.md", lambda: resume_table.table(recorded(resume_table.RESULTS))),
    "kills table": Part("docs/checkpoints.md", lambda: kills.table(recorded(kills.RESULTS)["runs"])),
    "lm-eval table": Part("docs/evaluation.md", lambda: lm_eval_reference.table(recorded(lm_eval_reference.RESULTS))),
    "TRL table": Part("docs/comparisons.md", lambda: trl_reference.table(recorded(trl_reference.RESULTS))),
    "real pairs": Part("docs/preferences.md", lambda: preference_run.table(recorded(preference_run.RESULTS))),
    "DPO table": Part("docs/comparisons.md", lambda: dpo_reference.table(recorded(dpo_reference.RESULTS))),
    "pretraining table": Part("docs/pretraining.md", lambda: pretrain_tiny.table(recorded(pretrain_tiny.RESULTS))),
    "step table": Part("docs/comparisons.md", lambda: step_report.markdown(step_report.recorded())),
    "data speed table": Part(
        "docs/comparisons.md", lambda: data_preparation.speed_table(recorded(data_preparation.RESULTS)["speed"])
    ),
    "data memory table": Part(
        "docs/comparisons.md", lambda: data_preparation.memory_table(recorded(data_preparation.RESULTS)["memory"])
    ),
    "checkpoint speed table": Part(
        "docs/comparisons.md", lambda: checkpoint_speed.table(recorded(checkpoint_speed.RESULTS))
    ),
}


def with_part(page: str, name: str, text: str) -> str:
    """The page with this text between the two comments of that name.

    Raises:
        ValueError: if the page does not have them exactly once.
    """
    pattern = rf"(<!-- {re.escape(name)}: [^\n]* -->\n).*?(<!-- end of {re.escape(name)} -->\n)"
    found = re.findall(pattern, page, flags=re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"The part {name!r} stands {len(found)} times in its page; it should stand there once.")
    opening, closing = found[0]
    before, after = re.split(pattern, page, flags=re.DOTALL)[::3]
    return before + opening + text.strip("\n") + "\n" + closing + after


def main() -> None:
    for name, part in PARTS.items():
        path = ROOT / part.page
        path.write_text(with_part(path.read_text(encoding="utf-8"), name, part.text()), encoding="utf-8")


if __name__ == "__main__":
    main()
