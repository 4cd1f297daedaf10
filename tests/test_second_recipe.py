"""The rooms are cut right: a recipe with another loss is sixty lines, and trains, saves and resumes as the first."""

from pathlib import Path
from typing import Any

import distillation
import pytest
import scenarios


def distil(config: Any) -> int:
    import os

    distillation.main(distillation.Config.model_validate(config.model_dump()))
    return int(os.environ.get("WORLD_SIZE", "1"))


def test_it_is_short():
    assert len(Path(distillation.__file__).read_text().splitlines()) < 60


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_it_trains_saves_and_resumes_under_a_strategy_as_in_one_process(
    strategy: str, ranks: Any, model_folder: Path, conversations: Path, held_out: Path, tmp_path: Path
):
    def figures(output: Path, world_size: int, **changes: Any) -> list[tuple[float, float, float]]:
        config = scenarios.configuration(
            model_folder, conversations, output, data__eval=str(held_out), **{"train__steps": 6} | changes
        )
        name = "single" if world_size == 1 else strategy
        assert ranks(world_size).run(distil, config, strategy=name) == [world_size] * world_size
        return [(m["loss"], m["grad_norm"], m.get("eval_loss", 0.0)) for m in scenarios.read_metrics(output)]

    alone = figures(tmp_path / "alone", 1)
    together = figures(tmp_path / "together", 2, train__steps=6, checkpoint__every=3, checkpoint__keep=5)
    assert len(alone) == len(together) == 6
    assert alone[-1][0] < alone[0][0]
    for one, other in zip(alone, together):
        assert one == pytest.approx(other, rel=1e-5)
    (tmp_path / "together" / "metrics.jsonl").rename(tmp_path / "uninterrupted.jsonl")
    again = {"checkpoint__resume": str(tmp_path / "together" / "checkpoints" / "step-00000003")}
    resumed = figures(tmp_path / "resumed", 2, **again)
    assert len(resumed) == 3
    for one, other in zip(together[3:], resumed):
        assert one == pytest.approx(other, rel=1e-6)
