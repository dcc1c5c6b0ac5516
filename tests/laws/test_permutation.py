"""Law 4: the layout is a permutation, undone exactly; work per shard is equal."""

import numpy as np
import pytest

from longtrain import layout

SHARDS = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("name", layout.LAYOUTS)
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("pieces", [2, 10, 14, 122, 514, 1024, 1536])
def test_the_layout_is_a_permutation_that_keeps_a_shards_tokens_ascending(name, shards, pieces):
    length = pieces * shards
    order = layout.order(name, length, shards)
    row = np.arange(length)
    assert sorted(order) == row.tolist()
    assert (row[order][np.argsort(order)] == row).all()
    assert (np.diff(order.reshape(shards, -1), axis=1) > 0).all()
    assert (order == layout.order(name, length, shards)).all()


@pytest.mark.parametrize("name", ["dealt", "contiguous"])
@pytest.mark.parametrize("local", [1, 3, 77, 251, 255, 257])
def test_odd_shards_are_dealt_too(name, local):
    assert sorted(layout.order(name, 4 * local, 4)) == list(range(4 * local))


@pytest.mark.parametrize("name", ["dealt", "zigzag"])
@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("rounds", [2, 4, 10])
def test_one_document_is_equal_work_for_every_shard_in_every_step(name, shards, rounds):
    length = rounds * shards * layout.TILE
    work = layout.work(name, np.ones(length, int), shards)
    assert (work == work[:, :1]).all()
    blocks = length // layout.TILE
    assert work.sum() == blocks * (blocks + 1) // 2
