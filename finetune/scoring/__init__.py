"""How answers are judged: ``scores`` (an answer and what was expected, to a number), ``intervals`` (how far chance may
move a score, and the difference of two), ``task_rows`` (questions, expected answers and choices of a file) and
``asked_rows`` (their tokens).
"""
