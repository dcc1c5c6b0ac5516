"""The row index: law 5, the order as a pure function, splits, mixtures and the end of the data."""

import pickle
from collections import Counter

import numpy as np
import pytest

from documents import Documents
from longtrain.data.packing import PACKINGS
from longtrain.data.rows import Row, RowIndex
from longtrain.errors import DataError

AWKWARD = [121, 5, 30, 1, 1, 60, 59, 61, 120, 119, 180, 2]
"""Lengths around multiples of 60, the row length of most tests here."""


def index_of(lengths: list[int], packing: str = "best_fit", length: int = 60, **options) -> RowIndex:
    return RowIndex(Documents(lengths), packing=packing, sequence_length=length, **{"seed": 0, **options})


def rows_of(index: RowIndex, count: int | None = None, first: int = 0) -> list[Row]:
    return [index.row(row) for row in range(first, first + (index.rows_per_epoch if count is None else count))]


def inputs(rows: list[Row]) -> Counter:
    return Counter(token for row in rows for token in row.tokens[row.segments > 0].tolist())


def targets(rows: list[Row]) -> Counter:
    return Counter(token for row in rows for token in row.targets[row.weights > 0].tolist())


@pytest.mark.parametrize("packing", PACKINGS)
def test_three_documents_in_rows_of_60(packing):
    rows = rows_of(index_of([121, 5, 30], packing, repeat=False))
    assert inputs(rows) == Counter([*range(1, 122), *range(1001, 1006), *range(2001, 2031)])
    assert len(rows) == {"concat": 3, "best_fit": 3, "one": 5}[packing]
    long_rows = [row for row in rows if any(piece.document == "0" for piece in row.pieces)]
    assert len(long_rows) == 3


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_a_target_once_bar_each_documents_first(packing, seed):
    random = np.random.default_rng(seed)
    lengths = AWKWARD + random.integers(1, 200, 40).tolist()
    rows = rows_of(index_of(lengths, packing, seed=seed, repeat=False))
    assert inputs(rows) == Counter(1000 * d + t + 1 for d, n in enumerate(lengths) for t in range(n))
    assert targets(rows) == Counter(1000 * d + t + 1 for d, n in enumerate(lengths) for t in range(1, n))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_row_says_of_each_place_what_it_holds(packing):
    documents = Documents(AWKWARD)
    for row in rows_of(index_of(AWKWARD, packing)):
        arrays = (row.tokens, row.targets, row.positions, row.segments)
        assert [array.dtype for array in arrays] == [np.int32] * 4
        assert row.weights.dtype == np.float32
        place = 0
        for segment, piece in enumerate(row.pieces, start=1):
            document, here = int(piece.document), slice(place, place + piece.end - piece.start)
            text = documents.tokens(document, 0, AWKWARD[document])
            following = np.append(text[1:], 0)
            assert np.array_equal(row.tokens[here], text[piece.start : piece.end])
            assert np.array_equal(row.targets[here], following[piece.start : piece.end])
            assert np.array_equal(row.weights[here], following[piece.start : piece.end] > 0)
            assert np.array_equal(row.positions[here], np.arange(piece.end - piece.start))
            assert np.all(row.segments[here] == segment)
            place = here.stop
        assert not any(array[place:].any() for array in (*arrays, row.weights))


def test_a_target_lies_beyond_the_border_of_its_row():
    first = next(row for row in rows_of(index_of([121])) if row.pieces[0].start == 0)
    assert first.targets[-1] == 61
    assert first.weights[-1] == 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_row_is_the_same_from_any_index_in_any_order(packing):
    index = index_of(AWKWARD, packing)
    expected = [index.row(row).tokens for row in range(60)]
    again = index_of(AWKWARD, packing)
    for row in np.random.default_rng(0).permutation(60).tolist():
        assert np.array_equal(again.row(row).tokens, expected[row])
    travelled = pickle.loads(pickle.dumps(index))
    assert np.array_equal(travelled.row(59).tokens, expected[59])
    assert travelled.fingerprint == index.fingerprint


