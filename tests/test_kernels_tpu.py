"""The TPU kernel: its visits against brute force, its numbers by interpretation, its programs by compiling for TPUs
that are not there."""

import dataclasses
import functools
import importlib.util
import itertools
import math
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import test_attention
from longtrain import layout
from longtrain.ops import kernels, tiles
from longtrain.ops.attention import attention
from longtrain.ops.kernels import mosaic, mosaic_grid
from longtrain.ops.kernels.workload import Settings, interpreted
from longtrain.ops.tiles import Tokens
from longtrain.plan import targets
from test_kernels import workload

TILE = 8
TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(layout, "TILE", TILE)
    monkeypatch.setattr(mosaic_grid, "LANES", TILE)


# --- The choice -------------------------------------------------------------------------------------------------------


def test_a_tpu_takes_it_and_other_platforms_are_refused_it():
    assert kernels.select("auto", workload(TPU))[0] == "mosaic"
    with pytest.raises(ValueError, match="'mosaic' cannot serve here: it compiles for TPUs, not for cpu.*take xla"):
        kernels.select("mosaic", workload(jax.devices()[0]))
    q, k = (jnp.zeros((1, 16, heads, 64)) for heads in (4, 2))
    with pytest.raises(ValueError, match="it compiles for TPUs, not for cpu"):
        attention(q, k, k, **test_attention.plain_tokens(1, 16), kernel="mosaic")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"dtype": "float16"}, "dtype float16: one of bfloat16, float32"),
        ({"head_dim": 257}, "head_dim 257: at most 256"),
        ({"q_heads": 512, "kv_heads": 8}, "64 query heads for each key/value head: .* does not fit the vector memory"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_numbers(facts, message, monkeypatch):
    monkeypatch.undo()  # tiles of full size
    assert mosaic.limits(workload(TPU)) is None
    assert re.search(message, mosaic.limits(workload(TPU, **facts)))
    assert kernels.select("auto", workload(TPU, **facts))[0] == "xla"


@pytest.mark.parametrize(
    ("kind", "serves"),
    [("TPU v3", False), ("TPU v4", False), ("TPU v4 lite", False), ("TPU v5 lite", True), ("TPU v5", True)],
)
def test_a_tpu_with_less_vector_memory_is_refused_it_by_name(kind, serves):
    work = workload(SimpleNamespace(platform="tpu", device_kind=kind))
    assert kernels.select("auto", work)[0] == ("mosaic" if serves else "xla")
    if not serves:
        with pytest.raises(ValueError, match=f"{kind} has too little vector memory: it needs TPU v5e or later"):
            kernels.select("mosaic", work)


@pytest.mark.parametrize(
    ("kv_heads", "group", "dtype", "expected"),
    [(8, 4, "bfloat16", 4), (8, 4, "float32", 4), (2, 4, "bfloat16", 1), (1, 8, "bfloat16", 1), (6, 1, "bfloat16", 3)],
)
def test_a_step_takes_several_heads_and_leaves_half_of_them_to_the_other_core(kv_heads, group, dtype, expected):
    assert mosaic_grid.step_heads(kv_heads, group, 128, 256, jnp.dtype(dtype)) == expected


@pytest.mark.parametrize("outer", ["queries", "keys"])
def test_more_tiles_than_can_be_numbered_are_refused_and_the_last_that_can_be_ends(outer):
    def grid_of(rows: int, keys: int) -> mosaic_grid.Grid:
        q, k = (jax.ShapeDtypeStruct((rows, *shape, 64), jnp.bfloat16) for shape in ((1, 1, 2**22), (1, keys)))
        return mosaic_grid.Grid.of(q, k, 256, outer)

    for rows, keys in ((1, 2**24), (2, 2**23)):
        with pytest.raises(ValueError, match=f"{rows} rows of 4194304 queries and {keys} keys are more tiles than 30"):
            grid_of(rows, keys)
    grid, number = grid_of(1, 2**23), 2**30 - 1
    assert mosaic_grid.bits_of(1, grid.q_tiles, grid.kv_tiles) == 30
    visit = grid.visit([-1, number, int(mosaic_grid.NO_VISIT)], 0)
    assert (visit.row, visit.q_tile, visit.kv_tile) == (0, grid.q_tiles - 1, grid.kv_tiles - 1)
    assert visit.full and visit.first and visit.last


# --- The visits -------------------------------------------------------------------------------------------------------


def tokens(length: int) -> Tokens:
    rows = test_attention.token_rows(length).values()
    return Tokens(*(jnp.asarray(np.stack(x), jnp.int32) for x in zip(*rows, strict=True)))


@pytest.mark.parametrize("outer", ["queries", "keys"])
@pytest.mark.parametrize("longest", [1 << 16, 40], ids=["one list", "several lists"])
def test_the_lists_hold_the_tiles_that_are_not_empty_each_once_and_in_order(outer, longest, monkeypatch):
    monkeypatch.setattr(mosaic_grid, "LISTED_VISITS", longest)
    q_tokens, kv_tokens = tokens(96), Tokens(*(x[:, 24:] for x in tokens(96)))
    B = len(q_tokens.positions)
    grid = mosaic_grid.Grid.of(jnp.zeros((B, 1, 1, 96, 8)), jnp.zeros((B, 1, 72, 8)), TILE, outer)
    lists, lengths = jax.jit(grid.list_visits)(q_tokens, kv_tokens)
    assert (len(lists) > 1) == (longest == 40) and (lengths <= max(longest, 12)).all()

    listed = []
    for visits, length in zip(np.asarray(lists), lengths, strict=True):
        steps = [grid.visit(visits, step) for step in range(length)]
        places = [(v.row, *((v.q_tile, v.kv_tile) if outer == "queries" else (v.kv_tile, v.q_tile))) for v in steps]
        assert places == sorted(places)
        sums = [place[:2] for place in places]
        assert [bool(v.first) for v in steps] == [a != b for a, b in itertools.pairwise([None, *sums])]
        assert [bool(v.last) for v in steps] == [a != b for a, b in itertools.pairwise([*sums, None])]
        listed += [(v.row, v.q_tile, v.kv_tile, bool(v.full)) for v in steps]

    cut = functools.partial(tiles.bounds, size=TILE)
    q, kv = (jax.tree.map(np.asarray, cut(x)) for x in (q_tokens, kv_tokens))
    expected = []
    for b, i, j in np.ndindex(B, 12, 9):
        pair = (tiles.Bounds(*(x[b, i] for x in q)), tiles.Bounds(*(x[b, j] for x in kv)))
        if not tiles.empty(*pair):
            expected.append((b, i, j, bool(tiles.full(*pair))))
    assert sorted(listed) == expected


def test_a_block_of_keys_that_nobody_sees_gives_nothing():
    """Not a single visit, as when a ring holds later keys: what the results begin with is the answer."""
    q, k, v = (jax.random.normal(key, (1, 2, 16, 8)) for key in jax.random.split(jax.random.key(0), 3))
    q = q[:, :, None]
    first, second = (Tokens(jnp.arange(start, start + 16)[None], jnp.ones((1, 16), jnp.int32)) for start in (0, 16))
    settings = Settings(scale=1.0, tile=TILE, block=16, interpret=True)
    out, stats = jax.jit(functools.partial(mosaic.forward, settings=settings))(q, k, v, first, second)
    assert (out == 0).all() and (stats[0] == tiles.UNSEEN).all() and (stats[1] == 1).all()
    gradients = jax.jit(functools.partial(mosaic.backward, settings=settings))(
        q, k, v, q, stats, jnp.ones((1, 2, 1, 16)), first, second
    )
    assert all((x == 0).all() for x in gradients)


# --- The numbers ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case(test_attention.Case):
    @functools.cached_property
    def call(self):
        return functools.partial(super().call, kernel="mosaic")

    def __call__(self, rows):
        with interpreted():
            return super().__call__(rows)


def case(*arguments, **rest) -> Case:
    plain = test_attention.case(*arguments, **rest)
    return Case(**{field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)})


