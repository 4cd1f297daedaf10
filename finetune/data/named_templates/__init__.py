"""Chat templates by name, for base models whose tokenizers have none: ``data.chat_template: chatml``.

Each is a Jinja file beside this one, for conversations of system, user and assistant; rows with tools need a template
of their own. None writes a BOS: it is put in front where the tokenizer itself begins texts with one. The token that
ends a turn becomes the tokenizer's end-of-sequence token, as in chat models.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import InputError, refuse_if_any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class NamedTemplate:
    """What a template asks of a tokenizer."""

    specials: tuple[str, ...] = ()
    """Special tokens that it writes, beside the tokenizer's own BOS and end-of-sequence token."""
    end: str | None = None
    """The one of them that ends a turn; None for the tokenizer's end-of-sequence token."""


NAMED = {
    "chatml": NamedTemplate(("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "gemma": NamedTemplate(("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "llama3": NamedTemplate(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "mistral": NamedTemplate(),
    "phi3": NamedTemplate(("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "zephyr": NamedTemplate(),
}


def problems(chat_template: str | None) -> list[str]:
    """Why this is neither a template's name nor a file, as sentences."""
    if chat_template is None or chat_template in NAMED or Path(chat_template).is_file():
        return []
    close = difflib.get_close_matches(chat_template, NAMED, n=1)
    return [
        f"data.chat_template: there is no file {chat_template}, and no template of that name; "
        f"{f'did you mean {close[0]}? Give' if close else 'give'} a Jinja file, or one of {', '.join(NAMED)}."
    ]


def has_specials(chat_template: str | None) -> bool:
    """Whether this is a template by name, which writes special tokens of its own."""
    return chat_template in NAMED and bool(NAMED[chat_template].specials)


def use(tokenizer: "PreTrainedTokenizerBase", chat_template: str, *, adds_tokens: bool = False) -> tuple[str, ...]:
    """Give a tokenizer the template of a name or of a file.

    Args:
        adds_tokens: add the special tokens of a named template that the tokenizer lacks: their embeddings are trained.

    Returns:
        Tokens that are new to its vocabulary.

    Raises:
        InputError: if the tokenizer lacks the special tokens of a named template, or gives one of them the id of
            another token; if the file cannot be read.
    """
    if chat_template not in NAMED:
        tokenizer.chat_template = _read(Path(chat_template))
        return ()
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    lacking = _lacking(chat_template, tokenizer, known)
    new: tuple[str, ...] = ()
    if lacking and adds_tokens and not (NAMED[chat_template].end is None and tokenizer.eos_token is None):
        from tokenizers import AddedToken

        vocabulary = tokenizer.get_vocab()
        new = tuple(token for token in lacking if token not in vocabulary)
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in lacking], True)
        _refuse_shared_ids(tokenizer, vocabulary, new)
    elif lacking:
        others = [name for name in NAMED if not _lacking(name, tokenizer, known)]
        raise InputError(
            f"data.chat_template: {chat_template} needs the special tokens {', '.join(lacking)}, which the tokenizer "
            f"of {tokenizer.name_or_path} lacks; set it to "
            f"{f'{_either(others)}, which need none that it lacks,' if others else 'a Jinja file'} or set "
            "model.tokenizer and model.path to a model that has them."
        )
    begin, bos = list(tokenizer("")["input_ids"]), tokenizer.bos_token_id
    with_bos = "{{- bos_token -}}\n" if bos is not None and begin[:1] == [bos] else ""
    tokenizer.chat_template = with_bos + _read(Path(__file__).with_name(f"{chat_template}.jinja"))
    tokenizer.eos_token = NAMED[chat_template].end or tokenizer.eos_token
    return new


def _refuse_shared_ids(tokenizer: "PreTrainedTokenizerBase", before: Mapping[str, int], new: Sequence[str]) -> None:
    """Refuse new tokens whose ids are those of others: where ids are missing, a tokenizer counts its tokens instead."""
    tokens = {number: token for token, number in before.items()}
    ids: Any = tokenizer.convert_tokens_to_ids(list(new))
    refuse_if_any(
        [
            f"data.chat_template: the tokenizer of {tokenizer.name_or_path} would give the new token {token} the id "
            f"{number}, which is that of {tokens[number]!r}: ids below its largest, {max(tokens)}, have no token; give "
            f"them tokens, or set model.tokenizer and model.path to a model that has {token}."
            for token, number in zip(new, ids, strict=True)
            if number in tokens
        ]
    )


def _lacking(name: str, tokenizer: "PreTrainedTokenizerBase", known: Collection[str]) -> list[str]:
    if NAMED[name].end is None and tokenizer.eos_token is None:
        return ["an end-of-sequence token"]
    return [token for token in NAMED[name].specials if token not in known]


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"data.chat_template: {path} cannot be read ({error}); give a UTF-8 file.") from error
