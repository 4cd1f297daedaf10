"""The ``finetune`` command. Each verb imports what it needs when it runs, so that ``--help`` answers at once."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import InputError

FOLDERS = ("recipes", "accelerate_configs")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="finetune", description="Fine-tune language models with Accelerate.")
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    init = verbs.add_parser("init", help="unpack recipes, strategy files and sample configurations into a folder")
    init.add_argument("folder", metavar="DIR", type=Path, help="folder to create, or to add to")
    options = parser.parse_args(arguments)
    try:
        unpack(options.folder)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"Unpacked {' and '.join(FOLDERS)} into {options.folder}. Next:\n"
        f"  cd {options.folder}\n"
        "  python recipes/sft.py --help\n"
        "  accelerate launch --config_file accelerate_configs/single.yaml recipes/sft.py \\\n"
        "    --config recipes/configs/sample.yaml --model.path YOUR_MODEL"
    )
    return 0


def unpack(folder: Path) -> None:
    """Copy the recipes and strategy files; a file that is there already is never touched.

    Raises:
        InputError: if something would be replaced.
    """
    source = shipped_files()
    taken = [str(folder / name) for name in FOLDERS if (folder / name).exists()]
    if taken or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{', '.join(taken) or folder} is there already; name another folder, nothing was written.")
    for name in FOLDERS:
        shutil.copytree(
            source / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "__init__.py", "*.pyc")
        )


def shipped_files() -> Path:
    """Where the recipes lie: in ``finetune/share`` of an installed wheel, beside the package in a clone."""
    package = Path(__file__).parent
    return package / "share" if (package / "share").is_dir() else package.parent


if __name__ == "__main__":
    raise SystemExit(main())
