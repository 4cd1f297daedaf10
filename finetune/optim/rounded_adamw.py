"""AdamW for bf16 weights that have no fp32 master.

Composed of PyTorch's operations, a step reads and writes each weight and its moments a dozen times, in fp32, and draws
three random numbers from memory. On a GPU a kernel in Triton does it all at once, and moves 14 bytes for each weight.
"""

import importlib.util
import socket
from collections.abc import Sequence
from typing import Any

import torch

from finetune.optim.rounding import CHUNK_ELEMENTS, local_shard, number_parameters, round_stochastically
from finetune.seeds import seed_of

BETAS, EPSILON = (0.9, 0.999), 1e-8


class StochasticRoundingAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) for bf16 weights that have no fp32 master.

    A bf16 number has 8 significant bits: an update below 1/256 of its weight is lost when the sum is rounded to
    nearest, which is what most updates of fine-tuning are. Rounding up or down with the probability that
    preserves the expectation keeps them (Gupta et al., arXiv:1502.02551). The same holds for the second moment, which
    changes by 1/1000 per step. The arithmetic is fp32; weights and both moments are stored in the parameter's dtype.
    The random numbers of a step depend only on ``seed``, the number of the step and the place among the parameters.

    Args:
        one_kernel: step contiguous bf16 weights by the kernel, instead of in chunks by PyTorch's operations.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = BETAS,
        seed: int = 0,
        one_kernel: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": EPSILON})
        self.seed, self.one_kernel = seed, one_kernel
        self.numbers: dict[torch.Tensor, int] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        number_parameters(self.numbers, self.param_groups)
        updated = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        steps = max((self.state[parameter].get("step", 0) for parameter, _ in updated), default=0)
        for parameter, group in updated:
            self._update(parameter, group, seed=seed_of(self.seed, steps + 1, self.numbers[parameter]))

    def _update(self, parameter: torch.Tensor, group: dict[str, Any], *, seed: int) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        held = [local_shard(each) for each in (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])]
        how = (group["lr"], group["weight_decay"], *group["betas"], group["eps"], state["step"], seed)
        fits = all(each.dtype == torch.bfloat16 and each.is_contiguous() for each in held) and held[0].numel() > 0
        if self.one_kernel and fits:
            adamw_rounded(*held, *how)
        else:
            _in_chunks(held, *how)


@torch.library.custom_op("finetune::adamw_rounded", mutates_args={"weight", "first", "second"})
def adamw_rounded(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    rate: float,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    seed: int,
) -> None:
    """One step of AdamW over bf16 weights, in fp32 arithmetic and rounded stochastically.

    Args:
        weight: in bf16 and contiguous, as are its gradient and both moments.
        decay: of the weights, each step by ``rate`` times this.
        step: of these weights, from 1.
        seed: of the rounding.
    """
    how = rate, decay, beta1, beta2, eps, step, seed
    if weight.is_cuda:
        from finetune.optim.adamw_kernel import launch

        launch(weight, gradient, first, second, *how)
    else:  # real numbers of a dry run
        _in_chunks((weight, gradient, first, second), *how)


@adamw_rounded.register_fake
def _(*_: Any) -> None:
    return None


def has_kernel() -> bool:
    """Whether Triton is installed, as it is beside PyTorch for GPUs on Linux."""
    return importlib.util.find_spec("triton") is not None


def kernel_problems(device: torch.device) -> list[str]:
    """Why Triton cannot make kernels on this machine, as a sentence. It makes one, which takes a moment."""
    weight, gradient, first, second = torch.zeros(4, 8, dtype=torch.bfloat16, device=device)
    try:
        adamw_rounded(weight, gradient, first, second, 0.0, 0.0, *BETAS, EPSILON, 1, 0)
    except Exception as error:  # of its compilers and of the driver there are several that have no more in common
        return [
            f"Triton cannot make kernels on {socket.gethostname()} ({type(error).__name__}: "
            f"{' '.join(str(error).split())}). It needs a C compiler and Python's headers: install gcc and "
            "python3-dev, or name a compiler in the variable CC. Or set model.kernels to plain and model.fp8 to "
            "false, which do without it."
        ]
    return []


def _in_chunks(
    held: Sequence[torch.Tensor],
    rate: float,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    seed: int,
) -> None:
    """The same by PyTorch's operations, of any dtype."""
    random = torch.Generator(held[0].device).manual_seed(seed)
    is_flat = all(tensor.is_contiguous() for tensor in (held[0], *held[2:]))
    parts = [tensor.reshape(-1).split(CHUNK_ELEMENTS) if is_flat else [tensor] for tensor in held]
    for weight, gradient, first, second in zip(*parts, strict=True):
        grad = gradient.float()
        first32 = first.float().lerp_(grad, 1 - beta1)
        second32 = second.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        _store(first, first32, random)
        _store(second, second32, random)
        denominator = (second32 / (1 - beta2**step)).sqrt_().add_(eps)
        updated = weight.float().mul_(1 - rate * decay)
        updated.addcdiv_(first32, denominator, value=-rate / (1 - beta1**step))
        _store(weight, updated, random)


def _store(target: torch.Tensor, values: torch.Tensor, random: torch.Generator) -> None:
    target.copy_(round_stochastically(values, random) if target.dtype == torch.bfloat16 else values)
