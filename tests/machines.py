"""Machines for tests: namespaces of this one, each with its own network, host name and process ids, and a cable.

Needs root and Linux. What runs in a machine sees this one's files, as on a shared disk.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
PORT = 29500
"""Of the first machine, whose ports nobody else uses."""
SETTINGS = Path("/etc/netns")
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Machine:
    """One of several, by its number from 0."""

    number: int
    namespace: str
    cable: str
    """Its end of the cable."""

    @property
    def host(self) -> str:
        """Its host name."""
        return f"node{self.number + 1}"

    @property
    def address(self) -> str:
        """Its address on the cable."""
        return f"10.77.0.{self.number + 1}"

    def start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Start a command there, whose output goes to a file. If it is killed, so is all that it started."""
        inside = f'hostname {self.host} && exec "$@"'
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", inside, "bash"]
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE", "FSDP", "PYTEST"))
        }
        entered = ["ip", "netns", "exec", self.namespace, *apart, *command]
        with output.open("wb") as file:
            return subprocess.Popen(entered, stdout=file, stderr=file, env=clean | {"OMP_NUM_THREADS": "1"})

    def unplug(self) -> None:
        """From now on nothing leaves or reaches it, and nobody is told."""
        _ip("-n", self.namespace, "link", "set", self.cable, "down")

    def limit(self, megabits_per_second: float) -> None:
        """Slow down what it sends."""
        rate = ["tbf", "rate", f"{megabits_per_second}mbit", "burst", "64kb", "latency", "100ms"]
        subprocess.run(["tc", "-n", self.namespace, "qdisc", "replace", "dev", self.cable, "root", *rate], check=True)


def problem() -> str | None:
    """Why there can be no such machines here; None if there can."""
    for command in ("ip", "unshare", "hostname"):
        if shutil.which(command) is None:
            return f"needs {command}"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux, for network namespaces"
    name = f"finetune-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"needs network namespaces: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines, with a cable between them."""
    number = f"{os.getpid()}-{next(NUMBERS)}"
    first, second = machines = (
        Machine(0, f"finetune-{number}-0", "cable0"),
        Machine(1, f"finetune-{number}-1", "cable1"),
    )
    try:
        for machine in machines:
            _ip("netns", "add", machine.namespace)
            own = SETTINGS / machine.namespace  # in the place of files of /etc, for what runs there
            own.mkdir(parents=True)
            (own / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{m.address} {m.host}\n" for m in machines))
            (own / "nsswitch.conf").write_text("hosts: files\n")
            _ip("-n", machine.namespace, "link", "set", "lo", "up")
        peer = ["peer", "name", second.cable, "netns", second.namespace]
        _ip("-n", first.namespace, "link", "add", first.cable, "type", "veth", *peer)
        for machine in machines:
            _ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", machine.cable)
            _ip("-n", machine.namespace, "link", "set", machine.cable, "up")
        yield machines
    finally:
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True)
            shutil.rmtree(SETTINGS / machine.namespace, ignore_errors=True)


def launch(
    machines: Sequence[Machine],
    strategy: str,
    processes: int,
    script: Path,
    flags: Sequence[Sequence[str]],
    folder: Path,
) -> list[subprocess.Popen[bytes]]:
    """``accelerate launch`` on each machine; the output of each is ``HOST.log`` in the folder.

    Args:
        processes: on all machines together.
        flags: of the recipe, on each machine.
    """
    started = []
    for machine, its_flags in zip(machines, flags, strict=True):
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml"), "--mixed_precision", "no"]
        command += ["--num_machines", str(len(machines)), "--num_processes", str(processes)]
        command += ["--machine_rank", str(machine.number), "--main_process_ip", machines[0].address]
        command += ["--main_process_port", str(PORT), str(script), *its_flags]
        started.append(machine.start(command, folder / f"{machine.host}.log"))
    return started


def send(number: signal.Signals, rank: int, script: Path) -> None:
    """Send a signal to a process of a launch, by its rank."""
    for process in psutil.process_iter(["cmdline"]):
        if str(script) in process.info["cmdline"] and process.environ().get("RANK") == str(rank):
            process.send_signal(number)
            return
    raise LookupError(f"there is no process {rank} of {script}")


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill what was started, with all that it started."""
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
