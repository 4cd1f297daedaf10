"""What a model has learnt: its loss on held-out rows, and its answers to questions."""

from collections.abc import Callable
from itertools import islice

import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from . import model as models
from .errors import InputError
from .loss import token_loss_sum
from .row_order import EMPTY, micro_batches
from .rows import Rows


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: torch.nn.Module, held_out: Rows, *, micro_batch_size: int, collate: Callable
) -> float:
    """Loss per trained token over the held-out rows, in nats."""
    model.eval()
    at_once = micro_batch_size * accelerator.num_processes
    order = held_out.lengths.argsort(kind="stable").tolist()  # rows of like length: little padding
    order += [EMPTY] * (-len(order) % at_once)
    loss_sum = torch.zeros((), device=accelerator.device)
    for places in micro_batches(
        order,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        micro_batch_size=micro_batch_size,
    ):
        next_tokens, inputs = collate([[held_out[i]] if i != EMPTY else [] for i in places], accelerator.device)
        loss_sum += token_loss_sum(model(**inputs, use_cache=False).logits, next_tokens)
    model.train()
    return accelerator.reduce(loss_sum, "sum").item() / int(held_out.trained_tokens.sum())


def answers(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    asked: list[tuple[str, list[int]]],
    max_new_tokens: int,
) -> dict[str, str]:
    """Questions and greedy answers; every process answers all of them, since layers may be sharded over them."""
    model.eval()
    bare = accelerator.unwrap_model(model)
    texts = {
        question: models.answer(bare, tokenizer, prompt, max_new_tokens=max_new_tokens, device=accelerator.device)
        for question, prompt in asked
    }
    model.train()
    return texts


def questions(
    prompts: int | list[str], held_out: Rows | None, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, list[int]]]:
    """What to answer, in words and in tokens: given texts, or the first held-out rows up to their last answer."""
    if isinstance(prompts, list):
        return list(zip(prompts, models.prompt_tokens(tokenizer, prompts)))
    if not prompts or held_out is None:
        return []
    rows = list(islice((row for row in held_out if row.prompt_tokens), prompts))
    if not rows:
        raise InputError(
            "eval.prompts asks for answers to held-out questions, but no held-out row has an answer that can be told "
            "from its question (plain texts, or data.train_on all); give the questions as a list of texts, or set it "
            "to 0."
        )
    return [(row.question, row.tokens[: row.prompt_tokens].tolist()) for row in rows]
