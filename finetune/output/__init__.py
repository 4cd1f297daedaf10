"""What a run writes but for checkpoints.

``run_record`` (what is known of a run), ``run_files`` (run.yaml, metrics.jsonl, final/), ``output_folder`` (where).
"""
