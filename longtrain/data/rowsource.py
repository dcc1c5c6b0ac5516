"""The random-access source the loader reads: a batch's rows in the layout's order, with their statistics.

Numpy only: worker processes import this and build the row index anew, and never touch a device.
"""

import dataclasses
import sys
from typing import NamedTuple

import numpy as np

from longtrain.data.hashing import LIMBS, from_limbs, hash_row, to_limbs
from longtrain.data.rows import Row, RowIndex
from longtrain.layout import Deal

SEQUENCE_KEYS = ("tokens", "targets", "positions", "segments", "weights")
ROW_STATS = LIMBS + 3
"""`row_stats` of a row, uint32 [7]: its hash as four 16-bit limbs, the low one first (they add up over rows,
see hashing.from_limbs); its pieces of documents; the busiest ring member's attention tiles, summed over ring steps;
and all members' tiles."""


class RowStats(NamedTuple):
    """`row_stats` summed over rows, read back."""

    hash: int
    documents: int
    busiest_tiles: int
    tiles: int

    @classmethod
    def of(cls, sums: np.ndarray) -> "RowStats":
        return cls(from_limbs(sums[:LIMBS]), *(int(value) for value in sums[LIMBS:]))


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Item i is the i-th row that this process needs, counted on over batches.

    Batch b (from 0) is rows first_row + b * sequences and on; this process needs those at `places` of each,
    ascending.
    """

    index: RowIndex
    deal: Deal
    first_row: int
    sequences: int
    places: tuple[int, ...]

    def __len__(self) -> int:
        if self.index.rows is None:
            return sys.maxsize
        return max(0, self.index.rows - self.first_row) // self.sequences * len(self.places)

    def __getitem__(self, item: int) -> dict[str, np.ndarray]:
        batch, place = divmod(item, len(self.places))
        number = self.first_row + batch * self.sequences + self.places[place]
        row = self.index.row(number)
        order_S = self.deal.order(self.index.sequence_length)
        arrays = {name: getattr(row, name)[order_S] for name in SEQUENCE_KEYS}
        return arrays | {"row_stats": row_stats(number, row, self.deal)}


def row_stats(number: int, row: Row, deal: Deal) -> np.ndarray:
    """What is counted of row `number` for the metrics: uint32 [7], as ROW_STATS says."""
    work = deal.work(row.segments)
    hashed = to_limbs(hash_row(number, row.tokens, row.targets, row.positions, row.segments, row.weights))
    return np.array([*hashed, len(row.pieces), work.max(axis=1).sum(), work.sum()], np.uint32)
