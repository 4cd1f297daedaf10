"""From examples to rows: tokens, and which of them are trained.

The mask is stored by position, never by token id, so that a PAD token that equals the end-of-turn token cannot hide it.
Each trained span is decoded again and compared with its text.

Example: the turn of characters 53 to 66 from ``chat_template``. With a tokenizer that makes 19 tokens of that text, the
turn's are ``c``, `` ``, ``d`` and ``<|im_end|>``, numbers 14 to 17: ``spans`` is [(14, 18)] and 4 tokens are trained.
"""

import copy
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

from finetune.data.chat_template import Rendering, Span
from finetune.data.columns import Columns
from finetune.data.formats import Example
from finetune.data.messages import shielded, shielded_messages, without_reasoning
from finetune.data.prompt_texts import begin_of_text
from finetune.data.template_process import Conversation, TemplateProcess
from finetune.errors import BadRow

_FIRST_SHIELD = 0xF0000  # Unicode's first private plane: finetune.data.formats lets no text have them
_NO_TEMPLATE = (
    "the tokenizer has no chat template to render conversations with; set data.chat_template to a name (chatml ...) or "
    "a Jinja file, or start from the model's instruction-tuned version"
)


@dataclass(frozen=True)
class Settings:
    """Settings that change the rows, beside files and tokenizer."""

    max_length: int
    """Maximum tokens of a row; longer texts become several."""
    format: str = "auto"
    """One of ``formats.FORMATS``, or auto."""
    train_on: str = "assistant"
    """assistant, last or all."""
    split_key: str | None = None
    """Field whose value, instead of the whole row, decides the side of a train/eval split."""
    too_long: str = "cut"
    """What becomes of a conversation with more tokens: cut (its end is cut off), keep_end (its beginning), drop or
    error. Plain texts become several rows whatever it says."""
    train_think: str = "auto"
    """auto trains reasoning where the model generates it; never leaves it to be read only."""
    on_dropped: str = "error"
    """error refuses a conversation of which the chat template leaves something out; warn counts it."""
    turn_ends: tuple[str, ...] = ()
    """Tokens at which generation stops, beside the tokenizer's own."""
    paired: bool = False
    """Each record has a chosen answer and a rejected one, which become two rows, one behind the other."""
    columns: Columns = ()
    """Fields of a format, each with the column of the records that holds it."""


class TooLong(BadRow):
    """A row that is left out because of its length."""


@dataclass(frozen=True)
class Row:
    """Tokens of one document of the training data."""

    tokens: np.ndarray
    """Of shape (tokens,), int32."""
    spans: list[Span]
    """Spans of trained tokens, in order; never the first token, which nothing predicts."""
    source: str
    """``file:line`` it came from."""
    prompt_tokens: int = 0
    """Tokens before the last answer; 0 where there is none."""
    question: str = ""
    """The question of the last answer, for display."""
    uncut_tokens: int = 0
    """Tokens before the row was cut at ``max_length``."""
    dropped: tuple[str, ...] = ()
    """What the chat template leaves out of the conversation."""
    reference: float = 0.0
    """Log-probability of its trained tokens by the model that the trained one is compared with, where it is known."""

    @property
    def trained(self) -> list[bool]:
        """Per token, whether its prediction is trained."""
        mask = [False] * len(self.tokens)
        for first, end in self.spans:
            mask[first:end] = [True] * (end - first)
        return mask

    @property
    def trained_tokens(self) -> int:
        """Tokens whose prediction is trained."""
        return sum(end - first for first, end in self.spans)


@dataclass(frozen=True)
class _Text:
    """A text to tokenise, and its trained spans in characters."""

    text: str
    turns: list[Span]
    question: str
    shielded: bool = False
    dropped: tuple[str, ...] = ()
    last: Span = (0, 0)
    """The last answer, with its reasoning."""


@dataclass
class _Tokens:
    """Tokens of a text, and the characters that each stands for."""

    ids: list[int]
    find_offsets: Callable[[], list[Span]]
    specials: tuple[np.ndarray, list[int]] | None = None  # where they are, and the characters behind each

    @cached_property
    def offsets(self) -> list[Span]:
        """Asked for only if the special tokens do not show where a span begins: it costs a third of the time."""
        return self.find_offsets()


