"""What `make prove` has proven, and of which sources: benchmarks/results/proofs.json.

A matrix is a test file with more points than `make test` runs. Its proof holds for the sources that it was made with:
the recipe and what the recipe imports (but for what makes rows of records), the strategy files, the test file and its
helpers. `make test` compares their
hash with the recorded one. Comments, docstrings and layout are no part of the hash: editing them needs no new proof.

For example, ``w = 1  # one`` and ``w=1`` have the same hash, ``w = 2`` has another.

Limits: a module that is imported by a name made at run time is not found. Versions of libraries are recorded, and not
compared.
"""

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from finetune.output.run_files import environment

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
RESULTS = ROOT / "benchmarks" / "results" / "proofs.json"

MATRICES = {
    "test_parity": "strategies x processes x precisions x optimizers x clipping x accumulation",
    "test_resume": "methods x ordered pairs of launches",
    "test_compatibility": "strategies x bits x adapters x optimizers",
    "test_adapters": "strategies x processes x LoRA or QLoRA x precisions",
    "test_state": "launches x optimizers x weights",
    "test_launch": "strategy files, by accelerate launch",
    "test_families": "families x strategies",
    "test_recipes": "recipes x strategies x processes x full weights, LoRA or QLoRA",
    "test_kills": "launches x kinds of kill x moments, and each change of files",
}
"""Test files and the axes of their points."""
FIXTURES = ("ranks", "tiny")
"""Test modules that every matrix uses, through conftest."""
NOT_TRAINING = (
    *("benchmarks", "finetune/__init__.py", "finetune/cli", "finetune/planner", "finetune/trace", "finetune/report"),
    *("finetune/export", "finetune/generation", "finetune/scoring"),
    *("finetune/run/run_result.py", "finetune/distributed/deepspeed_ops.py"),
    *("finetune/config/command_line.py", "finetune/config/foreign_keys.py"),
    *("finetune/models/flops.py", "finetune/models/generation_settings.py"),
)
"""What writes tables, the version, the commands, the planner and its traces, pages on runs, what judges answers, what
reads the result of a run, what has DeepSpeed's operations compiled, what makes a configuration of flags and files, the
FLOPs that are told, and the generation settings of a result: a training step runs none of them."""
FROM_RECORDS_TO_ROWS = tuple(
    f"finetune/data/{name}"
    for name in (
        "sources",
        "columns.py",
        "formats.py",
        "messages.py",
        "templates.py",
        "named_templates",
        "template_process.py",
        "chat_template.py",
        "encoding.py",
        "encoding_workers.py",
    )
)
"""What makes prepared rows of records. The points of a matrix compare runs with one another, and all train the same
prepared rows, whatever these hold; what is right in them is for the tests of the data room, all in `make test`."""
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")


def sources_hash(files: Iterable[Path]) -> str:
    """SHA-256 of the names and contents of Python and YAML files of the repository.

    Without comments, docstrings, and the words of errors that are raised.
    """
    digest = hashlib.sha256()
    for path in sorted(set(files)):
        text = path.read_text()
        content = json.dumps(yaml.safe_load(text)) if path.suffix == ".yaml" else _code_of(text)
        digest.update(f"{path.relative_to(ROOT).as_posix()}\n{content}\n".encode())
    return digest.hexdigest()


@functools.cache  # of the files that all matrices share, once
def _code_of(text: str) -> str:
    return _code(_tree(text))


@functools.cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _code(node: Any) -> str:
    """A syntax tree without docstrings, and without empty fields, of which versions of Python differ in number.

    Without the words of a refusal either, which decide nothing of what is trained. What is raised, and when, does.
    """
    if isinstance(node, list):
        return f"[{','.join(map(_code, node))}]"
    if isinstance(node, ast.Raise):
        return f"Raise({_code(node.exc.func if isinstance(node.exc, ast.Call) else node.exc)})"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        fields["body"] = [each for each in node.body if not _is_text(each)]
    told = [f"{name}={_code(value)}" for name, value in fields.items() if value is not None and value != []]
    return f"{type(node).__name__}({','.join(told)})"


def _is_text(node: ast.AST) -> bool:
    """A string that stands alone: a docstring, of a constant too."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def sources_of(matrix: str) -> list[Path]:
    """Files of the repository on which the outcome of a matrix depends.

    Raises:
        KeyError: no such matrix.
    """
    MATRICES[matrix]
    names = (matrix, *FIXTURES)
    found = imported_by(
        [ROOT / "recipes" / "sft.py", *(TESTS / f"{name}.py" for name in names)], NOT_TRAINING + FROM_RECORDS_TO_ROWS
    )
    return sorted(found) + sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def imported_by(files: Iterable[Path], left_out: Sequence[str] = ()) -> set[Path]:
    """These files and all modules of the repository that they import, at whatever depth, in functions too.

    Args:
        left_out: beginnings of paths in the repository; what only they import is left out with them.
    """
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path not in found and not path.relative_to(ROOT).as_posix().startswith(tuple(left_out)):
            found.add(path)
            waiting += [file for name in _imports(path) for file in _files_of(name)]
    return found


def _imports(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports; of ``from a import b``, ``a`` and what may be the module ``a.b``."""
    for node in ast.walk(_tree(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _files_of(module: str) -> Iterator[Path]:
    """The files that Python runs to import a module of the repository: it, and each package around it."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        for folder in (ROOT, TESTS):
            path = folder.joinpath(*parts[:end])
            yield from (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())


def read() -> dict[str, Any]:
    """The recorded proofs, by matrix."""
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return known


def write(matrix: str, points: int) -> None:
    """Record that every point of a matrix passed, today, with the sources and versions as they are."""
    known = environment()
    proof = {
        "axes": MATRICES[matrix],
        "points": points,
        "passed": points,
        "sources": sources_hash(sources_of(matrix)),
        "date": date.today().isoformat(),
        "python": known["python"],
        "packages": {name: version for name, version in known["packages"].items() if name in PACKAGES},
    }
    RESULTS.write_text(json.dumps(dict(sorted((read() | {matrix: proof}).items())), indent=1) + "\n")


def problem(matrix: str) -> str | None:
    """What is wrong with the proof of a matrix, in a sentence; None if it holds for the present sources."""
    proof = read().get(matrix)
    if proof is None:
        return f"benchmarks/results/proofs.json has no proof of tests/{matrix}.py; run `make prove`."
    if proof["sources"] != sources_hash(sources_of(matrix)):
        return (
            f"The proof of tests/{matrix}.py ({proof['axes']}) is of {proof['date']}, and its sources have changed "
            "since; run `make prove`, which renews it."
        )
    return None
