"""Optimizer state and weights kept in host memory or on NVMe: what a GPU gains, what a machine needs, what it costs.

Optimizer state leaves with its gradients in fp32: they go to the host once a step, AdamW runs there, 16-bit weights
come back. On disk the state is read and written once a step, too. Weights that leave are fetched for every forward
and every backward pass, beside computation. Seconds are those of the slowest link, taken to be busy all the time.
"""

from dataclasses import dataclass
from typing import Literal

from finetune.planner.paper.cluster import Cluster
from finetune.planner.paper.layout_memory import GRADIENT_BYTES, OPTIMIZER_BYTES, WEIGHT_BYTES
from finetune.planner.paper.prediction import Prediction

ADAM_TRAFFIC_BYTES = 28
"""Of host memory for each parameter: state and gradient read, state and weights written."""


@dataclass(frozen=True)
class Offload:
    """One way to make room on a GPU."""

    what: str
    """optimizer, or optimizer and weights."""
    to: Literal["host", "disk"]
    gpu_bytes: float
    """On the fullest GPU, of what is left of its peak."""
    host_bytes: float
    """Of a machine."""
    disk_bytes: float
    """Of a machine."""
    extra_seconds: float
    """Of a step."""


def offloads(prediction: Prediction, cluster: Cluster) -> tuple[Offload, ...]:
    """Four ways for a layout: the optimizer, or the weights as well, to host memory or to disk."""
    memory = prediction.memory
    elements = memory.optimizer / OPTIMIZER_BYTES  # after sharding: of which this GPU keeps the state
    weights = memory.weights / WEIGHT_BYTES
    gpus = cluster.gpus_per_node
    wire = cluster.host_gb_per_second * 1e9
    adam = ADAM_TRAFFIC_BYTES * elements * gpus / (cluster.host_memory_gb_per_second * 1e9)
    step_wire = (GRADIENT_BYTES + WEIGHT_BYTES) * elements / wire
    state_disk = 2 * OPTIMIZER_BYTES * elements * gpus / (cluster.disk_gb_per_second * 1e9)
    fetches = 2 * prediction.job.micro_batches(prediction.layout) * WEIGHT_BYTES * weights
    found = []
    for to in ("host", "disk"):
        on_disk = to == "disk"
        update = max(step_wire, adam, state_disk) if on_disk else max(step_wire, adam)
        fetch = fetches * gpus / (cluster.disk_gb_per_second * 1e9) if on_disk else fetches / wire
        for what in ("optimizer", "optimizer and weights"):
            leaves_weights = what != "optimizer"
            away = OPTIMIZER_BYTES * elements + (memory.weights if leaves_weights else 0.0)
            buffers = GRADIENT_BYTES * elements
            found.append(
                Offload(
                    what=what,
                    to="disk" if on_disk else "host",
                    gpu_bytes=memory.total - away,
                    host_bytes=gpus * (buffers if on_disk else buffers + away),
                    disk_bytes=gpus * away if on_disk else 0.0,
                    extra_seconds=update + (max(0.0, fetch - prediction.step_seconds) if leaves_weights else 0.0),
                )
            )
    return tuple(found)
