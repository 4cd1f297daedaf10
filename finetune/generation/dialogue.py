"""A conversation that goes on: what was said so far, and the next answer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from finetune.data.formats import Example
from finetune.data.prompt_texts import Prompt
from finetune.generation.manner import Manner
from finetune.generation.speaker import Answer, Speaker


@dataclass
class Dialogue:
    """With one model. What it is asked next is asked after all that was said before."""

    speaker: Speaker
    manner: Manner
    system: str | None = None
    """What the conversation begins with."""
    said: list[dict[str, Any]] = field(default_factory=list)

    def reset(self, system: str | None) -> None:
        """Begin again."""
        self.system, self.said = system, []

    def check(self) -> None:
        """Whether the model can be talked to at all.

        Raises:
            InputError: if it has no chat template, or one that refuses what the system says.
        """
        self._prompt([{"role": "user", "content": "Hello"}])

    def ask(self, text: str, say: Callable[[str], None]) -> Answer:
        """The answer to what a person says next; its text is given to ``say`` as it is made.

        An answer that is interrupted (KeyboardInterrupt) stands as far as it came. A question that is refused was
        not asked.

        Raises:
            InputError: if the conversation has become longer than the model's positions, or its template refuses it.
        """
        turns = [*self.said, {"role": "user", "content": text}]
        answer = self.speaker.streamed(self._prompt(turns), self.manner, say, number=len(self.said))
        self.said = [*turns, {"role": "assistant", "content": answer.text}]
        return answer

    def _prompt(self, turns: list[dict[str, Any]]) -> list[int]:
        begin = [{"role": "system", "content": self.system}] if self.system else []
        (prompt,) = self.speaker.prompt_tokens([Prompt("the conversation", Example([*begin, *turns]), {})])
        return prompt
