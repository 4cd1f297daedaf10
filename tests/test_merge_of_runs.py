"""The adapter of a run is merged by what its run.yaml records: its data, whatever the recipe, and its base."""

import json
import shutil
from pathlib import Path
from typing import Any

import every_recipe
import pytest
import tiny
import yaml
from every_recipe import RECIPES, Recipe
from safetensors.torch import load_file, save_file

from finetune.data.encoding import Settings
from finetune.data.sources import Source
from finetune.errors import InputError
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, and a run of recipes/sft.py that trained an adapter of it."""
    folder = tmp_path_factory.mktemp("finished")
    base = tiny.write_weights(tiny.build_model_folder(folder / "base"))
    trained(RECIPES[0], base, folder, model__random_weights=False)
    return folder


def change(base: Path) -> None:
    """Other values in the same places."""
    state = load_file(base / "model.safetensors")
    save_file({name: value + 0.5 for name, value in state.items()}, base / "model.safetensors", {"format": "pt"})


def moved(finished: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of the base, and of the run with an adapter that names it."""
    base, run = shutil.copytree(finished / "base", folder / "base"), shutil.copytree(finished / "run", folder / "run")
    config = json.loads((run / "final" / "adapter_config.json").read_text())
    named = config | {"base_model_name_or_path": str(base)}
    (run / "final" / "adapter_config.json").write_text(json.dumps(named))
    return base, run


def test_a_base_that_has_changed_since_the_run_is_merged_only_if_it_is_named(finished: Path, tmp_path: Path):
    base, run = moved(finished, tmp_path)
    said: list[str] = []
    merge(run, tmp_path / "same", dtype="fp32", say=said.append)
    merge(run, tmp_path / "named", dtype="fp32", base_model=str(base), say=said.append)
    assert not any("is not the one that the run recorded" in line for line in said)
    change(base)
    with pytest.raises(InputError, match=r"base is not the one .* have changed, .* restore it, or .*--base-model"):
        merge(run, tmp_path / "changed")
    assert not (tmp_path / "changed").exists()
    result = merge(run, tmp_path / "changed", dtype="fp32", base_model=str(base), say=said.append)
    assert result["verdict"] == "equal"
    assert f"The model {base} is not the one that the run recorded" in said[-4]


def test_a_base_is_not_compared_where_the_run_recorded_none(finished: Path, tmp_path: Path):
    base, run = moved(finished, tmp_path)
    change(base)
    for file in (run / "run.yaml", run / "final" / "run.yaml"):
        record = yaml.safe_load(file.read_text())
        del record["data"]["base"]
        file.write_text(yaml.safe_dump(record))
    assert merge(run, tmp_path / "merged", dtype="fp32")["verdict"] == "equal"


def test_the_copy_of_a_base_from_the_hub_is_taken_without_a_warning(finished: Path, tmp_path: Path):
    """The run recorded a commit then, which a folder does not tell."""
    base, run = moved(finished, tmp_path)
    for file in (run / "run.yaml", run / "final" / "run.yaml"):
        record = yaml.safe_load(file.read_text())
        record["config"]["model"]["path"], record["data"]["base"] = "owner/model", "0" * 32
        file.write_text(yaml.safe_dump(record))
    said: list[str] = []
    merge(run, tmp_path / "merged", dtype="fp32", base_model=str(base), say=said.append)
    assert not any("recorded" in line for line in said)
