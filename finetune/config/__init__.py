"""The configuration: its keys, its parser and its rules. PyTorch is not imported.

``sections`` (every key, its type and its meaning), ``key_types`` (of keys that take numbers or paths), ``adapter_file``
(what a saved adapter decides of them), ``command_line`` (YAML and flags to sections), ``foreign_keys`` (what others
call them), ``strategy_names`` (which strategies there are, and their sizes), ``compatibility`` (which strategy goes
with which quantisation, adapter and optimizer), ``refusals`` (what else cannot be asked for), ``dpo_section`` and
``pretrain_section`` (the keys of one recipe), ``recipe_classes`` (which recipe a configuration is for),
``token_budget`` (tokens to rows and steps).
"""
