"""Python and the libraries, against what this package asks for and what it was tested with."""

import importlib.metadata
import logging
import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from finetune.cli.health.finding import Finding
from finetune.distributed.built_operations import describe_operations
from finetune.errors import first_line
from finetune.shipped import shipped_files

PACKAGE = "finetune"
TESTED_PYTHON = ((3, 10), (3, 12))
"""The first and the last version that constraints.txt is made for."""
CORE = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "datasets", "deepspeed")
"""What is named where all is well, if it is there."""
INSTALL = "python -m pip install --constraint constraints.txt"


def examine() -> Iterator[Finding]:
    """Look at everything that is installed."""
    yield python_version(sys.version_info[:2])
    yield from versions(_required(), _installed(), tested_versions())
    yield _bitsandbytes()
    yield _deepspeed()


def python_version(found: tuple[int, int]) -> Finding:
    """Whether it is one of those that the constraints are made for."""
    first, last = TESTED_PYTHON
    seen = f"Python {platform.python_version()}"
    if found < first:
        return Finding("Python", "error", seen, f"Install Python {first[0]}.{first[1]} or newer.")
    if found > last:
        return Finding("Python", "warning", f"{seen}; tested up to {last[0]}.{last[1]}")
    return Finding("Python", "ok", seen)


def tested_versions() -> dict[str, str]:
    """Versions of constraints.txt for this Python and system, by name."""
    lines = (shipped_files() / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {
        canonicalize_name(pin.name): next(iter(pin.specifier)).version
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }


def versions(required: list[Requirement], installed: dict[str, str], tested: dict[str, str]) -> Iterator[Finding]:
    """One finding for each library that is missing, too old or another than the tested one; else one for all."""
    as_tested = True
    for requirement in required:
        name = canonicalize_name(requirement.name)
        found = installed.get(name)
        pinned = f'{INSTALL} "{name}=={tested[name]}"' if name in tested else f"python -m pip install {name}"
        if found is None:
            yield Finding(name, "error", "not installed", pinned)
        elif not requirement.specifier.contains(found, prereleases=True):
            yield Finding(name, "error", f"{found}, needed is {requirement.specifier}", pinned)
        elif Version(found).public != tested.get(name, Version(found).public):
            yield Finding(name, "warning", f"{found}, tested is {tested[name]}", f"If a run fails: {pinned}")
        else:
            continue
        as_tested = False
    named = ", ".join(f"{name} {installed[name]}" for name in CORE if name in installed)
    yield Finding("libraries", "ok", f"{named}{'; all as tested' if as_tested else ''}")


def _required() -> list[Requirement]:
    """What this package asks for, without its extras; nothing where it runs from a clone that is not installed."""
    try:
        lines = importlib.metadata.requires(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        lines = list(CORE[:-1])
    required = map(Requirement, lines)
    return [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]


def _installed() -> dict[str, str]:
    return {canonicalize_name(each.name): each.version for each in importlib.metadata.distributions() if each.name}


def _bitsandbytes() -> Finding:
    """Quantises a few numbers, on the GPU where there is one."""
    what = "bitsandbytes"
    try:
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a kernel that would be faster is no finding
        import torch
        from bitsandbytes import functional

        device = "cuda" if torch.cuda.is_available() else "cpu"
        quantised, state = functional.quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4")
        restored = functional.dequantize_4bit(quantised, state)
    except Exception as error:  # of a library that is not installed as it should be, anything
        return Finding(what, "error", f"cannot quantise: {first_line(error)}", f"{INSTALL} --force-reinstall {what}")
    if not torch.allclose(restored, torch.ones_like(restored)):
        return Finding(what, "error", f"quantises wrongly on the {device}", f"{INSTALL} --force-reinstall {what}")
    return Finding(what, "ok", f"quantises to 4 bits on the {'GPU' if device == 'cuda' else 'CPU'}")


def _deepspeed() -> Finding:
    seen, problems = describe_operations()
    return Finding("deepspeed", "warning" if problems else "ok", seen, " ".join(problems))
