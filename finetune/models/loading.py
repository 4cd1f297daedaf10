"""Configuration, tokenizer, weights and generated answers, through transformers."""

import copy
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from finetune.cache import key_of
from finetune.compat.transformers_private import forget_unused_conversions
from finetune.config import adapter_file
from finetune.data import named_templates
from finetune.errors import InputError, first_line, refuse_if_any
from finetune.hub_access import is_hub_id, missing_in_folder, refuse_without_access
from finetune.models import attention as attentions
from finetune.models import generation_settings, packing_support, quantization, text_part
from finetune.models.attention import stock_attention
from finetune.models.flops import products_of
from finetune.models.weights import files as weight_files_of

SAMPLES, SAMPLE_BYTES = 64, 2**14
MOST_LAYERS = 2000
"""Llama 3.1 405B has 126. A wildly wrong number would build modules endlessly."""


def quiet() -> None:
    """Leave the screen to the recipe: no progress bars and no library messages below errors."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # what it casts inside, kernels that it did not find


def problems(path: str, tokenizer: str | None, chat_template: str | None) -> list[str]:
    """Problems with the model's names that the file system shows, as sentences."""
    found = []
    for key, value in (("model.path", path), ("model.tokenizer", tokenizer)):
        if value is not None and not Path(value).is_dir() and not is_hub_id(value, needs_owner=False):
            general = f"there is no folder {value}; give a model folder, or a hub id (owner/name)."
            found.append(f"{key}: {missing_in_folder(value) or general}")
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        found.append(
            f"model.path: {path} holds an adapter; set adapter.from to it, and model.path to its base."
            if adapter_file.folder_of(Path(path))
            else f"model.path: the folder {path} has no config.json; give the folder of a transformers model."
        )
    return found + named_templates.problems(chat_template)


