"""CPU cores that this process may use: often fewer than the machine has, in containers and under schedulers.

``os.process_cpu_count`` (Python 3.13) only knows the affinity. joblib knows the quota of a container, but not that of a
group below the root, which schedulers and systemd set. Limit: Linux only; elsewhere all cores of the machine count.
"""

import math
import os
import sys
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def usable() -> int:
    """Whole cores that the affinity and the CPU quota of this process allow; at least 1."""
    if sys.platform != "linux":
        return os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0))
    quota = quota_of(Path("/proc/self/cgroup").read_text(), CONTROL_GROUPS)
    return max(1, int(min(allowed, quota)))


def quota_of(memberships: str, root: Path) -> float:
    """Cores that a process may keep busy on average, by its control groups and those above them; infinite if unlimited.

    With ``4:cpu,cpuacct:/a/b`` it is the smallest of ``cpu/a/b``, ``cpu/a`` and ``cpu``. In a container the root is the
    container's own group, and a path of the host leads nowhere.

    Args:
        memberships: the text of ``/proc/PID/cgroup``.
        root: where the control groups are mounted.
    """
    limits = [math.inf]
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = Path(path.lstrip("/"))  # relative, so that its parents end with "."
        top = root / "cpu" if controllers else root  # version 2 names no controllers
        limits += [_limit(top / part) for part in (group, *group.parents)]
    return min(limits)


def _limit(group: Path) -> float:
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
    elif (group / "cpu.cfs_quota_us").exists():
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    else:
        return math.inf
    return math.inf if quota in ("max", "-1") else int(quota) / int(period)
