"""How much of its data sheet hardware reaches: the constants of predicted time, each with its source.

Seen against 74 published speeds: one share for all cards is wrong (A100 reach 0.80 of their data sheet, Hopper 0.65,
GeForce 0.9 to 1.0, whose tensor cores are slowed down and so are never short of data), and a launch takes 17
microseconds rather than the 5 to 10 of an empty kernel, as Python, autograd and the modules' hooks run on the way.
"""

from dataclasses import dataclass, replace

from finetune.hardware.cards import Gpu

MATRIX_EFFICIENCY = {(8, 0): 0.80, (9, 0): 0.65}
"""Share of the data sheet's FLOP/s that matrix products reach, by compute capability: A100, Hopper."""
GEFORCE_EFFICIENCY = 0.95


@dataclass(frozen=True)
class Rates:
    """Of one card."""

    matrix_efficiency: float = 0.72
    """Share of the data sheet's FLOP/s that the matrix products of a model reach, where nothing better is known: 0.80
    was measured for the best sizes on an H200 (790 of 989 TFLOP/s in bf16); 0.9 of that is assumed."""
    fp8_speed: float = 1.87
    """Products in fp8 over those in bf16, with a scale for each row: of the matrices of Llama 3.1 8B and 8,192
    positions on an H200. Data sheets say 2."""
    attention_efficiency: float = 0.5
    """The same for flash attention, forward and backward: FlashAttention-2 reaches 50 to 73 % on an A100
    (arXiv:2307.08691), and the lower end is assumed."""
    attention_most_tflops: float = 320.0
    """What the kernel of FlashAttention-2, PyTorch's first choice, reaches on cards that are faster: 309 to 370 forward
    on an H100 (arXiv:2407.08608), less backward; the mean is assumed."""
    memory_efficiency: float = 0.83
    """Share of the data sheet's memory bandwidth that elementwise kernels reach: 4.0 of 4.8 TB/s, assumed of an H200;
    3.0 of 3.35 was published for an H100."""
    launch_seconds: float = 17e-6
    """Time in which the host launches one operation."""
    kernel_seconds: float = 4e-6
    """In which a kernel starts and ends, and keeps only some of the GPU's multiprocessors busy: the time of one that
    does nothing, assumed. It makes small products less efficient."""
    host_gb_per_second: float = 11.0
    """Memory bandwidth that the optimizer of one process reaches on the host: seen with one OpenMP thread, which is
    what ``accelerate launch`` gives each process unless OMP_NUM_THREADS is set."""
    disk_gb_per_second: float = 6.0
    """Of the local disk, reading or writing, all processes of a machine together; assumed for one NVMe drive on four
    lanes of PCIe 4."""


def rates_of(gpu: Gpu) -> Rates:
    """The rates of a card."""
    if gpu.name.startswith("RTX") and not gpu.name.startswith(("RTX A", "RTX 6000", "RTX PRO")):
        return replace(Rates(), matrix_efficiency=GEFORCE_EFFICIENCY)
    if gpu.compute_capability in MATRIX_EFFICIENCY:
        return replace(Rates(), matrix_efficiency=MATRIX_EFFICIENCY[gpu.compute_capability])
    return Rates()
