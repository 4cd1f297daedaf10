"""Executes the notebooks, and keeps them with what they print and draw.

  python -m benchmarks.notebooks                   # or one of them: python -m benchmarks.notebooks 05_collectives

Each begins with a badge that opens it where notebooks are hosted, and with a cell that installs what is missing there;
both are written here. The badge names the repository if ``url`` in setup.cfg does. Paths of the machine and times of
cells are left out; seconds that a run prints are not, and differ from one time to the next.
"""

import argparse
import configparser
import hashlib
import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEAD = ("badge", "install")
"""Ids of the cells that are the same in every notebook."""
HOST = "https://colab.research.google.com"
BADGE = "[![Open in Colab]({host}/assets/colab-badge.svg)]({address})"
WITHOUT_ADDRESS = " (there, choose this repository, or upload this file)"
EXTRAS = {"03_what_fits": "deepspeed,notebooks", "05_collectives": "notebooks"}
"""Of setup.cfg, that a notebook needs; the others need the demo's model."""
INSTALL = """\
# Installs finetune where it is missing, as on a hosted machine. Where it is installed, this only finds the repository
import importlib.util
import os
from pathlib import Path

if importlib.util.find_spec("finetune") is None:
    sources = [folder for folder in (".", "..") if (Path(folder) / "setup.cfg").is_file()]
    sources += [str(wheel) for wheel in Path().glob("finetune-*.whl")]
    requirement = next((f"{{source}}[{extras}]" for source in sources), {otherwise})
    if requirement is None:
        raise FileNotFoundError("Upload the wheel of finetune (`python -m build` makes it), and run this cell again.")
    %pip install --quiet "{{requirement}}"
if not Path("recipes").is_dir():  # the paths below are those of the repository
    root = next((folder for folder in ("..", "unpacked") if (Path(folder) / "recipes").is_dir()), None)
    if root is None:
        root = "unpacked"
        !finetune init {{root}}
    os.chdir(root)"""


def head(name: str) -> list[Any]:
    """The first two cells of a notebook."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    url = settings["metadata"].get("url", "").rstrip("/")
    address = f"{HOST}/github"
    if url:
        address += f"{url.removeprefix('https://github.com')}/blob/main/notebooks/{name}.ipynb"
    badge = BADGE.format(host=HOST, address=address)
    extras = extras_of(name)
    otherwise = f'"finetune[{extras}] @ git+{url}"' if url else None
    install = INSTALL.format(extras=extras, otherwise=otherwise)
    cells = [
        nbformat.v4.new_markdown_cell(badge + ("" if url else WITHOUT_ADDRESS)),
        nbformat.v4.new_code_cell(install),
    ]
    for cell, identity in zip(cells, HEAD, strict=True):
        cell["id"] = identity
    return cells


def extras_of(name: str) -> str:
    """Those of setup.cfg that a notebook needs, with commas."""
    return EXTRAS.get(name, "demo,notebooks")


def sources_hash(notebook: Any) -> str:
    """Of the code: outputs belong to the code that they were made with."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\0".join(code).encode()).hexdigest()[:16]


def execute(path: Path) -> None:
    """Run a notebook from top to bottom, and write it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: at the first cell that fails; the file stays as it was.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    notebook.cells = [*head(path.stem), *(cell for cell in notebook.cells if cell.id not in HEAD)]
    about = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    where = {"metadata": {"path": path.parent}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where, record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = kept(cell.outputs)
    notebook.metadata = nbformat.from_dict(about | {"executed": sources_hash(notebook)})
    nbformat.write(notebook, path)


def kept(outputs: list[Any]) -> list[Any]:
    """Outputs as they are kept: without widgets, which nothing draws any more; printed pieces in one."""
    found: list[Any] = []
    for output in outputs:
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            continue
        if found and output.output_type == "stream" and output.get("name") == found[-1].get("name"):
            found[-1].text += output.text
        else:
            found.append(output)
    for output in found:
        if output.output_type == "stream":
            output.text = without_machine(output.text)
        for kind, content in output.get("data", {}).items():
            if kind.startswith("text/"):
                output.data[kind] = without_machine(content)
    return found


def without_machine(text: str) -> str:
    """Text without folders of this machine: the repository, the user's, temporary ones."""
    text = text.replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    text = re.sub(re.escape(tempfile.gettempdir()) + r"/\w+", "...", text)
    return text.replace(str(Path.home()), "~")


if __name__ == "__main__":
    known = {path.stem: path for path in NOTEBOOKS}
    parser = argparse.ArgumentParser(description="Run notebooks, and keep them with what they print and draw.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of {', '.join(known)}")
    wanted = parser.parse_args().names or list(known)
    if strange := [name for name in wanted if name not in known]:
        parser.error(f"there is no notebook {strange[0]}; there are {', '.join(known)}")
    for name in wanted:
        print(known[name].relative_to(ROOT))
        execute(known[name])
