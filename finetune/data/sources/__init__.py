"""Data sources by name: files, globs, folders and hub datasets, read one record at a time.

``names`` resolves a name, ``reading`` returns its records, ``turns`` those of several sources by their weights, and the
other modules each read one kind of file.
"""

from finetune.data.sources.names import Source, extent, identity, named_sources, problems
from finetune.data.sources.reading import read
from finetune.data.sources.record import Record, Rejected

__all__ = ["Record", "Rejected", "Source", "extent", "identity", "named_sources", "problems", "read"]
