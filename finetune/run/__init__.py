"""What every recipe shares: from its command line to its result, but for the loop, the step and the loss.

``entry`` (a recipe's script, its exit codes), ``preflight`` (all that can be refused before anything is loaded),
``inputs`` (rows and batches), ``sizes`` (what the planner chooses), ``session`` (a run from its lock to its result), of
which ``opening`` (record, first lines), ``agreement`` (what all processes must have in common), ``resumption`` (what it
resumes from), ``model_setup`` (model, adapter, optimizer), ``between_steps`` (garbage, profile), ``examination``
(held-out figures, answers), ``improvement`` (which of them were the best), ``logbook`` (what it writes as it goes),
``trackers`` (what is sent to others) and ``result`` (what came of it); ``screen`` (what a person sees), its
``sparkline`` and its ``standard_output``. For pairs of answers ``pairs`` (refusals), ``references`` and
``reference_point``; for texts ``corpus``. For notebooks ``from_python`` (a recipe as a function) and ``run_result``
(what it returns).
"""