def load_tokenizer(
    path: str, *, revision: str | None, trust_remote_code: bool, chat_template: str | None, adds_tokens: bool = False
) -> PreTrainedTokenizerBase:
    """A fast tokenizer, with the chat template of a file or of a name if one is given.

    Args:
        adds_tokens: special tokens of a named template, where it lacks them (see ``models.new_tokens``).

    Raises:
        InputError: if there is none, if it is a slow one or lacks tokens of the template, or if the hub denies access.
    """
    refuse_without_access(path, "tokenizer_config.json", revision=revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise InputError(
            f"No tokenizer could be loaded from {path} ({first_line(error)}); set model.tokenizer to its folder or id."
        ) from error
    if not tokenizer.is_fast:
        raise InputError(
            f"The tokenizer of {path} is a slow one, which cannot map tokens to positions in the text; set "
            "model.tokenizer to a fast one."
        )
    if chat_template is not None:
        named_templates.use(tokenizer, chat_template, adds_tokens=adds_tokens)
    return tokenizer


def load_config(path: str, *, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """The model's configuration, a few kilobytes that show whether the model can be loaded at all.

    Raises:
        InputError: if it cannot be read, if the model type is unknown, or if the hub denies access.
    """
    refuse_without_access(path, "config.json", revision=revision)
    try:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"model.path: transformers cannot load {path} ({first_line(error)}); check the path, or use another model."
        ) from error
    except Exception as error:  # of any type: libraries compute with what the file says, before they check it
        raise InputError(
            f"model.path: the config.json of {path} does not describe a valid model ({_last_line(error)}); "
            "correct it, or "
            "download it again."
        ) from error
    refuse_if_any(_impossible_sizes(config.get_text_config().to_dict()))
    return config


def config_from(fields: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration that the contents of a config.json describe.

    Raises:
        InputError: if the model type is unknown, or the fields are wrong.
    """
    known, kind = dict(fields), fields.get("model_type")
    known.pop("model_type", None)
    if kind is None:
        raise InputError("config.json: it has no model_type; give the config.json of a model.")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise InputError(
            f"config.json: model_type is {kind!r}, which is no model that transformers knows (version "
            f"{transformers.__version__}); use another model, or correct the file."
        )
    try:
        config: PreTrainedConfig = AutoConfig.for_model(kind, **known)
        sizes = config.get_text_config().to_dict()
    except Exception as error:  # of any type: libraries compute with what the file says, before they check it
        raise InputError(
            f"config.json: it does not describe a valid model ({_last_line(error)}); correct it, or download it again."
        ) from error
    refuse_if_any(_impossible_sizes(sizes))
    return config


def _impossible_sizes(sizes: Mapping[str, Any]) -> list[str]:
    """Sizes that do not make a valid model, as sentences.

    Args:
        sizes: keys of a config.json, as transformers names them.
    """
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    sizes = {key: sizes[key] for key in keys if isinstance(sizes.get(key), int)}  # some models have one for each layer
    found = [
        f"model.path: config.json has {key}: {size}, but it must be 1 or more; correct it, or download it again."
        for key, size in sizes.items()
        if size < 1
    ]
    heads, key_value_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    if not found and heads and key_value_heads and heads % key_value_heads:
        found.append(
            f"model.path: config.json has num_attention_heads: {heads}, which is not a multiple of its "
            f"num_key_value_heads: {key_value_heads}; correct it, or download it again."
        )
    if sizes.get("num_hidden_layers", 0) > MOST_LAYERS:
        found.append(
            f"model.path: config.json has num_hidden_layers: {sizes['num_hidden_layers']:,}, more than the "
            f"supported {MOST_LAYERS:,}; correct it, or download it again."
        )
    return found


def identity(path: str, *, revision: str | None, weights: bool) -> str:
    """Hash that identifies a model wherever it is stored: its configuration, and its weights if asked for.

    Weight files count by size and samples of their bytes, header included. So a commit on the hub that corrects the
    words of a README leaves the model what it is.
    """
    files = weight_files_of(path, revision) if weights else []  # and not what else lies beside them
    folder = folder_of(path, revision=revision)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("_name_or_path", "transformers_version"):
        described.pop(key, None)
    return key_of([described, [[file.name, _sampled(file)] for file in files]])


def folder_of(path: str, *, revision: str | None) -> Path:
    """Where a model's files lie: its folder, or that of a commit in the hub's cache, with what was downloaded."""
    return Path(path) if Path(path).is_dir() else Path(str(cached_file(path, "config.json", revision=revision))).parent


def _sampled(file: Path) -> str:
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        for place in range(SAMPLES):
            opened.seek(size * place // SAMPLES)
            digest.update(opened.read(SAMPLE_BYTES))
    return f"{size} {digest.hexdigest()}"


def stored_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype of the weights by the configuration."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32


def most_positions(config: PreTrainedConfig) -> int | None:
    """Maximum positions of a model, None if it has no limit."""
    return getattr(config, "max_position_embeddings", None)  # state-space models have none


def without_weights(config: PreTrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """The model's modules and shapes, without memory for its weights.

    Raises:
        InputError: if it is not a valid causal language model.
    """
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any type: what a model's code makes of sizes that cannot be
        raise InputError(
            f"model.path: its config.json does not make a causal language model ({first_line(error)}); use another "
            "model, or correct the file."
        ) from error


def attention_problems(config: PreTrainedConfig, attention: str, trust_remote_code: bool) -> list[str]:
    """Why transformers cannot use an attention implementation: a missing package or GPU, or the model.

    Args:
        attention: as ``model.attention``, or a name that is registered with transformers.
    """
    if attention == "auto":
        return []
    if attention == "sdpa" and packing_support.caps_scores(config):
        return [
            "model.attention: the model caps the scores of attention, and sdpa has no cap; set it to auto, or to eager."
        ]
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(  # which writes into the configuration
                copy.deepcopy(config), trust_remote_code=trust_remote_code, attn_implementation=attention
            )
    except (ImportError, ValueError) as error:
        return [
            f"model.attention: {attention} cannot be used ({first_line(error)}); set it to auto, or install what "
            "is missing."
        ]
    return []


def load_model(
    path: str,
    config: PreTrainedConfig,
    *,
    revision: str | None,
    trust_remote_code: bool,
    attention: str,
    dtype: torch.dtype,
    seed: int,
    bits: int | None,
    device: torch.device,
    random_weights: bool = False,
) -> PreTrainedModel:
    """Weights in ``dtype``, on the CPU (or partitioned while they are read, if the strategy does that).

    Args:
        seed: of random weights.
        bits: 4 or 8 for quantised linear layers, on ``device``; None for those that are stored, quantised or not.
        random_weights: draw the weights instead of reading them.

    Raises:
        InputError: if the model cannot be loaded.
    """
    if attention == attentions.PACKED:
        attentions.register()
    common: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "attn_implementation": None if attention == "auto" else attention,
    }
    if attention == "auto" and packing_support.caps_scores(config):
        common["attn_implementation"] = "eager"
    try:
        if random_weights:
            torch.manual_seed(seed)
            # drawn in fp32, so that a seed means the same weights in every precision
            own = copy.deepcopy(config)  # which transformers writes the dtype into
            model = AutoModelForCausalLM.from_config(own, dtype=torch.float32, **common)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
            if bits:
                quantization.quantize(model, bits, dtype, device)
        else:
            stored_bits = quantization.stored_bits(config)
            if bits and not stored_bits:
                common["quantization_config"] = quantization.bitsandbytes_config(bits, dtype)
            if bits or stored_bits:
                common["device_map"] = {"": device}
            model = AutoModelForCausalLM.from_pretrained(
                path, config=config, revision=revision, dtype=dtype, use_safetensors=True, **common
            )
            # a note of transformers where the model lies, on which Accelerate would insist when the strategy moves it
            vars(model).pop("hf_device_map", None)
            forget_unused_conversions(model)
        if bits or quantization.stored_bits(config):
            quantization.settle(model, dtype)
    except (OSError, ImportError, ValueError) as error:
        raise InputError(
            f"The model {path} could not be loaded ({first_line(error)}); check model.path and model.attention."
        ) from error
    generation_settings.settle(model)
    return model


def shape(model: PreTrainedModel) -> dict[str, Any]:
    """Sizes needed to count FLOPs; taken from modules, since weights may already be partitioned."""
    config, of_head = model.config.get_text_config(), set(model.get_output_embeddings().modules())
    beside = text_part.unreached(model)
    named = [(name, module) for name, module in model.named_modules() if not text_part.is_within(name, beside)]
    every = [module for name, module in named if "original_m" not in name]
    of_layers, of_the_head = (
        [products_of(each, config) for each in every if (each in of_head) == is_head] for is_head in (False, True)
    )
    heads = getattr(config, "num_attention_heads", None) or 0  # a state-space model has none
    return {
        "matrix_parameters": sum(all_of_them for all_of_them, _ in of_layers),
        "trained_matrix_parameters": sum(trained for _, trained in of_layers),
        "head_parameters": sum(all_of_them for all_of_them, _ in of_the_head),
        "trained_head_parameters": sum(trained for _, trained in of_the_head),
        "layers": config.num_hidden_layers,
        "heads": heads,
        "head_dim": _head_dim(config, every) or config.hidden_size // max(1, heads),
    }


def _head_dim(config: PreTrainedConfig, modules: Sequence[torch.nn.Module]) -> float | None:
    """Of a configuration, or the mean of attention modules where layers differ; None where neither has one."""
    try:
        return getattr(config, "head_dim", None)
    except RuntimeError:  # of transformers: it is one size in some layers, and another in others
        sizes = [size for each in modules if isinstance(size := getattr(each, "head_dim", None), int)]
        return sum(sizes) / len(sizes) if sizes else None


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer's files.

    Raises:
        OSError: if they cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(str(error)) from error  # of tokenizers, which has no type for it


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    most_tokens: Sequence[int],
    device: torch.device,
    together: bool = False,
    use_cache: bool = True,
) -> list[str]:
    """The most likely continuations, computed in one batch. Collective: sharded layers are gathered.

    Args:
        prompts: tokens up to where the answers begin; shorter ones are padded on the left.
        most_tokens: length of each answer, at most.
        device: where the model computes; offloaded weights lie elsewhere.
        use_cache: keep the keys and values of earlier positions; else all are computed again for each token.
        together: other processes answer other prompts at the same time; the model runs until the last has ended.
    """
    longest, padding = max(map(len, prompts)), tokenizer.pad_token_id or 0
    padded = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    with stock_attention(model):
        output = model.generate(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=max(most_tokens),
            pad_token_id=padding,
            synced_gpus=together,
            use_cache=use_cache,
            **generation_settings.MOST_LIKELY,
        )
    return answer_texts(tokenizer, [row[:most] for row, most in zip(output[:, longest:].tolist(), most_tokens)])


def answer_texts(tokenizer: PreTrainedTokenizerBase, tokens: list[list[int]]) -> list[str]:
    """Texts of answers, without special tokens."""
    return [str(tokenizer.decode(answer, skip_special_tokens=True)).strip() for answer in tokens]


def _last_line(error: Exception) -> str:
    """Where a library wraps a reason into general words, the reason comes last."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip().rstrip(".")
