"""How evenly each layout deals attention's work to the shards: `python scripts/layout_balance.py`. No device, no jax.

Printed is the lock-step imbalance of a ring over rows of documents of several mixes: tiles of each ring step's busiest
shard, summed over the steps, over the pairs a shard would attend if all were dealt evenly and none were wasted. It is
the factor by which the ring is slower than it could be; mean of 4 rows. Tiles that a document's edge cuts through are
computed whole, so mixes of short documents cost more than 1 however they are dealt.
"""

import argparse
from collections.abc import Callable

import numpy as np

from longtrain import layout

Draw = Callable[[np.random.Generator, int], np.ndarray]

MIXES: dict[str, Draw] = {
    "one document": lambda rng, length: np.array([length]),
    "exponential, mean 1/4 of the row": lambda rng, length: rng.exponential(length / 4, 4096).astype(int) + 1,
    "exponential of mean 8K": lambda rng, length: rng.exponential(8192, length).astype(int) + 1,
    "exponential of mean 1K": lambda rng, length: rng.exponential(1024, length).astype(int) + 1,
    "log-normal, heavy tail": lambda rng, length: rng.lognormal(7, 2, length).astype(int) + 1,
    "half one document, half of 1K": lambda rng, length: np.array([length // 2] + [1024] * (length // 2048)),
}
"""Lengths of documents that fill a row and more; the last is cut."""


def segments(lengths: np.ndarray, total: int) -> np.ndarray:
    """Segments of a row filled with documents of these lengths, the last one cut: int32 [total]."""
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), total) + 1]
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)[:total].astype(np.int32)


def imbalance(name: str, mix: str, length: int, shards: int) -> float:
    """Of the layout `name`, a mix of MIXES, rows of `length` tokens over `shards`."""
    ratios = []
    for seed in range(4):
        segments_S = segments(MIXES[mix](np.random.default_rng(seed), length), length)
        sizes = np.unique(segments_S, return_counts=True)[1].astype(float)
        pairs = (sizes * (sizes + 1)).sum() / 2
        tiles_waited_for = layout.work(name, segments_S, shards).max(axis=1).sum()
        ratios.append(tiles_waited_for * layout.tile(name, length, shards) ** 2 / (pairs / shards))
    return float(np.mean(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072, help="tokens a row (default: %(default)s)")
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="(default: %(default)s)")
    options = parser.parse_args()
    print(f"{options.length:,} tokens over shards: {'':20}" + "".join(f"{shards:>8}" for shards in options.shards))
    for mix in MIXES:
        for name in layout.LAYOUTS:
            ratios = (imbalance(name, mix, options.length, shards) for shards in options.shards)
            print(f"{mix:36}{name:14}" + "".join(f"{ratio:8.2f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
