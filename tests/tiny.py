"""A tiny GQA Llama with random weights, a tokenizer trained on the spot, and conversations: nothing is downloaded."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from finetune.data import dataset
from finetune.data.batches import collate
from finetune.data.encoding import Row, Settings
from finetune.data.rows import Rows
from finetune.data.sources import Source

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = "the a one two red blue green house tree river stone walks runs sings sleeps under over beside with and then"
WORDS = TEXT.split()


def build_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE with 512 entries, whose PAD equals the end of a turn, as SmolLM2's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS) + " user assistant system\n"] * 8, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = chat_template
    return fast


def build_model_folder(
    folder: Path, *, tied: bool = True, hidden_size: int = 64, intermediate_size: int = 128, layers: int = 2
) -> Path:
    """Configuration without weights (random ones are drawn from the seed), and the tokenizer."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=1,
    )
    config.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def write_weights(folder: Path) -> Path:
    """Add random weights to a folder with a configuration."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


def sentence(rng: random.Random, longest: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, longest)))


def write_conversations(path: Path, rows: int, seed: int = 0, longest: int = 12) -> Path:
    """Conversations with very uneven numbers of trained tokens, one or two answers each."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(rows):
            messages = []
            for _ in range(rng.choice([1, 1, 2])):
                messages.append({"role": "user", "content": sentence(rng, longest)})
                messages.append({"role": "assistant", "content": sentence(rng, longest)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def read_rows(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int = 64, **manner: Any) -> Rows:
    """The rows of a file, as the recipe reads them by default."""
    return dataset.read_rows([Source(str(path))], tokenizer, Settings(max_length), **manner)


def tensors(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """A row alone as the model takes it: what to predict, and the input; each of shape (1, positions)."""
    next_tokens, inputs = collate([[row]], torch.device("cpu"), flat=False)
    return next_tokens, inputs["input_ids"]
