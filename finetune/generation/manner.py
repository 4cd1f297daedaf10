"""How a model answers: how far, and how freely."""

from dataclasses import dataclass
from typing import Any

from finetune.errors import refuse_if_any
from finetune.models.generation_settings import MOST_LIKELY, NOTHING_ELSE, ONE


@dataclass(frozen=True)
class Manner:
    """Settings of an answer. The default is the most likely answer, which is the same each time."""

    max_new_tokens: int = 256
    """After which an answer is cut."""
    temperature: float = 0.0
    """Of sampling; 0 takes the most likely token each time."""
    top_p: float = 1.0
    """Of sampling: the most likely tokens that have this probability together."""
    seed: int = 0
    """Of sampling."""

    def __post_init__(self) -> None:
        """
        Raises:
            InputError: for values that mean nothing.
        """
        wrong = {
            f"--max-new-tokens {self.max_new_tokens}: give a number from 1 on.": self.max_new_tokens < 1,
            f"--temperature {self.temperature}: give 0, or a number above it.": not 0
            <= self.temperature
            < float("inf"),
            f"--top-p {self.top_p}: give a number above 0, and at most 1.": not 0 < self.top_p <= 1,
            f"--seed {self.seed}: give 0, or a number above it.": self.seed < 0,
            f"--top-p {self.top_p} is for sampling; add --temperature, for example 0.7.": (
                self.top_p < 1 and self.temperature == 0
            ),
        }
        refuse_if_any([sentence for sentence, is_wrong in wrong.items() if is_wrong])

    def arguments(self) -> dict[str, Any]:
        """For ``generate`` of transformers: they win over what a model's own generation_config.json says.

        Samples are drawn with its penalties; the most likely answer is the one that has none.
        """
        if self.temperature == 0:
            return MOST_LIKELY
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return drawn | ONE | NOTHING_ELSE
