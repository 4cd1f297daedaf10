"""Text from a model: ``speaker`` (a model that answers), ``speaker_loading`` (the one that a path names), ``manner``
(how it answers), ``prompts`` (what files ask), ``dialogue`` (a conversation that goes on), ``judging`` (what it scores
on rows).
"""
