"""What a model has learnt: its loss on held-out rows, and its answers to questions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from finetune.data.batches import NOTHING, Inputs
from finetune.data.encoding import Row
from finetune.data.prompt_texts import Prompt, room_problems, texts_of, tokens_of
from finetune.data.rows import Rows
from finetune.data.sampler import EMPTY, dealt_batch, micro_batches
from finetune.data.template_process import TemplateProcess
from finetune.distributed.held_parts import part_of, pipeline_of
from finetune.errors import InputError, refuse_if_any
from finetune.models import loading as models
from finetune.training import documents
from finetune.training.loss import Objective

TOKENS_AT_ONCE = 2048
"""Of questions that are answered together, with their answers: 1 GiB in the cache of Llama 2 7B."""


@dataclass(frozen=True)
class Question:
    """What is answered before and after training."""

    name: str
    """In words; no two questions have the same."""
    prompt: list[int]
    """Tokens up to where the answer begins."""
    expected: str | None = None
    """The held-out row's own answer, where it is compared."""
    expected_tokens: int = 0

    def most_tokens(self, max_new_tokens: int, positions: int | None) -> int:
        """Length of the answer, at most: one that is compared may be as long as the expected one.

        Args:
            positions: of the model, for prompt and answer together; None for one without limit.
        """
        most = max(max_new_tokens, self.expected_tokens)
        return most if positions is None else min(most, positions - len(self.prompt))


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    objective: Objective,
    held_out: Inputs,
    *,
    micro_batch_size: int,
    collate: Callable,
    share: dict[str, int],
) -> dict[str, float]:
    """The mean loss over the held-out rows, in nats, as ``eval_loss``; and ``eval_...`` for each figure of the loss.

    Args:
        share: of the rows, that of this process, as ``rank`` and ``world_size``.
    """
    model.eval()
    objective.figures()  # of what was before
    at_once = micro_batch_size * share["world_size"]
    order = [*range(len(held_out)), *[EMPTY] * (-len(held_out) % at_once)]
    order = dealt_batch(order, held_out.lengths, micro_batch_size, flat=held_out.flat)
    manner: dict[str, Any] = {"micro_batch_size": micro_batch_size, "collate": collate, "share": share}
    objective.look_over(accelerator, model, held_out, order, **manner)
    total = torch.zeros((), device=accelerator.device)
    for places in micro_batches(order, micro_batch_size=micro_batch_size, **share):
        micro_batch = collate(list(map(held_out.documents, places)), accelerator.device)
        total += _told(model, partial(objective.loss_sum, model, micro_batch))
    model.train()
    figures = objective.figures()
    mine = torch.stack([each.float() for each in (total, *chain(*figures.values()))])
    found, *others = accelerator.reduce(mine, "sum").tolist()
    loss = found / objective.count(rows=len(held_out), tokens=int(held_out.trained_tokens.sum()))
    means = zip(figures, others[::2], others[1::2], strict=True)
    return {"eval_loss": loss} | {f"eval_{name}": of_all / divisor for name, of_all, divisor in means}


def known_everywhere(objective: Objective, model: torch.nn.Module) -> Objective:
    """The same, with figures of the same names on every process, which count once: in a pipeline only the last stage
    knows any, and processes that split layers have the same."""
    part, own = part_of(model), objective.figures
    if part is None or own is dict:
        return objective
    return replace(objective, figures=lambda: part.figures(own()))


def answers(
    accelerator: Accelerator,
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Question],
    max_new_tokens: int,
) -> dict[str, str]:
    """Greedy answers by the names of their questions; collective. Each process answers a share of them.

    Layers may be sharded over the processes, so all go through the model equally often: one whose answers have ended
    goes on until those of the others have, and one without a question of its own answers another's.
    """
    model.eval()
    bare, pipeline = accelerator.unwrap_model(model), pipeline_of(model)
    share, processes = _share(accelerator, model)
    positions = models.most_positions(bare.config.get_text_config())
    texts: dict[str, str] = {}
    for batch in _batches(asked, max_new_tokens, processes, positions):
        own = batch[share::processes] or batch[:1]
        with pipeline.answering() if pipeline else nullcontext():
            found = models.answers(
                bare,
                tokenizer,
                [question.prompt for question in own],
                most_tokens=[question.most_tokens(max_new_tokens, positions) for question in own],
                device=accelerator.device,
                together=processes > 1,
                use_cache=pipeline is None or pipeline.caches,
            )
        texts |= zip((question.name for question in own), found)
    model.train()
    every = dict(gather_object([*texts.items()]))
    return {question.name: every[question.name] for question in asked}