CASES = [
    case("one device, odd length, groups of 3", layout="contiguous", length=77, heads=(3, 1), head_dim=60),
    case("ring 4", mesh="context=4"),
]

MORE_CASES = [
    case("one device, groups in parts", layout="contiguous", heads=(8, 2), head_dim=128),
    case("ring 4, contiguous, bfloat16", layout="contiguous", mesh="context=4", head_dim=96, dtype=jnp.bfloat16),
    case("ring 2, zigzag, over tensor too", layout="zigzag", mesh="context=2 tensor=2", heads=(8, 4)),
    case("all_gather 2, several lists", "all_gather", mesh="context=2", length=100),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_dense_attention(case):
    test_attention.assert_exact(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=lambda case: case.name)
def test_it_is_dense_attention_in_more_ways(case, monkeypatch):
    if "parts" in case.name:
        monkeypatch.setattr(mosaic_grid, "PRODUCT_ROWS", 2 * TILE)
    if "lists" in case.name:
        monkeypatch.setattr(mosaic_grid, "LISTED_VISITS", 40)
    test_attention.assert_exact(case)


@pytest.mark.slow
def test_scores_of_any_size_are_as_exact_as_dense_float32_attention(monkeypatch):
    monkeypatch.setattr(mosaic_grid, "LANES", 64)
    ring = case("ring 4", mesh="context=4", length=512, heads=(2, 1))
    test_attention.test_scores_of_any_size_are_as_exact_as_dense_float32_attention(ring, monkeypatch)


@pytest.mark.slow
def test_documents_do_not_see_each_other_by_a_bit():
    test_attention.test_documents_do_not_see_each_other_by_a_bit(CASES[1])


# --- The programs for TPUs --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.ahead_of_time
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the extra `plan` (libtpu)")
@pytest.mark.parametrize(("kind", "dtype", "head_dim"), [("v5p", jnp.bfloat16, 128), ("v6e", jnp.float32, 64)])
def test_a_ring_compiles_for_tpus_in_linear_memory(kind, dtype, head_dim, monkeypatch):
    """Forward and backward of 64K tokens over four chips, with Llama 3 8B's heads."""
    monkeypatch.undo()  # tiles of full size
    S, N, K, shards = 65536, 32, 8, 4
    target = targets.target(kind, shards)
    for name, value in target.environment.items():
        monkeypatch.setenv(name, value)
    shape = (1, 1, shards, 1)
    axes = (AxisType.Auto,) * 4
    mesh = jax.make_mesh(shape, test_attention.AXES, axis_types=axes, devices=target.abstract_devices())
    sharding = NamedSharding(mesh, PartitionSpec(None, "context"))

    def both(q, k, v, d_out, positions, segments):
        facts = {"positions_BS": positions, "segments_BS": segments, "mesh": mesh, "layout": "dealt"}
        return jax.vjp(functools.partial(attention, **facts), q, k, v)[1](d_out)

    q, k = (jax.ShapeDtypeStruct((1, S, heads, head_dim), dtype, sharding=sharding) for heads in (N, K))
    numbers = jax.ShapeDtypeStruct((1, S), jnp.int32, sharding=sharding)
    program = jax.jit(both).lower(q, k, k, q, numbers, numbers).compile()
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2 + 3 + 3  # a ring's loop and the steps beside it
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)]
    assert max(sizes) == S // shards * N * 128  # no scores, no mask: nothing above a shard's q, in whole lanes
