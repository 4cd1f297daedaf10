"""What the model of a run will see of its data, in figures and as text, before any model is loaded.

``figures`` computes it from prepared rows, with ``lengths`` and ``row_text``; ``wording`` says it, ``terminal`` and
``page`` show it; ``verb`` is ``finetune data``.
"""
