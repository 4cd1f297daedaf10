"""Hardware: ``cards`` (published figures of GPUs and interconnects), ``cores`` (CPU cores this process may use)."""
