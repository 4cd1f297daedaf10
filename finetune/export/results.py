"""What a folder holds that a run left, or that another program saved: an adapter or a model, and the run's record."""

from dataclasses import dataclass
from pathlib import Path

from finetune.errors import InputError


@dataclass(frozen=True)
class Result:
    """An adapter or a model, by its folder."""

    folder: Path
    """Of adapter_config.json or config.json."""
    run: Path | None
    """The run.yaml beside it, or above its final/."""

    @property
    def is_adapter(self) -> bool:
        """Whether its base lies elsewhere."""
        return (self.folder / "adapter_config.json").is_file()


def result_at(path: Path) -> Result:
    """The result in the output folder of a run, or in a folder of its own.

    Raises:
        InputError: if there is none.
    """
    if not path.is_dir():
        raise InputError(f"There is no folder {path}; check its name.")
    is_result = (path / "adapter_config.json").is_file() or (path / "config.json").is_file()
    if not is_result and not (path / "run.yaml").is_file():
        raise InputError(
            f"{path} has neither run.yaml nor adapter_config.json nor config.json, so it is no run, no adapter and no "
            "model; check its name."
        )
    folder = path if is_result else path / "final"
    if not folder.is_dir():
        raise InputError(
            f"{path} has a run without a result: final/ is missing; let it finish, or write one of its checkpoints to "
            "a folder of its own with finetune checkpoint export."
        )
    above = [folder.resolve().parent / "run.yaml"] if folder.resolve().name == "final" else []
    return Result(folder, next((run for run in (folder / "run.yaml", *above) if run.is_file()), None))
