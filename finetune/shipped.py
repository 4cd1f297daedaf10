"""Where the recipes and strategy files lie."""

from pathlib import Path


def shipped_files() -> Path:
    """In ``finetune/share`` of an installed wheel, beside the package in a clone."""
    package = Path(__file__).parent
    return package / "share" if (package / "share").is_dir() else package.parent
