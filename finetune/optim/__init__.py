"""Optimizers: ``optimizer`` (by name), ``rounded_adamw`` (bf16 weights) and ``adamw_kernel`` (on a GPU), ``eight_bit``
(8-bit state), ``rounding`` (bf16), ``schedule`` (learning rate), ``rate_scales`` (of single weights), ``averaging`` (of
weights over the steps), ``optimizer_state`` (its bytes).
"""
