"""What ``finetune doctor`` looks at: ``finding`` (what was seen, and what to do), ``installed_libraries`` (Python,
versions, bitsandbytes, DeepSpeed), ``gpu_state`` (GPUs, driver, links), ``host_state`` (cores, memory, disk),
``hub_state``.
"""
