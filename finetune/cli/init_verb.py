"""``finetune init``: a folder to work in, for someone who has installed the package and has no clone."""

import json
import shlex
import shutil
from pathlib import Path

from finetune.errors import InputError
from finetune.shipped import shipped_files

FOLDERS = ("recipes", "accelerate_configs", "notebooks")
FILES = ("README.md", "constraints.txt")
NOT_COPIED = shutil.ignore_patterns("__pycache__", "__init__.py", "*.pyc", ".ipynb_checkpoints")


def init(folder: Path, *, as_json: bool = False) -> int:
    """Run the verb; returns the exit code.

    Raises:
        InputError: if something would be overwritten, or cannot be written.
    """
    try:
        kept = unpack(folder)
    except OSError as error:
        reason = (
            error.args[0][0][-1] if isinstance(error, shutil.Error) else error.strerror
        )  # of the first of many files
        raise InputError(f"{folder} cannot be written ({reason or error}); choose another folder.") from error
    copied = [name for name in (*FOLDERS, *FILES) if name not in kept]
    if as_json:
        print(json.dumps({"folder": str(folder), "copied": copied, "kept": kept}, indent=2))
        return 0
    is_here = folder.resolve() == Path.cwd()
    enters = "" if is_here else f"  cd {shlex.quote(str(folder))}\n"
    print(f"Copied {', '.join(copied[:-1])} and {copied[-1]} to {'this folder' if is_here else folder}.")
    for name in kept:
        print(f"{name} was there before, and stays as it was.")
    print(
        f"Next steps:\n{enters}"
        "  finetune doctor\n"
        "  finetune train recipes/configs/demo.yaml \\\n"
        '    --model.path "$(python -m finetune.cli.demo_model)"\n'
        "  finetune chat runs/demo"
    )
    return 0


def unpack(folder: Path) -> list[str]:
    """Copy what belongs to a project; returns the names of files that were there, and were left alone.

    Raises:
        InputError: if a folder of ours is there; nothing is written then.
        OSError: if it cannot be written; what was copied is gone then.
    """
    taken = [str(folder / name) for name in FOLDERS if (folder / name).exists()]
    if taken or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{', '.join(taken) or folder} already exists; choose another folder. Nothing was written.")
    sources = (Path(__file__).with_name("project_readme.md"), shipped_files() / "constraints.txt")
    kept = [name for name in FILES if (folder / name).exists()]
    copied = [(source, folder / name) for name, source in zip(FILES, sources) if name not in kept]
    try:
        for name in FOLDERS:
            shutil.copytree(shipped_files() / name, folder / name, ignore=NOT_COPIED)
        for source, file in copied:
            shutil.copyfile(source, file)
    except OSError:  # half a project would be in the way of another try
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
        for _, file in copied:
            file.unlink(missing_ok=True)
        raise
    return kept
