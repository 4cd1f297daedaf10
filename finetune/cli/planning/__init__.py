"""What ``finetune plan`` reads and shows: from words to a question for the planner, and from its answer to words.

The question: ``written`` (the command line), ``asked``, ``machine`` (the GPUs that are here), ``strategy_file``.
The answer: ``reasons`` and ``largest_term`` (in sentences), ``launch_command`` (that starts it), ``plan_tables``,
``json_answer``, ``picture``. Beside real steps: ``probe`` takes them, ``probed`` compares.
"""