@pytest.mark.parametrize("packing", ["best_fit", "one"])
def test_each_epoch_is_whole_and_in_another_order(packing):
    index = index_of(AWKWARD * 5, packing)
    epochs = [rows_of(index, first=epoch * index.rows_per_epoch) for epoch in range(3)]
    assert inputs(epochs[0]) == inputs(epochs[1]) == inputs(epochs[2])
    orders = [[[piece.document for piece in row.pieces] for row in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("packing", PACKINGS)
def test_held_out_documents_stay_held_out_over_three_epochs(packing):
    lengths = [13] * 100
    seen = {}
    for split in ("train", "eval"):
        index = index_of(lengths, packing, 13, split=split, eval_fraction=0.1)
        rows = rows_of(index, 3 * index.rows_per_epoch)
        seen[split] = Counter(
            piece.document for row in rows for piece in row.pieces for _ in range(piece.end - piece.start)
        )
    assert len(seen["train"]) == 90
    assert len(seen["eval"]) == 10
    assert not seen["train"].keys() & seen["eval"].keys()
    assert set(seen["train"].values()) == {3 * 13}


def test_the_split_follows_documents_and_not_their_numbers():
    def held_out(keys: range) -> set[int]:
        documents = Documents([5] * len(keys))
        documents.keys = np.array(keys, np.uint64)
        index = RowIndex(documents, packing="one", sequence_length=5, seed=0, split="eval", eval_fraction=0.2)
        return {int(documents.keys[int(piece.document)]) for row in rows_of(index) for piece in row.pieces}

    assert held_out(range(100)) == held_out(range(99, -1, -1))
    assert held_out(range(100)) != set(range(20))


def test_the_eval_rows_are_the_same_for_every_seed():
    one, other = (index_of(AWKWARD, seed=seed, split="eval", eval_fraction=0.3) for seed in (0, 1))
    assert [one.row(row).pieces for row in range(4)] == [other.row(row).pieces for row in range(4)]
    train = index_of(AWKWARD, seed=1, eval_fraction=0.3)
    held_out = {piece.document for row in rows_of(one) for piece in row.pieces}
    assert not held_out & {piece.document for row in range(train.rows_per_epoch) for piece in train.row(row).pieces}


def test_a_fraction_too_small_for_a_document_still_holds_one_out():
    assert index_of([5] * 10, split="eval", eval_fraction=0.01).documents == 1
    assert index_of([5] * 10, eval_fraction=0.99).documents == 1
    with pytest.raises(DataError, match=r"eval split holds no document.*eval_fraction = 0.0"):
        index_of([5] * 10, split="eval")


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_corpus_smaller_than_a_row(packing):
    index = index_of([4], packing, length=10)
    assert index.rows_per_epoch == 1
    row = index.row(0)
    if packing == "concat":  # the stream goes on: 2 1/2 epochs in the row
        assert row.tokens.tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
        assert row.segments.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    else:
        assert row.tokens.tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 0, 0]
        assert row.weights.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("packing", PACKINGS)
def test_data_that_does_not_repeat_ends(packing):
    index = index_of(AWKWARD, packing, repeat=False)
    assert index.rows == index.rows_per_epoch
    index.row(index.rows - 1)
    with pytest.raises(DataError, match=rf"exhausted.*{index.rows} rows"):
        index.row(index.rows)
    with pytest.raises(DataError, match="3 left are too few for a batch of 4"):
        index.check(index.rows - 3, 4)
    index_of(AWKWARD, packing).row(10 * index.rows)


def test_padding_is_what_rows_hold_none_of():
    for packing in PACKINGS:
        index = index_of(AWKWARD, packing)
        rows = rows_of(index)
        assert index.padding_fraction == pytest.approx(np.mean([row.segments == 0 for row in rows]))


def test_weights_are_shares_of_tokens():
    random = np.random.default_rng(0)
    lengths = [*random.integers(1, 200, 300), *random.integers(20, 40, 300), *random.integers(1, 100, 300)]
    documents = Documents([int(n) for n in lengths], [0] * 300 + [1] * 300 + [2] * 300)
    for packing in PACKINGS:
        index = RowIndex(documents, packing=packing, sequence_length=64, seed=0, weights=[5.0, 3.0, 2.0])
        rows = [index.row(row) for row in range(4000)]
        assert all(len({piece.source for piece in row.pieces}) == 1 for row in rows)
        tokens = Counter()
        for row in rows:
            tokens[row.pieces[0].source] += int(np.sum(row.segments > 0))
        shares = [tokens[source] / sum(tokens.values()) for source in documents.sources]
        assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.01)


def test_in_a_mixture_each_source_has_epochs_of_its_own():
    documents = Documents([10] * 30, [0] * 10 + [1] * 20)
    index = RowIndex(documents, packing="one", sequence_length=10, seed=0, weights=[1.0, 1.0])
    counts = Counter(index.row(row).pieces[0].document for row in range(40))
    assert {counts[str(document)] for document in range(10)} == {2}
    assert {counts[str(document)] for document in range(10, 30)} == {1}
    assert index.rows_per_epoch == 20


