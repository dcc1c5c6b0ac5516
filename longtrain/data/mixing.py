"""A mixture of sources: which source gives row r of the run, and which of that source's own rows it is."""

from collections.abc import Sequence

_ONE = 1 << 48


class Mixture:
    """Rows dealt to sources by fixed shares, spread as evenly as whole rows can be; a pure function of r.

    The first source is split off from the rest: of the first n rows it has round(share · n). The others share
    what is left in the same way. All is done in whole numbers, so that every machine deals alike. Each source
    counts its own rows on from 0, so each has epochs of its own.
    """

    def __init__(self, shares: Sequence[float]):
        """`shares`: of the rows, in any unit, one a source, all above 0."""
        rest = [sum(shares[place:]) for place in range(len(shares))]
        self._parts = [round(share / left * _ONE) for share, left in zip(shares, rest, strict=True)]
        self._parts[-1] = _ONE

    def locate(self, row: int) -> tuple[int, int]:
        """(source, row of that source) of the run's row `row`."""
        for source, part in enumerate(self._parts):
            before = _rounded(row, part)
            if _rounded(row + 1, part) > before:
                return source, before
            row -= before
        raise AssertionError("the last source takes every row that is left")

    def taken(self, rows: int) -> list[int]:
        """How many of the run's first `rows` rows each source gives."""
        counts = []
        for part in self._parts:
            counts.append(_rounded(rows, part))
            rows -= counts[-1]
        return counts

    def rows_within(self, limits: Sequence[int]) -> int:
        """The largest number of rows for which no source gives more than its limit."""
        low, high = 0, sum(limits) + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = all(count <= limit for count, limit in zip(self.taken(middle), limits, strict=True))
            low, high = (middle, high) if fits else (low, middle)
        return low


def _rounded(rows: int, part: int) -> int:
    return (rows * part + _ONE // 2) // _ONE
