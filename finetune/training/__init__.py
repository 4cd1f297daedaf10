"""One optimizer step, and its figures.

``loss`` (what is learnt, from the scores of some positions at a time), ``step`` (gradients, and the optimizer's step),
``router_balance`` (a loss that balances experts), ``embedding_noise``,
``memory_check`` (the heaviest micro-batch, before training), ``evaluation`` (held-out loss and answers), ``meter`` (the
figures of each step); ``preferences`` (what is learnt from pairs of answers), ``preference_loss`` (its formulas) and
``mismatched`` (prompts with the answers of others); ``pretraining`` (what is learnt from a corpus); ``accumulation``
(steps of other numbers of micro-batches);
``documents`` (where they lie in a micro-batch, and what the model says of each); ``task_scores`` (scores of answers).
"""
