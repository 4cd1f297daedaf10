"""The recipe's step on fake tensors: which memory it would take, found by running it where there is no memory to take.

The model, the adapter, the strategy, the optimizer and the step are the recipe's own; the tensors have shapes and no
contents, and the process group answers without other processes. So any model can be traced on any machine, as any
process of any number of them.

``setting`` and ``placement`` (a way to train, and what its strategy splits). ``tracer`` (steps of a model, remembered),
which asks by ``asking``, and is answered by ``serving``. ``layers`` and ``anatomy`` (how many layers tell of all),
``depth`` (a trace of few layers), ``shallow`` (what two of them tell of the model), ``partly`` (of layers some of which
are recomputed), ``powers`` (how sizes grow with the micro-batch), ``tensor_parts`` (the model of a GPU that has a part
of each layer), ``one_part`` (a part that several GPUs hold shards of), ``spans`` (the moments that matter), ``work``
(operations and collectives). ``dry_run`` (the step itself), ``building`` (model and optimizer), ``ledger`` (the bytes
of every storage, from birth to death), ``accounts`` (the ledger's blocks by what they are for), ``kernel_workspace``
(what CUDA's kernels take inside), ``patches`` (what the libraries need so that they run on fake tensors).
"""
