"""The kernel of AdamW for bf16 weights in Triton's interpreter, or on a GPU: see ``test_optimizer``."""

import math
import sys

import torch

from finetune.optim.adamw_kernel import ELEMENTS, launch

HOW = {"rate": 1e-2, "decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "step": 3}
COUNT = 8 * ELEMENTS + 7


def given(device: str) -> list[torch.Tensor]:
    """Weights, their gradients and both moments."""
    torch.manual_seed(0)
    weight, gradient, first, second = torch.randn(4, COUNT).bfloat16().to(device)
    return [weight, gradient, first / 10, second.square() / 100]


def stepped(device: str, seed: int) -> list[torch.Tensor]:
    """Weights and moments after a step of the kernel."""
    tensors = given(device)
    launch(*tensors, **HOW, seed=seed)
    return [tensors[0], *tensors[2:]]


def exact(device: str) -> list[torch.Tensor]:
    """The same of PyTorch's AdamW, in fp64."""
    weight, gradient, first, second = (each.double() for each in given(device))
    parameter = torch.nn.Parameter(weight)
    betas = HOW["beta1"], HOW["beta2"]
    optimizer = torch.optim.AdamW([parameter], HOW["rate"], betas, HOW["eps"], HOW["decay"])
    optimizer.state[parameter] = {"step": torch.tensor(HOW["step"] - 1.0), "exp_avg": first, "exp_avg_sq": second}
    parameter.grad = gradient
    optimizer.step()
    return [parameter.detach(), first, second]


def check_rounding(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Each is one of the two numbers of bf16 that are next to what is exact; on average they are what is exact."""
    gap = torch.exp2(wanted.abs().log2().floor() - 7)  # between two numbers of bf16
    error = (found.double() - wanted) / (gap + wanted.abs().max() * 2**-24)  # of a small sum of large numbers in fp32
    assert 0.9 < error.abs().max() < 1.001
    assert abs(error.mean()) < 4 * 0.5 / math.sqrt(COUNT)


if __name__ == "__main__":
    device = sys.argv[1]
    results = {seed: stepped(device, seed) for seed in (1, 2**62 + 1)}
    for found in results.values():
        for each, wanted in zip(found, exact(device), strict=True):
            check_rounding(each, wanted)
    for each, same, other in zip(results[1], stepped(device, 1), results[2**62 + 1], strict=True):
        assert torch.equal(each, same)
        assert 0.2 < (each != other).double().mean() < 0.5
    noise = torch.stack([(each > wanted).double() for each, wanted in zip(results[1], exact(device), strict=True)])
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 5 / math.sqrt(COUNT)
    tensors = given(device)
    tensors[1].view(torch.int16).fill_(0x7FFF)  # NaN as CUDA writes it
    launch(*tensors, **HOW, seed=1)
    assert all(each.isnan().all() for each in (tensors[0], *tensors[2:]))
    print("as AdamW", flush=True)
