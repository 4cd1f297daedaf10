"""How many elements of a tensor each process holds where tensors are split along their first dimension."""

import math
from collections.abc import Sequence


def row_shard_elements(shape: Sequence[int], shards: int, rank: int) -> int:
    """Elements of a tensor on one of the processes that share it by rows, as ``fully_shard`` does.

    Rows go to the processes in chunks of equal size, rounded up (``torch.chunk``): the last ones may hold fewer, or
    none. (``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``, ``_init_sharded_param``)
    """
    rows = -(-shape[0] // shards)
    return max(0, min(rows, shape[0] - rank * rows)) * math.prod(shape[1:])


def row_shard_storage(shape: Sequence[int], shards: int) -> int:
    """Elements of the memory of each process's rows: padded to the same number on all."""
    return -(-shape[0] // shards) * math.prod(shape[1:])
