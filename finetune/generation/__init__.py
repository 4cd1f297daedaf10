"""Text from a model: ``speaker`` (a run, an adapter or a model, loaded to answer), ``manner`` (how it answers),
``prompts`` (what files ask), ``dialogue`` (a conversation that goes on), ``judging`` (what it scores on rows).
"""
