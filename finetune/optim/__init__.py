"""``optimizer`` (by name), ``eight_bit`` (its state), ``rounding`` (of bf16 weights), ``schedule`` (learning rates)."""
