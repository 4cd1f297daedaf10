"""Every notebook runs from top to bottom, and is kept in git with the outputs of the code that it holds."""

import configparser
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from benchmarks import notebooks

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").rglob("*.ipynb"))
OF_A_MACHINE = re.compile(r"(?<![\w.~])/(?:tmp|var|opt|mnt|srv|usr|home|root|Users|private|content|dev/shm)/")
LARGEST_BYTES = 400_000
PRINTED = {
    "01_first_run": "step 4/4  loss",
    "02_qlora_on_your_data": "Merged model:",
    "03_what_fits": "bytes for each token of a tiny layer in bf16; by the formula",
    "04_preferences": "held-out pairs: accuracy",
    "05_collectives": "packed weights are those of bitsandbytes: True",
}

LONG = {"01_first_run", "02_qlora_on_your_data", "03_what_fits", "04_preferences"}
"""Those that take half a minute and more, and are left to `make prove`."""


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prove_complete(notebook: Any, name: str) -> str:
    """Check the outputs of an executed notebook; returns what it printed."""
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    assert "image/png" in {kind for output in outputs for kind in output.get("data", {})}
    printed = "".join(output.get("text", "") for output in outputs)
    assert "warning" not in printed.lower()
    assert PRINTED[name] in printed
    assert "\x1b" not in printed  # plain lines, not a bar drawn over and over
    return printed


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == list(PRINTED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_with_the_outputs_of_its_code_and_nothing_of_a_machine(path: Path):
    notebook: Any = nbformat.read(path, as_version=4)
    code = code_of(notebook)
    assert notebook.metadata.executed == notebooks.sources_hash(notebook), "run python -m benchmarks.notebooks"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    prove_complete(notebook, path.stem)
    texts = [output.get("text", "") for output in outputs]
    texts += [str(shown) for output in outputs for kind, shown in output.get("data", {}).items() if "text" in kind]
    assert [text for text in texts if OF_A_MACHINE.search(text)] == []
    assert all("execution" not in cell.metadata for cell in code)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "executed"}
    assert path.stat().st_size < LARGEST_BYTES


def test_paths_of_a_machine_are_found_and_left_out():
    mine = str(Path(__file__).parent.parent / "recipes" / "sft.py")
    assert notebooks.without_machine(f"see {mine}") == "see recipes/sft.py"
    assert notebooks.without_machine(str(Path.home() / "x")) == "~/x"
    assert OF_A_MACHINE.search("model: /tmp/abc/final")
    assert not OF_A_MACHINE.search("runs/tmp/abc, 3/usr/s and ~/mnt/x")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_begins_with_a_badge_and_with_what_installs_the_extras_that_it_needs(path: Path):
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.source for cell in cells[:2]] == [cell.source for cell in notebooks.head(path.stem)]
    settings = configparser.ConfigParser()
    settings.read(path.parent.parent / "setup.cfg")
    extras = notebooks.extras_of(path.stem)
    assert {*extras.split(",")} <= {*settings["options.extras_require"]}
    assert f"[{extras}]" in cells[1].source


def test_badge_opens_the_notebook_of_the_repository_that_setup_cfg_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "setup.cfg").write_text("[metadata]\nurl = https://github.com/someone/some-repository\n")
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    badge, install = (cell.source for cell in notebooks.head("04_preferences"))
    file = "someone/some-repository/blob/main/notebooks/04_preferences.ipynb"
    assert badge.endswith(f"](https://colab.research.google.com/github/{file})")
    assert '"finetune[demo,notebooks] @ git+https://github.com/someone/some-repository"' in install


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_exercises_each_with_a_solution_that_runs(path: Path):
    cells: Any = nbformat.read(path, as_version=4).cells
    asked = [i for i, cell in enumerate(cells) if cell.source.startswith("**Exercise")]
    assert asked
    for place in asked:
        assert "<details><summary>Solution</summary>" in cells[place].source
        assert cells[place + 1].source.startswith("# Solution of ")
        assert cells[place + 1].metadata.tags == ["solution"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_commands_to_copy_have_one_backslash_at_the_end_of_a_line(path: Path):
    shown = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    assert not [line for source in shown for line in source.splitlines() if line.endswith("\\\\")]


@pytest.mark.parametrize(
    "path",
    [pytest.param(each, marks=[pytest.mark.prove] if each.stem in LONG else []) for each in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_notebook_runs_without_errors_and_warnings(path: Path):
    notebook: Any = nbformat.read(path, as_version=4)
    install, imports, *others = code_of(notebook)
    notebook.cells = [install, imports, install.copy(), imports.copy(), *others]  # as one does by accident
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    client.execute()  # raises at the first cell that fails
    assert install.outputs == []  # finetune is here
    printed = prove_complete(notebook, path.stem)
    if path.stem == "04_preferences":
        ((accuracy, margin),) = re.findall(r"held-out pairs: accuracy (\d+)%, margin (-?\d+\.\d+)\n", printed)
        assert int(accuracy) >= 80
        assert float(margin) > 0.5
    if path.stem == "02_qlora_on_your_data":  # the one whole run of a 4-bit model: test_demo's is shorter
        ((before, after),) = re.findall(r"held-out loss: (\d\.\d{4}) before, (\d\.\d{4}) after\n", printed)
        assert float(after) < 0.3 * float(before)
