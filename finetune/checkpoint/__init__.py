"""Checkpoints: written in the background, complete or absent, and readable under any strategy.

``saver`` (the recipe's interface), ``host_copy`` (a copy of the state in host memory), ``writing`` (the thread that
writes it), ``folder`` (atomic creation and removal, and the lock of an output folder), ``manifest`` (which file has
which elements), ``reader`` (reading), ``looking`` (which checkpoint to resume from), ``resuming`` (whether it belongs
to the run), ``run_state`` (save and restore model and optimizer).

A checkpoint is a folder with one safetensors file per process and a manifest. It contains no pickle. That is one reason
not to use torch.distributed.checkpoint, whose metadata are a pickle. The other is that it cannot represent ZeRO's
partitions, which are ranges of flattened tensors.
"""

from finetune.checkpoint.folder import hold
from finetune.checkpoint.looking import chosen, describe_newest, has_saved, is_own, look_for, room_problems
from finetune.checkpoint.reader import Checkpoint, newest, open_checkpoint
from finetune.checkpoint.run_state import restore, restore_weights, save
from finetune.checkpoint.saver import Saver

__all__ = [
    "Checkpoint",
    "Saver",
    "chosen",
    "describe_newest",
    "has_saved",
    "hold",
    "is_own",
    "look_for",
    "newest",
    "open_checkpoint",
    "restore",
    "restore_weights",
    "room_problems",
    "save",
]
