"""The random-access source the loader reads: a batch's rows in the layout's order, and what is counted of them.

Numpy only: worker processes import this and build the row index anew, and never touch a device.
"""

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from longtrain.data.hashing import LIMBS, from_limbs, hash_row, to_limbs
from longtrain.data.rows import RowIndex
from longtrain.layout import Deal

SEQUENCE_KEYS = ("tokens", "targets", "positions", "segments", "weights")
ROW_STATS = LIMBS + 3
"""`row_stats` of a context shard's part of a row, uint32 [7]: its hash as four 16-bit limbs, the low one first (they
add up over parts and rows, see hashing.from_limbs). The rest is the whole row's, given to the first shard alone: its
pieces of documents; attention tiles of the busiest member, summed over ring steps, of all rows that are computed
together with this one, given to the first of them alone; and all members' tiles of this row."""


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
    """Item i is what this process needs of the i-th row it needs any of, counted on over batches.

    Batch b (from 0) is rows first_row + b * sequences and on; this process needs those at `places` of each,
    ascending, and of each row what goes to the context shards `shards`. An item is the row's sequences, [shard, T];
    `hashes` (uint32 [shard, 4]); and, where the first context shard is among them, `pieces` and `work` (see Deal.work)
    of the whole row.
    """

    index: RowIndex
    deal: Deal
    first_row: int
    sequences: int
    places: tuple[int, ...]
    shards: tuple[int, ...]

    def __len__(self) -> int:
        if self.index.rows is None:
            return sys.maxsize
        return max(0, self.index.rows - self.first_row) // self.sequences * len(self.places)

    def __getitem__(self, item: int) -> dict[str, np.ndarray]:
        batch, place = divmod(item, len(self.places))
        number = self.first_row + batch * self.sequences + self.places[place]
        place_CT = self.deal.order(self.index.sequence_length).reshape(self.deal.context, -1)
        rows = [self.index.row(number, place_CT[shard]) for shard in self.shards]
        made = {name: np.stack([getattr(row, name) for row in rows]) for name in SEQUENCE_KEYS}
        made["hashes"] = np.stack(
            [
                to_limbs(
                    hash_row(
                        number,
                        row.tokens,
                        row.targets,
                        row.positions,
                        row.segments,
                        row.weights,
                        place_CT[shard].astype(np.uint64),
                    )
                )
                for shard, row in zip(self.shards, rows, strict=True)
            ]
        )
        if 0 in self.shards:
            made |= {"pieces": np.array(len(rows[0].pieces)), "work": self.deal.work(self.index.segments(number))}
        return made


def computed_together(sequences: int, devices: int, accumulation: int) -> list[range]:
    """The rows of a batch, by place, that a device computes in one micro-batch: as `step.py` cuts it.

    `devices`: that the rows are cut over.
    """
    held = sequences // devices
    starts = range(0, sequences, held)
    return [range(start + part, start + held, accumulation) for start in starts for part in range(accumulation)]


def row_stats(
    rows: Mapping[int, dict[str, np.ndarray]], together: Iterable[range], shards: tuple[int, ...]
) -> dict[int, np.ndarray]:
    """`row_stats` of the items at these places of a batch: uint32 [shard, 7] each, as ROW_STATS says.

    The members of a ring wait for each other in a step, in which each computes all the rows it has: so the busiest one
    is that of their sum. Of rows computed together all are in `rows`, or none.
    """
    stats = {place: np.zeros((len(shards), ROW_STATS), np.uint32) for place in rows}
    for place, item in rows.items():
        stats[place][:, :LIMBS] = item["hashes"]
    if 0 not in shards:
        return stats
    for places in together:
        if places[0] in rows:
            busiest = np.sum([rows[place]["work"] for place in places], axis=0).max(axis=1).sum()
            for place in places:
                first = busiest if place == places[0] else 0
                stats[place][shards.index(0), LIMBS:] = rows[place]["pieces"], first, rows[place]["work"].sum()
    return stats
