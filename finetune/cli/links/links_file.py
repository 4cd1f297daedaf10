"""The file that ``finetune links`` writes, and ``finetune plan --links`` takes in place of data sheets."""

from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune.cli.links.bus_bandwidth import BETWEEN, INSIDE, MeasuredLink, Timing, link_of
from finetune.errors import InputError, first_line
from finetune.hardware.cards import Link, Machines
from finetune.planner.speed import MEASURED


class Machine(BaseModel):
    """What was measured between."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    """Name of the GPU, or CPU."""
    backend: str
    torch: str


class LinksFile(BaseModel):
    """All that was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machines: int = Field(ge=1)
    processes_per_machine: int = Field(ge=1)
    machine: Machine
    timings: list[Timing]
    slow_links: list[int] = []
    """Ranks."""
    slow_computation: list[int] = []

    @property
    def inside(self) -> MeasuredLink | None:
        """Between the GPUs of a machine."""
        return link_of(self.timings, INSIDE, side_by_side=1)

    @property
    def between(self) -> MeasuredLink | None:
        """Out of a machine. One ring for each of its GPUs was measured at the same time."""
        return link_of(self.timings, BETWEEN, side_by_side=self.processes_per_machine)

    @property
    def text(self) -> str:
        several = f"{self.machines} machines x " if self.machines > 1 else ""
        return f"{several}{self.processes_per_machine} x {self.machine.device}, {self.machine.backend}"

    def given_to(self, machines: Machines) -> Machines:
        """Machines with the links that were measured; those that were not stay as in the data sheets."""
        gpu = machines.gpu
        if self.inside is not None:
            gpu = replace(gpu, node_link=Link(MEASURED, self.inside.gb_per_second, self.inside.microseconds))
        if self.between is not None:
            network = Link(MEASURED, self.between.gb_per_second, self.between.microseconds, shared=True)
            gpu = replace(gpu, network=network)
        return replace(machines, gpu=gpu)

    def notes(self, machines: Machines) -> list[str]:
        """What a plan for other machines than the measured ones should say, as sentences."""
        found = [f"Links as measured by finetune links ({self.text})."]
        if self.machines == 1 and machines.nodes > 1:
            found.append("Links between machines were not measured: they are those of data sheets.")
        if self.processes_per_machine != machines.gpus_per_node:
            found.append(
                f"They were measured with {self.processes_per_machine} GPUs of a machine, and {machines.gpus_per_node} "
                "are planned for."
            )
        return found


def read_links(path: Path) -> LinksFile:
    """Read a file of ``finetune links``.

    Raises:
        InputError: if it is none.
    """
    try:
        found = LinksFile.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not such a file: {first_line(error)}"
        raise InputError(
            f"--links: {path} cannot be read ({why}); give a file that finetune links --output wrote."
        ) from error
    if any(not each.seconds > 0 or each.bytes < 1 or each.members < 2 for each in found.timings):
        raise InputError(f"--links: {path} has times that cannot be; run finetune links --output {path} again.")
    return found
