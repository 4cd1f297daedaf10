"""Documents of a corpus end to end, cut wherever a row is full: the custom of pretraining.

Example: documents A, B and C of 3, 6 and 5 tokens in rows of 4 are [A A A B], [B B B B], [B C C C] and [C C]. The first
token of a row is predicted by nothing, and a last row of one token is left out.
"""

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
        self._ends = np.cumsum(documents.lengths, dtype=np.int64)
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
        its_own = [self.documents[number] for number in range(first, last + 1)]
        before = begin - (int(self._ends[first]) - len(its_own[0].tokens))
        tokens = np.concatenate([each.tokens for each in its_own])[before : before + end - begin]
        sources = its_own[0].source, its_own[-1].source
        source = sources[0] if sources[0] == sources[1] else " to ".join(sources)
        return Row(tokens, [(1, len(tokens))], source, uncut_tokens=len(tokens))

    @property
    def fingerprint(self) -> str:
        """Hash of tokens, in order, and of where they are cut."""
        return key_of([self.documents.fingerprint, self.length])
