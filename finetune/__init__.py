"""The library that the recipes are written with.

Pure modules, which import no accelerate: ``loss``, ``schedule``, ``row_order``, ``flops``, ``errors``.
Process: ``start_up`` (what ends it before it trains), ``cores`` (how many it may use).
Configuration: ``config`` (the keys), ``command_line`` (YAML and flags).
Data: ``chat`` (conversation to tokens and mask), ``data`` (files to rows, rows to batches).
Model: ``model`` (tokenizer, weights, answers), ``optimizer``.
Run: ``strategy`` (DDP, FSDP2, ZeRO and nothing but that), ``metrics``, ``output``, ``progress``.
Commands: ``cli``, ``demo_model``.
"""

__version__ = "0.1.0"
