"""The parity check itself: what is compared, how closely, and over which runs."""

from collections.abc import Sequence
from typing import Any

from finetune.config.strategy_names import has_stages

FP32_TOLERANCE = {"loss": 1e-5, "grad_norm": 1e-5}
BF16_TOLERANCE = {"loss": 3e-3, "grad_norm": 1e-2}
"""Losses are between 4 and 6, gradient norms between 1 and 2; bf16 has 8 significant bits."""

TWO = (
    *("ddp", "fsdp2", "fsdp2_offload", "zero1", "zero2", "zero3", "zero3_offload", "zero3_nvme"),
    *("cp", "ulysses", "pp", "tp"),
)
FOUR = (
    *("ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3", "cp", "ulysses"),
    *("pp", "tp", "tp_pp", "fsdp2_tp", "fsdp2_pp", "cp_tp"),
)
EIGHT = ("tp_pp", "fsdp2_tp_pp", "cp_tp")
LAUNCHES = [(name, number) for number, names in ((2, TWO), (4, FOUR), (8, EIGHT)) for name in names]
OF_MIXTURES = [("ep", 2), ("ep", 4)]
"""Which train mixtures of experts only: their runs are in ``test_expert_runs``."""

OPTIMIZERS = {"adamw": 1e-3, "sgd": 0.2}
"""Optimizers and their learning rates. AdamW hides a wrong loss scale, which SGD shows."""
MAX_GRAD_NORMS = (0.5, 0.0)
"""The gradient norms of the run lie between 1 and 2: one clips every step, the other never."""
ACCUMULATIONS = (1, 2, 4)
ROWS_PER_STEP = 16


def data_processes(strategy: str, world_size: int) -> int:
    """Processes, or groups of them, that compute different rows: two of some strategies share theirs, or four."""
    sharing = {"cp", "ulysses", "pp", "tp"}
    return world_size // 2 ** len(sharing & set(strategy.split("_")))


def differences(metrics: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Largest differences of loss and gradient norm over the steps of two runs."""
    assert len(metrics) == len(reference) > 0
    return {
        key: max(abs(one[key] - other[key]) for one, other in zip(metrics, reference)) for key in ("loss", "grad_norm")
    }


def assert_parity(
    metrics: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]], tolerance: dict[str, float]
) -> None:
    """Two runs are the same run: same trained tokens and learning rates, losses and norms within their tolerances."""
    for key in ("step", "tokens", "learning_rate"):
        assert [m[key] for m in metrics] == [m[key] for m in reference], f"{key} differs"
    for key, difference in differences(metrics, reference).items():
        assert difference <= tolerance[key], f"{key} differs by {difference:.2e}, more than {tolerance[key]:.0e}"


def assert_really_active(seen: dict[str, Any], strategy: str, world_size: int) -> None:
    """What a rank saw of the prepared model is the strategy that was asked for, told by PyTorch's own classes."""
    assert seen["world_size"] == seen["num_processes"] == world_size
    if strategy in ("single", "ddp"):
        kind = "DistributedDataParallel" if strategy == "ddp" else "ForCausalLM"
        assert seen["model_class"].endswith(kind)
        assert seen["share_held"] == 1
        return
    if strategy == "pp":  # two stages
        assert seen["model_class"] == "LlamaForCausalLM"
        assert seen["layers_held"] == seen["layers"] / 2
        assert seen["share_held"] < 0.9
        return
    if strategy == "tp":  # each layer over two processes; norms are whole
        assert seen["model_class"] == "LlamaForCausalLM"
        assert 1 / 2 < seen["share_held"] < 0.6
        return
    if strategy == "tp_pp":  # two stages, and each layer of one over two processes
        assert seen["model_class"] == "LlamaForCausalLM"
        assert seen["layers_held"] == seen["layers"] / 2
        assert seen["share_held"] < 0.5
        return
    if strategy.endswith(("_tp", "_pp")):  # two parts of the model or four, and each over the other processes
        assert seen["model_class"].startswith("FSDP")
        assert seen["meshes"] == {(world_size // (4 if strategy == "fsdp2_tp_pp" else 2),)}
        assert seen["share_held"] < (1.9 if has_stages(strategy) else 1.2) / world_size
        return
    if strategy == "ep":  # two processes for the experts
        assert seen["model_class"].endswith("ForCausalLM")
        assert seen["share_held"] == 1 / 2  # of the experts
        return
    shards = world_size // 2 if strategy == "hsdp" else world_size
    assert abs(seen["share_held"] - 1 / shards) < 0.02
    if strategy.startswith("zero"):
        assert seen["model_class"] == "DeepSpeedEngine"
        assert seen["stage"] == int(strategy[4])
        assert seen["offload"] == {"offload": "cpu", "nvme": "nvme"}.get(strategy.partition("_")[2], "none")
    else:
        assert seen["model_class"] == "FSDPLlamaForCausalLM"
        assert seen["parameter_class"] == "DTensor"
        assert seen["mesh"] == ((2, shards) if strategy == "hsdp" else (shards,))
