"""Export of models: ``merge`` (adapter into base), ``checkpoint_export``, ``comparison`` (merged with unmerged).

``adapter_source`` reads the adapter to merge, ``adapted_model`` runs it unmerged.
"""
