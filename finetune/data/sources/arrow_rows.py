"""Records from Arrow: Parquet files and hub datasets.

Arrow gives every struct all keys of its column; a key with null counts as absent, at any depth. Other values stay as
Arrow returns them, including dates, bytes and decimals.
"""

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from finetune.data.sources.byte_stream import damaged
from finetune.data.sources.record import Record, Rejected
from finetune.errors import first_line

_BATCH_ROWS = 256
_BUFFER = 2**20  # bytes of a column read at once, instead of a whole row group's


def without_nulls(value: Any) -> Any:
    """A value without the keys whose value is null, at any depth of lists and objects."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def parquet_rows(path: str, stream: io.BufferedReader) -> Iterator[Record | Rejected]:
    """The rows of a Parquet file, read in batches."""
    row = 0
    try:
        file = pq.ParquetFile(stream, buffer_size=_BUFFER, pre_buffer=False)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for value in _values(batch):
                row += 1
                if isinstance(value, dict):
                    yield Record(f"{path}:row {row}", without_nulls(value))
                else:
                    yield Rejected(f"{path}:row {row}", f"the row cannot be read ({value})", "")
    except (pa.ArrowException, OSError, ValueError) as error:
        yield Rejected(f"{path}:row {row + 1}", damaged(path, error), "")


def _values(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | str]:
    """The rows as objects; for one that Python cannot hold, why."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError) as error:  # bytes that are not UTF-8, dates beyond the year 9999
        if batch.num_rows == 1:
            yield first_line(error)
        else:
            for i in range(batch.num_rows):
                yield from _values(batch.slice(i, 1))
