"""Which prompts and answers tell the reference point of answers that are judged alone, as kto does.

How far the model went from its reference on answers to others: of the prompts of an optimizer step, or of the held-out
rows, each with the answer of another row, the mean of what the model adds to the reference's log-probability, or 0 if
that is negative (arXiv:2402.01306, section 4.1). It is the same for all processes and micro-batches, so that how a step
is split does not change its loss.
"""

from dataclasses import replace

import numpy as np

from finetune.data.batches import Inputs
from finetune.data.encoding import Row

AWAY = 0.382
"""Share of all rows between a row and the one that lends its answer. Answers to one question are often neighbours, or
half a file apart where the good ones come first."""


def mismatched(inputs: Inputs, place: int) -> Row:
    """The prompt of a row with the answer of another, no longer than the longest document of the two.

    It knows what the reference says of it from the place of the answer that the row does not have.
    """
    lender = (place + max(1, round(AWAY * len(inputs)))) % len(inputs)
    own, other = inputs.documents(place), inputs.documents(lender)
    [prompt], [answer] = ([each for each in row if each.trained_tokens] for row in (own, other))
    [missing] = [each for each in own if not each.trained_tokens]
    begin, start = prompt.spans[0][0], answer.spans[0][0]
    longest = max(len(prompt.tokens), len(answer.tokens))
    tokens = np.concatenate([prompt.tokens[:begin], answer.tokens[start:]])[:longest]
    moved = [(first - start + begin, min(end - start + begin, longest)) for first, end in answer.spans]
    spans = [each for each in moved if each[0] < longest]
    return replace(prompt, tokens=tokens, spans=spans, reference=missing.reference)


def both_answers(inputs: Inputs, place: int) -> list[Row]:
    """The documents of a row, of which the answer that it does not have is another's."""
    return [each if each.trained_tokens else mismatched(inputs, place) for each in inputs.documents(place)]
