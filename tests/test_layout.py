"""The repository keeps its own rules: every YAML parses and is used, imports go one way, strategies have one place."""

import ast
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from parity import LAUNCHES, OF_MIXTURES

from finetune.config.command_line import parse
from finetune.config.compatibility import Cell, refusal
from finetune.config.recipe_classes import CorpusRun, PairedRun, class_of
from finetune.config.sections import Run
from recipes import dpo, pretrain, sft

ROOT = Path(__file__).parent.parent
STRATEGIES = sorted((ROOT / "accelerate_configs").rglob("*.yaml"))
CONFIGS = sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
LIBRARY = sorted((ROOT / "finetune").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def test_there_are_files_to_check():
    assert len(STRATEGIES) == 20
    assert len(CONFIGS) == 18
    assert len(LIBRARY) >= 30
    assert len(RECIPES) == 3


def test_every_strategy_file_is_trained_by_the_parity_tests():
    assert {path.stem for path in STRATEGIES} == {"single"} | {name for name, _ in LAUNCHES + OF_MIXTURES}


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_strategy_file_is_short_commented_and_known_to_accelerate(path: Path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 16
    assert lines[0].startswith("# ")
    assert [line for line in lines if "#" not in line] == []  # each key says why it is there
    config = ClusterConfig.from_yaml_file(str(path))  # refuses unknown keys
    assert config.mixed_precision == "bf16"
    assert yaml.safe_load(path.read_text()).get("num_processes") == (None if path.stem == "single" else 1)


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_strategy_file_says_what_the_launcher_stops_without(path: Path):
    comments = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert ("--num_processes N" in comments) == (path.stem != "single")
    assert ("pip install deepspeed" in comments) == path.stem.startswith("zero")


def read(path: Path) -> Any:
    """A configuration, by the recipe that it is for."""
    arguments = ["--config", str(path), "--model.path", "some/model"]
    known: dict[Any, Any] = {PairedRun: dpo.Config, CorpusRun: pretrain.Config, Run: sft.Config}
    return parse(known[class_of(arguments)], arguments)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_configuration_parses_and_its_data_files_exist(path: Path):
    config = read(path)
    if isinstance(config, CorpusRun):
        assert "# your texts: " in path.read_text()  # of which there are none here
        return
    for file in (config.data.train, config.data.eval):
        assert isinstance(file, str)
        assert (ROOT / file).is_file()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_configuration_is_not_refused_under_the_strategy_that_it_names(path: Path):
    config = read(path)
    named = re.findall(r"accelerate_configs/(\w+)\.yaml", path.read_text()) or ["single", "fsdp2"]
    bits = None if config.quantization.bits == "none" else config.quantization.bits
    for strategy in named:
        assert refusal(Cell(strategy, bits, config.adapter.type, config.train.optimizer)) is None
    if "_lora" in path.stem or "_qlora" in path.stem:
        assert (config.adapter.type, bits) == ("lora", 4 if "qlora" in path.stem else None)
        assert len(named) == 1


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            package = list(path.relative_to(ROOT).parts[: -node.level]) if node.level else []
            module = ".".join([*package, *([node.module] if node.module else [])])
            found |= {f"{module}.{name}" for name in names} | {module}
    return found


ROOMS = (
    *("compat", "config", "hardware", "data", "scoring", "models", "optim", "distributed", "training"),
    *("output", "report", "checkpoint", "export", "generation", "trace", "planner", "run", "cli"),
)
"""From the lowest: a room imports from those before it. Below them all are the modules outside of any room."""


def room_of(path: Path) -> int:
    parts = path.relative_to(ROOT / "finetune").parts
    return 1 + ROOMS.index(parts[0]) if len(parts) > 1 else 0


def test_every_room_says_what_is_in_it():
    assert {path.name for path in (ROOT / "finetune").iterdir() if (path / "__init__.py").exists()} == set(ROOMS)
    for room in ROOMS:
        folder = ROOT / "finetune" / room
        documented = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert documented
        inside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/*.py")}
        missing = {name for name in inside - {"__init__", "__main__"} if f"``{name}``" not in documented}
        assert not missing, f"finetune/{room}/__init__.py says nothing of {missing}"


DOOR = ROOT / "finetune" / "__init__.py"
"""Gives what is in a room when it is asked for, and imports none of them before."""


def test_a_room_imports_only_from_rooms_below_it():
    modules = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in LIBRARY}
    checked = 0
    for path in LIBRARY:
        for name in imports(path):
            assert not name.startswith("recipes"), f"{path} imports a recipe"
            imported = modules.get(name, modules.get(f"{name}.__init__"))
            if imported is None or DOOR in (imported, path):
                continue
            if room_of(imported) != room_of(path) or path.relative_to(ROOT / "finetune").parts[0] not in ROOMS:
                checked += 1
                assert room_of(imported) < room_of(path) or room_of(path) == 0 == room_of(imported), f"{path}: {name}"
    assert checked > 100


def test_a_basename_means_one_thing():
    names = [path.stem for path in LIBRARY if not path.stem.startswith("__")]
    assert sorted(names) == sorted(set(names))


LONGEST_FILE, LONGEST_FUNCTION = 400, 100


def test_files_and_functions_are_short_enough_to_be_read():
    files = [*LIBRARY, *RECIPES, *(ROOT / "benchmarks").glob("*.py")]
    for path in files:
        text = path.read_text()
        assert len(text.splitlines()) <= LONGEST_FILE, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < LONGEST_FUNCTION, f"{path}: {node.name}"


def test_a_recipe_is_read_at_one_sitting():
    for path in RECIPES:
        assert len(path.read_text().splitlines()) <= 110
        (main,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "main"]
        assert main.end_lineno is not None
        assert main.end_lineno - main.lineno < 80


COMPAT = sorted((ROOT / "finetune" / "compat").glob("*.py"))
PURE = [p for p in LIBRARY if room_of(p) <= 1 + ROOMS.index("hardware") and p not in COMPAT]


@pytest.mark.parametrize("path", PURE, ids=lambda path: path.stem)
def test_lowest_rooms_import_no_torch_and_no_transformers(path: Path):
    assert not {"torch", "accelerate", "transformers", "deepspeed"} & {name.split(".")[0] for name in imports(path)}
    assert not any(name.startswith("finetune.compat") for name in imports(path))


OWN_PACKAGES = {"finetune", "recipes"}
DOCUMENTED = {"_asdict", "_exit", "_replace", "_no_split_modules"}
"""Names with an underscore that are documented: by Python, of named tuples, and ``os._exit``; by transformers and
Accelerate, of the layers that stay whole where a model is sharded."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(path: Path) -> set[str]:
    """Private names that a file defines: functions, classes, variables, attributes of ``self``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def foreign_private_names(path: Path, own: set[str]) -> list[str]:
    """Private names of other libraries in a file: imported, as an attribute, or named to ``getattr`` and the like."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if any(map(is_private, alias.name.split(".")))]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | DOCUMENTED:
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            constants = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            found += [name for name in constants if is_private(name) and name not in own | DOCUMENTED]
    return [name for name in found if name.split(".")[0] not in OWN_PACKAGES]


def test_private_names_of_other_libraries_are_used_in_compat_only():
    others = [path for path in [*LIBRARY, *RECIPES] if path not in COMPAT]
    own = set().union(*map(own_names, others))
    assert {path: names for path in others if (names := foreign_private_names(path, own))} == {}
    used = {path.stem for path in COMPAT if foreign_private_names(path, own_names(path))}
    assert used >= {"torch_private", "fake_tensors", "transformers_private", "accelerate_private", "deepspeed_private"}


BUILDS_ON = {"quick_operations": "finetune.compat.fake_tensors", "fake_tensors": "finetune.compat.torch_private"}
"""The compat modules that import another: all are of PyTorch."""


def test_compat_says_of_each_library_in_which_version_it_was_read():
    modules = [path for path in COMPAT if path.stem != "__init__"]
    assert len(modules) >= 6
    for path in modules:
        tree = ast.parse(path.read_text())
        assert re.search(r"Read in\s+\d", ast.get_docstring(tree) or ""), path
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not is_private(node.name)]
        own = {name for name in imports(path) if name.startswith("finetune")}
        assert all(name.startswith(BUILDS_ON.get(path.stem, "nothing")) for name in own), path
        for function in functions:
            assert ast.get_docstring(function), f"{path}: {function.name}"


STRATEGY_NAMES = re.compile(r"\b(ddp|fsdp\d?|hsdp|deepspeed|zero[123]|DistributedDataParallel)", re.IGNORECASE)


def code_tokens(path: Path) -> list[str]:
    """Names and strings of the code, without comments and docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    documented = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {ast.get_docstring(node, clean=False) for node in documented}
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    tokens = tokenize.generate_tokens(iter(path.read_text().splitlines(keepends=True)).__next__)
    return [t.string for t in tokens if t.type == tokenize.NAME] + [s for s in strings if s not in docstrings]


def test_strategies_are_named_in_one_place_only():
    own = [ROOT / "finetune" / name for name in ("distributed", "compat")]
    tables = [  # which there are, what goes with each, and what each does
        ROOT / "finetune" / name
        for name in ("config/strategy_names.py", "config/compatibility.py", "trace/placement.py")
    ]
    others = [path for path in [*LIBRARY, *RECIPES] if not {*own, *tables} & {path, *path.parents}]
    assert len(others) >= 12
    # the package's version in run.yaml; what a trace changes in it
    allowed = {"deepspeed", "deepspeed_ops"}
    for path in others:
        named = [text for text in code_tokens(path) if STRATEGY_NAMES.search(text) and text not in allowed]
        assert named == [], f"{path} names a strategy"
    assert any(STRATEGY_NAMES.search(text) for path in own[0].rglob("*.py") for text in code_tokens(path))


def test_tests_and_notebooks_name_no_machine_and_no_registry():
    hosts = re.compile(r"/root/|/work/|/home/\w|pypi\.org|files\.pythonhosted")
    folders = ("accelerate_configs", "benchmarks", "docs", "finetune", "notebooks", "recipes", "tests")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    files = [p for p in files if p.suffix in {".py", ".md", ".yaml", ".cfg", ".toml", ".ipynb", ".json", ".txt"}]
    assert len(files) > 40
    for path in files:
        if path != Path(__file__):
            assert not hosts.search(path.read_text()), path
