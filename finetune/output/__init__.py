"""What a run writes but for checkpoints: ``run_files`` (run.yaml, metrics, final/), ``output_folder`` (their place)."""
