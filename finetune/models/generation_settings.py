"""How a model generates: what its generation_config.json may say, where it ends, and what the most likely answer is."""

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from finetune.models.end_tokens import file_if_any

ONE: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1}
"""Answer at a time, token by token."""
UNCHANGED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
}
"""Are the scores of tokens with these values."""
NOTHING_ELSE: dict[str, Any] = {
    "min_p": None,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "stop_strings": None,
}
"""With these values, only what a ``Manner`` says leaves tokens out of sampling or ends an answer."""
OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
MOST_LIKELY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None} | ONE | NOTHING_ELSE | UNCHANGED
"""For ``generate`` of transformers: the most likely answer, whatever a model's own generation_config.json says."""


def settle(model: PreTrainedModel) -> None:
    """Have a model's settings be such as transformers saves: it reads all that a file says, and refuses at saving what
    contradicts itself.

    Settings that change a sample mean that the model samples, unless the file says that it does not. What is wrong even
    then is left out, such as a padding token of -1.
    """
    stored = model.generation_config
    if _can_be_saved(stored):
        return
    named = stored.to_diff_dict().keys() - {"do_sample"}
    sampling = GenerationConfig(**{name: getattr(stored, name) for name in named.intersection(OF_SAMPLING)})
    samples = True if stored.do_sample is None and not _can_be_saved(sampling) else stored.do_sample
    kept = GenerationConfig(do_sample=samples)
    for name in sorted(named, key=lambda name: name != "num_beams"):  # upon which others depend
        default = getattr(kept, name, None)
        setattr(kept, name, getattr(stored, name, None))
        if not _can_be_saved(kept):
            setattr(kept, name, default)
    model.generation_config = kept


def _can_be_saved(settings: GenerationConfig) -> bool:
    try:
        settings.validate(strict=True)
    except ValueError:
        return False
    return True


def take_over(model: PreTrainedModel, path: str, *, revision: str | None) -> None:
    """Give a model without weights the settings that it has when it is loaded; without a file, those of its config."""
    if file := file_if_any(path, "generation_config.json", revision):
        model.generation_config = GenerationConfig.from_pretrained(file.parent, file.name)
    settle(model)


def stop_at(model: PreTrainedModel, *tokens: int | None) -> None:
    """Have generation stop at more tokens, the tokenizer's own, beside those that the model's files name."""
    for token in tokens:
        known = model.generation_config.eos_token_id
        ends = [] if known is None else [known] if isinstance(known, int) else list(known)
        if token is not None and token not in ends:
            model.generation_config.eos_token_id = [*ends, token] if ends else token
