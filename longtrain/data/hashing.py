"""Fixed 64-bit mixes: the order of the data, and the `batch_hash` that shows two runs to see the same.

Everything is unsigned 64-bit arithmetic that wraps, so that another tool, in any language, can do the same.

    mix64(z):   z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31

    key(a, b, …):  h = 0;  for each word w:  h = mix64(h ^ w + 0x9E3779B97F4A7C15)      (the addition first)

    A token's hash, in row `row` at `place` (its place in the row before any layout):
        h = key(row)
        for word in (place << 32 | token,  target << 32 | position,  segment << 32 | the float32 weight's bits):
            h = mix64(h ^ word + 0x9E3779B97F4A7C15)
    A row's hash is the sum of its tokens' (padding too), a batch's the sum of its rows', modulo 2^64: no
    order, mesh, layout or number of hosts changes it.

Order uses the same mix, and not numpy's random generators, whose streams may change with its version.
"""

import numpy as np

GAMMA = 0x9E3779B97F4A7C15
LIMBS = 4
"""16-bit limbs of a hash: what fits a uint32 with room to add 65,536 of them up."""


def mix64(words: np.ndarray) -> np.ndarray:
    """Mix each uint64: a bijection in which every bit of the input moves every bit of the output."""
    mixed = words ^ (words >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def fold(state: np.ndarray | int, words: np.ndarray) -> np.ndarray:
    """One step of `key`, for arrays: mix64(state ^ words + GAMMA)."""
    return mix64((words + np.uint64(GAMMA)) ^ np.asarray(state, np.uint64))


def key(*words: int) -> int:
    """One 64-bit number of several, each taken modulo 2^64; their order counts."""
    state = np.zeros(1, np.uint64)
    for word in words:
        state = fold(state, np.array([word % 2**64], np.uint64))
    return int(state[0])


def shuffled(count: int, *words: int) -> np.ndarray:
    """A permutation of `count` numbers, int64 [count], that is a pure function of `words`."""
    return np.argsort(fold(key(*words), np.arange(count, dtype=np.uint64)), kind="stable")


def hash_row(
    row: int,
    tokens_S: np.ndarray,
    targets_S: np.ndarray,
    positions_S: np.ndarray,
    segments_S: np.ndarray,
    weights_S: np.ndarray,
    place_S: np.ndarray | None = None,
) -> int:
    """The row's part of `batch_hash`: int32 arrays and float32 weights, [S], in document order.

    `place_S`: the tokens' places in the row, where the arrays hold only some of them; parts of a row add up to it.
    """
    place_S = np.arange(len(tokens_S), dtype=np.uint64) if place_S is None else place_S
    state: np.ndarray | int = key(row)
    for high, low in (
        (place_S, tokens_S),
        (targets_S, positions_S),
        (segments_S, np.ascontiguousarray(weights_S, np.float32).view(np.uint32)),
    ):
        state = fold(state, high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64))
    return int(np.sum(state, dtype=np.uint64))


def to_limbs(value: int) -> np.ndarray:
    """A 64-bit value as four 16-bit limbs, the low one first: uint32 [4]."""
    return np.array([value >> (16 * limb) & 0xFFFF for limb in range(LIMBS)], np.uint32)


def from_limbs(sums: np.ndarray) -> int:
    """The 64-bit sum of values whose limbs were summed, modulo 2^64. `sums`: [4], the low limb first."""
    return sum(int(limb) << (16 * place) for place, limb in enumerate(sums)) % 2**64
