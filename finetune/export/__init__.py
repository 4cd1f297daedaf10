"""Models made of a run: ``merge`` (adapter and base), ``checkpoint_export``, ``comparison`` (of both to the adapter).

``adapter_source`` reads what is merged, ``adapted_model`` runs it unmerged.
"""
