"""A model that answers, with its tokenizer and its template. See ``speaker_loading`` for where it comes from."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from finetune.compat.peft_private import adapter_off
from finetune.data.prompt_texts import Prompt, room_problems, texts_of, tokens_of
from finetune.data.template_process import TemplateProcess
from finetune.errors import InputError, refuse_if_any
from finetune.generation.manner import Manner
from finetune.models import loading as models
from finetune.seeds import seed_of


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    text: str
    tokens: int
    """The one that ends it included."""
    is_cut: bool
    """It did not end by itself."""


@dataclass(frozen=True)
class Known:
    """What is known of a model before its weights load."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    end_tokens: tuple[int, ...]
    """At which an answer ends: those of the model's files, the tokenizer's own, and the one that ends the turns of its
    template, which is trained."""
    positions: int | None
    """Of prompt and answer together, at most; None for a model without limit."""


@dataclass(frozen=True)
class Speaker(Known):
    """A model on its device, and what it takes to ask it."""

    model: Any
    without_adapter: bool = False
    """It is the base of the model that answers."""

    @cached_property
    def _template(self) -> TemplateProcess:
        return TemplateProcess(self.tokenizer)

    def prompt_tokens(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Tokens up to where the answers begin: conversations by the chat template, texts as they stand.

        Raises:
            InputError: if a model without a chat template is given a conversation, the template refuses one, or one
                leaves no position for an answer.
        """
        if not all(each.is_text for each in prompts) and self.tokenizer.chat_template is None:
            raise InputError(
                f"{self.name} has no chat template, so it continues texts and holds no conversation; add --plain, or "
                "give a template with --chat-template."
            )
        texts = texts_of(prompts, self._template)
        found = [tokens_of(self.tokenizer, each, text) for each, text in zip(prompts, texts)]
        refuse_if_any(room_problems([each.source for each in prompts], found, self.positions, self.name))
        return found

    def answers(self, prompts: Sequence[Sequence[int]], manner: Manner, *, number: int = 0) -> list[Answer]:
        """Answers to prompts that are computed in one batch; shorter ones are padded on the left.

        Where positions end before ``max_new_tokens``, each answer has as many as alone, in several batches.

        Args:
            number: of the first of them among all that are asked: samples of other batches are others.
        """
        found: dict[int, Answer] = {}
        for batch in self._with_room(prompts, manner.max_new_tokens):
            output = self._generate([prompts[place] for place in batch], manner, None, number + batch[0])
            longest = max(len(prompts[place]) for place in batch)
            found |= zip(batch, map(self._answer, output[:, longest:].tolist()))
        return [found[place] for place in range(len(prompts))]

    def _with_room(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Numbers of prompts, by batches that cut no answer: the model goes on with all rows until the longest ends.

        With 64 positions and answers of 40 tokens, prompts of 9, 43, 12 and 30 tokens are (9, 12), (43) and (30): an
        answer that may go on to the last position has only prompts of the same length beside it.
        """
        batches: dict[int, list[int]] = {}
        for place, prompt in enumerate(prompts):
            has_all = self.positions is None or len(prompt) + max_new_tokens <= self.positions
            batches.setdefault(0 if has_all else len(prompt), []).append(place)
        return list(batches.values())

    def streamed(self, prompt: Sequence[int], manner: Manner, say: Callable[[str], None], *, number: int = 0) -> Answer:
        """The answer to one prompt, of which ``say`` is given each piece of text as it is made.

        After a KeyboardInterrupt the answer is what was said until then. ``number`` is as in ``answers``.
        """
        streamer = _Pieces(self.tokenizer, say)
        try:
            (row,) = self._generate([prompt], manner, streamer, number).tolist()
        except KeyboardInterrupt:
            streamer.end()
            return Answer("".join(streamer.pieces).strip(), streamer.tokens, True)
        return self._answer(row[len(prompt) :])

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Sequence[int]], manner: Manner, streamer: Any, number: int) -> torch.Tensor:
        encoded = self.tokenizer.pad(
            {"input_ids": [list(prompt) for prompt in prompts]}, padding_side="left", return_tensors="pt"
        ).to(self.model.device)
        room = manner.max_new_tokens
        if self.positions is not None:
            room = min(room, self.positions - encoded["input_ids"].shape[1])
        torch.manual_seed(seed_of(manner.seed, number))
        with self.as_it_answers():
            output: torch.Tensor = self.model.generate(
                **encoded,
                **manner.arguments(),
                max_new_tokens=room,
                eos_token_id=list(self.end_tokens) or None,
                pad_token_id=self.tokenizer.pad_token_id,
                streamer=streamer,
            )
        return output

    def as_it_answers(self) -> Any:
        """A context in which the model is the one that answers: without its adapter, where that is the other one."""
        if not self.without_adapter:
            return nullcontext()
        return adapter_off(self.model)

    def _answer(self, row: list[int]) -> Answer:
        end = next((i for i, token in enumerate(row) if token in self.end_tokens), None)
        mine = row if end is None else row[:end]
        return Answer(models.answer_texts(self.tokenizer, [mine])[0], len(mine) + (end is not None), end is None)


class _Pieces(TextStreamer):
    """Gives each piece of text to a function."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.say = say
        self.pieces: list[str] = []
        self.tokens = -1  # the first call brings the prompt

    def put(self, value: torch.Tensor) -> None:
        """One more token, or the prompt."""
        self.tokens += 1
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """A piece that no later token changes."""
        self.pieces.append(text)
        self.say(text)
