"""The memory of ZeRO, term by term, against the live tensors of real processes in the phases of a step."""

import functools
from pathlib import Path
from typing import Any

import live_bytes
import pytest
import scenarios
import tiny

from finetune.planner.zero import PERSISTENT_ELEMENTS, ZeroBytes, flat_shares, tensor_shares, zero_bytes
from finetune.planner.zero_gather import Gathered, gathered

SMALL = 2000
"""Bytes of input, labels, losses and counters."""
LAYER = [(256, 256), (128, 256), (128, 256), (256, 256), (768, 256), (768, 256), (256, 768)]
MATRICES = [512 * 256] + [rows * columns for _ in range(2) for rows, columns in LAYER]
NORMS = [256] * 5
MODULES = [[0], *([first] for first in (16, 1, 2, 3, 4, 17, 5, 6, 7, 18, 8, 9, 10, 11, 19, 12, 13, 14)), [15], [0]]
"""Numbers of the weights (0 the tied embedding, 1 to 14 matrices, 15 to 19 norms) in the order of the forward pass."""


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.7 million weights, beside which the activations of a few tokens are small."""
    return tiny.build_model_folder(tmp_path_factory.mktemp("wide"), hidden_size=256, intermediate_size=768)


@pytest.fixture(scope="module")
def short_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_conversations(tmp_path_factory.mktemp("short") / "train.jsonl", rows=40, longest=2)


@pytest.fixture(scope="module")
def phases(ranks: Any, wide_model: Path, short_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The marks of the last step on every process: two micro-batches, and the step itself. A run is made once."""
    output = tmp_path_factory.mktemp("phases") / "run"

    @functools.cache
    def run(stage: int, processes: int = 2, precision: str = "bf16", offload: str = "", **zero: Any) -> Any:
        changes = {"train__steps": 2, "train__global_batch_size": 2 * processes, "data__max_length": 16}
        config = scenarios.configuration(wide_model, short_rows, output, **changes)
        everyone = ranks(processes).run(
            live_bytes.count_phases, config, zero, strategy=f"zero{stage}{offload}", mixed_precision=precision
        )
        assert len(everyone) == processes
        names = [name for name, _, _ in everyone[0][-5:]]
        assert names == ["forward", "backward", "forward", "backward", "step"]
        return [[mark[1:] for mark in marks[-5:]] for marks in everyone]

    return run


def terms(stage: int, processes: int = 2, **changes: Any) -> ZeroBytes:
    return zero_bytes(stage=stage, processes=processes, trained=[MATRICES, NORMS], **changes)


@pytest.mark.parametrize(
    ("stage", "processes", "precision"),
    [(1, 2, "bf16"), (2, 2, "bf16"), (2, 4, "bf16"), (3, 2, "bf16"), (1, 2, "no"), (2, 2, "no"), (3, 2, "no")],
)
def test_bytes_between_steps_and_after_a_backward_pass_are_exact(
    stage: int, processes: int, precision: str, phases: Any
):
    predicted = terms(stage, processes, precision=precision)
    everyone = phases(stage, processes, precision)
    assert 0 <= max(marks[-1][0] for marks in everyone) - predicted.between_steps < SMALL
    assert 0 <= max(marks[1][0] for marks in everyone) - predicted.backward_end < SMALL


def test_offloaded_bytes_are_all_told(phases: Any):
    predicted = terms(3, offload="host", bucket_elements=10**6)
    found = phases(3, offload="_offload", reduce_bucket_size=10**6)[0][-1][0]
    assert 0 <= found - predicted.between_steps - predicted.host < SMALL


