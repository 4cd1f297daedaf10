"""The ``finetune`` command: ``commands`` (all commands and their options), ``init_verb`` and ``doctor_verb`` (and their
``setup_options``), ``health`` (what the doctor looks at), ``train_verb`` (and ``train_options``), ``plan_verb`` (and
``planning``: what it reads and shows), ``links_verb`` (and ``links``: what it measures, and its ``links_options``),
``data_verb``, ``data_cache``, ``checkpoint_verb``, ``export_options``, ``generate_verb``, ``chat_verb`` (and their
``talk_options``), ``evaluate_verb`` (and its ``evaluate_options``), ``hub_first`` (asks the hub before a verb is
imported), ``terminal`` (what a terminal may be given of an answer), ``report_verb``, ``data_report`` (the data as the
model sees them), ``demo_model``.
"""
