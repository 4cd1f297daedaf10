"""What ``finetune links`` measures: ``bus_bandwidth`` (pure arithmetic), ``measuring`` (collectives and exchanges, in
the processes of a launch), ``links_file`` (what is written, and what a plan takes of it), ``links_table``.
"""
