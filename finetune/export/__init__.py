"""Export of models: ``merge`` (adapter into base), ``checkpoint_export``, ``comparison`` (merged with unmerged).

``gguf_file`` and ``gguf_vocabulary`` write a model for llama.cpp, ``hub_upload`` brings a result to the hub.

``results`` finds what a run left in a folder, ``adapter_source`` reads an adapter there, ``adapted_model`` runs it
unmerged. ``own_code`` says where code that comes with a model may be run, ``new_folder`` has what is written complete
or absent.
"""
