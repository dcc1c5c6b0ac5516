"""The order in which a row's tokens are dealt to the context shards. This module is its one owner.

A row is cut into equal blocks and the blocks are dealt to the `n` shards like cards, back and forth: the
first round goes to shards 0..n-1, the second to n-1..0, and so on. The three layouts differ in
the block alone:

    contiguous   S / n        one round: shard i holds the i-th stretch of the row
    zigzag       S / 2n       two rounds: shard i holds blocks i and 2n-1-i
    dealt        <= 256       many rounds of one attention tile each

    4 shards, 16 tokens, one letter a shard:    contiguous  AAAABBBBCCCCDDDD
                                                zigzag      AABBCCDDDDCCBBAA
                                                dealt       ABCDDCBAABCDDCBA   (a block of 1)

Why it matters: in causal attention late tokens see more than early ones, and a ring moves in lock-step, at
the pace of its busiest shard. With one document a row, an even number of rounds is balanced exactly. With
packed documents only small blocks are: every document is then spread over all shards.

Where groups of context shards exchange heads for sequence (`attention.ulysses_degree`), a group is what is dealt to,
and its shards cut what it gets into stretches: put together again, they are in the row's order too.

Within a shard tokens keep the row's order. The permutation is applied once, by the data loader; nothing after
it may lean on array indices. Numpy only: data is prepared without jax.
"""

import dataclasses
import functools

import numpy as np

LAYOUTS = ("dealt", "zigzag", "contiguous")

STRETCH_KERNELS = ("cudnn",)
"""The block kernels that are made for stretches dealt whole, and not for tiles."""

TILE = 256
"""Tokens along one side of an attention tile, at most: the unit of work that is computed or skipped whole."""


def resolve(layout: str, *, context: int, strategy: str, packing: str, kernel: str) -> tuple[str, str]:
    """The layout to use and the reason, in a few words. Anything but `auto` is taken as it is.

    `kernel` is the block kernel that was chosen, or the config's `auto` where no device is there to choose for.
    Raises ValueError for an unknown layout.
    """
    if layout != "auto":
        _check_name(layout, ("auto", *LAYOUTS))
        return layout, "asked for"
    if context == 1:
        return "contiguous", "one context shard: nothing to balance"
    if strategy == "ulysses":
        return "contiguous", "ulysses gives every shard whole rows of some heads: balanced in any order"
    if kernel in STRETCH_KERNELS:
        return "zigzag", f"kernel {kernel} needs stretches dealt whole: the layout that balances one document so"
    rows = "one document a row" if packing == "one" else f"rows packed by {packing}"
    reason = f"{rows}: dealt in single tiles the shards' work is equal; kernel {kernel} skips by tile"
    if kernel == "auto" and packing == "one":
        reason += f", unless a GPU makes it {' or '.join(STRETCH_KERNELS)}, which deals zigzag"
    return "dealt", reason


def block(layout: str, sequence_length: int, shards: int) -> int:
    """Tokens of the blocks that `layout` deals.

    The block of `dealt` is the largest divisor of the local length, up to TILE, that gives an even number of
    rounds (an even number balances one document exactly); where the local length is odd, the largest divisor
    at all.

    Raises ValueError, with the numbers, where the row cannot be cut evenly.
    """
    _check_name(layout, LAYOUTS)
    pieces = 2 * shards if layout == "zigzag" else shards
    if shards < 1 or sequence_length < 1 or sequence_length % pieces:
        raise ValueError(
            f"layout {layout} over {shards} shards cuts a row into {pieces} equal pieces: "
            f"sequence length {sequence_length} is not a multiple of {pieces}"
        )
    local = sequence_length // shards
    if layout == "contiguous":
        return local
    if layout == "zigzag":
        return local // 2
    rounds = 2 if local % 2 == 0 else 1
    return max(size for size in range(1, min(TILE, local) + 1) if local % (rounds * size) == 0)


