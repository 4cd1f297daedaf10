"""The adapter of a run is merged by what its run.yaml records: its data, whatever the recipe, and its base."""

from pathlib import Path
from typing import Any

import every_recipe
import pytest
import tiny
from every_recipe import RECIPES, Recipe

from finetune.data.encoding import Settings
from finetune.data.sources import Source
from finetune.export import comparison
from finetune.export.merge import merge

LORA = {"adapter__type": "lora", "adapter__rank": 4, "train__steps": 2, "train__learning_rate": 5e-2}


def trained(recipe: Recipe, model: Path, folder: Path, **changes: Any) -> Path:
    """The folder of a run of this recipe that trained an adapter; its rows lie beside it."""
    rows = recipe.write(folder / "rows.jsonl", rows=60, seed=0)
    every_recipe.train(
        recipe.module.__name__, every_recipe.values_of(recipe, model, rows, folder / "run", **LORA, **changes)
    )
    return folder / "run"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_adapter_of_every_recipe_is_merged_and_compared_on_rows_of_its_run(
    recipe: Recipe, model_folder: Path, tmp_path: Path
):
    run = trained(recipe, model_folder, tmp_path)
    result = merge(run, tmp_path / "merged", dtype="fp32")
    assert result["verdict"] == "equal"
    assert result["text"] == str(tmp_path / "rows.jsonl")
    assert result["difference"]["tokens"] > 100


def test_without_a_row_that_can_be_used_a_run_is_compared_on_the_sample_texts(tmp_path: Path):
    (tmp_path / "other.jsonl").write_text('{"rating": 3}\n')
    entries = [Source(str(tmp_path / "other.jsonl"))]
    options: dict[str, Any] = {"entries": entries, "settings": Settings(2048), "vocabulary": 512}
    text = comparison.choose_text(tiny.build_tokenizer(), text_file=None, **options)
    assert (text.name, len(text.rows)) == ("sample texts", 3)
