"""Hub datasets, through ``datasets``, which is imported lazily because that takes a second."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from finetune.data.sources.arrow_rows import without_nulls
from finetune.data.sources.record import Record
from finetune.errors import InputError, first_line
from finetune.hub_access import refuse_without_access


@contextmanager
def _quiet(path: str) -> Iterator[None]:
    """Without progress bars, and with the library's errors as sentences.

    Raises:
        InputError: if the dataset cannot be loaded.
    """
    import datasets

    refuse_without_access(path, "README.md", kind="dataset")
    were_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{path}: it is neither a local file or folder nor a dataset that can be loaded from the hub "
            f"({first_line(error)}); check the name, subset and split, the network and your access."
        ) from error
    finally:
        if were_shown:
            datasets.enable_progress_bars()


def commit(path: str, subset: str | None) -> str:
    """The commit that would be loaded, which pins the content of a hub dataset.

    Raises:
        InputError: if the dataset cannot be found.
    """
    import datasets

    with _quiet(path):
        return str(datasets.load_dataset_builder(path, subset).hash)


def hub_rows(path: str, subset: str | None, split: str, streaming: bool = False) -> Iterator[Record]:
    """The rows of a split, as ``owner/name[split]:row N``, downloaded to disk first unless they are streamed.

    Raises:
        InputError: if the dataset, the subset or the split cannot be loaded.
    """
    import datasets

    with _quiet(path):
        if streaming:
            dataset: Any = datasets.load_dataset(path, subset, split=split, streaming=True)
        else:
            dataset = datasets.load_dataset(path, subset, split=split)
        for row, value in enumerate(dataset, start=1):
            yield Record(f"{path}[{split}]:row {row}", without_nulls(value))
