"""The Triton kernel's numbers, interpreted on CPU: through the public function, against dense float64 attention.

Tiles are shrunk, so that rows of a hundred tokens have many, of unlike sides as in earnest.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import steps
import test_attention
from longtrain import layout
from longtrain.ops import tiles
from longtrain.ops.kernels import triton
from longtrain.ops.kernels.workload import interpreted
from test_attention import Case


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(layout, "TILE", 8)
    monkeypatch.setattr(triton, "FORWARD_SIDES", {2: (16, 8), 4: (16, 8)})
    monkeypatch.setattr(triton, "BACKWARD_SIDES", {2: (16, 8), 4: (16, 8)})
    monkeypatch.setattr(triton, "SMALLEST", 8)
    with interpreted():
        yield


class TritonCase(Case):
    @functools.cached_property
    def call(self):
        return functools.partial(super().call, kernel="triton")

    @functools.cached_property
    def compiled(self):
        whole = super().compiled
        return lambda *arrays: whole.lower(*arrays).compile(steps.QUICK)(*arrays)


def case(*args, **options) -> TritonCase:
    return TritonCase(**dataclasses.asdict(test_attention.case(*args, **options)))


CASES = [case("ring 4", mesh="context=4")]

MORE_CASES = [
    case("one device, odd length, groups of 3", length=77, heads=(3, 1), head_dim=96),
    case("ring 4, groups of 4, bfloat16", mesh="context=4", heads=(4, 1), head_dim=128, dtype=jnp.bfloat16),
    case("all_gather 4, blocks of 25", "all_gather", mesh="context=4", length=100),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_dense_attention(case):
    test_attention.assert_exact(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_it_is_dense_attention_in_more_cases(case):
    test_attention.assert_exact(case)


@pytest.mark.slow
def test_scores_of_any_size_are_as_exact_as_dense_float32_attention(monkeypatch):
    monkeypatch.setattr(triton, "FORWARD_SIDES", {4: (64, 32)})
    monkeypatch.setattr(triton, "BACKWARD_SIDES", {4: (64, 32)})
    extreme = case("ring 4", mesh="context=4", length=512, heads=(2, 1))
    # Dense float32 attention's own error grows tenfold here when the H products of a score are summed the other way
    # round. Interpreted, the tiles' products are small, and a CPU sums them in another order than one large product:
    # dq is up to 2.4 times dense's error where the vectors are of 512 bits.
    test_attention.test_scores_of_any_size_are_as_exact_as_dense_float32_attention(extreme, monkeypatch, times=4)


@pytest.mark.slow
def test_documents_do_not_see_each_other_by_a_bit():
    test_attention.test_documents_do_not_see_each_other_by_a_bit(CASES[0])


@pytest.mark.parametrize("of", ["queries", "keys"])
def test_spans_hold_every_tile_with_a_visible_pair_and_their_full_part_needs_no_mask(of):
    length, q_side, kv_side = 96, 8, 4
    find = jax.jit(lambda tokens: tiles.spans(tiles.bounds(tokens, q_side), tiles.bounds(tokens, kv_side), of=of))
    for name, (positions, segments) in test_attention.token_rows(length).items():
        tokens = tiles.Tokens(jnp.asarray(positions)[None], jnp.asarray(segments)[None])
        spans = find(tokens)
        seen = (segments[:, None] == segments) & (segments != 0) & (positions[:, None] >= positions)
        seen = seen.reshape(length // q_side, q_side, length // kv_side, kv_side)
        seen = seen.transpose(0, 2, 1, 3) if of == "queries" else seen.transpose(2, 0, 1, 3)
        for pairs, start, full_start, full_stop, stop in zip(seen, *(x[0].tolist() for x in spans), strict=True):
            visited = np.arange(len(pairs))
            inside = (visited >= start) & (visited < stop)
            assert not pairs[~inside].any(), name
            assert start <= full_start <= full_stop <= stop, name
            assert pairs[full_start:full_stop].all(), name
            if name in ("one document", "ends on edges"):
                assert pairs.any(axis=(1, 2))[inside].all(), name
                assert full_stop - full_start == pairs.all(axis=(1, 2)).sum(), name
