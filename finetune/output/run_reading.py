"""What a run has written, read back: run.yaml and metrics.jsonl. Imports nothing that is slow."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


def read_metrics(folder: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """The lines of metrics.jsonl by their steps, and how many could not be read.

    A machine that lost its power may leave any bytes. The last line of a killed run may be cut; it does not count.
    """
    path = folder / "metrics.jsonl"
    written = path.read_bytes() if path.exists() else b""
    lines: dict[int, dict[str, Any]] = {}
    unread = 0
    for line in written[: written.rfind(b"\n") + 1].splitlines():
        try:
            metrics = json.loads(line)
        except (ValueError, RecursionError):
            metrics = None
        if isinstance(metrics, dict) and type(metrics.get("step")) is int:
            lines[metrics["step"]] = metrics
        else:
            unread += 1
    return lines, unread


def line_of(metrics: Mapping[str, Any]) -> str:
    """A line of metrics.jsonl."""
    return json.dumps(finite(metrics), allow_nan=False)


def finite(found: Any) -> Any:
    """What was measured, with null for each figure that is not finite: JSON has no such numbers."""
    if isinstance(found, Mapping):
        return {key: finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def read_run(folder: Path) -> dict[str, Any]:
    """The run.yaml of a folder; empty where there is none, or none that can be read."""
    path = folder / "run.yaml"
    try:
        run = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    return run if isinstance(run, dict) else {}
