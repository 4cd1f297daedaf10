"""Hub datasets, through ``datasets``, which is imported lazily because that takes a second."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from finetune.data.sources.arrow_rows import without_nulls
from finetune.data.sources.names import Source
from finetune.data.sources.record import Record
from finetune.errors import InputError
from finetune.hub_access import refuse_without_access

_LONGEST_MESSAGE = 500


@contextmanager
def _quiet(path: str, revision: str | None) -> Iterator[None]:
    """Without progress bars, and with the library's errors as sentences.

    Raises:
        InputError: if the dataset cannot be loaded.
    """
    import datasets

    refuse_without_access(path, "README.md", kind="dataset", revision=revision)
    were_shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{path}: it is neither a local file or folder nor a dataset that can be loaded from the hub "
            f"({_told(error)}); check the name, subset, split and revision, the network and your access."
        ) from error
    finally:
        if were_shown:
            datasets.enable_progress_bars()


def _told(error: Exception) -> str:
    """The message, whose later lines name the subsets or splits that there are."""
    return " ".join(str(error).split())[:_LONGEST_MESSAGE].rstrip(".") or type(error).__name__


def commit(path: str, subset: str | None, revision: str | None = None) -> str:
    """The commit that would be loaded, which pins the content of a hub dataset.

    Raises:
        InputError: if the dataset cannot be found.
    """
    import datasets

    with _quiet(path, revision):
        return str(datasets.load_dataset_builder(path, subset, revision=revision).hash)


def hub_rows(source: Source, streaming: bool = False) -> Iterator[Record]:
    """The rows of a split, as ``owner/name[split]:row N``, downloaded to disk first unless they are streamed.

    Raises:
        InputError: if the dataset, the subset or the split cannot be loaded.
    """
    import datasets

    path, split = source.path, source.hub_split
    with _quiet(path, source.revision):
        how: dict[str, Any] = {"split": split, "revision": source.revision, "streaming": streaming}
        dataset = datasets.load_dataset(path, source.subset, **how)
        for row, value in enumerate(_without_media(dataset), start=1):
            yield Record(f"{path}[{split}]:row {row}", without_nulls(value))


def _without_media(dataset: Any) -> Any:
    """A dataset without its columns of images, sound and the like, which nothing reads, and which would be decoded."""
    features = dataset.features or {}  # None where a stream has not told them
    media = {name: found for name, feature in features.items() if (found := _undecoded(feature)) is not None}
    for name, feature in media.items():  # a stream decodes them before it leaves them out
        dataset = dataset.cast_column(name, feature)
    return dataset.remove_columns(list(media))


def _undecoded(feature: Any) -> Any:
    """The feature of media as they are stored, or of a list of them; None of anything else."""
    import datasets

    if isinstance(feature, datasets.List):
        inner = _undecoded(feature.feature)
        return None if inner is None else replace(feature, feature=inner)
    is_media = hasattr(feature, "decode_example") and not isinstance(feature, datasets.Json)
    return replace(feature, decode=False) if is_media else None
