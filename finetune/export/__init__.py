"""Export of models: ``merge`` (adapter into base), ``checkpoint_export``, ``comparison`` (merged with unmerged).

``results`` finds what a run left in a folder, ``adapter_source`` reads an adapter there, ``adapted_model`` runs it
unmerged.
"""