def test_a_mixture_without_repeat_ends_with_its_first_source():
    documents = Documents([10] * 30, [0] * 10 + [1] * 20)
    index = RowIndex(documents, packing="one", sequence_length=10, seed=0, weights=[1.0, 3.0], repeat=False)
    assert 26 <= index.rows <= 28  # 20 rows of the source with three quarters of the weight
    counts = Counter(index.row(row).pieces[0].document for row in range(index.rows))
    assert set(counts.values()) == {1}
    assert sum(counts[str(document)] for document in range(10, 30)) == 20


def test_sources_without_weights_are_one():
    documents = Documents([10] * 30, [0] * 10 + [1] * 20)
    index = RowIndex(documents, packing="one", sequence_length=10, seed=0)
    assert index.rows_per_epoch == 30
    assert len({index.row(row).pieces[0].document for row in range(30)}) == 30


def test_the_fingerprint_is_the_plans():
    plans = [
        index_of(AWKWARD),
        index_of(AWKWARD[1:]),
        index_of(AWKWARD, "one"),
        index_of(AWKWARD, length=30),
        index_of(AWKWARD, seed=1),
        index_of(AWKWARD, eval_fraction=0.1),
        index_of(AWKWARD, eval_fraction=0.1, split="eval"),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert index_of(AWKWARD, weights=[3.0]).fingerprint == index_of(AWKWARD).fingerprint
    assert index_of(AWKWARD, repeat=False).fingerprint == index_of(AWKWARD).fingerprint


def tokens_by_length(index: RowIndex, lengths: list[int], bounds: list[int], rows: int) -> np.ndarray:
    """Part of the first rows' tokens that documents of each range of lengths give."""
    found = np.zeros(len(bounds) + 1)
    for row in range(rows):
        for document, start, end in index.spans(row):
            found[np.searchsorted(bounds, lengths[document])] += end - start
    return found / found.sum()


@pytest.mark.parametrize("packing", PACKINGS)
def test_shares_of_the_tokens_by_length(packing):
    lengths = np.random.default_rng(0).integers(1, 400, 300).tolist() + [60, 61, 240, 241]
    shares = [(60, 1.0), (240, 1.0), (None, 2.0)]
    index = index_of(lengths, packing, length_shares=shares)
    found = tokens_by_length(index, lengths, [60, 240], 2000)
    assert found == pytest.approx([0.25, 0.25, 0.5], abs=0.02)
    assert index.documents == len(lengths)
    # Each row holds documents of one range, and each range has every token once before any a second time.
    for bounds in ((0, 60), (60, 240), (240, 10**6)):
        of_range = [d for d, n in enumerate(lengths) if bounds[0] < n <= bounds[1]]
        seen: Counter = Counter()
        row = 0
        while sum(seen.values()) < sum(lengths[d] for d in of_range):
            seen.update((d, t) for d, start, end in index.spans(row) if d in of_range for t in range(start, end))
            row += 1
        if packing != "concat":  # which runs on into the next epoch within a row
            assert set(seen.values()) == {1}


def test_shares_by_length_are_of_each_source():
    lengths = [10, 200] * 50
    corpus = Documents(lengths, source_of=[0, 0, 1, 1] * 25)
    index = RowIndex(
        corpus,
        packing="best_fit",
        sequence_length=60,
        seed=0,
        weights=[1, 3],
        length_shares=[(100, 1), (None, 1)],
    )
    found: Counter = Counter()
    for row in range(1000):
        for document, start, end in index.spans(row):
            found[corpus.source_of[document], lengths[document]] += end - start
    total = sum(found.values())
    for (source, _), tokens in found.items():
        assert tokens / total == pytest.approx([1, 3][source] / 8, abs=0.02)


def test_a_share_that_no_document_can_give_is_refused():
    with pytest.raises(DataError, match="no document to give it: data.sources, documents of 401 or more tokens"):
        index_of([5, 300], length_shares=[(100, 1), (400, 1), (None, 1)])
    with pytest.raises(DataError, match="data.sources source 1, documents of 101 or more tokens"):
        RowIndex(
            Documents([5, 300, 5], source_of=[0, 0, 1]),
            packing="one",
            sequence_length=60,
            seed=0,
            weights=[1, 1],
            length_shares=[(100, 1), (None, 1)],
        )


def test_limit_and_shares_are_part_of_the_plan_and_change_nothing_where_they_are_not_given():
    plans = {
        index_of(AWKWARD).fingerprint,
        index_of(AWKWARD, documents_per_row=2).fingerprint,
        index_of(AWKWARD, length_shares=[(60, 1), (None, 1)]).fingerprint,
        index_of(AWKWARD, length_shares=[(60, 1), (None, 2)]).fingerprint,
    }
    assert len(plans) == 4
    limited = index_of(AWKWARD, documents_per_row=2)
    assert max(len(limited.spans(row)) for row in range(limited.rows_per_epoch)) == 2
