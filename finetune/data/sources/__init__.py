"""Data sources by name: files, globs, folders and datasets of the hub, read one record at a time.

``names`` finds what a name stands for, ``reading`` gives its records, the other modules know one kind of file each.
"""

from finetune.data.sources.names import Source, extent, identity, problems
from finetune.data.sources.reading import read
from finetune.data.sources.record import Record, Rejected

__all__ = ["Record", "Rejected", "Source", "extent", "identity", "problems", "read"]