@pytest.mark.parametrize(("stage", "gloo_copies"), [(1, 0), (2, 0), (3, 1)])
def test_peak_of_the_reduction_of_gradients(stage: int, gloo_copies: int, phases: Any):
    """Gloo scatters by way of a copy, which NCCL does not make; stage 3 has the tied embedding gathered meanwhile."""
    predicted = terms(stage, bucket_elements=5 * 10**6)
    by_gloo = gloo_copies * (predicted.reduction + 2 * MATRICES[0])
    backward = phases(stage, reduce_bucket_size=5 * 10**6)[0][3]
    assert backward[1] == pytest.approx(predicted.reduction_peak + by_gloo, abs=SMALL)


@pytest.mark.parametrize("bucket_elements", [600_000, 100_000], ids=["smaller than the model", "than a weight"])
def test_small_bucket_of_stage_2(bucket_elements: int, phases: Any):
    """When the first is full, activations of a few tokens are left."""
    predicted = terms(2, bucket_elements=bucket_elements)
    peak = max(marks[3][1] for marks in phases(2, reduce_bucket_size=bucket_elements))
    assert peak == pytest.approx(predicted.reduction_peak, rel=0.02)


@pytest.mark.parametrize(
    ("stage", "processes", "precision"), [(1, 2, "bf16"), (2, 2, "bf16"), (2, 4, "bf16"), (2, 2, "no")]
)
def test_peak_of_the_step(stage: int, processes: int, precision: str, phases: Any):
    everyone = phases(stage, processes, precision)
    found = max(marks[-1][1] for marks in everyone)
    assert found == pytest.approx(terms(stage, processes, precision=precision).step_peak, abs=SMALL)


def test_stage_3_looks_for_infinities_in_a_copy_that_no_operation_shows(phases: Any):
    """What is seen of the step is the flat copy of the gradients; ``isinf`` takes 5 bytes an element inside itself."""
    predicted = terms(3, bucket_elements=10**6)
    seen = predicted.backward_end + 4 * predicted.largest_flat - predicted.persistent
    assert phases(3, reduce_bucket_size=10**6)[0][-1][1] == pytest.approx(seen, abs=2 * SMALL)
    share = tensor_shares(MATRICES + NORMS, 2)
    assert predicted.step == 5 * share - predicted.persistent


@pytest.mark.parametrize("prefetch", [50_000_000, 200_000])
def test_gathered_weights_are_those_of_the_coordinator(prefetch: int, phases: Any):
    """Activations are told by stage 2, which gathers nothing."""
    predicted = replay(prefetch)
    gathers = phases(3, reduce_bucket_size=10**6, prefetch_bucket_size=prefetch)[0]
    plain = phases(2, reduce_bucket_size=10**6)[0]
    base = terms(3, bucket_elements=10**6).between_steps
    activations = plain[0][0] - terms(2).between_steps
    assert gathers[0][0] - base - activations == pytest.approx(predicted.forward_end, abs=SMALL)
    early = gathers[0][1] - base - predicted.forward_peak
    assert -SMALL < early <= activations + SMALL


def replay(prefetch: int = 50_000_000, scale: int = 1, **changes: Any) -> Gathered:
    sizes = [0 if size <= PERSISTENT_ELEMENTS else size * scale for size in [*MATRICES, *NORMS]]
    return gathered(sizes, MODULES, processes=2, element_bytes=2, prefetch=prefetch, **changes)


def test_all_of_a_small_model_stays_gathered_and_of_a_large_one_its_end():
    whole = 2 * sum(size for size in MATRICES if size > PERSISTENT_ELEMENTS)
    assert replay().forward_end == whole
    assert replay(scale=1000).forward_end < 0.9 * 1000 * whole


def test_flat_shares_are_padded_to_two_elements_a_process():
    assert flat_shares([[5, 4], [1]], 4) == [4, 2]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [({"stage": 4}, "ZeRO has no stage 4"), ({"stage": 2, "offload": "host"}, "Offload is configured for stage 3")],
)
def test_what_is_not_configured_is_refused(wrong: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        zero_bytes(**{"stage": 1, "processes": 2, "trained": [[8]]} | wrong)
