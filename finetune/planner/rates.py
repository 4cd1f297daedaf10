"""How much of its data sheet hardware reaches: the constants of predicted time, each with its source."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Measured, derived or assumed; two real steps on a GPU can replace them (``replace(RATES, ...)``)."""

    matrix_efficiency: float = 0.72
    """Share of the data sheet's FLOP/s that the matrix products of a model reach. 0.80 was measured for the best sizes
    on an H200 (790 of 989 TFLOP/s in bf16); 0.9 of that for a model's sizes is assumed."""
    attention_efficiency: float = 0.5
    """The same for flash attention, forward and backward: FlashAttention-2 reaches 50 to 73 % on an A100
    (arXiv:2307.08691), and the lower end is assumed."""
    attention_most_tflops: float = 320.0
    """What the kernel of FlashAttention-2, PyTorch's first choice, reaches on cards that are faster: 309 to 370 forward
    on an H100 (arXiv:2407.08608), less backward; the mean is assumed."""
    memory_efficiency: float = 0.83
    """Share of the data sheet's memory bandwidth that elementwise kernels reach: 4.0 of 4.8 TB/s, assumed of an H200;
    3.0 of 3.35 was published for an H100."""
    kernel_seconds: float = 6e-6
    """Time in which the host launches one kernel through PyTorch's autograd; assumed (5 to 10 microseconds)."""
    host_gb_per_second: float = 200.0
    """Memory bandwidth that the optimizer reaches on the host, all processes of a machine together; assumed for two
    sockets with eight channels each."""
    disk_gb_per_second: float = 6.0
    """Of the local disk, reading or writing, all processes of a machine together; assumed for one NVMe drive on four
    lanes of PCIe 4."""


RATES = Rates()
