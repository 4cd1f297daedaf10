"""What a run writes but for checkpoints.

``run_record`` (what is known of a run), ``run_files`` (run.yaml, metrics.jsonl, final/), ``run_reading`` (reads the
first two back), ``output_folder`` (where).
"""
