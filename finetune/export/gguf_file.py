"""A model as one GGUF file, which llama.cpp and Ollama read.

Names, metadata and layout are those of llama.cpp's own converter (convert_hf_to_gguf.py, and docs/gguf.md of ggml): the
rows of the q and k projections of the architecture llama are reordered, because llama.cpp rotates neighbours where
transformers rotates halves. Tensors are read, converted and written one at a time. Needs the package ``gguf`` (the
extra ``demo``).
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from finetune.data.template_process import end_of_turn
from finetune.errors import InputError, refuse_if_any
from finetune.export.gguf_vocabulary import Vocabulary, vocabulary_of
from finetune.export.results import result_at
from finetune.models import loading as models
from finetune.models import quantization, weights
from finetune.models.end_tokens import end_tokens_of
from finetune.units import GIB

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type of transformers, with llama.cpp's name."""
TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "q8_0": ("Q8_0", 7), "bf16": ("BF16", 32)}
"""Of matrices: gguf's name, and the number of general.file_type. Vectors are in fp32, and matrices whose rows q8_0
cannot divide into its blocks of 32 in fp16, as llama.cpp's converter has them."""
ROPES = ("default", "linear", "llama3")


def write_gguf(path: Path, file: Path, *, dtype: str = "bf16") -> dict[str, Any]:
    """Write a model to a GGUF file, complete or not at all.

    Args:
        path: output folder of a run that trained all weights, or folder of a model, for example a merged one.
        dtype: of the matrices, a key of ``TYPES``.

    Returns:
        What was written, for JSON.

    Raises:
        InputError: if there is no such model, it or its tokenizer is not of a known kind, or the file exists.
    """
    models.quiet()
    result = result_at(path)
    if result.is_adapter:
        raise InputError(
            f"{path} is an adapter, and a GGUF file holds a whole model; merge it first (finetune merge {path} "
            "--output DIR), and export that folder."
        )
    folder = str(result.folder)
    config = models.load_config(folder, revision=None, trust_remote_code=False)
    refuse_if_any(_problems(config, file))
    files = weights.files(folder, None)
    refuse_if_any(weights.problems(models.without_weights(config, False), files))
    tokenizer = _tokenizer(folder)
    ends, of_turn = end_tokens_of(config, folder, revision=None), end_of_turn(tokenizer)
    ends = ends if of_turn is None else tuple(dict.fromkeys((of_turn, *ends)))
    vocabulary = vocabulary_of(tokenizer, config.get_text_config().vocab_size, ends)
    temporary = file.with_name(file.name + ".tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = _write(temporary, config, files, vocabulary, dtype, name=result.folder.resolve().name)
        temporary.rename(file)
    except OSError as error:
        raise InputError(
            f"--gguf {file} could not be written ({error.strerror or error}); choose another one."
        ) from error
    finally:
        temporary.unlink(missing_ok=True)  # it is gone, if it has taken its name
    return {
        "file": str(file),
        "model": folder,
        "architecture": ARCHITECTURES[config.model_type],
        "dtype": dtype,
        "tensors": len(tensors),
        "in_f16": [tensor.name for tensor in tensors if dtype == "q8_0" and tensor.kind.name == "F16"],
        "bytes": file.stat().st_size,
    }


def describe(result: dict[str, Any]) -> str:
    """The result as text."""
    text = (
        f"GGUF file: {result['file']}\n"
        f"  {result['tensors']:,} tensors of {result['model']} in {result['dtype']}, {result['bytes'] / GIB:.2f} GiB"
    )
    if kept := result["in_f16"]:
        text += (
            f"\n  {len(kept):,} matrices are in f16 ({kept[0]} first): their rows are no multiple of the 32 values "
            "that q8_0 takes together"
        )
    return text


def _tokenizer(folder: str) -> PreTrainedTokenizerBase:
    try:
        return models.load_tokenizer(folder, revision=None, trust_remote_code=False, chat_template=None)
    except InputError as error:
        said = str(error).partition("; set model.tokenizer")[0]
        raise InputError(f"--gguf: {said}; copy the files of a fast tokenizer to that folder.") from error


def _problems(config: PreTrainedConfig, file: Path) -> list[str]:
    found = []
    if find_spec("gguf") is None:
        found.append("--gguf: the package gguf is not installed; install it with: pip install 'gguf>=0.17'")
    if config.model_type not in ARCHITECTURES:
        found.append(
            f"--gguf: models of the type {config.model_type} are not written here, only {', '.join(ARCHITECTURES)}; "
            "use llama.cpp's convert_hf_to_gguf.py."
        )
    elif (rope := rope_of(config)).get("rope_type", "default") not in ROPES:
        found.append(
            f"--gguf: rotary embeddings of the type {rope['rope_type']} are not written here; use llama.cpp's "
            "convert_hf_to_gguf.py."
        )
    if quantization.stored_bits(config):
        found.append(
            "--gguf: the model is stored quantised; merge onto 16-bit weights first, or give the original model."
        )
    if file.exists():
        found.append(f"--gguf {file} already exists; choose another file. Nothing was written.")
    return found


def rope_of(config: Any) -> dict[str, Any]:
    """How positions are rotated: rope_type and what belongs to it, rope_theta included."""
    return dict(config.rope_parameters)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of the file, and where its values come from."""

    name: str
    shape: tuple[int, ...]
    kind: Any
    """Of gguf.GGMLQuantizationType."""
    read: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        from gguf.constants import GGML_QUANT_SIZES

        block, size = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * size

    def values(self) -> np.ndarray:
        """As they lie in the file."""
        from gguf import quantize

        return np.ascontiguousarray(quantize(self.read().float().numpy(), self.kind))


def _write(
    file: Path, config: Any, files: Sequence[Path], vocabulary: Vocabulary, dtype: str, *, name: str
) -> list[_Tensor]:
    from gguf import GGUFWriter

    writer = GGUFWriter(file, ARCHITECTURES[config.model_type])
    with ExitStack() as stack:
        stack.callback(writer.close)
        opened = [stack.enter_context(safe_open(each, framework="pt")) for each in files]
        tensors = list(_tensors(config, opened, dtype))
        (head_dim,) = {
            each.shape[0] // config.num_key_value_heads for each in tensors if each.name.endswith("attn_k.weight")
        }
        _add_metadata(writer, config, head_dim, dtype, name)
        _add_vocabulary(writer, vocabulary)
        for tensor in tensors:
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.bytes, raw_dtype=tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.values())
    return tensors


def _tensors(config: Any, opened: Sequence[Any], dtype: str) -> Iterator[_Tensor]:
    """The tensors of a model, in the order of its files.

    Raises:
        InputError: if llama.cpp has no name for one of them.
    """
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
    from gguf.constants import GGML_QUANT_SIZES

    architecture = ARCHITECTURES[config.model_type]
    (arch,) = (number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for file in opened:
        for own in file.keys():  # noqa: SIM118  # no mapping
            if own == "lm_head.weight" and config.tie_word_embeddings and _is_embedding(file.get_tensor(own), opened):
                continue
            if any(re.search(each, own) for each in weights.HARMLESS):
                continue
            name = names.get_name(own, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise InputError(f"--gguf: llama.cpp has no name for the tensor {own}; use its convert_hf_to_gguf.py.")
            shape = tuple(file.get_slice(own).get_shape())
            kind = GGMLQuantizationType[TYPES[dtype][0] if len(shape) > 1 else "F32"]
            if shape[-1] % GGML_QUANT_SIZES[kind][0]:
                kind = GGMLQuantizationType.F16
            turned = heads.get(name.split(".")[-2]) if architecture == "llama" else None
            yield _Tensor(name, shape, kind, partial(_read, file, own, turned))
    if rope_of(config).get("rope_type") == "llama3":
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        factors = rope_factors(rope_of(config), head_dim)
        yield _Tensor("rope_freqs.weight", tuple(factors.shape), GGMLQuantizationType.F32, lambda: factors)


def _is_embedding(head: torch.Tensor, opened: Sequence[Any]) -> bool:
    """Whether a stored head equals the embedding: where it does not, transformers does not tie the two either."""
    name = "model.embed_tokens.weight"
    return any(name in file.keys() and torch.equal(head, file.get_tensor(name).to(head.dtype)) for file in opened)  # noqa: SIM118  # no mapping


def _read(file: Any, name: str, heads: int | None) -> torch.Tensor:
    value: torch.Tensor = file.get_tensor(name)
    return value if heads is None else in_pairs(value, heads)


def in_pairs(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a q or k projection as llama.cpp rotates them: the pairs of a head beside each other.

    For example, of one head the rows 0, 1, 2, 3 become 0, 2, 1, 3: transformers rotates row i with i + half.
    """
    return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)


def rope_factors(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """By what each frequency is divided, fp32, of shape (head_dim / 2,): Llama 3.1's long contexts.

    Source: transformers, modeling_rope_utils.py, _compute_llama3_parameters.
    """
    lengths = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high, known = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    smooth = ((known / lengths - low) / (high - low)).clamp(0, 1)  # 1 for short waves, which stay as they are
    return (1 / (smooth + (1 - smooth) / rope["factor"])).float()


def _add_metadata(writer: Any, config: Any, head_dim: int, dtype: str, name: str) -> None:
    from gguf import RopeScalingType

    rope = rope_of(config)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(TYPES[dtype][1])
    writer.add_quantization_version(2)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.splits)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges(vocabulary.merges)
    for name, token in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", token)
    writer.add_add_bos_token(vocabulary.adds_bos)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)
