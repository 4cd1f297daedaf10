"""A source to its records, file by file in the order of their names."""

from collections.abc import Iterator

from finetune.data.sources.byte_stream import opened
from finetune.data.sources.json_files import json_file
from finetune.data.sources.names import Source, data_files, is_hub_dataset, kind_of
from finetune.data.sources.record import Record, Rejected
from finetune.data.sources.text_files import table, text_blocks


def read(source: Source, streaming: bool = False) -> Iterator[Record | Rejected]:
    """The records of a source, one at a time, and what could not be read as one.

    Args:
        streaming: read a dataset of the hub from there, without a copy on disk.

    Raises:
        InputError: if the source is missing, a file of it cannot be opened, or the hub does not give it.
    """
    if is_hub_dataset(source.path):
        from finetune.data.sources.hub import hub_rows

        yield from hub_rows(source, streaming)
        return
    for path in data_files(source.path):
        yield from _read_file(path, kind_of(path))


def _read_file(path: str, kind: str | None) -> Iterator[Record | Rejected]:
    with opened(path) as stream:
        if kind == "json":
            yield from json_file(path, stream)
        elif kind == "parquet":
            from finetune.data.sources.arrow_rows import parquet_rows  # imports a tenth of a second's worth of Parquet

            yield from parquet_rows(path, stream)
        elif kind == "txt":
            yield from text_blocks(path, stream)
        else:
            yield from table(path, stream, "\t" if kind == "tsv" else ",")
