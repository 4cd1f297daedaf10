"""Checkpoints: written while training goes on, complete or absent, and read back under any strategy.

``saver`` (the recipe's side of writing), ``host_copy`` (the state, copied for a thread), ``writing`` (that thread),
``folder`` (how checkpoints appear and disappear, and the lock of an output folder), ``manifest`` (what lies where),
``reader`` (reading), ``looking`` (for what to go on from), ``resuming`` (whether it is the same run), ``run_state``
(model and optimizer in and out).

A checkpoint is a folder: one safetensors file per process, and a manifest. Nothing in it is a pickle, which is one
reason why torch.distributed.checkpoint does not write it: its metadata are one. The other is that ZeRO's partitions are
stretches of flattened tensors, for which it has no form.
"""

from finetune.checkpoint.folder import hold
from finetune.checkpoint.looking import chosen, describe_newest, is_own, look_for, room_problems
from finetune.checkpoint.reader import Checkpoint, newest, open_checkpoint
from finetune.checkpoint.run_state import restore, save
from finetune.checkpoint.saver import Saver

__all__ = [
    "Checkpoint",
    "Saver",
    "chosen",
    "describe_newest",
    "hold",
    "is_own",
    "look_for",
    "newest",
    "open_checkpoint",
    "restore",
    "room_problems",
    "save",
]
