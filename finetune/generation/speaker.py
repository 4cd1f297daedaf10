"""A model that answers: a run, an adapter or a model by its folder or hub id, with its tokenizer and its template."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, TextStreamer

from finetune.compat.peft_private import adapter_off
from finetune.data.columns import Columns
from finetune.data.named_templates import problems
from finetune.data.prompt_texts import Prompt, room_problems, texts_of, tokens_of
from finetune.data.template_process import TemplateProcess, end_of_turn
from finetune.distributed.strategy import native_precision
from finetune.errors import InputError, refuse_if_any
from finetune.export import adapted_model, adapter_source, own_code
from finetune.export.results import Result, result_at
from finetune.generation.manner import Manner
from finetune.hub_access import is_hub_id
from finetune.models import loading as models
from finetune.models import new_tokens, quantization, weights
from finetune.models.end_tokens import end_tokens_of
from finetune.output.run_files import read_run


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

    def answers(self, prompts: Sequence[Sequence[int]], manner: Manner) -> list[Answer]:
        """Answers to prompts that are computed in one batch; shorter ones are padded on the left.

        Where positions end before ``max_new_tokens``, each answer has as many as alone, in several batches.
        """
        found: dict[int, Answer] = {}
        for batch in self._with_room(prompts, manner.max_new_tokens):
            output = self._generate([prompts[place] for place in batch], manner, None)
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

    def streamed(self, prompt: Sequence[int], manner: Manner, say: Callable[[str], None]) -> Answer:
        """The answer to one prompt, of which ``say`` is given each piece of text as it is made.

        After a KeyboardInterrupt the answer is what was said until then.
        """
        streamer = _Pieces(self.tokenizer, say)
        try:
            (row,) = self._generate([prompt], manner, streamer).tolist()
        except KeyboardInterrupt:
            streamer.end()
            return Answer("".join(streamer.pieces).strip(), streamer.tokens, True)
        return self._answer(row[len(prompt) :])

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[Sequence[int]], manner: Manner, streamer: Any) -> torch.Tensor:
        encoded = self.tokenizer.pad(
            {"input_ids": [list(prompt) for prompt in prompts]}, padding_side="left", return_tensors="pt"
        ).to(self.model.device)
        room = manner.max_new_tokens
        if self.positions is not None:
            room = min(room, self.positions - encoded["input_ids"].shape[1])
        torch.manual_seed(manner.seed)
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


@dataclass(frozen=True)
class Unloaded:
    """The model that a path names, or two: all that can be refused has been, but no weights are loaded."""

    known: list[Known]
    load: Callable[[], list[Speaker]]


def read_speakers(
    path: str,
    *,
    base_model: str | None,
    bits: int | None,
    chat_template: str | None,
    compared: bool,
    trust_remote_code: bool = False,
) -> Unloaded:
    """The model that a path names; before it the one that it was trained from, where they are compared.

    A base answers through the same tokenizer and template, so that both are asked the same.

    Args:
        path: output folder of a run, or folder of an adapter or of a model, or a model's id on the hub.
        base_model: folder of an adapter's base, if it was moved.
        bits: 4 or 8, to quantise a model; of an adapter's base, if there is no run.yaml.
        chat_template: Jinja file or name, instead of the tokenizer's own template.
        trust_remote_code: run the code that comes with the model.

    Raises:
        InputError: if there is no such model, or it cannot be loaded; loading raises it for what the files do not show.
    """
    models.quiet()
    with _of_options():
        found = _read(path, base_model, bits, chat_template, compared, trust_remote_code)
    return Unloaded(found.known, _of_options()(found.load))


@contextmanager
def _of_options() -> Iterator[None]:
    """Problems without the keys of a configuration, which these verbs do not have."""
    try:
        yield
    except InputError as error:
        said = [problem.removeprefix("model.path: ") for problem in error.problems]
        raise InputError([each.replace("data.chat_template:", "--chat-template:") for each in said]) from error


def columns_of(path: str) -> Columns:
    """The columns that the rows of a run were read by; none for what no run left.

    Raises:
        InputError: if there is no result in the folder.
    """
    run = result_at(Path(path)).run if Path(path).is_dir() else None
    data = {} if run is None else read_run(run.parent).get("config", {}).get("data", {})
    return tuple(data.get("columns", {}).items())


def _read(
    path: str, base_model: str | None, bits: int | None, chat_template: str | None, compared: bool, trusts: bool
) -> Unloaded:
    refuse_if_any(problems(chat_template))
    result = None if is_hub_id(path) else result_at(Path(path))
    if result is not None and result.is_adapter:
        return _adapted(path, base_model, bits, chat_template, compared, trusts)
    if base_model is not None:
        raise InputError(f"--base-model: {path} is a model and not an adapter; leave it out.")
    folder = path if result is None else str(result.folder)
    before = _trained_from(path, result) if compared else None
    tokenizer = _tokenizer(folder, None, chat_template, trusts)
    own = _whole(folder, None, tokenizer, bits, trusts)
    if before is None:
        return own
    first = _whole(*before, tokenizer, bits, trusts)
    return Unloaded([*first.known, *own.known], lambda: [*first.load(), *own.load()])


def _adapted(
    path: str, base_model: str | None, bits: int | None, chat_template: str | None, compared: bool, trusts: bool
) -> Unloaded:
    source = adapter_source.read(Path(path), base_model=base_model, bits=bits, trust_remote_code=trusts)
    has_own = (source.folder / "tokenizer_config.json").is_file()
    where, revision = (str(source.folder), None) if has_own else (source.base, source.revision)
    tokenizer = _tokenizer(where, revision, chat_template, trusts)
    ends = end_tokens_of(source.config, source.base, revision=source.revision)
    own = _known(path, source.config, tokenizer, ends)
    base = replace(own, name=source.base)

    def load() -> list[Speaker]:
        model = adapted_model.load_to_answer(source, _dtype(source.dtype)).eval()
        speaker = Speaker(**vars(own), model=model)
        return [Speaker(**vars(base), model=model, without_adapter=True), speaker] if compared else [speaker]

    return Unloaded([base, own] if compared else [own], load)


def _whole(
    path: str, revision: str | None, tokenizer: PreTrainedTokenizerBase, bits: int | None, trusts: bool
) -> Unloaded:
    config = own_code.load_config(path, revision=revision, trust_remote_code=trusts)
    refuse_if_any(quantization.problems(config, bits))
    refuse_if_any(weights.problems(models.without_weights(config, trusts), weights.files(path, revision)))
    known = _known(path, config, tokenizer, end_tokens_of(config, path, revision=revision))

    def load() -> list[Speaker]:
        device = torch.device("cuda" if bits and torch.cuda.is_available() else "cpu")
        model = models.load_model(
            path,
            config,
            revision=revision,
            trust_remote_code=trusts,
            attention="auto",
            dtype=_dtype(models.stored_dtype(config)),
            seed=0,
            bits=bits,
            device=device,
        )
        # of a base that is asked by another's tokenizer
        new_tokens.give_rows(model, new_tokens.of_tokenizer(tokenizer, config))
        return [Speaker(**vars(known), model=adapted_model.on_device(model).eval())]

    return Unloaded([known], load)


def _known(name: str, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> Known:
    own = [token for token in (tokenizer.eos_token_id, end_of_turn(tokenizer)) if token is not None]
    return Known(name, tokenizer, tuple(sorted({*ends, *own})), models.most_positions(config.get_text_config()))


def _tokenizer(path: str, revision: str | None, chat_template: str | None, trusts: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = models.load_tokenizer(
            path, revision=revision, trust_remote_code=trusts, chat_template=chat_template
        )
    except InputError as error:
        what, key, _ = str(error).partition("; set model.tokenizer")
        raise InputError(f"{what}; copy the files of a fast tokenizer to that folder." if key else what) from error
    if tokenizer.pad_token_id is None:  # masked wherever it stands
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _dtype(stored: torch.dtype) -> torch.dtype:
    """Of computation: that of the weights, or fp32 on a CPU for which 16 bits are slow."""
    is_slow = not torch.cuda.is_available() and (native_precision() == "no" or stored == torch.float16)
    return torch.float32 if is_slow else stored


def _trained_from(path: str, result: Result | None) -> tuple[str, str | None]:
    """The model that a run trained all weights of, and its revision.

    Raises:
        InputError: if nothing says what it was.
    """
    if result is None or result.run is None:
        raise InputError(
            f"--compare: nothing says what {path} was trained from; give an adapter, or the output folder of a run."
        )
    try:
        model = yaml.safe_load(result.run.read_text(encoding="utf-8"))["config"]["model"]
        return str(model["path"]), model["revision"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise InputError(
            f"--compare: {result.run} is not the record of a run ({type(error).__name__}: {error}); leave it out."
        ) from error
