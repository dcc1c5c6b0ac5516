"""The batch hash, against a plain-integer implementation of what hashing.py documents."""

import numpy as np

from documents import Documents
from longtrain.data.hashing import from_limbs, hash_row, key, shuffled, to_limbs
from longtrain.data.rows import RowIndex

WORD = 2**64


def mix64(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % WORD
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % WORD
    return z ^ z >> 31


def plain_hash(row: int, arrays: list[list]) -> int:
    total = 0
    for place, (token, target, position, segment, weight) in enumerate(zip(*arrays, strict=True)):
        bits = int(np.float32(weight).view(np.uint32))
        state = mix64((row + 0x9E3779B97F4A7C15) % WORD)
        for word in (place << 32 | token, target << 32 | position, segment << 32 | bits):
            state = mix64(state ^ (word + 0x9E3779B97F4A7C15) % WORD)
        total += state
    return total % WORD


def arrays_of(row) -> list[np.ndarray]:
    return [row.tokens, row.targets, row.positions, row.segments, row.weights]


def test_a_rows_hash_is_the_documented_one():
    index = RowIndex(Documents([121, 5, 30]), packing="best_fit", sequence_length=60, seed=0)
    for row in range(3):
        arrays = arrays_of(index.row(row))
        assert hash_row(row, *arrays) == plain_hash(row, [array.tolist() for array in arrays])


def test_any_change_changes_it():
    index = RowIndex(Documents([121, 5, 30]), packing="best_fit", sequence_length=60, seed=0)
    arrays = arrays_of(index.row(0))
    hashes = {hash_row(0, *arrays), hash_row(1, *arrays)}
    for number in range(5):
        changed = [array.copy() for array in arrays]
        changed[number][7] += 1
        hashes.add(hash_row(0, *changed))
    swapped = [array.copy() for array in arrays]
    for array in swapped:
        array[[3, 4]] = array[[4, 3]]
    hashes.add(hash_row(0, *swapped))
    assert len(hashes) == 8


def test_limbs_add_up():
    values = [WORD - 1, WORD - 2, 12345, 0xDEADBEEF << 32]
    sums = np.sum([to_limbs(value) for value in values], axis=0)
    assert sums.dtype == np.uint64 or sums.dtype == np.uint32
    assert from_limbs(sums) == sum(values) % WORD


def test_keys_and_shuffles_are_fixed():
    assert key(1, 2) != key(2, 1)
    state = 0
    for word in (1, WORD - 1):
        state = mix64(state ^ (word + 0x9E3779B97F4A7C15) % WORD)
    assert key(1, -1) == state
    order = shuffled(1000, 5, 6)
    assert sorted(order.tolist()) == list(range(1000))
    assert (
        order[:4].tolist() == sorted(range(1000), key=lambda i: mix64(key(5, 6) ^ (i + 0x9E3779B97F4A7C15) % WORD))[:4]
    )
