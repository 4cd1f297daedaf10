"""Private names of other libraries: every use of one is here, with the version it was read in and when it can go.

``torch_private`` (what training needs of PyTorch), ``fake_tensors`` (what a trace on fake tensors needs of it, which
registers a process group of its tests), ``quick_operations`` (fake tensors without PyTorch's dispatch),
``transformers_private``, ``accelerate_private``, ``deepspeed_private``,
``traced_engine`` (what a trace needs of DeepSpeed's), ``bitsandbytes_private``, ``liger_private``, ``peft_private``,
``python_private``. A
module is imported where its library is loaded anyway: nothing here is imported for ``finetune --help``.
"""
