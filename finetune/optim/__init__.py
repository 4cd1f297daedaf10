"""Optimizers: ``optimizer`` (by name), ``eight_bit`` (8-bit state), ``rounding`` (bf16), ``schedule`` (learning rate),
``rate_scales`` (of single weights), ``averaging`` (of weights over the steps), ``optimizer_state`` (its bytes)."""
