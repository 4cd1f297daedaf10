"""What the machine has: ``cards`` (GPUs and links by their published figures), ``cores`` (those that may be used)."""
