"""The data as the model will see them, in figures and as text, before any model is loaded.

``figures`` computes the report from prepared rows, with ``lengths`` and ``row_text``; ``wording`` puts it into words,
``report_tables`` and ``page`` show it.
"""
