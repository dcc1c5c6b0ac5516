"""How documents fill rows: from document lengths alone to the pieces of each row.

Two kinds of packing answer the same three questions: `rows_per_epoch`, `tokens_per_epoch`, and `row(k)`, the
spans `(document, start, end)` of the k-th row, for any k from 0 on, in any order of asking:

    concat          documents run on from row to row in one endless stream, across epochs too: no padding
    best_fit, one   documents are cut into pieces of at most a row, and pieces are put into rows whole
                    (a limit on the pieces of a row may close one early)

    rows of 10; documents of 14, 5 and 3     concat     AAAAAAAAAA AAAABBBBBC CCA…
                                             best_fit   AAAAAAAAAA BBBBBAAAA. CCC.......
                                             one        AAAAAAAAAA AAAA...... BBBBB..... CCC.......

Each epoch holds every token of every document once. A packing is a pure function of (lengths, row length,
key): it keeps no state but a cache of the epochs asked for last.
"""

import hashlib
import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np

from longtrain.data.hashing import fold, key, shuffled

PACKINGS = ("concat", "best_fit", "one")

Span = tuple[int, int, int]
"""(document, start, end): tokens start..end-1 of a document."""


class Packing(Protocol):
    """The rows that one set of documents makes."""

    rows_per_epoch: int
    tokens_per_epoch: int

    def row(self, number: int) -> list[Span]:
        """The spans of row `number`, which counts on from epoch to epoch."""
        ...

    def last_row(self) -> list[Span]:
        """The spans of the first epoch's last row, with nothing of the second: for data that ends there."""
        ...


Keep = Callable[[str, Callable[[], np.ndarray]], np.ndarray]
"""Gives the array of a name: made now, or kept from when it was made before."""


def pack(
    policy: str,
    lengths_D: np.ndarray,
    row_length: int,
    seed_key: int,
    *,
    most: int | None = None,
    keep: Keep | None = None,
) -> Packing:
    """The packing named `policy`, one of PACKINGS, over documents of the given lengths (tokens, above 0).

    `most`: pieces in a row, at most, with best_fit. `keep`: where what takes long may be kept for the next time.
    """
    lengths_D = np.asarray(lengths_D, np.int64)
    if policy == "concat":
        return Stream(lengths_D, row_length, seed_key)
    pieces = cut(lengths_D, row_length)
    lengths_P = pieces[2]
    by_length_P = lengths_P[np.argsort(-lengths_P, kind="stable")]
    if policy == "best_fit":
        made_of = hashlib.sha256(by_length_P.astype("<i8").tobytes()).hexdigest()[:16]
        name = f"best_fit-{made_of}-{row_length}-{most or 'any'}"

        def fit() -> np.ndarray:
            return best_fit_decreasing(by_length_P, row_length, most)

        return PackedPieces(pieces, keep(name, fit) if keep else fit(), seed_key)
    if policy == "one":
        return PackedPieces(pieces, np.arange(len(by_length_P)), seed_key)
    raise ValueError(f"packing {policy!r} is not one of {', '.join(PACKINGS)}")


