"""The command ``finetune``: ``commands`` (all of them, and their options), ``plan_verb``, ``data_verb``,
``checkpoint_verb``, ``data_report`` (what a model will see of its data), ``demo_model``.
"""
