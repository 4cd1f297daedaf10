"""GPUs by name, machines with several of them, and their interconnects, from ``cards.yaml``.

``parse_gpus("2x8xH100")`` is for what a user writes, ``lookup`` for what a driver reports, ``peak_flops`` for the MFU.
Limits: recipes are for NVIDIA's cards, so that one of AMD can be planned for and no more (``caveat``); all machines are
identical; links are the usual ones for that card.
"""

import difflib
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import InputError
from finetune.units import GIB

MOST_GPUS_OF_A_MACHINE = 16
_COUNTED = re.compile(r"(?:(?P<first>[0-9]{1,6})\s*x\s*)?(?:(?P<second>[0-9]{1,6})\s*x\s*)?(?P<card>.*)", re.I | re.S)
_COUNTED_LAST = re.compile(r"(?P<card>.*\S)\s*x\s*(?P<gpus>[0-9]{1,6})", re.I | re.S)
_SIZE = re.compile(r"(?P<size>[0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(?P<unit>GB|GiB)", re.I)
_MEMORY = re.compile(r"(?<![a-z0-9])([0-9]{1,6})\s?GB?(?![a-z0-9])", re.I)
"""As a word of a card's name: GH200 144G HBM3e."""
_TELLS_NOTHING = re.compile(
    r"nvidia|amd|geforce|tesla|instinct|rtx|blackwell|workstation|edition|generation|sxm(?:[2-6](?!\d))?|hbm\de?|[\s_-]",
    re.I,
)
"""Of a card's name: its vendor and product line, and the socket and memory of the cards in cards.yaml."""
_HOPPER = (9, 0)
AMPERE = (8, 0)
"""The compute capability of the first tensor cores that multiply in bf16, and of the first with flash attention."""


@dataclass(frozen=True)
class Link:
    """Bandwidth and latency that a collective sees."""

    name: str
    gb_per_second: float
    """In one direction, 10^9 bytes: of one GPU, or of a machine where ``shared``."""
    microseconds: float
    """Latency of one hop."""
    shared: bool = False

    def of_machine(self, gpus: int) -> float:
        """GB/s out of a machine with so many GPUs."""
        return self.gb_per_second * (1 if self.shared else gpus)


@dataclass(frozen=True)
class Gpu:
    """A card; if only its memory is known, it has no speed."""

    name: str
    memory_gib: float
    """What the driver leaves to programs."""
    node_link: Link
    """To the other GPUs of its machine."""
    host_link: Link
    network: Link
    """From machine to machine."""
    tflops: float | None = None
    """bf16 or fp16 with fp32 accumulation, dense: of the tensor cores, where it has some. None: not known."""
    fp32_tflops: float | None = None
    memory_gb_per_second: float | None = None
    compute_capability: tuple[int, int] | None = None
    """NVIDIA's number for what it can compute, (9, 0) for an H100. None: of another vendor, or not known."""
    gb: int = 0
    """Nominal memory of a known card."""

    @property
    def bf16(self) -> bool:
        """Whether it multiplies in bf16; if not, it trains in fp16. A card that is not known is taken to do so."""
        return self.compute_capability is None or self.compute_capability >= AMPERE

    @property
    def has_flash_attention(self) -> bool:
        """Whether PyTorch's flash attention runs on it; a card that is not known is taken to have it."""
        return self.bf16

    @property
    def has_large_workspaces(self) -> bool:
        """Whether cuBLAS takes as much as on Hopper and later; also where that is not known."""
        return self.compute_capability is None or self.compute_capability >= _HOPPER


