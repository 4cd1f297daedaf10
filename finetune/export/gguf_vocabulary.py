"""A tokenizer as llama.cpp reads it from a GGUF file: its tokens, their kinds, its merges and its special tokens.

Byte-level BPE, as Llama 3, Qwen and SmolLM2 have it. llama.cpp splits a text before it merges, by rules that it knows
by name, and the name is found by the rules of the tokenizer's own file.
Source of names and rules: llama.cpp, src/llama-vocab.cpp.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.errors import InputError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens: gguf.TokenType."""
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    rf"{_LETTERS}|\p{{N}}{{1,3}}|{_OTHERS}": "llama-bpe",
    rf"{_LETTERS}|\p{{N}}|{_OTHERS}": "qwen2",
}
"""Patterns of tokenizers that split by one, with llama.cpp's names for them."""


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file holds of a tokenizer."""

    splits: str
    """llama.cpp's name for the rules by which texts are split."""
    tokens: list[str]
    """By their ids, as many as the model has embeddings."""
    kinds: list[int]
    merges: list[str]
    """Pairs with a space between them; a space within is written as the byte-level alphabet does."""
    special: dict[str, int]
    """Ids by their names in the file: bos_token_id ..."""
    adds_bos: bool
    chat_template: str | None


def vocabulary_of(tokenizer: PreTrainedTokenizerBase, size: int, ends: tuple[int, ...] = ()) -> Vocabulary:
    """What a file needs of this tokenizer.

    Args:
        size: tokens that the model has embeddings for.
        ends: at which the model stops, beside the tokenizer's own; llama.cpp takes one of them.

    Raises:
        InputError: if it is not a byte-level BPE that llama.cpp knows, or has more tokens than the model.
    """
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    splits = splits_of(described["pre_tokenizer"]) if model["type"] == "BPE" else None
    if splits is None or model.get("byte_fallback") or described["normalizer"] not in (None, {"type": "NFC"}):
        raise InputError(
            "--gguf: the tokenizer is not one of those that this export knows (byte-level BPE as in Llama 3, Qwen, "
            "SmolLM2 and GPT-2); convert the model's folder with llama.cpp's convert_hf_to_gguf.py."
        )
    if len(tokenizer) > size:
        raise InputError(
            f"--gguf: the tokenizer has {len(tokenizer):,} tokens, but the model {size:,}; give it its own."
        )
    added = tokenizer.added_tokens_decoder
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    kinds = {number: CONTROL if token.special else USER_DEFINED for number, token in added.items()}
    bos, begins = tokenizer.bos_token_id, list(tokenizer("")["input_ids"])
    return Vocabulary(
        splits=splits,
        tokens=[by_id.get(number, f"[PAD{number}]") for number in range(size)],
        kinds=[kinds.get(number, NORMAL) if number in by_id else UNUSED for number in range(size)],
        merges=[_merge(pair) for pair in model["merges"]],
        special=_special(tokenizer, ends),
        adds_bos=bos is not None and begins[:1] == [bos],
        chat_template=tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None,
    )


def splits_of(described: Mapping[str, Any] | None) -> str | None:
    """llama.cpp's name for a pre-tokenizer, as tokenizer.json describes it; None for one that it does not know.

    For example, {"type": "ByteLevel", "use_regex": true} is gpt-2; behind {"type": "Digits", "individual_digits": true}
    it is smollm.
    """
    steps = [] if described is None else described.get("pretokenizers", [described])
    kinds = [step["type"] for step in steps]
    if not kinds or kinds[-1] != "ByteLevel" or steps[-1].get("add_prefix_space"):
        return None
    by_regex = steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and by_regex:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and by_regex and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not by_regex and steps[0].get("behavior") == "Isolated":
        return SPLITS.get(steps[0]["pattern"].get("Regex", ""))
    return None


def _merge(pair: str | list[str]) -> str:
    parts = pair.split(" ") if isinstance(pair, str) else pair
    return " ".join(part.replace(" ", "\u0120") for part in parts)


def _special(tokenizer: PreTrainedTokenizerBase, ends: tuple[int, ...]) -> dict[str, int]:
    named = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "unknown_token_id": tokenizer.unk_token_id,
        "padding_token_id": tokenizer.pad_token_id,
        "eot_token_id": next((token for token in ends if token != tokenizer.eos_token_id), None),
    }
    return {name: token for name, token in named.items() if token is not None}
