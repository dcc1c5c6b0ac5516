"""Packing: every token of every document once an epoch, in rows that are filled as each policy promises."""

from collections import Counter

import numpy as np
import pytest

from longtrain.data.packing import PACKINGS, best_fit_decreasing, cut, pack


def textbook_best_fit(lengths: list[int], row_length: int) -> list[int]:
    """The free room of each row after best-fit decreasing, one piece at a time."""
    rooms: list[int] = []
    for length in lengths:
        fitting = [row for row, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(row_length)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda row: rooms[row])] -= length
    return sorted(rooms)


def test_best_fit_by_groups_gives_the_rows_of_the_textbook():
    random = np.random.default_rng(0)
    for _ in range(200):
        row_length = int(random.integers(1, 70))
        lengths = np.sort(random.integers(1, row_length + 1, random.integers(1, 80)))[::-1]
        rows = best_fit_decreasing(lengths, row_length)
        rooms = row_length - np.bincount(rows, weights=lengths).astype(int)
        assert sorted(rooms.tolist()) == textbook_best_fit(lengths.tolist(), row_length)


def test_best_fit_finds_rooms_in_rows_longer_than_a_word_of_its_search():
    rows = best_fit_decreasing(np.array([50_000, 30_000, 14_000, 1_536, 6]), 65_536)
    assert rows.tolist() == [0, 1, 0, 0, 1]


def test_cut_leaves_whole_rows_and_a_remainder():
    document, start, length = cut(np.array([25, 10, 1]), 10)
    assert document.tolist() == [0, 0, 0, 1, 2]
    assert start.tolist() == [0, 10, 20, 0, 0]
    assert length.tolist() == [10, 10, 5, 10, 1]


@pytest.mark.parametrize("policy", PACKINGS)
@pytest.mark.parametrize("lengths", [[7], [1], [8, 8, 8], [7, 8, 9, 16, 17, 15, 1, 1, 1, 24], [3] * 50])
def test_an_epoch_holds_every_token_once(policy, lengths):
    packing = pack(policy, np.array(lengths), 8, seed_key=1)
    spans = [packing.row(row) for row in range(packing.rows_per_epoch - 1)] + [packing.last_row()]
    seen = Counter((document, token) for row in spans for document, start, end in row for token in range(start, end))
    assert seen == Counter((document, token) for document, length in enumerate(lengths) for token in range(length))
    assert all(0 < sum(end - start for _, start, end in row) <= 8 for row in spans)


def test_policies_differ_in_what_shares_a_row():
    lengths = np.random.default_rng(1).integers(1, 30, 200)
    rows = {policy: pack(policy, lengths, 16, seed_key=1) for policy in PACKINGS}
    least = -(-int(lengths.sum()) // 16)
    assert rows["concat"].rows_per_epoch == least
    assert least <= rows["best_fit"].rows_per_epoch <= 1.05 * least
    assert rows["one"].rows_per_epoch == int(np.sum(-(-lengths // 16)))
    assert all(len(rows["one"].row(row)) == 1 for row in range(rows["one"].rows_per_epoch))


@pytest.mark.parametrize("policy", PACKINGS)
def test_order_changes_with_epoch_and_key_and_nothing_else(policy):
    lengths = np.full(100, 8)

    def epoch(key: int, number: int) -> list:
        packing = pack(policy, lengths, 8, key)
        first = number * packing.rows_per_epoch
        return [packing.row(row) for row in range(first, first + packing.rows_per_epoch)]

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != epoch(2, 0)


def test_concat_runs_on_over_the_epochs_border():
    packing = pack("concat", np.array([5, 6]), 8, seed_key=0)
    stream = [piece for row in range(11) for piece in packing.row(row)]  # 88 tokens: 8 epochs of 11
    assert all(sum(end - start for _, start, end in packing.row(row)) == 8 for row in range(11))
    assert Counter((document, token) for document, start, end in stream for token in range(start, end)) == Counter(
        {(document, token): 8 for document, length in enumerate((5, 6)) for token in range(length)}
    )


def test_rows_of_long_documents_do_not_cluster():
    packing = pack("best_fit", np.array([800] + [7] * 100), 8, seed_key=0)
    of_the_long_one = [row for row in range(packing.rows_per_epoch) if packing.row(row)[0][0] == 0]
    assert len(of_the_long_one) == 100
    assert np.mean(np.diff(of_the_long_one) == 1) < 0.7


def test_a_limit_on_the_pieces_of_a_row():
    random = np.random.default_rng(3)
    for most in (1, 2, 3, 7):
        for _ in range(50):
            row_length = int(random.integers(1, 70))
            lengths = random.integers(1, 2 * row_length + 1, random.integers(1, 80))
            packing = pack("best_fit", lengths, row_length, seed_key=1, most=most)
            rows = [packing.row(row) for row in range(packing.rows_per_epoch)]
            assert max(map(len, rows)) <= most
            assert sum(end - start for row in rows for _, start, end in row) == lengths.sum()
            assert all(0 < sum(end - start for _, start, end in row) <= row_length for row in rows)
            assert len(rows) <= pack("one", lengths, row_length, seed_key=1).rows_per_epoch
    assert len(pack("best_fit", np.full(10, 2), 64, 1, most=3).row(0)) == 3


def test_rows_are_kept_and_taken_again():
    kept: dict[str, np.ndarray] = {}
    asked = []

    def keep(name, make):
        asked.append(name)
        if name not in kept:
            kept[name] = make()
        return kept[name]

    lengths = np.random.default_rng(1).integers(1, 30, 200)

    def rows(**settings) -> list:
        packing = pack("best_fit", lengths, settings.pop("row_length", 16), seed_key=1, **settings)
        return [packing.row(row) for row in range(packing.rows_per_epoch)]

    assert rows(keep=keep) == rows(keep=keep) == rows()
    assert len(kept) == 1 and len(asked) == 2
    rows(keep=keep, most=2)
    rows(keep=keep, row_length=17)
    lengths = lengths + 1
    rows(keep=keep)
    assert len(kept) == 4  # what is kept under a name is of all that it follows from
