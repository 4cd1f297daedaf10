"""The library that the recipes are written with: rooms, each of which imports from those before it, and from no other.

Small modules: ``errors``, ``seeds``, ``units``, ``start_up`` (what ends a process before it trains), ``cache``,
``hub_access``, ``shipped`` (the files that an installed package carries).
``config``: the keys, YAML and flags, what goes with what. ``hardware``: GPUs, links, cores.
``data``: files to rows, rows to batches. ``models``: weights, adapters, attention. ``optim``: optimizers, schedule.
``distributed``: DDP, FSDP2, ZeRO and nothing but that. ``training``: the step, the loss, evaluation.
``output``: what a run writes. ``checkpoint``: what it goes on from. ``trace``: the step on fake tensors.
``planner``: what fits, and how fast. ``run``: what every recipe shares. ``export``: merged models.
``cli``: the command ``finetune``.
"""

__version__ = "0.1.0"
