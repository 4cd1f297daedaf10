"""Every notebook runs from top to bottom, and is kept in git without outputs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").rglob("*.ipynb"))

PRINTED = {
    "01_first_run": "step 4/4  loss",
    "02_qlora_on_your_data": "Merged model:",
    "03_what_fits": "bytes for each token of a tiny layer in bf16; by the formula",
    "04_preferences": "held-out pairs: accuracy",
}


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == list(PRINTED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_no_outputs(path: Path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_commands_to_copy_have_one_backslash_at_the_end_of_a_line(path: Path):
    shown = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    assert not [line for source in shown for line in source.splitlines() if line.endswith("\\\\")]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_without_errors_and_warnings(path: Path):
    notebook = nbformat.read(path, as_version=4)
    cells = notebook.cells
    first = next(i for i, cell in enumerate(cells) if cell.cell_type == "code")
    notebook.cells = [*cells[: first + 1], cells[first].copy(), *cells[first + 1 :]]  # as one does by accident
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    client.execute()  # raises at the first cell that fails
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert "image/png" in {kind for output in outputs for kind in output.get("data", {})}
    printed = "".join(output.get("text", "") for output in outputs)
    assert "warning" not in printed.lower()
    assert PRINTED[path.stem] in printed
    assert "\x1b" not in printed  # plain lines, not a bar drawn over and over
    if path.stem == "04_preferences":
        ((accuracy, margin),) = re.findall(r"held-out pairs: accuracy (\d+)%, margin (-?\d+\.\d+)\n", printed)
        assert int(accuracy) >= 80
        assert float(margin) > 0.5
    if path.stem == "02_qlora_on_your_data":  # the one whole run of a 4-bit model: test_demo's is shorter
        ((before, after),) = re.findall(r"held-out loss: (\d\.\d{4}) before, (\d\.\d{4}) after\n", printed)
        assert float(after) < 0.3 * float(before)
