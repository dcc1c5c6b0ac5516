"""The layouts' blocks, tiles and work; that they are permutations is law 4."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from longtrain import layout
from longtrain.ops import tiles


def row(lengths: list[int]) -> np.ndarray:
    """Segments of a row of documents; a negative length is padding."""
    numbers = np.cumsum([n > 0 for n in lengths]) * [n > 0 for n in lengths]
    return np.repeat(numbers, np.abs(lengths))


def positions_of(segments: np.ndarray) -> np.ndarray:
    starts = np.nonzero(np.diff(segments, prepend=-1))[0]
    return np.arange(len(segments)) - np.repeat(starts, np.diff(starts, append=len(segments)))


def test_zigzag_gives_shard_i_chunks_i_and_2n_minus_1_minus_i():
    chunks = layout.order("zigzag", 16, 4).reshape(4, 2, 2)[:, :, 0] // 2
    assert chunks.tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_contiguous_is_the_identity():
    assert layout.order("contiguous", 24, 8).tolist() == list(range(24))


def test_dealt_goes_back_and_forth_in_single_tiles():
    order = layout.order("dealt", 4096, 4)
    blocks = order.reshape(4, 4, 256)
    assert (np.diff(blocks, axis=-1) == 1).all()
    assert (blocks[:, :, 0] // 256).tolist() == [[0, 7, 8, 15], [1, 6, 9, 14], [2, 5, 10, 13], [3, 4, 11, 12]]


@pytest.mark.parametrize(
    ("local", "block", "tile"),
    [
        (1024, 256, 256),
        (256, 128, 128),
        (1000, 250, 250),
        (300, 150, 150),
        (12, 6, 12),
        (77, 77, 77),
        (514, 1, 256),
    ],
)
def test_the_dealt_block_divides_into_an_even_number_of_rounds(local, block, tile):
    assert layout.block("dealt", 4 * local, 4) == block
    assert layout.tile("dealt", 4 * local, 4) == tile


def test_a_row_that_cannot_be_dealt_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="zigzag over 4 shards.*8 equal pieces: sequence length 100"):
        layout.order("zigzag", 100, 4)
    with pytest.raises(ValueError, match="sequence length 30 is not a multiple of 4"):
        layout.order("dealt", 30, 4)
    with pytest.raises(ValueError, match="'striped' is not one of dealt, zigzag, contiguous"):
        layout.order("striped", 32, 4)


def test_auto_is_resolved_with_a_reason():
    def resolve(name="auto", context=4, strategy="ring", packing="best_fit", kernel="xla"):
        return layout.resolve(name, context=context, strategy=strategy, packing=packing, kernel=kernel)

    assert resolve()[0] == "dealt" and "best_fit" in resolve()[1]
    assert resolve(strategy="all_gather")[0] == "dealt"
    assert resolve(context=1)[0] == resolve(strategy="ulysses")[0] == "contiguous"
    assert resolve("zigzag") == ("zigzag", "asked for")
    assert resolve(kernel="cudnn", packing="one")[0] == "zigzag"
    assert resolve(kernel="triton", packing="one")[0] == "dealt"
    assert "unless a GPU" in resolve(kernel="auto", packing="one")[1]
    with pytest.raises(ValueError, match="auto, dealt"):
        resolve("snake")


ROWS = {
    "one document": [2048],
    "documents": [100, 700, 1, 255, 257, 600, 135],
    "on block borders": [256, 256, 512, 1, 255, 768],
    "padding everywhere": [-100, 300, -1, 400, -300, 1, 1, -500, 345, -100],
    "padding alone": [-2048],
}


@pytest.mark.parametrize(
    "ring",
    [{}, {"ulysses_degree": 2}, {"two_way": True}, {"strategy": "all_gather"}, {"strategy": "ulysses"}],
    ids=str,
)
@pytest.mark.parametrize("name", layout.LAYOUTS)
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_work_counts_the_tiles_that_attention_visits(name, lengths, ring):
    segments, deal = row(lengths), layout.Deal(name, 4 * ring.get("ulysses_degree", 1), **ring)
    order, size, shards = deal.order(2048), layout.tile(name, 2048, 4), deal.members
    assert shards == 4
    local = tiles.Tokens(*(jnp.asarray(x[order].reshape(shards, -1)) for x in (positions_of(segments), segments)))
    bounds = tiles.bounds(local, size)

    def visited(shard: int, source: int) -> int:
        q = tiles.Bounds(*(x[shard][:, None] for x in bounds))
        kv = tiles.Bounds(*(x[source][None] for x in bounds))
        return int((~tiles.empty(q, kv)).sum())

    def met(way: int) -> np.ndarray:
        steps, members = range(shards), range(shards)
        return np.array([[visited(i, (i - way * step) % shards) for i in members] for step in steps])

    expected = met(1) + met(-1) if deal.two_way else met(1)
    if deal.strategy == "all_gather":  # a shard goes through the keys of all at its own pace
        expected = [[sum(visited(i, source) for source in range(shards)) for i in range(shards)]]
    if deal.strategy == "ulysses":  # each shard has every tile of its heads, a quarter of all
        expected = [[math.ceil(met(1).sum() / 4)] * shards]
    np.testing.assert_array_equal(deal.work(segments), expected)


def test_a_ring_waits_in_each_step_all_gather_once_and_ulysses_never():
    """Three shards of three tiles, AAA BCD DEF: A keeps shard 0 busiest in step 0 and D shard 2 in step 1."""
    segments = np.repeat([1, 1, 1, 2, 3, 4, 4, 5, 6], layout.TILE)
    work = {name: layout.Deal("contiguous", 3, strategy=name).work(segments) for name in ("ring", "all_gather")}
    assert work["ring"].tolist() == [[6, 3, 3], [0, 0, 1], [0, 0, 0]]
    assert work["all_gather"].tolist() == [[6, 3, 4]]
    assert layout.Deal("contiguous", 3, strategy="ulysses").work(segments).tolist() == [[5, 5, 5]]


@pytest.mark.parametrize("name", layout.LAYOUTS)
def test_the_shards_of_a_group_together_hold_what_their_member_of_the_ring_is_dealt(name):
    """So that their tokens ascend when they are joined, and each tile of the joined sequence is one stretch."""
    deal = layout.Deal(name, 8, ulysses_degree=2)
    shards = deal.order(4096).reshape(8, -1)
    groups = layout.order(name, 4096, 4).reshape(4, -1)
    for group in range(4):
        joined = np.concatenate(shards[2 * group : 2 * group + 2])
        assert (joined == groups[group]).all() and (np.diff(joined) > 0).all()


def test_packed_rows_over_groups_are_as_balanced_as_over_so_many_shards():
    segments = row(list(np.random.default_rng(0).exponential(4096, 1000).astype(int) + 1))[:65536]
    work = layout.Deal("dealt", 16, ulysses_degree=4).work(segments)
    assert work.shape == (4, 4)
    assert work.max(axis=1).sum() / work.mean(axis=1).sum() < 1.1


@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_tiles_are_told_apart_exactly_where_each_is_one_stretch_of_the_row(lengths):
    segments, size = row(lengths), 256
    positions = positions_of(segments)
    seen = (segments[:, None] == segments) & (segments[:, None] != 0) & (positions[:, None] >= positions)
    seen = seen.reshape(8, size, 8, size)
    bounds = tiles.bounds(tiles.Tokens(jnp.asarray(positions)[None], jnp.asarray(segments)[None]), size)
    q, kv = (tiles.Bounds(*(x[0].reshape(shape) for x in bounds)) for shape in ((8, 1), (1, 8)))
    np.testing.assert_array_equal(tiles.empty(q, kv), ~seen.any(axis=(1, 3)))
    np.testing.assert_array_equal(tiles.full(q, kv), seen.all(axis=(1, 3)))


def test_full_and_empty_are_certain_for_tokens_in_any_order():
    rng = np.random.default_rng(0)
    found = np.zeros(2, int)
    for _ in range(200):
        segments = rng.choice([-3, 0, 1, 2, 2**31 - 1], 64, p=[0.1, 0.1, 0.2, 0.5, 0.1])
        segments[: rng.integers(64)] = rng.integers(3)
        positions = rng.integers(-5, 5, 64)
        seen = (segments[:, None] == segments) & (segments[:, None] != 0) & (positions[:, None] >= positions)
        seen = seen.reshape(16, 4, 16, 4)
        bounds = tiles.bounds(tiles.Tokens(jnp.asarray(positions)[None], jnp.asarray(segments)[None]), 4)
        q, kv = (tiles.Bounds(*(x[0].reshape(shape) for x in bounds)) for shape in ((16, 1), (1, 16)))
        full, empty = np.asarray(tiles.full(q, kv)), np.asarray(tiles.empty(q, kv))
        assert not (full & ~seen.all(axis=(1, 3))).any()
        assert not (empty & seen.any(axis=(1, 3))).any()
        found += full.sum(), empty.sum()
    assert (found > 100).all()


def test_packed_rows_are_balanced_by_dealing_tiles_and_by_nothing_else():
    rng = np.random.default_rng(0)
    lengths = rng.exponential(4096, 1000).astype(int) + 1
    segments = row(list(lengths))[:65536]
    imbalance = {}
    for name in layout.LAYOUTS:
        work = layout.work(name, segments, 8)
        imbalance[name] = work.max(axis=1).sum() / work.mean(axis=1).sum()
    assert imbalance["dealt"] < 1.15
    assert imbalance["zigzag"] > 1.5 and imbalance["contiguous"] > 1.5
