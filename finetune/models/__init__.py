"""Models: files, weights, quantisation, adapters and attention.

``spec`` (what is known before weights are read), ``loading`` (configuration, tokenizer, weights, answers),
``end_tokens`` (at which a model stops), ``generation_settings`` (with which it answers), ``initialisation`` (of random
weights), ``text_part`` (which rows of text reach), ``recomputation`` (activation checkpointing), ``activation_offload``
(what is kept of it, in host memory), ``fused`` (norms and gated products), ``rotary`` (queries and keys turned by their
positions), ``frequencies`` (of these turns, the same in a whole run), ``lora_forward``, ``fp8`` with ``fp8_kernel``
(products in 8 bits), ``new_tokens`` (that a chat template adds), ``token_rows`` (trained, of a frozen embedding),
``deferred_gradients`` (of weights, in a pipeline), ``weight_files`` (headers, without PyTorch), ``model_config`` (a
config.json, without PyTorch), ``weights`` (whether they are the model's), ``quantization``, ``adapter``,
``adapter_layers`` (which get one), ``adapter_start`` (what its matrices begin with), ``continued_adapter``,
``attention``, ``context_attention`` (rows that several processes compute together), ``document_attention`` (without a
GPU) and ``packing_support`` (documents that lie end to end), ``pipeline_stages`` (which modules each has),
``stage_cuts`` (where layers are cut into them, without PyTorch), ``pipeline_order`` (in which stages compute, without
PyTorch), ``tensor_plan`` (how layers are split over processes), ``tensor_layers`` (what these exchange), ``routers``
(of mixtures of experts), ``expert_layers`` (experts that processes share), ``exchange`` (what they send one another),
``flops``.
"""
