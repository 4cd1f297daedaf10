"""Every cell of strategy x bits x adapter x optimizer trains with the losses of one process, or is refused as it says.

Real configuration, real recipe, real classes; a tiny GQA Llama read from a file in fp32, uneven masks. Shapes are
multiples of 256 elements on every shard, so that the blocks of 8-bit state are those of one process. Under tp shards
may be columns, and the model is wider.
"""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import balancing
import pytest
import scenarios
import tiny
from parity import FP32_TOLERANCE, assert_parity, assert_really_active
from ranks import STRATEGY_FILES

from finetune.config import sections
from finetune.config.compatibility import ADAPTERS, BITS, OPTIMIZERS, Cell, cells, refusal
from finetune.config.strategy_names import STRATEGIES, splits_layers
from finetune.distributed.launch_environment import launch_environment
from finetune.errors import InputError
from finetune.models import loading
from recipes import sft

CELLS = cells()
TRAINED = [cell for cell in CELLS if refusal(cell) is None]
REFUSED = [cell for cell in CELLS if refusal(cell) is not None]
STEPS = 4
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
LEARNING_RATES = {"sgd": 0.2, "lion_8bit": 3e-4}


def processes(strategy: str) -> int:
    four = dict.fromkeys(("hsdp", "tp_pp", "fsdp2_tp", "fsdp2_pp", "cp_tp"), 4)
    return {"single": 1, **four, "fsdp2_tp_pp": 8}.get(strategy, 2)


def configuration(cell: Cell, model: Path, rows: Path, output: Path, learning_rate: float | None = None) -> Any:
    has_no_dora_for_experts = cell.adapter == "dora" and "mixtral" in (model / "config.json").read_text()
    return scenarios.configuration(
        model,
        rows,
        output,
        quantization__bits=cell.bits or "none",
        adapter__type=cell.adapter,
        **({"adapter__rank": 8} if cell.adapter != "none" else {}),
        **({"adapter__targets": ATTENTION} if has_no_dora_for_experts else {}),
        train__optimizer=cell.optimizer,
        train__learning_rate=learning_rate or LEARNING_RATES.get(cell.optimizer, 2e-3),
        train__steps=STEPS,
        train__micro_batch_size=2,
    )


def test_the_table_covers_every_strategy_file_and_every_choice_of_the_configuration():
    assert set(STRATEGIES) == {path.stem for path in STRATEGY_FILES.glob("*.yaml")}
    assert set(OPTIMIZERS) == set(sections.Train.model_fields["optimizer"].annotation.__args__)
    assert set(ADAPTERS) == set(sections.Adapter.model_fields["type"].annotation.__args__)
    assert {bits or "none" for bits in BITS} == set(sections.Quantization.model_fields["bits"].annotation.__args__)
    assert len(CELLS) == len(set(CELLS)) == len(STRATEGIES) * 3 * 3 * 6


def test_what_users_come_for_is_not_refused():
    for strategy in STRATEGIES:
        found = {bits for s, bits, adapter, optimizer in TRAINED if s == strategy and adapter == "lora"}
        assert found >= ({None} if strategy == "ep" else {None, 4})  # experts stay in 16 bits
    counts = Counter(cell.strategy for cell in TRAINED)
    assert min(counts.values()) >= 4
    assert counts["single"] == counts["ddp"] == counts["pp"] == max(counts.values()) == 36


