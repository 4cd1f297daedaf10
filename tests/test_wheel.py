"""The wheel carries recipes, strategy files and sample data for someone without a clone."""

import subprocess
import sys
import time
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
UNPACKED = [
    *(path.relative_to(ROOT) for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))),
    *(path.relative_to(ROOT) for path in sorted((ROOT / "recipes").rglob("*.*")) if "__pycache__" not in path.parts),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a wheel in an environment of its own, which sees this environment's dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "venv" / "bin" / "python"


def finetune(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "finetune.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=python.parent, timeout=60)


def test_init_unpacks_everything_and_the_recipe_runs(installed: Path, tmp_path: Path):
    assert len(UNPACKED) >= 15
    result = finetune(installed, "init", tmp_path / "mine")
    assert result.returncode == 0, result.stderr
    for path in UNPACKED:
        assert (tmp_path / "mine" / path).read_bytes() == (ROOT / path).read_bytes()
    recipe = [str(installed), "recipes/sft.py", "--config", "recipes/configs/sample.yaml", "--print_config"]
    printed = subprocess.run(recipe, capture_output=True, text=True, cwd=tmp_path / "mine", timeout=120)
    assert printed.returncode == 0, printed.stderr
    assert "recipes/data/demo_train.jsonl" in printed.stdout


def test_init_never_touches_what_is_there(installed: Path, tmp_path: Path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.py").write_text("precious")
    result = finetune(installed, "init", tmp_path)
    assert result.returncode == 2
    assert "already exists; choose another folder. Nothing was written." in result.stderr
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["mine.py"]


def test_help_answers_without_importing_the_heavy_libraries(installed: Path):
    start = time.perf_counter()
    result = finetune(installed, "--help")
    assert time.perf_counter() - start < 3
    assert "init" in result.stdout
    check = "import sys, finetune.cli.commands; print({'torch', 'transformers', 'accelerate'} & set(sys.modules))"
    printed = subprocess.run([str(installed), "-c", check], capture_output=True, text=True, timeout=60)
    assert printed.stdout.strip() == "set()"