@dataclass(frozen=True)
class Machines:
    """Machines of one kind."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int = 1

    @property
    def world_size(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def text(self) -> str:
        """As ``parse_gpus`` reads it."""
        return (f"{self.nodes}x" if self.nodes > 1 else "") + f"{self.gpus_per_node}x{self.gpu.name}"


@cache
def links() -> dict[str, Link]:
    """Known interconnects by name."""
    return {
        name: Link(name, line["gb_per_second"], line["microseconds"], line.get("of") == "machine")
        for name, line in _read()["links"].items()
    }


@cache
def known_gpus() -> tuple[Gpu, ...]:
    """Every card of the data file, in its order; cards that share a name are told apart by their memory."""
    lines = _read()["gpus"]
    names = [line["name"] for line in lines]
    several = {name for name in names if names.count(name) > 1}
    return tuple(
        Gpu(
            name=f"{line['name']}-{line['gb']}GB" if line["name"] in several else line["name"],
            gb=line["gb"],
            memory_gib=line["memory_gib"],
            tflops=line["tflops"],
            fp32_tflops=line["fp32"],
            memory_gb_per_second=line["gb_per_second"],
            node_link=links()[line["node_link"]],
            host_link=links()[line["host_link"]],
            network=links()[line["network"]],
            compute_capability=_capability(line.get("compute")),
        )
        for line in lines
    )


def _capability(written: float | None) -> tuple[int, int] | None:
    """(8, 9) for 8.9."""
    if written is None:
        return None
    major, minor = str(written).split(".")
    return int(major), int(minor)


def _read() -> Any:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def parse_gpus(text: str) -> Machines:
    """What ``[MACHINES x] [GPUS x] CARD`` or ``CARD x GPUS`` stands for: ``2x8xH100``, ``H100x8``, ``8x80GB``.

    A card is a known name in any spelling (4090, rtx-4090, "NVIDIA GeForce RTX 4090"), with its memory if there are
    several (A100-40GB). Or only a memory size: in GB as in a card's name, of which programs get less, or in GiB for
    what programs get (22.5GiB); its speed is then unknown.

    Raises:
        InputError: for an unknown card or an impossible number.
    """
    shown = text.strip() or "(empty)"
    nodes, gpus, written = _counted(text.strip())
    if nodes < 1 or gpus < 1:
        raise InputError(f"--gpus: {shown} means no GPUs; give at least one, for example 1xH100.")
    card = _card(written, shown)
    if gpus > MOST_GPUS_OF_A_MACHINE:
        raise InputError(
            f"--gpus: {shown} is one machine with {gpus} GPUs, but machines have at most {MOST_GPUS_OF_A_MACHINE}; "
            f"give the number of machines and the GPUs of each, for example {-(-gpus // 8)}x8x{card.name}."
        )
    return Machines(card, gpus, nodes)


def _counted(text: str) -> tuple[int, int, str]:
    """Machines, GPUs of each, and what is written for the card.

    A number comes last only after a known card, and only where none comes first that would leave a known one: the x of
    "RTX 4090" counts nothing, and the 4090 of "4090x2" is no number of GPUs.
    """
    counted = _COUNTED.fullmatch(text)
    assert counted is not None  # everything matches
    card = counted["card"].strip()
    counted_last = _COUNTED_LAST.fullmatch(text)
    if counted_last is not None and not _is_known(card) and _is_known(counted_last["card"]):
        return 1, int(counted_last["gpus"]), counted_last["card"]
    numbers = [int(number) for number in (counted["first"], counted["second"]) if number is not None]
    nodes, gpus = (*([1] * (2 - len(numbers))), *numbers)
    return nodes, gpus, card


def _is_known(written: str) -> bool:
    return _SIZE.fullmatch(written) is not None or _squeezed(written) in _spellings()


def _card(written: str, shown: str) -> Gpu:
    if sized := _SIZE.fullmatch(written):
        if float(sized["size"]) == 0:
            raise InputError(f"--gpus: {shown} has no memory; give the memory of one card, for example 8x80GB.")
        return _of_memory(float(sized["size"]), in_gib=sized["unit"].lower() == "gib")
    if (name := _squeezed(written)) in _spellings():
        return _spellings()[name]
    counted_last = _COUNTED_LAST.fullmatch(shown)
    nearest = _nearest(written) or (_nearest(counted_last["card"]) if counted_last else None)
    meant = f" Did you mean {nearest.name}?" if nearest else ""
    known = ", ".join(gpu.name for gpu in known_gpus())
    raise InputError(
        f"--gpus: unknown GPU {shown}.{meant} Or give its memory instead, for example 1x8GB. Known GPUs: {known}."
    )


@cache
def _spellings() -> dict[str, Gpu]:
    """Known cards by squeezed name: with their memory, and the first of each name without."""
    spellings: dict[str, Gpu] = {}
    for gpu in known_gpus():
        for name in (gpu.name, _family(gpu), f"{_family(gpu)} {gpu.gb}GB"):
            spellings.setdefault(_squeezed(name), gpu)
    return spellings


def _nearest(written: str) -> Gpu | None:
    """The card that an unknown name may have meant."""
    wanted = _squeezed(written)
    of_the_family = [name for name in _spellings() if re.match(rf"{name}(?!\d)", wanted)]  # RTX 4090 D is a 4090
    close = sorted(of_the_family, key=len)[-1:] or difflib.get_close_matches(wanted, _spellings(), n=1, cutoff=0.7)
    return _spellings()[close[0]] if close else None


def _squeezed(name: str) -> str:
    """What is left of a name that tells one card from another, its memory last: A100 80GB PCIe as a100pcie80gb."""
    rest = _TELLS_NOTHING.sub("", _MEMORY.sub(" ", name)).lower()
    return rest + "".join(f"{size}gb" for size in _MEMORY.findall(name))


def _family(gpu: Gpu) -> str:
    return gpu.name.removesuffix(f"-{gpu.gb}GB")


def _of_memory(size: float, *, in_gib: bool) -> Gpu:
    """A card of known memory only: programs get as much of it as on the worst known card of that size."""
    shares = {gpu: gpu.memory_gib / gpu.gb for gpu in known_gpus()}
    alike = [share for gpu, share in shares.items() if gpu.gb == size] or list(shares.values())
    return Gpu(
        f"{size:.10g}{'GiB' if in_gib else 'GB'}",
        size if in_gib else size * min(alike),
        node_link=links()["pcie4"],
        host_link=links()["pcie4"],
        network=links()["ethernet"],
    )


def stand_in(gpu: Gpu) -> Gpu:
    """The known card with the nearest memory, at whose speed ways to train on a card of unknown speed are compared.

    Of several at the same distance, the first in the data file. Show its name, but never its seconds.
    """
    return gpu if gpu.tflops else min(known_gpus(), key=lambda known: abs(known.memory_gib - gpu.memory_gib))


def lookup(device_name: str, total_bytes: int, compute_capability: tuple[int, int] | None = None) -> Gpu:
    """The card that a driver reports; an unknown one has its memory but no speed.

    Args:
        device_name: as ``torch.cuda.get_device_name`` tells it.
        total_bytes: as ``torch.cuda.get_device_properties`` does.
        compute_capability: NVIDIA's, of a card that no data sheet here names; None where it is not known.
    """
    memory_gib = total_bytes / GIB
    cards = _cards(device_name)
    if not cards:
        card = _of_memory(memory_gib, in_gib=True)
        return replace(card, name=device_name, compute_capability=compute_capability)
    return replace(min(cards, key=lambda card: abs(card.memory_gib - memory_gib)), memory_gib=memory_gib)


def _cards(device_name: str) -> list[Gpu]:
    """Known cards of a device's name, whatever their memory.

    A slice of a card (MIG 1g.10gb), its variant for laptops or with another suffix (RTX 4090 D) is none of them.
    """
    wanted = _squeezed(_MEMORY.sub(" ", device_name))
    return [gpu for gpu in known_gpus() if _squeezed(_family(gpu)) == wanted]


def peak_flops(gpu_name: str) -> float | None:
    """Peak FLOP/s in bf16 or fp16 of the GPU with this driver name, or None if unknown."""
    cards = _cards(gpu_name)
    return cards[0].tflops * 1e12 if cards and cards[0].tflops else None


def precision_problem(gpu: Gpu, precision: str) -> str | None:
    """Why a card cannot train in a launch's mixed precision, as a sentence; None if it can."""
    if precision == "bf16" and not gpu.bf16:
        return f"{gpu.name} does not support bf16; launch with --mixed_precision fp16 (or no)."
    return None


def caveat(gpu: Gpu) -> str | None:
    """What a plan for a known card of another vendor leaves out, as a sentence; None for all other cards."""
    if gpu.gb and gpu.compute_capability is None:
        return (
            f"{gpu.name} is not an NVIDIA GPU: kernels, libraries and what they take are assumed to be as on NVIDIA's, "
            "and the recipes have never run on it."
        )
    return None