class Stream:
    """`concat`: the documents end to end, in a new order each epoch; row k is the k-th stretch."""

    def __init__(self, lengths_D: np.ndarray, row_length: int, seed_key: int):
        self._lengths_D, self._row_length, self._key = lengths_D, row_length, seed_key
        self.tokens_per_epoch = int(lengths_D.sum())
        self.rows_per_epoch = -(-self.tokens_per_epoch // row_length)
        self._epoch = _Recent(self._order)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's documents in their order, and where each ends in the epoch's stream."""
        order_D = shuffled(len(self._lengths_D), self._key, epoch)
        return order_D, np.cumsum(self._lengths_D[order_D])

    def row(self, number: int) -> list[Span]:
        first = number * self._row_length
        return self._spans(first, first + self._row_length)

    def last_row(self) -> list[Span]:
        return self._spans((self.rows_per_epoch - 1) * self._row_length, self.tokens_per_epoch)

    def _spans(self, first: int, stop: int) -> list[Span]:
        spans: list[Span] = []
        while first < stop:  # once for each epoch it touches: a tiny corpus fills a row several times over
            epoch, offset = divmod(first, self.tokens_per_epoch)
            order_D, ends_D = self._epoch(epoch)
            until = min(self.tokens_per_epoch, offset + stop - first)
            low = int(np.searchsorted(ends_D, offset, side="right"))
            high = int(np.searchsorted(ends_D, until, side="left")) + 1
            for document, end in zip(order_D[low:high].tolist(), ends_D[low:high].tolist(), strict=True):
                begin = end - int(self._lengths_D[document])
                spans.append((document, max(offset, begin) - begin, min(until, end) - begin))
            first += until - offset
        return spans


class PackedPieces:
    """`best_fit` and `one`: pieces of at most a row, put into rows whole.

    What fits with what depends on lengths alone, so the rows are shaped once, as slots of given lengths. An
    epoch then draws which piece goes into which slot of its length, and the order of the rows. So every epoch
    has the same number of rows.
    """

    def __init__(self, pieces: tuple[np.ndarray, np.ndarray, np.ndarray], row_of_slot_P: np.ndarray, seed_key: int):
        """`pieces` as `cut` gives them; `row_of_slot_P`: a slot's row, slots in falling order of length."""
        self._document_P, self._start_P, self._length_P = pieces
        self._key = seed_key
        self.tokens_per_epoch = int(self._length_P.sum())
        self.rows_per_epoch = int(row_of_slot_P.max()) + 1
        self._slots_by_row_P = np.argsort(row_of_slot_P, kind="stable")
        self._slots_end_R = np.cumsum(np.bincount(row_of_slot_P, minlength=self.rows_per_epoch))
        self._longest = int(self._length_P.max())
        self._epoch = _Recent(self._order)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's piece in each slot, and its rows in their order."""
        random_P = fold(key(self._key, epoch, 0), np.arange(len(self._length_P), dtype=np.uint64))
        # One sort by (falling length, random): the high bits are the length, what is left of 64 is random.
        bits = max(1, self._longest.bit_length())
        falling_P = (self._longest - self._length_P).astype(np.uint64) << np.uint64(64 - bits)
        piece_of_slot_P = np.argsort(falling_P | random_P >> np.uint64(bits), kind="stable")
        return piece_of_slot_P, shuffled(self.rows_per_epoch, self._key, epoch, 1)

    def row(self, number: int) -> list[Span]:
        epoch, place = divmod(number, self.rows_per_epoch)
        piece_of_slot_P, order_R = self._epoch(epoch)
        row = int(order_R[place])
        first, stop = int(self._slots_end_R[row - 1]) if row else 0, int(self._slots_end_R[row])
        pieces = piece_of_slot_P[self._slots_by_row_P[first:stop]]
        starts = self._start_P[pieces]
        ends = starts + self._length_P[pieces]
        return list(zip(self._document_P[pieces].tolist(), starts.tolist(), ends.tolist(), strict=True))

    def last_row(self) -> list[Span]:
        return self.row(self.rows_per_epoch - 1)


def cut(lengths_D: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents cut into pieces of at most `row_length` tokens: (document, start, length), each int64 [P]."""
    counts_D = -(-lengths_D // row_length)
    document_P = np.repeat(np.arange(len(lengths_D)), counts_D)
    first_P = np.repeat(np.cumsum(counts_D) - counts_D, counts_D)
    start_P = (np.arange(len(document_P)) - first_P) * row_length
    return document_P, start_P, np.minimum(lengths_D[document_P] - start_P, row_length)


def best_fit_decreasing(lengths_P: np.ndarray, row_length: int, most: int | None = None) -> np.ndarray:
    """The row of each piece, int64 [P], for lengths in falling order: where the least room is left over.

    `most`: pieces of a row; one that has as many is full.

    The same rows as the textbook's loop over pieces, but over groups: pieces of one length meet rows of one
    free room together. Time grows with the number of different lengths and not with that of pieces.
    """
    row_of_piece_P = np.empty(len(lengths_P), np.int64)
    lengths, counts = np.unique(lengths_P, return_counts=True)
    rooms = _Rooms(row_length)
    most = most or len(lengths_P)
    rows = placed = 0
    for length, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            room = rooms.smallest(length)
            if room is None:
                room = row_length
                opened = -(-count // min(room // length, most))
                rooms.add(room, 0, np.arange(rows, rows + opened))
                rows += opened
            # A row with room for several pieces of this length gets them all before any other row does: with
            # each its room shrinks, and it stays the tightest.
            held = rooms.held(room)
            each = min(room // length, most - held, count)
            chosen = rooms.take(room, count // each)
            stop = placed + each * len(chosen)
            row_of_piece_P[placed:stop] = np.repeat(chosen, each)
            if held + each < most:
                rooms.add(room - each * length, held + each, chosen)
            count -= stop - placed
            placed = stop
    return row_of_piece_P


class _Rooms:
    """Rows by their free room; the smallest room of at least a length is found in two levels of bits."""

    _WORD = 1024

    def __init__(self, row_length: int):
        self._rows: dict[int, list[tuple[int, np.ndarray]]] = {}
        self._words = [0] * (row_length // self._WORD + 1)
        self._nonempty_words = 0

    def add(self, room: int, held: int, rows: np.ndarray) -> None:
        """Put rows with so much room, which hold so many pieces each."""
        if room == 0:
            return  # full: never asked for again
        self._rows.setdefault(room, []).append((held, rows))
        word, bit = divmod(room, self._WORD)
        self._words[word] |= 1 << bit
        self._nonempty_words |= 1 << word

    def held(self, room: int) -> int:
        """The pieces that each of the rows holds which `take` gives next."""
        return self._rows[room][-1][0]

    def take(self, room: int, count: int) -> np.ndarray:
        """At most `count` of the rows with exactly this room, at least one, all with as many pieces."""
        stack = self._rows[room]
        held, rows = stack.pop()
        if len(rows) > count:
            stack.append((held, rows[count:]))
            rows = rows[:count]
        if not stack:
            del self._rows[room]
            word, bit = divmod(room, self._WORD)
            self._words[word] ^= 1 << bit
            if not self._words[word]:
                self._nonempty_words ^= 1 << word
        return rows

    def smallest(self, length: int) -> int | None:
        """The smallest room of at least `length` that a row has, or None."""
        word, bit = divmod(length, self._WORD)
        rest = self._words[word] >> bit
        if rest:
            return length + _lowest_bit(rest)
        higher = self._nonempty_words >> (word + 1)
        if not higher:
            return None
        word += 1 + _lowest_bit(higher)
        return word * self._WORD + _lowest_bit(self._words[word])


def _lowest_bit(number: int) -> int:
    return (number & -number).bit_length() - 1


class _Recent:
    """A function of the epoch whose last two values are kept: rows around an epoch's border need both."""

    def __init__(self, function: Callable[[int], tuple[np.ndarray, np.ndarray]]):
        self._function = function
        self._values: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __call__(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        with self._lock:
            if epoch not in self._values:
                while len(self._values) >= 2:
                    del self._values[next(iter(self._values))]  # the one made first
                self._values[epoch] = self._function(epoch)
            return self._values[epoch]