@pytest.fixture(scope="module")
def models(weights_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of cells whose strategies need another than the rest."""
    mixture = balancing.mixture_folder(
        tmp_path_factory.mktemp("mixture"), "mixtral", architectures=["MixtralForCausalLM"]
    )
    # half of the inputs of each layer that tp splits by inputs are 256
    wide = tiny.build_model_folder(tmp_path_factory.mktemp("wide"), intermediate_size=512)
    described = json.loads((wide / "config.json").read_text()) | {"head_dim": 64}
    (wide / "config.json").write_text(json.dumps(described))
    found = {"ep": tiny.write_weights(mixture), "tp": tiny.write_weights(wide)}
    found |= dict.fromkeys(filter(splits_layers, STRATEGIES), found["tp"])
    return {strategy: found.get(strategy, weights_folder) for strategy in STRATEGIES}


@pytest.fixture(scope="module")
def references() -> dict[tuple[Any, ...], Any]:
    """Metrics of one process by bits, adapter and optimizer; by bits and adapter, those of weights that stand still."""
    return {}


def run(
    cell: Cell, ranks: Any, model: Path, rows: Path, folder: Path, learning_rate: float | None = None
) -> list[dict[str, Any]]:
    world_size = processes(cell.strategy)
    config = configuration(cell, model, rows, folder / "run", learning_rate)
    for seen in ranks(world_size).run(scenarios.train, config, strategy=cell.strategy):
        assert_really_active(seen, cell.strategy, world_size)
    return scenarios.read_metrics(folder / "run")


@pytest.mark.parametrize("cell", TRAINED, ids=scenarios.point_id)
def test_cell_trains_with_the_losses_of_one_process(
    cell: Cell, ranks: Any, models: dict[str, Path], conversations: Path, tmp_path: Path, references: dict[Any, Any]
):
    alone, model = cell._replace(strategy="single"), models[cell.strategy]
    key = (model, alone)
    if key not in references:
        references[key] = run(alone, ranks, model, conversations, tmp_path)
        # weights that stay where they are have the same losses with any optimizer
        standing = (model, alone.bits, alone.adapter)
        if standing not in references:
            references[standing] = run(alone, ranks, model, conversations, tmp_path, learning_rate=1e-12)
        gained = references[standing][-1]["loss"] - references[key][-1]["loss"]  # on the same rows
        assert gained > 0.01, "nothing was learnt"
    metrics = references[key] if cell == alone else run(cell, ranks, model, conversations, tmp_path)
    assert len(metrics) == STEPS
    assert_parity(metrics, references[key], FP32_TOLERANCE)


@pytest.mark.parametrize("cell", REFUSED, ids=scenarios.point_id)
def test_cell_is_refused_with_its_sentence_before_weights_load(
    cell: Cell, weights_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were loaded")

    world_size = processes(cell.strategy)
    launched = launch_environment(STRATEGY_FILES / f"{cell.strategy}.yaml", world_size, "no")
    launched |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)} if world_size > 1 else {}
    for key, value in launched.items():
        monkeypatch.setitem(os.environ, key, value)
    monkeypatch.setattr(loading, "load_model", load)
    with pytest.raises(InputError) as error:
        sft.main(configuration(cell, weights_folder, conversations, tmp_path / "run"))
    sentence = refusal(cell)
    assert sentence in error.value.problems
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("cell", REFUSED, ids=lambda cell: "-".join(map(str, cell)))
def test_refusal_names_something_that_works(cell: Cell):
    for _ in range(3):  # following the first piece of advice each time ends in something that trains
        alternatives = advised(cell)
        assert all(refusal(other) != refusal(cell) for other in alternatives), "advice that changes nothing"
        cell = alternatives[0]
        if refusal(cell) is None:
            return
    raise AssertionError(f"advice leads to {cell}, which is refused as well")


def advised(cell: Cell) -> list[Cell]:
    """The cells that the sentence of a refusal names, in its order."""
    advice = refusal(cell).partition(";")[2]
    settings = re.findall(r"(adapter\.type|train\.optimizer|quantization\.bits) to (\w+)", advice)
    field = {"adapter.type": "adapter", "train.optimizer": "optimizer", "quantization.bits": "bits"}
    value = {"none": None, "8": 8, "4": 4}
    others = [cell._replace(**{field[key]: value.get(text, text)}) for key, text in settings]
    names = re.findall(r"strategy file (\w+)(?: or (\w+))?", advice)
    others += [cell._replace(strategy=name) for pair in names for name in pair if name]
    assert others, "no advice"
    return others
