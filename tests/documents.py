"""Documents in memory, for tests of what stands on tokenized documents."""

from collections.abc import Sequence

import numpy as np

from longtrain.data.hashing import hash_row
from longtrain.data.rows import RowIndex


class Documents:
    """A rows.Corpus of given lengths. Token t of document d is 1000 d + t + 1, so that each says where it is from."""

    def __init__(self, lengths: Sequence[int], source_of: Sequence[int] | None = None):
        self.lengths = np.array(lengths, np.int64)
        self.source_of = np.zeros(len(lengths), int) if source_of is None else np.array(source_of)
        self.sources = [f"source {number}" for number in range(int(self.source_of.max()) + 1)]
        self.keys = np.arange(len(lengths), dtype=np.uint64)
        self.fingerprint = f"lengths {list(lengths)}"

    def tokens(self, document: int, start: int, end: int) -> np.ndarray:
        return np.arange(start, end) + 1000 * document + 1

    def name(self, document: int) -> str:
        return str(document)


def batch_hash(index: RowIndex, first: int, count: int) -> str:
    """The `batch_hash` of rows first..first+count-1, of the rows themselves: before layout, mesh and loader."""
    rows = ((number, index.row(number)) for number in range(first, first + count))
    hashes = [hash_row(n, row.tokens, row.targets, row.positions, row.segments, row.weights) for n, row in rows]
    return f"{sum(hashes) % 2**64:016x}"
