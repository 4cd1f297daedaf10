"""What was measured of links, for a terminal."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from finetune.cli.links.bus_bandwidth import BETWEEN, INSIDE, OPERATIONS, MeasuredLink, Timing
from finetune.cli.links.links_file import LinksFile
from finetune.hardware.cards import lookup

LEGEND = (
    "GB/s: bus bandwidth, as nccl-tests define it: 10^9 bytes that a link carries in one direction, of a ring that all "
    "links take part in."
)


def print_links(found: LinksFile, console: Console) -> None:
    """Tables of each scope, and in sentences what a plan takes of them and which processes are slow."""
    console.print(f"Links of {found.text}, PyTorch {found.machine.torch}")
    for scope in (INSIDE, BETWEEN):
        timings = [each for each in found.timings if each.scope == scope]
        if timings:
            console.print()
            console.print(_table(scope, timings))
    console.print(LEGEND)
    console.print()
    for line in sentences(found):
        console.print(line)


def sentences(found: LinksFile) -> Iterator[str]:
    """What follows from the times."""
    if found.inside is not None:
        yield f"{INSIDE}: {_text(found.inside, _assumed(found, INSIDE))}."
    if found.between is not None:
        yield f"{BETWEEN}, of each: {_text(found.between, _assumed(found, BETWEEN))}."
    for ranks, what in ((found.slow_links, "links"), (found.slow_computation, "computation")):
        if ranks:
            places = ", ".join(f"{rank} (on machine {rank // found.processes_per_machine})" for rank in ranks)
            yield f"Slower than the others by its {what}: process {places}."
    if not found.slow_links and not found.slow_computation and found.machines * found.processes_per_machine > 2:
        yield "No process is much slower than the others."


def _table(scope: str, timings: list[Timing]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    table.add_column(scope)
    sizes = sorted({each.bytes for each in timings})
    for size in sizes:
        table.add_column(_size(size), justify="right")
    for operation in OPERATIONS:
        of_size = {each.bytes: each for each in timings if each.operation == operation}
        table.add_row(f"{operation}, us", *(_number(of_size[size].seconds * 1e6) for size in sizes))
        table.add_row(f"{operation}, GB/s", *(_number(of_size[size].bus_gb_per_second) for size in sizes))
    return table


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _size(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


def _text(link: MeasuredLink, sheet: tuple[str, float] | None) -> str:
    text = f"{_number(link.gb_per_second)} GB/s, {_number(link.microseconds)} us a hop"
    if sheet is None:
        return text
    name, gb_per_second = sheet
    share = link.gb_per_second / gb_per_second
    return f"{text}; {share:.0%} of the {_number(gb_per_second)} GB/s that a plan assumes for {name}"


def _assumed(found: LinksFile, scope: str) -> tuple[str, float] | None:
    """Name and GB/s of the usual link of a card, None if the card is not known."""
    gpu = lookup(found.machine.device, 0)
    if not gpu.gb:
        return None
    if scope == INSIDE:
        return gpu.node_link.name, gpu.node_link.gb_per_second
    return gpu.network.name, gpu.network.of_machine(found.processes_per_machine)
