"""What machines can do, as plain figures, and the assumptions by which times follow from them."""

from dataclasses import dataclass

from finetune.errors import InputError
from finetune.hardware.cards import Machines
from finetune.units import GIB

PROCESSORS = {
    "T4": 40,
    "V100": 80,
    "A100": 108,
    "H100": 132,
    "H200": 132,
    "H100 PCIe": 114,
    "H100 NVL": 132,
    "B200": 148,
}
"""Streaming multiprocessors of a GPU by name, from NVIDIA's architecture papers; of any other 128 are assumed."""


@dataclass(frozen=True)
class Cluster:
    """Machines with the same number of the same GPU. GB are 10^9 bytes, GiB 2^30."""

    name: str
    nodes: int
    gpus_per_node: int
    memory_gib: float
    """Of a GPU, as the driver reports it."""
    peak_tflops: float
    """Dense 16-bit tensor cores with fp32 accumulation."""
    memory_gb_per_second: float
    """Of a GPU's own memory, from the data sheet."""
    processors: int
    """Streaming multiprocessors of a GPU."""
    node_gb_per_second: float
    """Between GPUs of a machine, one direction: the bus bandwidth that collectives reach."""
    network_gb_per_second: float
    """Between machines, of one GPU's share of the network cards."""
    node_latency_seconds: float = 3.4e-6
    """For each step of a ring inside a machine."""
    network_latency_seconds: float = 1.4e-5
    """For each step of a ring that crosses machines."""
    host_gb_per_second: float = 45.0
    """Between a GPU and host memory, one direction; PCIe 5 x16 reaches 40 to 50 (assumed)."""
    host_memory_gb_per_second: float = 300.0
    """Of a machine's host memory; two sockets with eight channels of DDR5 reach about that (assumed)."""
    disk_gb_per_second: float = 6.0
    """Of a machine's NVMe, read or write; one PCIe 4 x4 drive (assumed)."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB


def cluster_of(machines: Machines) -> Cluster:
    """Plain figures of machines that ``finetune.hardware.cards`` knows.

    Raises:
        InputError: if the GPU is known by its memory alone, which tells no speed.
    """
    gpu = machines.gpu
    if gpu.tflops is None or gpu.memory_gb_per_second is None:
        raise InputError(
            f"The speed of {gpu.name} is unknown, but layouts are ranked by speed; name a GPU, for example --gpus "
            f"{machines.nodes}x{machines.gpus_per_node}xH100."
        )
    return Cluster(
        name=machines.text,
        nodes=machines.nodes,
        gpus_per_node=machines.gpus_per_node,
        memory_gib=gpu.memory_gib,
        peak_tflops=gpu.tflops,
        memory_gb_per_second=gpu.memory_gb_per_second,
        processors=PROCESSORS.get(gpu.name.split("-")[0], 128),
        node_gb_per_second=gpu.node_link.gb_per_second,
        network_gb_per_second=gpu.network.of_machine(machines.gpus_per_node) / machines.gpus_per_node,
        node_latency_seconds=gpu.node_link.microseconds * 1e-6,
        network_latency_seconds=gpu.network.microseconds * 1e-6,
        host_gb_per_second=gpu.host_link.gb_per_second,
    )


@dataclass(frozen=True)
class Assumptions:
    """Constants that no data sheet holds. None was fitted: they rank layouts, and promise no absolute speed.

    Real runs are slower. One public report has 430 TFLOP/s for each of 128 H100 and a Llama 3 of 8B parameters
    (swiss-ai/Megatron-LM, pull request 29), where these give 510 to 530 for the same tokens a step; its layout is not
    told. Not counted: launches of small kernels, uneven experts, the merging of partial results in context parallelism,
    stragglers, checkpoints, data.
    """

    matrix_share: float = 0.70
    """Of the peak that a large matrix product reaches in training, whole waves counted. Assumed; 790 of 989 TFLOP/s
    were measured on an H200 for a single large product."""
    attention_share: float = 0.40
    """Of the peak that attention kernels reach, forward and backward; the FlashAttention-3 paper (arXiv:2407.08608) has
    309 to 370 of 989 TFLOP/s forward for FlashAttention-2 on an H100 and 467 to 648 for its own."""
    elementwise_bytes: float = 115.0
    """Memory traffic of norms, activation function, rotary embedding and residuals with fused kernels, forward and
    backward, for each token, layer and hidden element. Derived."""
    logit_traffic_bytes: float = 40.0
    """Memory traffic of the loss for each token and word of the vocabulary. Derived."""
    memory_share: float = 0.83
    """Of the data sheet's memory bandwidth that kernels reach: 4.0 of 4.8 TB/s on an H200."""
    logit_bytes: float = 8.0
    """Of the logits at the peak, for each token and word: bf16, the same in fp32, and their gradient in bf16. Assumed
    of a loss that works in place."""
    backward_bytes: float = 22.0
    """Working set of a layer's backward pass, for each token and hidden element. Measured by a dry run of an 8B
    model."""
    optimizer_traffic_bytes: float = 30.0
    """Memory traffic of AdamW on fp32 master weights with bf16 copies, for each parameter."""
    overlaps_gradients: bool = False
    """The reduction of gradients runs beside the last backward pass (off by default in Megatron-LM)."""
    fragmentation: float = 1.05
    """Memory that the allocator reserves over what is used: 1.02 to 1.08, unverified."""
    outside_gib: float = 2.0
    """CUDA context, kernels, and buffers of the communication library. Assumed."""
    safe_share: float = 0.80
    """Of a GPU's memory: of 454 runs of 4D parallel training on A100 and H100 none that was estimated below it ran out
    of memory (Fujii et al., arXiv:2411.06465)."""

    def limit_bytes(self, cluster: Cluster) -> float:
        """Of a stage's own peak, for it to fit."""
        return (cluster.memory_gib - self.outside_gib) * GIB / self.fragmentation


ASSUMED = Assumptions()
"""What is assumed where nothing else is said."""
