"""What `finetune plan` sees of the GPUs of its own machine, by what their driver reports."""

import shutil
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from finetune.cli.planning.machine import gpus_here, unequal_cards
from finetune.hardware.cards import precision_problem
from finetune.units import GIB

Cards = Callable[..., None]


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Gives the machine GPUs of a name, GiB and compute capability."""

    def of(*cards: tuple[str, float, tuple[int, int]]) -> None:
        found = [
            SimpleNamespace(name=name, total_memory=int(size * GIB), major=major, minor=minor)
            for name, size, (major, minor) in cards
        ]
        monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return of


def test_a_card_without_a_data_sheet_can_do_what_its_driver_says(has: Cards):
    for capability, has_bf16 in (((7, 5), False), ((8, 6), True)):
        has(("NVIDIA RTX 9999 Mobile", 8, capability))
        gpu = gpus_here().gpu
        assert (gpu.compute_capability, gpu.bf16, gpu.tflops) == (capability, has_bf16, None)
        assert (precision_problem(gpu, "bf16") is None) == has_bf16


def test_unequal_cards_count_as_the_smallest_and_are_told_with_the_number_of_the_largest(
    has: Cards, monkeypatch: pytest.MonkeyPatch
):
    has(("NVIDIA GeForce RTX 3060", 11.6, (8, 6)), ("NVIDIA GeForce RTX 4090", 23.5, (8, 9)))
    assert gpus_here().text == "2xRTX 3060"
    (said,) = unequal_cards()
    assert said.startswith("This machine has 1x RTX 3060 and 1x RTX 4090, planned as 2x RTX 3060: each GPU gets")
    assert "set CUDA_VISIBLE_DEVICES=1, for the plan and for the run" in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert "set CUDA_VISIBLE_DEVICES=5," in unequal_cards()[0]


def test_nothing_is_said_of_equal_cards_and_of_none(has: Cards):
    assert unequal_cards() == []
    has(*[("NVIDIA GeForce RTX 4090", 23.5, (8, 9))] * 2)
    assert (unequal_cards(), gpus_here().text) == ([], "2xRTX 4090")
