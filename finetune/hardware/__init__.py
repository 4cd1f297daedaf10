"""Hardware: ``cards`` (published figures of GPUs and interconnects), ``rates`` (how much of them is reached),
``cores`` (CPU cores this process may use)."""
