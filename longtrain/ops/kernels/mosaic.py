"""Flash attention for TPU, as a Pallas kernel compiled by Mosaic: any layout, any packing, no empty tile.

The grid is the list of visits that the tokens make (`mosaic_grid.py`); here is what a visit computes. Scores are held
as [keys, rows] in all passes, a row being a query of one of the heads that share a key/value head: a softmax then
reduces over sublanes, a row's statistics lie along lanes, and only K and V, the smallest operands, are ever transposed
for a product. Sums are float32; float32 inputs are multiplied as float32, the others on the matrix unit as they are.

Why not splash attention, of which jax (0.10.2, 0.12.0.1) and tokamax (0.0.17) each ship one. Read in their sources:

    what a ring over packed rows needs        jax's splash              tokamax's splash
    keys whose positions are data             no: index in the array    no: index in the array
    tiles skipped by positions that are data  no: a numpy mask, or a    no: likewise
                                              dense [T, S] one
    tiles skipped by segments                 no: masked only           yes
    segment 0 sees nothing                    no: sees itself           no: sees itself
    out and gradients in float32              no: the inputs' dtype     no: dQ is summed in the inputs' dtype

In the layouts here a shard's keys do not lie at the positions of their indices, whose keys they are is known in the
ring's step alone, and a dense mask is what a ring is there to avoid.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from longtrain import layout
from longtrain.ops import tiles
from longtrain.ops.kernels import mosaic_grid
from longtrain.ops.kernels.mosaic_grid import Grid, Visit
from longtrain.ops.kernels.workload import Settings, Workload
from longtrain.ops.tiles import Tokens

DTYPES = ("bfloat16", "float32")
LARGEST_HEAD_DIM = 256

SMALL_VECTOR_MEMORY = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")
"""The kinds of TPU whose cores have less than `mosaic_grid.VMEM_BYTES`: 16 MiB, by jax's table of chips."""


def limits(work: Workload) -> str | None:
    """Why it cannot serve this workload; None where it can."""
    if not work.interpret and work.platform != "tpu":
        return f"it compiles for TPUs, not for {work.platform}"
    if work.device_kind in SMALL_VECTOR_MEMORY:
        return f"{work.device_kind} has too little vector memory: it needs TPU v5e or later"
    if work.dtype not in DTYPES:
        return f"dtype {work.dtype}: one of {', '.join(DTYPES)}"
    if work.head_dim > LARGEST_HEAD_DIM:
        return f"head_dim {work.head_dim}: at most {LARGEST_HEAD_DIM}"
    group = work.q_heads // work.kv_heads
    if not mosaic_grid.step_heads(work.kv_heads, group, work.head_dim, layout.TILE, jnp.dtype(work.dtype)):
        return f"{group} query heads for each key/value head: a tile of theirs does not fit the vector memory"
    return None


