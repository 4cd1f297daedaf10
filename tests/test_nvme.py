"""State that is swapped to disk: of a larger model than other tests have, since less than a MiB stays in memory."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scenarios
import tiny
from parity import FP32_TOLERANCE, assert_parity

TOGETHER = 2_000_000
"""Weights that step at a time: of these, a process has some four million."""


def swapping(config: Any, together: int) -> list[tuple[int, int]]:
    """Run the recipe; returns how many groups of weights this process steps, and its bytes on disk, after each step."""
    from recipes import sft

    found: list[tuple[int, int]] = []
    close_step = sft.Session.close_step

    def closed(session: Any, *of: Any) -> None:
        rank = session.accelerator.process_index
        files = (Path(config.train.output_dir) / "nvme_offload").rglob(f"rank{rank}/*.swp")
        groups = len(session.model.optimizer.fp32_partitioned_groups_flat)
        found.append((groups, sum(file.stat().st_size for file in files)))
        close_step(session, *of)

    together_is = mock.patch("finetune.distributed.setup.SWAPPED_TOGETHER", together)
    with together_is, mock.patch.object(sft.Session, "close_step", closed):
        sft.main(config)
    return found


@pytest.mark.slow
def test_state_that_is_swapped_to_disk_in_groups_gives_the_run_of_state_in_host_memory(
    ranks: Any, conversations: Path, tmp_path: Path
):
    model = tiny.build_model_folder(tmp_path / "model", tied=False, hidden_size=512, intermediate_size=2048)
    tiny.write_weights(model)
    settings = {"train__steps": 4, "train__micro_batch_size": 4, "checkpoint__at_end": False}
    in_memory = scenarios.configuration(model, conversations, tmp_path / "in memory", **settings)
    ranks(2).run(scenarios.train, in_memory, strategy="zero3_offload", mixed_precision="no")
    config = scenarios.configuration(model, conversations, tmp_path / "swapped", **settings)
    found = ranks(2).run(swapping, config, TOGETHER, strategy="zero3_nvme", mixed_precision="no")
    assert len(found) == 2
    for steps in found:
        assert len(steps) == 4
        for groups, on_disk in steps:
            assert groups > 1
            assert on_disk > 12 * 3_000_000  # masters and two averages of most of its half of 8.9 million weights
    expected = scenarios.read_metrics(tmp_path / "in memory")
    assert_parity(scenarios.read_metrics(tmp_path / "swapped"), expected, FP32_TOLERANCE)
