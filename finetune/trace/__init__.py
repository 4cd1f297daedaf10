"""The recipe's step on fake tensors: which memory it would take, found by running it where there is no memory to take.

The model, the adapter, the strategy, the optimizer and the step are the recipe's own; the tensors have shapes and no
contents, and the process group answers without other processes. So any model can be traced on any machine, as any
process of any number of them.

``setting`` and ``placement`` (a way to train, and what its strategy splits), ``child`` (a dry run in a process of its
own: the way to call it), ``dry_run`` (the dry run itself), ``findings`` (what it found), ``building`` (the model),
``ledger`` (the bytes of every storage, from birth to death), ``accounts`` (the ledger's blocks by what they are for),
``kernel_workspace`` (what CUDA's kernels take inside), ``patches`` (what the libraries need so that they run on fake
tensors), ``probe`` (real steps, on a GPU).
"""