def _batches(
    asked: Sequence[Question], max_new_tokens: int, processes: int, positions: int | None
) -> Iterator[list[Question]]:
    """Questions of like length, up to ``TOKENS_AT_ONCE`` with padding and answers for each process, or one for each.

    With room for 100 tokens and answers of 10, prompts of 40, 8 and 30 tokens are two batches: (40, 30) and (8).

    The model goes on with every row of a batch until the longest answer has ended, so the longest prompt and the
    longest answer have room in its positions together. A batch may then have fewer questions than there are processes.
    """
    batch: list[Question] = []
    for question in sorted(asked, key=lambda question: len(question.prompt), reverse=True):
        longer = [*batch, question]
        each = len(longer[0].prompt) + max(other.most_tokens(max_new_tokens, positions) for other in longer)
        has_no_room = positions is not None and each > positions
        if has_no_room or (len(batch) >= processes and -(-len(longer) // processes) * each > TOKENS_AT_ONCE):
            yield batch
            longer = [question]
        batch = longer
    if batch:
        yield batch


@torch.no_grad()
def log_probabilities(
    accelerator: Accelerator, model: torch.nn.Module, rows: Sequence[Row], *, flat: bool
) -> list[float]:
    """Of each row, the sum over its trained tokens, in nats; collective. Each process computes a share of them.

    Args:
        flat: whether the rows of a micro-batch lie end to end, without padding.
    """
    model.eval()
    lengths = np.array([len(row.tokens) for row in rows])
    (share, processes), size = _share(accelerator, model), max(1, TOKENS_AT_ONCE // int(lengths.max()))
    order = [*range(len(rows)), *[EMPTY] * (-len(rows) % (size * processes))]
    order = dealt_batch(order, lengths, size, flat=flat)
    shares = [micro_batches(order, rank=i, world_size=processes, micro_batch_size=size) for i in range(processes)]
    values = list[torch.Tensor]()
    for places in shares[share]:
        own = [NOTHING if place == EMPTY else rows[place] for place in places]
        asked = partial(documents.log_probabilities, model, own, accelerator.device, flat=flat)
        values.append(_told(model, asked, len(own)))
    model.train()
    every, found = np.array(shares), of_each_share(accelerator, model, torch.stack(values))
    return list(found[every != EMPTY][np.argsort(every[every != EMPTY])].tolist())


def of_each_share(accelerator: Accelerator, model: torch.nn.Module, values: torch.Tensor) -> np.ndarray:
    """What a process computed of its share, of all shares in their order; collective."""
    gathered, part = accelerator.gather(values[None]), part_of(model)
    found: np.ndarray = (gathered[part.knowing] if part else gathered).cpu().numpy()
    return found


def _share(accelerator: Accelerator, model: torch.nn.Module) -> tuple[int, int]:
    """Which of the shares of all questions this process has, and how many there are."""
    if part := part_of(model):
        return part.shares[accelerator.process_index], len(part.knowing)
    return accelerator.process_index, accelerator.num_processes


def _told(model: torch.nn.Module, function: Callable[[], torch.Tensor], *shape: int) -> torch.Tensor:
    """What a function of one forward pass returns; zeros of its shape, where another process counts it."""
    part = part_of(model)
    return part.told(function, *shape) if part else function()


def questions(
    prompts: int | list[str],
    held_out: Rows | None,
    tokenizer: PreTrainedTokenizerBase,
    positions: int | None,
    *,
    compared: bool,
) -> list[Question]:
    """What to answer: given texts, or the first held-out rows up to their last answer.

    Args:
        positions: of the model; None for one without limit.
        compared: ask every held-out row, and compare the answer with the row's own.

    Raises:
        InputError: if no held-out row can be asked, or a text leaves no room for an answer.
    """
    asked = []
    if isinstance(prompts, list):
        is_plain = tokenizer.chat_template is None
        written = [Prompt.of_user("eval.prompts", text, is_plain=is_plain) for text in prompts]
        texts = texts_of(written, TemplateProcess(tokenizer))
        tokens = [tokens_of(tokenizer, *each) for each in zip(written, texts)]
        refuse_if_any(room_problems(["eval.prompts"] * len(prompts), tokens, positions, "the model"))
        asked = [Question(*each) for each in zip(prompts, tokens)]
    count = None if compared else prompts if isinstance(prompts, int) else 0
    if held_out is None or count == 0:
        return asked
    # an answer that was cut at data.max_length is nobody's to give
    whole = (row for row in held_out if row.prompt_tokens and (not compared or row.uncut_tokens == len(row.tokens)))
    rows = list(islice(whole, count))
    if not rows:
        key, instead = "prompts", "give the questions as a list of texts, or set it to 0"
        if compared:
            key, instead = "exact_match", "set it to false"
        raise InputError(
            f"eval.{key} asks for answers to held-out questions, but no held-out row has a complete answer that can be "
            f"separated from its question (plain texts, data.train_on all, or rows cut at data.max_length); {instead}."
        )
    names = {question.name for question in asked}
    for number, row in enumerate(rows, start=1):
        name = row.question if row.question not in names else f"{row.question} (held-out row {number})"
        names.add(name)
        answer = row.tokens[row.prompt_tokens : row.spans[-1][1]].tolist()
        own = (models.answer_texts(tokenizer, [answer])[0], len(answer)) if compared else (None, 0)
        asked.append(Question(name, row.tokens[: row.prompt_tokens].tolist(), *own))
    return asked


def exact_match(asked: Sequence[Question], answered: Mapping[str, str]) -> float | None:
    """Share of the compared questions whose answer is the expected one, word for word; None if one was not asked."""
    compared = [question for question in asked if question.expected is not None]
    if any(question.name not in answered for question in compared):
        return None
    return sum(answered[question.name] == question.expected for question in compared) / len(compared)


def shown(asked: Sequence[Question], answered: Mapping[str, str], prompts: int | list[str]) -> dict[str, str]:
    """Answers for a person to read. Of compared ones as many as requested, as often right as all of them are.

    Of 36 compared answers of which 27 are right, 4 are the first three right ones and then the first wrong one.
    """
    count = prompts if isinstance(prompts, int) else 0
    texts = {question.name: answered[question.name] for question in asked if question.expected is None}
    compared = [question for question in asked if question.expected is not None]
    right = [question for question in compared if answered[question.name] == question.expected]
    wrong = [question for question in compared if answered[question.name] != question.expected]
    right_ones = round(min(count, len(compared)) * len(right) / max(1, len(compared)))
    texts |= {question.name: answered[question.name] for question in right[:right_ones]}
    for question in wrong[: count - right_ones]:
        texts[question.name] = f"{answered[question.name]}\n(expected: {question.expected})"
    return texts