class Encoder:
    """Examples to rows, with one tokenizer and its chat template. May be shared between threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.settings, self.train_on, self.max_length = settings, settings.train_on, settings.max_length
        backend = tokenizer.backend_tokenizer
        if backend.truncation or backend.padding:  # as some tokenizers are published
            backend = copy.deepcopy(backend)
            backend.no_truncation()
            backend.no_padding()
        self.tokenizer: Tokenizer = backend
        self.template = TemplateProcess(tokenizer, ends=settings.turn_ends) if tokenizer.chat_template else None
        self._form: Literal["text", "turns"] = "text" if self.train_on == "all" else "turns"
        self._tokens_in = lru_cache(maxsize=1000)(lambda text: len(backend.encode(text, add_special_tokens=False).ids))
        self.special_ids = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self.is_special = np.zeros(backend.get_vocab_size() + max(self.special_ids, default=0) + 1, bool)
        self.is_special[list(self.special_ids)] = True
        specials = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len)
        self.shield_of = {special: chr(_FIRST_SHIELD + i) for i, special in enumerate(reversed(specials))}
        self.special_of = {shield: special for special, shield in self.shield_of.items()}
        self.eos = tokenizer.eos_token_id
        self.begin = begin_of_text(tokenizer)

    @cached_property
    def literal(self) -> Tokenizer:
        """Treats special strings as text."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def shielding(self) -> Tokenizer:
        """Knows the shields as tokens."""
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.add_tokens([AddedToken(shield, normalized=False) for shield in self.special_of])
        return tokenizer

    def encode(self, examples: Sequence[tuple[str, Example]]) -> list[list[Row] | BadRow]:
        """Rows of each (source, example), or why it cannot be used.

        Several rows are made of a long plain text, and of a conversation whose answers no single text has as the model
        generates them.

        Raises:
            InputError: if the chat template exceeds its limits of time or memory.
        """
        found = self._texts(examples)
        texts = [(i, text) for i, each in enumerate(found) if not isinstance(each, BadRow) for text in each]
        encoded = self._tokenize([(text, examples[i][1].messages is None) for i, text in texts])
        results: list[list[Row] | BadRow] = [each if isinstance(each, BadRow) else [] for each in found]
        for (i, text), tokens in zip(texts, encoded):
            source, example = examples[i]
            rows = results[i]
            if isinstance(rows, BadRow):
                continue
            is_plain = example.messages is None
            try:
                rows += self._plain_rows(source, example, text, tokens) if is_plain else self._row(source, text, tokens)
            except BadRow as reason:
                results[i] = reason
        return results

    def _tokenize(self, texts: Sequence[tuple[_Text, bool]]) -> list[_Tokens]:
        """Tokens of each text; a plain one holds no special tokens, whatever its words look like."""
        plain = [i for i, (_, is_plain) in enumerate(texts) if is_plain]
        chats = [i for i, (text, is_plain) in enumerate(texts) if not is_plain and not text.shielded]
        encoded: dict[int, _Tokens] = {}
        if plain:
            batch = self.literal.encode_batch([texts[i][0].text for i in plain], add_special_tokens=False)
            encoded |= {i: _Tokens(found.ids, partial(getattr, found, "offsets")) for i, found in zip(plain, batch)}
        if chats:
            words = [texts[i][0].text for i in chats]
            batch = self.tokenizer.encode_batch_fast(words, add_special_tokens=False)
            offsets = [partial(self._offsets_of, text) for text in words]
            encoded |= {i: _Tokens(found.ids, find) for i, found, find in zip(chats, batch, offsets)}
        return [encoded[i] if i in encoded else self._tokenize_shielded(text.text) for i, (text, _) in enumerate(texts)]

    def _offsets_of(self, text: str) -> list[Span]:
        return self.tokenizer.encode(text, add_special_tokens=False).offsets

    def _plain(self, example: Example) -> _Text:
        text = example.prompt + example.completion
        turns = [(len(example.prompt), len(text))]
        return _Text(text, turns, example.prompt)

    def _texts(self, examples: Sequence[tuple[str, Example]]) -> list[list[_Text] | BadRow]:
        """The texts to tokenise of each example; all conversations are rendered at once."""
        if self.template is None:
            return [
                [self._plain(example)] if example.messages is None else BadRow(_NO_TEMPLATE) for _, example in examples
            ]
        asked = {
            i: Conversation(
                source,
                shielded_messages(example.messages, self._shield),
                shielded(example.tools, self._shield),
                self._form,
                self._trained(example),
            )
            for i, (source, example) in enumerate(examples)
            if example.messages is not None
        }
        rendered = dict(zip(asked, self.template.render(list(asked.values()))))
        texts: list[list[_Text] | BadRow] = []
        for i, (_, example) in enumerate(examples):
            if i not in asked:
                texts.append([self._plain(example)])
            elif isinstance(found := rendered[i], BadRow):
                texts.append(found)
            else:
                texts.append(self._conversation(example, asked[i], found))
        return texts

    def _trained(self, example: Example) -> tuple[int, ...]:
        """Indices of the answers that are trained."""
        assert example.messages is not None
        answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        trained = tuple(i for i in answers if i not in example.untrained)
        return trained[-1:] if self.train_on == "last" else trained

    def _conversation(
        self, example: Example, asked: Conversation, renderings: Sequence[Rendering]
    ) -> list[_Text] | BadRow:
        messages = example.messages
        assert messages is not None
        dropped = list(dict.fromkeys(chain.from_iterable(each.dropped for each in renderings)))
        if dropped and self.settings.on_dropped == "error":
            return BadRow(
                f"the chat template leaves out {' and '.join(dropped)}; remove them from the row, set "
                "data.chat_template to a template that writes them, or set data.on_dropped to warn to train without"
            )
        assert asked.trained is not None
        is_shielded = asked.messages != messages or asked.tools != example.tools
        texts = []
        for each in renderings:
            last = max(each.turns, default=asked.trained[-1])
            question = messages[last - 1]["content"]
            turns = list(each.turns.values())
            never = self.settings.train_think == "never"
            spans = [span for turn in turns for span in without_reasoning(each.text, turn)] if never else turns
            texts.append(_Text(each.text, spans, question, is_shielded, each.dropped, turns[-1] if turns else (0, 0)))
        return texts

    def _shield(self, text: str) -> str:
        """A text with a private-use character in place of each string that the tokenizer treats as special."""
        assert self.template is not None
        return self.template.special.sub(lambda found: self.shield_of[found[0]], text)

    def _tokenize_shielded(self, text: str) -> _Tokens:
        """Tokens of a text, with each shield tokenised as the text that it stands for."""
        encoding = self.shielding.encode(text, add_special_tokens=False)
        tokens: list[int] = []
        spans: list[Span] = []
        for token, (first, end) in zip(encoding.ids, encoding.offsets):
            special = self.special_of.get(text[first:end])
            own = [token] if special is None else self.literal.encode(special, add_special_tokens=False).ids
            tokens += own
            spans += [(first, end)] * len(own)
        return _Tokens(tokens, lambda: spans)

    def _row(self, source: str, text: _Text, tokens: _Tokens) -> list[Row]:
        if self.train_on == "all":
            return [replace(self._fitting(tokens.ids, [(0, len(tokens.ids))], source), dropped=text.dropped)]
        spans = [self._tokens_of(text, turn, tokens) for turn in text.turns]
        last = spans[-1] if text.turns[-1:] == [text.last] else self._tokens_of(text, text.last, tokens)
        return [replace(self._fitting(tokens.ids, spans, source, last[0], text.question), dropped=text.dropped)]

    def _plain_rows(self, source: str, example: Example, text: _Text, found: _Tokens) -> list[Row]:
        if self.eos is None:
            raise BadRow(
                "the tokenizer has no end-of-sequence token, so the model would not learn to stop; set model.tokenizer "
                "to one that has it"
            )
        first, ids = 0, found.ids
        if example.prompt:
            first = self._tokens_of(text, text.turns[0], found)[0]
            if found.offsets[first][0] < len(example.prompt):  # no model sees a token of both when it is asked
                parts = (example.prompt, example.completion)
                prompt, completion = (self.literal.encode(part, add_special_tokens=False).ids for part in parts)
                if self.tokenizer.decode(prompt + completion) == self.tokenizer.decode(ids):  # and no space was added
                    first, ids = len(prompt), prompt + completion
        begin = self.begin if example.begins else []
        first, tokens = first + len(begin), begin + ids
        if example.ends and tokens[-1:] != [self.eos]:
            tokens = [*tokens, self.eos]
        if example.prompt:
            spans = [(0 if self.train_on == "all" else first, len(tokens))]
            return [self._fitting(tokens, spans, source, first, text.question)]
        step = max(1, self.max_length - 1)  # rows overlap by a token, so that each token is predicted in one of them
        pieces = [tokens[i : i + self.max_length] for i in range(0, max(1, len(tokens) - 1), step)]
        return [self._fitting(piece, [(0, len(piece))], source) for piece in pieces]

    def _between_specials(self, text: _Text, turn: Span, found: _Tokens) -> Span | None:
        """Where a span that ends with a special token should be, from the special tokens alone; to be verified.

        The text between the preceding special token and the span counts as many tokens as it has by itself.
        """
        if self.template is None or text.shielded:
            return None
        if found.specials is None:
            behind = [special.end() for special in self.template.special.finditer(text.text)]
            found.specials = np.flatnonzero(self.is_special[found.ids]), behind
        places, ends = found.specials
        before, last = bisect_right(ends, turn[0]) - 1, bisect_left(ends, turn[1])
        if len(places) != len(ends) or before < 0 or last == len(ends) or ends[last] != turn[1]:
            return None
        return int(places[before]) + 1 + self._tokens_in(text.text[ends[before] : turn[0]]), int(places[last]) + 1

    def _tokens_of(self, text: _Text, turn: Span, found: _Tokens) -> Span:
        """Tokens of a span of the text.

        Raises:
            BadRow: if they do not decode to it.
        """
        plain = self._between_specials(text, turn, found)
        if plain and text.text[slice(*turn)] == self.tokenizer.decode(
            found.ids[slice(*plain)], skip_special_tokens=False
        ):
            return plain
        tokens, offsets = found.ids, found.offsets
        first, end = bisect_left(offsets, (turn[0], -1)), bisect_left(offsets, (turn[1], -1))
        # a token that begins before the span belongs to it, unless it is a special one that swallowed white space
        while first > 0 and offsets[first - 1][1] > turn[0] and tokens[first - 1] not in self.special_ids:
            first -= 1
        begins = min(offsets[first][0], turn[0]) if first < end else turn[0]
        meant = text.text[begins : turn[1]]
        if text.shielded:
            meant = "".join(self.special_of.get(character, character) for character in meant)
        decoded = self.tokenizer.decode(list(tokens[first:end]), skip_special_tokens=False)
        if decoded != meant and _without_spaces(decoded) != _without_spaces(meant):
            raise BadRow(
                f"the tokenizer cannot represent an answer: {_short(meant)} becomes {_short(decoded)}; set "
                "model.tokenizer to one that covers its characters"
            )
        return first, end

    def _fitting(
        self, tokens: list[int], spans: list[Span], source: str, prompt_tokens: int = 0, question: str = ""
    ) -> Row:
        """A row no longer than ``max_length``, whose first token is not trained.

        Raises:
            BadRow: if it is longer, and is not to be cut.
        """
        length, most = len(tokens), self.max_length
        if length > most and self.settings.too_long in ("drop", "error"):
            reason = f"it has {length:,} tokens, more than data.max_length {most:,}"
            raise TooLong(reason) if self.settings.too_long == "drop" else BadRow(f"{reason}; see data.too_long")
        first = max(0, length - most) if self.settings.too_long == "keep_end" else 0
        last = min(length, first + most)
        kept = [(max(begin, first + 1) - first, min(end, last) - first) for begin, end in spans]
        return Row(
            np.array(tokens[first:last], np.int32),
            [(begin, end) for begin, end in kept if begin < end],
            source,
            prompt_tokens=prompt_tokens - first if first < prompt_tokens < last else 0,
            question=question,
            uncut_tokens=length,
        )


def _without_spaces(text: str) -> str:
    """Text as all tokenizers agree on it: some normalise characters, and some remove or add spaces at the edges."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
