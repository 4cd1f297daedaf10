"""The repository keeps its own rules: every YAML parses and is used, imports go one way, strategies have one place."""

import ast
import re
import tokenize
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from parity import LAUNCHES

from finetune.command_line import parse
from finetune.compatibility import Cell, refusal
from recipes.sft import Config

ROOT = Path(__file__).parent.parent
STRATEGIES = sorted((ROOT / "accelerate_configs").rglob("*.yaml"))
CONFIGS = sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
LIBRARY = sorted((ROOT / "finetune").rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").glob("*.py"))


def test_there_are_files_to_check():
    assert len(STRATEGIES) == 10
    assert len(CONFIGS) == 12
    assert len(LIBRARY) >= 30
    assert len(RECIPES) == 1


def test_every_strategy_file_is_trained_by_the_parity_tests():
    assert {path.stem for path in STRATEGIES} == {"single"} | {name for name, _ in LAUNCHES}


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_strategy_file_is_short_commented_and_known_to_accelerate(path: Path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 16
    assert lines[0].startswith("# ")
    assert [line for line in lines if "#" not in line] == []  # each key says why it is there
    config = ClusterConfig.from_yaml_file(str(path))  # refuses unknown keys
    assert config.mixed_precision == "bf16"
    assert "num_processes" not in yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", STRATEGIES, ids=lambda path: path.stem)
def test_strategy_file_says_what_the_launcher_stops_without(path: Path):
    comments = "".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert ("--num_processes N" in comments) == (path.stem != "single")
    assert ("pip install deepspeed" in comments) == path.stem.startswith("zero")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_configuration_parses_and_its_data_files_exist(path: Path):
    config = parse(Config, ["--config", str(path), "--model.path", "some/model"])
    for file in (config.data.train, config.data.eval):
        assert isinstance(file, str)
        assert (ROOT / file).is_file()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_configuration_is_not_refused_under_the_strategy_that_it_names(path: Path):
    config = parse(Config, ["--config", str(path), "--model.path", "some/model"])
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


# from the lowest; a module imports from its own line and from those above it
LAYERS_FROM_THE_LOWEST = """
loss schedule row_order flops errors start_up cores config randomness rounding packing compatibility hardware shipped \
hub_access durations
sources formats messages rendering chat template_process encoding pipeline cache preparation rows batches data \
streaming weight_files weights model data_checks attention packing_support optimizer eight_bit adapter quantization
strategy evaluation metrics output output_folder progress checkpoint
command_line cli demo_model merge adapted_model adapter_source comparison data_report plan dry_run
"""
LAYERS = [set(line.split()) for line in LAYERS_FROM_THE_LOWEST.strip().splitlines()]


def test_imports_of_the_library_go_one_way():
    names = {path.relative_to(ROOT / "finetune").parts[0].removesuffix(".py") for path in LIBRARY} - {"__init__"}
    assert names == set().union(*LAYERS)
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    checked = 0
    for path in LIBRARY:
        module = path.relative_to(ROOT / "finetune").parts[0].removesuffix(".py")
        for name in imports(path):
            assert not name.startswith("recipes"), f"{path} imports a recipe"
            parts = name.split(".")
            if parts[0] == "finetune" and len(parts) > 1 and parts[1] in level and parts[1] != module:
                checked += 1
                assert level[parts[1]] <= level[module], f"{path} imports {parts[1]}, which is above it"
    assert checked > 10


@pytest.mark.parametrize("module", sorted(LAYERS[0]))
def test_pure_modules_import_no_accelerate_and_no_transformers(module: str):
    assert not {"accelerate", "transformers", "deepspeed"} & {
        name.split(".")[0] for name in imports(ROOT / "finetune" / f"{module}.py")
    }


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
    own = ROOT / "finetune" / "strategy"
    tables = [ROOT / "finetune" / "compatibility.py", ROOT / "finetune" / "plan" / "placement.py"]  # of what each does
    others = [path for path in [*LIBRARY, *RECIPES] if own not in path.parents and path not in tables]
    assert len(others) >= 12
    allowed = {"deepspeed"}  # the package's version in run.yaml
    for path in others:
        named = [text for text in code_tokens(path) if STRATEGY_NAMES.search(text) and text not in allowed]
        assert named == [], f"{path} names a strategy"
    assert any(STRATEGY_NAMES.search(text) for path in own.rglob("*.py") for text in code_tokens(path))


def test_tests_and_notebooks_name_no_machine_and_no_registry():
    hosts = re.compile(r"/root/|/work/|/home/\w|pypi\.org|files\.pythonhosted")
    folders = ("accelerate_configs", "benchmarks", "finetune", "notebooks", "recipes", "tests")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*")] + list(ROOT.glob("*"))
    files = [p for p in files if p.suffix in {".py", ".md", ".yaml", ".cfg", ".toml", ".ipynb", ".json", ".txt"}]
    assert len(files) > 40
    for path in files:
        if path != Path(__file__):
            assert not hosts.search(path.read_text()), path