def forward(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """See the package. Softmax in one pass: each visit rescales what the visits before it have summed."""
    grid = Grid.of(q_BKGTH, k_BKSH, settings.tile, outer="queries")
    q, k, v = grid.cut_queries(q_BKGTH), grid.cut_keys(k_BKSH), grid.cut_keys(v_BKSH)
    number = jnp.arange(2)[:, None]
    out, stats = grid.run(
        "attention_forward",
        functools.partial(_forward_visit, grid, settings.scale),
        q_tokens,
        kv_tokens,
        operands=[(q, grid.query_block), (k, grid.key_block), (v, grid.key_block)],
        results=[
            (jnp.zeros(q.shape, jnp.float32), grid.query_block),
            (jnp.broadcast_to(jnp.where(number == 0, tiles.UNSEEN, 1.0), grid.rows_shape(2)), grid.row_block(2)),
        ],
        scratch=[grid.query_sums],
        products=2,
        interpret=settings.interpret,
    )
    return grid.join_queries(out, q_BKGTH.shape), grid.join_rows(stats, q_BKGTH.shape)


def backward(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    d_out_BKGTH: jax.Array,
    stats_2BKGT: jax.Array,
    delta_BKGT: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the package. Two passes, one for dQ and one for dK and dV, each of which rebuilds the softmax.

    A single one would save two products of seven, and at every visit add dQ up in memory.
    """
    by_query, by_key = (Grid.of(q_BKGTH, k_BKSH, settings.tile, outer) for outer in ("queries", "keys"))
    q, d_out = by_query.cut_queries(q_BKGTH), by_query.cut_queries(d_out_BKGTH)
    k, v = by_query.cut_keys(k_BKSH), by_query.cut_keys(v_BKSH)
    rows = by_query.cut_rows(stats_2BKGT[0], jnp.log(stats_2BKGT[1]), delta_BKGT)

    def operands(grid: Grid) -> list[mosaic_grid.Block]:
        blocks = (grid.query_block, grid.query_block, grid.row_block(3), grid.key_block, grid.key_block)
        return list(zip((q, d_out, rows, k, v), blocks, strict=True))

    (dq,) = by_query.run(
        "attention_dq",
        functools.partial(_dq_visit, by_query, settings.scale),
        q_tokens,
        kv_tokens,
        operands(by_query),
        results=[(jnp.zeros(q.shape, jnp.float32), by_query.query_block)],
        scratch=[by_query.query_sums],
        products=3,
        interpret=settings.interpret,
    )
    dk, dv = by_key.run(
        "attention_dkv",
        functools.partial(_dkv_visit, by_key, settings.scale),
        q_tokens,
        kv_tokens,
        operands(by_key),
        results=[(jnp.zeros(x.shape, jnp.float32), by_key.key_block) for x in (k, v)],
        products=4,
        interpret=settings.interpret,
    )
    return (
        by_query.join_queries(dq, q_BKGTH.shape),
        by_key.join_keys(dk, k_BKSH.shape),
        by_key.join_keys(dv, v_BKSH.shape),
    )


# --- What a visit computes. Refs hold its blocks: of queries [P, G, T, H], of keys [K, S, H], of rows [P, numbers, R].


def _forward_visit(
    grid: Grid,
    scale: float,
    visit: Visit,
    bias_ST: Callable[[], jax.Array],
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    stats_ref: Any,
    sum_ref: Any,
) -> None:
    peak, total = (pl.ds(n, 1) for n in range(2))

    @pl.when(visit.first)
    def _() -> None:
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        stats_ref[:, peak] = jnp.full((grid.parts, 1, grid.part_rows), tiles.UNSEEN, jnp.float32)
        stats_ref[:, total] = jnp.zeros((grid.parts, 1, grid.part_rows), jnp.float32)

    def part(p: jax.Array, bias: jax.Array | None) -> None:
        v_SH = v_ref[grid.head(p)]
        scores_SR = _scores(grid, k_ref[grid.head(p)], q_ref[p], scale, bias)
        peak_1R = stats_ref[p, peak]
        new_peak_1R = jnp.maximum(peak_1R, scores_SR.max(axis=0, keepdims=True))
        weights_SR = jnp.exp(scores_SR - new_peak_1R)
        shrink_1R = jnp.exp(peak_1R - new_peak_1R)
        stats_ref[p, peak] = new_peak_1R
        stats_ref[p, total] = stats_ref[p, total] * shrink_1R + weights_SR.sum(axis=0, keepdims=True)
        sum_ref[p] = sum_ref[p] * shrink_1R + _dot("sh,sr->hr", v_SH, weights_SR.astype(v_SH.dtype))

    _each_part(grid, visit, bias_ST, part)

    @pl.when(visit.last)
    def _() -> None:
        @pl.loop(0, grid.parts)
        def _(p: jax.Array) -> None:
            total_1R = stats_ref[p, total]
            total_1R = jnp.where(total_1R == 0, 1, total_1R)
            stats_ref[p, total] = total_1R
            out_ref[p] = (sum_ref[p] / total_1R).T.reshape(out_ref.shape[1:])


def _dq_visit(
    grid: Grid,
    scale: float,
    visit: Visit,
    bias_ST: Callable[[], jax.Array],
    q_ref: Any,
    d_out_ref: Any,
    rows_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dq_ref: Any,
    sum_ref: Any,
) -> None:
    @pl.when(visit.first)
    def _() -> None:
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    def part(p: jax.Array, bias: jax.Array | None) -> None:
        k_SH, v_SH = k_ref[grid.head(p)], v_ref[grid.head(p)]
        scores_SR = _scores(grid, k_SH, q_ref[p], scale, bias)
        _, d_scores_SR = _softmax(grid, scores_SR, rows_ref[p], v_SH, d_out_ref[p])
        sum_ref[p] += _dot("sh,sr->hr", k_SH, d_scores_SR.astype(k_SH.dtype))

    _each_part(grid, visit, bias_ST, part)

    @pl.when(visit.last)
    def _() -> None:
        @pl.loop(0, grid.parts)
        def _(p: jax.Array) -> None:
            dq_ref[p] = (sum_ref[p] * scale).T.reshape(dq_ref.shape[1:])


def _dkv_visit(
    grid: Grid,
    scale: float,
    visit: Visit,
    bias_ST: Callable[[], jax.Array],
    q_ref: Any,
    d_out_ref: Any,
    rows_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    @pl.when(visit.first)
    def _() -> None:
        dk_ref[...] = jnp.zeros(dk_ref.shape, jnp.float32)
        dv_ref[...] = jnp.zeros(dv_ref.shape, jnp.float32)

    def part(p: jax.Array, bias: jax.Array | None) -> None:
        head = grid.head(p)
        q_RH, d_out_RH = _rows(grid, q_ref[p]), _rows(grid, d_out_ref[p])
        scores_SR = _scores(grid, k_ref[head], q_ref[p], scale, bias)
        weights_SR, d_scores_SR = _softmax(grid, scores_SR, rows_ref[p], v_ref[head], d_out_ref[p])
        dk_ref[head] += _dot("sr,rh->sh", d_scores_SR.astype(q_RH.dtype), q_RH) * scale
        dv_ref[head] += _dot("sr,rh->sh", weights_SR.astype(d_out_RH.dtype), d_out_RH)

    _each_part(grid, visit, bias_ST, part)


def _each_part(
    grid: Grid, visit: Visit, bias_ST: Callable[[], jax.Array], part: Callable[[jax.Array, jax.Array | None], None]
) -> None:
    """Runs `part(p, bias)` for all parts of the step; the mask is made once for all, and for a full tile not at all."""

    @pl.when(visit.full)
    def _() -> None:
        pl.loop(0, grid.parts)(lambda p: part(p, None))

    @pl.when(jnp.logical_not(visit.full))
    def _() -> None:
        bias = bias_ST()
        pl.loop(0, grid.parts)(lambda p: part(p, bias))


def _rows(grid: Grid, x_GTH: jax.Array) -> jax.Array:
    return x_GTH.reshape(grid.part_rows, grid.head_dim)


def _scores(grid: Grid, k_SH: jax.Array, q_GTH: jax.Array, scale: float, bias_ST: jax.Array | None) -> jax.Array:
    scores_SR = _dot("sh,rh->sr", k_SH, _rows(grid, q_GTH)) * scale
    return scores_SR if bias_ST is None else scores_SR + jnp.concatenate([bias_ST] * grid.part_heads, axis=1)


def _softmax(
    grid: Grid, scores_SR: jax.Array, rows_3R: jax.Array, v_SH: jax.Array, d_out_GTH: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The weights and the gradient of the scores, from the rows' peak, log of the total, and delta."""
    peak_1R, log_total_1R, delta_1R = (rows_3R[n : n + 1] for n in range(3))
    weights_SR = jnp.exp((scores_SR - peak_1R) - log_total_1R)
    d_weights_SR = _dot("sh,rh->sr", v_SH, _rows(grid, d_out_GTH))
    return weights_SR, weights_SR * (d_weights_SR - delta_1R)


def _dot(expression: str, x: jax.Array, y: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(expression, x, y, precision=precision, preferred_element_type=jnp.float32)