@functools.lru_cache(4)  # of a row of a million tokens it takes longer to make than what is done with it
def order(layout: str, sequence_length: int, shards: int) -> np.ndarray:
    """The permutation, int64 [S]: entry p is the place in the row of the token that comes p-th in the layout.

    So `row[order(...)]` is in the layout's order, of which shard i holds the i-th of `shards` equal
    stretches, and `np.argsort(order(...))` undoes it. Raises ValueError as `block` does.
    """
    size = block(layout, sequence_length, shards)
    rounds = np.arange(sequence_length // (size * shards))
    shard = np.arange(shards)[:, None]
    turn = np.where(rounds % 2 == 0, shard, shards - 1 - shard)
    blocks = rounds * shards + turn
    permutation = (blocks[..., None] * size + np.arange(size)).reshape(-1)
    permutation.flags.writeable = False
    return permutation


def tile(layout: str, sequence_length: int, shards: int) -> int:
    """Tokens along one side of this layout's attention tiles, at most TILE.

    A tile that lies inside one block covers one stretch of the row, and can be skipped exactly. So blocks are
    split evenly into tiles, and short blocks share a tile only where one alone would be too small to compute
    well.
    """
    size = block(layout, sequence_length, shards)
    if size >= TILE // 2:
        return -(-size // -(-size // TILE))
    return min(size * (TILE // size), sequence_length // shards)


def work(layout: str, segments_S: np.ndarray, shards: int, *, two_way: bool = False) -> np.ndarray:
    """Attention tiles that a ring computes for one row: int64 [ring step, shard].

    `segments_S` numbers the row's documents in the row's own order (0 is padding); each document is one
    stretch. In step t, shard i meets the keys of shard i - t. In a two-way ring half of its heads meet those of
    shard i + t instead: a tile is then counted for each half. A ring's pace is the sum over steps of the busiest
    shard.
    """
    length = len(segments_S)
    size = tile(layout, length, shards)
    shard_tokens = order(layout, length, shards).reshape(shards, -1)
    padded = np.pad(shard_tokens, ((0, 0), (0, -shard_tokens.shape[1] % size)), constant_values=-1)
    tokens = padded.reshape(shards, -1, size)

    segments = np.asarray(segments_S)
    document = np.cumsum(np.diff(segments, prepend=segments[:1]) != 0)
    real = (tokens >= 0) & (segments[tokens] != 0)
    first = np.where(real, tokens, length).min(-1)
    last = np.where(real, tokens, -1).max(-1)
    filled = last >= 0

    # A tile of queries meets the tiles of keys from the first that reaches its own first document to the last
    # that begins no later than its own last token; in a shard's ascending order these are neighbours.
    owner = np.nonzero(filled)[0]
    met = np.zeros((shards, shards), np.int64)
    for source in range(shards):
        begins, ends = first[source][filled[source]], last[source][filled[source]]
        stop = np.searchsorted(begins, last[filled], side="right")
        start = np.searchsorted(document[ends], document[first[filled]], side="left")
        met[:, source] = np.bincount(owner, np.maximum(stop - start, 0), minlength=shards)
    step, shard = np.ogrid[:shards, :shards]
    one_way = met[shard, (shard - step) % shards]
    return one_way + met[shard, (shard + step) % shards] if two_way else one_way


@dataclasses.dataclass(frozen=True)
class Deal:
    """How a run's rows are dealt to its context shards."""

    layout: str
    context: int
    ulysses_degree: int = 1
    two_way: bool = False
    strategy: str = "ring"

    @property
    def members(self) -> int:
        """What a row is dealt to, and the members of a ring: the context shards, or groups of `ulysses_degree`."""
        return self.context // self.ulysses_degree

    def order(self, sequence_length: int) -> np.ndarray:
        """The permutation, of which context shard i holds the i-th of `context` equal stretches: see `order`."""
        return order(self.layout, sequence_length, self.members)

    def work(self, segments_S: np.ndarray) -> np.ndarray:
        """Attention tiles of a row, int64 [step, member]: a step is what a member computes without waiting for others.

        Of strategy `ring` the steps are the ring's: see `work`. Of the others the whole row is one. With `all_gather`
        a member's tiles are those of a ring in all steps together; with `ulysses` every member attends the whole row
        for its share of the heads, which counts as that share of the row's tiles, rounded up.
        """
        ring = work(self.layout, segments_S, self.members, two_way=self.two_way)
        if self.strategy == "ring":
            return ring
        if self.strategy == "all_gather":
            return ring.sum(axis=0, keepdims=True)
        return np.full((1, self.members), -(-ring.sum() // self.members))


def _check_name(layout: str, legal: tuple[str, ...]) -> None:
    if layout not in legal:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(legal)}")
