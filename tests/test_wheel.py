"""The wheel carries the package, and what someone without a clone needs: recipes, strategy files, data, notebooks."""

import os
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from tiny import build_model_folder, write_conversations, write_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
UNPACKED = [
    *(path.relative_to(ROOT) for path in sorted((ROOT / "accelerate_configs").glob("*.yaml"))),
    *(path.relative_to(ROOT) for path in sorted((ROOT / "recipes").rglob("*.*")) if "__pycache__" not in path.parts),
    *(path.relative_to(ROOT) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))),
    Path("constraints.txt"),
]


OUTSIDE = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
"""The environment, without a path to a clone."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a wheel in an environment of its own, which sees this environment's dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--ignore-installed", str(wheel)], check=True)
    return python


def finetune(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "finetune.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=python.parent, env=OUTSIDE, timeout=60)


def test_init_unpacks_everything_and_the_recipe_runs(installed: Path, tmp_path: Path):
    assert len(UNPACKED) >= 15
    result = finetune(installed, "init", tmp_path / "mine")
    assert result.returncode == 0, result.stderr
    for path in UNPACKED:
        assert (tmp_path / "mine" / path).read_bytes() == (ROOT / path).read_bytes()
    assert "finetune train recipes/configs/demo.yaml" in (tmp_path / "mine" / "README.md").read_text()
    recipe = [str(installed), "recipes/sft.py", "--config", "recipes/configs/sample.yaml", "--print_config"]
    printed = subprocess.run(recipe, capture_output=True, text=True, cwd=tmp_path / "mine", env=OUTSIDE, timeout=120)
    assert printed.returncode == 0, printed.stderr
    assert "recipes/data/demo_train.jsonl" in printed.stdout


def test_train_finds_its_files_in_the_folder_or_in_the_wheel(installed: Path, tmp_path: Path):
    share = next(installed.parent.parent.rglob("site-packages")) / "finetune" / "share"
    (tmp_path / "mine.yaml").write_text((ROOT / "recipes" / "configs" / "sample.yaml").read_text())
    command = [str(installed), "-m", "finetune.cli", "train", "mine.yaml", "--processes", "1", "--print-command"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=OUTSIDE, timeout=60)
    assert printed.returncode == 0, printed.stderr
    assert str(share / "recipes" / "sft.py") in printed.stdout
    assert str(share / "accelerate_configs" / "single.yaml") in printed.stdout


def test_every_module_and_its_data_files_are_in_the_wheel(installed: Path):
    packages = next(installed.parent.parent.rglob("site-packages"))
    endings = {".py", ".yaml", ".json", ".jinja", ".md"}
    files = [path.relative_to(ROOT) for path in (ROOT / "finetune").rglob("*") if path.suffix in endings]
    assert len(files) > 100
    assert [str(path) for path in files if not (packages / path).is_file()] == []


def test_init_leaves_files_of_a_project_alone(installed: Path, tmp_path: Path):
    (tmp_path / "README.md").write_text("mine")
    result = finetune(installed, "init", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "README.md was there before, and stays as it was." in result.stdout
    assert (tmp_path / "README.md").read_text() == "mine"


def test_init_never_touches_folders_that_are_there(installed: Path, tmp_path: Path):
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
    printed = subprocess.run([str(installed), "-c", check], capture_output=True, text=True, env=OUTSIDE, timeout=60)
    assert printed.stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.prove
def test_a_newcomer_comes_from_rows_of_their_own_to_a_model_for_transformers(installed: Path, tmp_path: Path):
    """In an empty folder, by the commands of the README: unpack, the demo, and then look, plan, train with QLoRA, talk,
    score, report, merge."""
    base = write_weights(build_model_folder(tmp_path / "base", hidden_size=128))
    write_conversations(tmp_path / "mine.jsonl", 16)
    write_conversations(tmp_path / "held_out.jsonl", 4, seed=1)
    environment = OUTSIDE | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def says(verb: str, *arguments: str, read: str = "") -> str:
        command = [str(installed.with_name("finetune")), verb, *arguments]
        done = subprocess.run(
            command, input=read, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=180
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    flags = ["--model.path", str(base), "--data.train", "mine.jsonl", "--data.eval", "held_out.jsonl"]
    flags += ["--data.max_length", "64", "--quantization.bits", "4", "--adapter.type", "lora"]
    flags += ["--train.output_dir", "run", "--train.steps", "2", "--train.global_batch_size", "4"]
    sample, fp32 = "recipes/configs/sample.yaml", ["--mixed-precision", "no"]
    says("init", ".")
    few = ["--train.steps", "2", "--eval.max_new_tokens", "2"]
    demo = says("train", "recipes/configs/demo.yaml", "--model.path", str(base), *few, *fp32)
    assert "exact match on 36 held-out rows: 0 before, 0 after training" in demo
    assert "A run would accept these data." in says("data", "--config", sample, *flags)
    assert "fits" in says("plan", "--config", sample, *flags, "--gpus", "1x24GB")
    assert "step 2/2" in says("train", sample, *flags, *fp32)
    answer = says("generate", "run", "the red house", "--max-new-tokens", "4")
    assert answer.strip() in says("chat", "run", "--max-new-tokens", "4", read="the red house\n")
    assert "exact_match" in says("evaluate", "run", "--score", "exact_match")
    says("report", "run", "--output", "page.html")
    assert "<svg" in (tmp_path / "page.html").read_text()
    says("merge", "run", "--output", "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.model_type == "llama"
    assert "quantization_config" not in model.config.to_dict()
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
