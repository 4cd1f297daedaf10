"""Documents of a corpus end to end, cut wherever a row is full: the custom of pretraining.

Example: documents A, B and C of 3, 6 and 5 tokens in rows of 4 are [A A A B], [B B B B], [B C C C] and [C C]. The first
token of a row is predicted by nothing, and a last row of one token is left out.

A text of more than ``data.max_length`` tokens comes in parts, each of which begins with the last token of the one
before (``encoding``: kept apart, each token is then predicted in one of them). End to end, that token stands once.
"""

from collections.abc import Sequence

import numpy as np

from finetune.cache import key_of
from finetune.data.encoding import Row
from finetune.data.rows import Rows


class Concatenated(Rows):
    """The rows that documents make, in their order; every token but the first of a row is trained.

    Args:
        documents: texts, or parts of them, one after the other.
        length: tokens of a row.
    """

    def __init__(self, documents: Rows, length: int) -> None:
        super().__init__(documents.folder, documents.chosen)
        self.documents, self.length = documents, length
        self._continues = documents.continues(length)
        self._ends = np.cumsum(documents.lengths - self._continues, dtype=np.int64)
        whole, rest = divmod(int(self._ends[-1]), length)
        self.lengths = np.array([length] * whole + [rest] * (rest > 1), np.int32)
        self.trained_tokens = self.lengths - 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Row:
        """Row by its number, from 0.

        Raises:
            IndexError: if there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} rows, so none with number {index}")
        begin = index * self.length
        end = begin + int(self.lengths[index])
        first, last = np.searchsorted(self._ends, [begin, end - 1], side="right").tolist()
        its_own = [self._part(number) for number in range(first, last + 1)]
        before = int(self._ends[first - 1]) if first else 0
        return cut_row(its_own, self._ends[first : last + 1] - before, begin - before, end - before)

    @property
    def fingerprint(self) -> str:
        """Hash of tokens, in order, and of where they are cut."""
        joined = int(self._continues.sum())
        return key_of([self.documents.fingerprint, self.length, *([joined] if joined else [])])

    def _part(self, number: int) -> Row:
        part = self.documents[number]
        return behind_its_first_token(part) if self._continues[number] else part


def behind_its_first_token(part: Row) -> Row:
    """What a part of a text adds to the part before it."""
    return Row(part.tokens[1:], [], part.source)


def cut_row(parts: Sequence[Row], ends: np.ndarray, begin: int, end: int) -> Row:
    """The row that lies from one token to another of parts that follow one another.

    Args:
        ends: where each part ends, in tokens from the first one's begin.
    """
    first, last = np.searchsorted(ends, [begin, end - 1], side="right").tolist()
    before = begin - (int(ends[first]) - len(parts[first].tokens))
    tokens = np.concatenate([part.tokens for part in parts[first : last + 1]])[before : before + end - begin]
    # of a part that was cut from others, the name says from which to which
    names = parts[first].source.split(" to ")[0], parts[last].source.split(" to ")[-1]
    source = names[0] if names[0] == names[1] else " to ".join(names)
    return Row(tokens, [(1, len(tokens))], source, uncut_tokens=len(tokens))
