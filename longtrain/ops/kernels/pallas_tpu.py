"""Attention on TPU: a flash kernel in Pallas whose grid is the list of the tiles that have something in them.

A visit is one tile of queries meeting one tile of keys, for some of the heads. Which visits there are depends on
the tokens: they are listed on the device (`_visits`), the list is prefetched into scalar memory, the length of the
grid is the length of the list, and the block that a step fetches is read from it. So an empty tile is neither
fetched nor computed nor stepped over, in all three passes, and while one visit computes the next one's blocks are
on their way. The forward and the pass for dQ list the visits by tile of queries, the pass for dK and dV by tile of
keys; each sums in place and writes a tile once. Tiles that nobody visits keep the value the results begin with.

All three passes hold scores as [keys, rows], a row being a query of one of the G heads that share a key/value head:
the softmax then reduces over sublanes, a row's statistics lie along lanes as they do in memory, and only K and V,
the smallest operands, are ever transposed for a product.

Why not splash attention, which jax (0.10.2, 0.12.0.1) and tokamax (0.0.17) ship for TPU. Read in their sources:

    what a ring over packed rows needs             jax's splash             tokamax's splash
    keys' positions that are data                  no: index in the array   no: index in the array
    tiles skipped by position, known at run time   no: numpy mask, or a     no: likewise
                                                   dense [T, S] one
    tiles skipped by segment                       no, masked only          yes
    segment 0 sees nothing                         no: sees itself          no: sees itself
    out and gradients in float32                   no: the inputs' dtype    no: dQ is summed in the inputs' dtype
    float32 computed as float32                    no: default precision    no: default precision

With the layouts here (`layout.py`) a shard's keys are not at the positions of their array index, and in a ring which
shard's they are is known at run time alone; a dense mask is what the ring is there to avoid.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from longtrain.ops import tiles
from longtrain.ops.tiles import Tokens

LANES = 128
"""Of a vector register: tiles and head_dim are padded to a multiple."""

PRODUCT_ROWS = 1024
"""Rows (queries x heads) of one matrix product, at most: keeps a tile of scores at 1 MiB."""

LISTED_VISITS = 1 << 16
"""Visits of one call of a kernel, at most: their list takes a quarter of the scalar memory. More are several calls."""

VMEM_BYTES = 40 << 20
"""Vector memory that a kernel may use, of the 64 MiB a core has on v5p (128 MiB on v5e and v6e)."""

NO_VISIT = jnp.iinfo(jnp.int32).max

Arrays = tuple[jax.Array, ...]


def forward(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    *,
    scale: float,
    tile: int,
) -> tuple[jax.Array, jax.Array]:
    """See the package. Softmax in one pass: each visit rescales what the visits before it have summed."""
    grid = _Grid.of(q_BKGTH, k_BKSH, tile, outer="queries")
    q, k, v = grid.queries(q_BKGTH), grid.keys(k_BKSH), grid.keys(v_BKSH)
    unseen = jnp.full(grid.rows_shape, tiles.UNSEEN, jnp.float32)
    out, stats = grid.run(
        functools.partial(_forward_kernel, grid, scale),
        (q_tokens, kv_tokens),
        operands=((q, grid.query_block), (k, grid.key_block), (v, grid.key_block)),
        results=(
            (jnp.zeros(q.shape, jnp.float32), grid.query_block),
            (jnp.concatenate((unseen, jnp.ones_like(unseen)), axis=3), grid.row_block(2)),
        ),
        scratch=(grid.sum_shape,),
    )
    peak_BKGT, total_BKGT = (grid.from_rows(stats[:, :, :, n], q_BKGTH) for n in range(2))
    return grid.from_queries(out, q_BKGTH), jnp.stack((peak_BKGT, total_BKGT))


def backward(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    d_out_BKGTH: jax.Array,
    stats_2BKGT: jax.Array,
    delta_BKGT: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    *,
    scale: float,
    tile: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the package. Two passes, each rebuilding the softmax from its global statistics: one for dQ, one for dK, dV.

    One pass for all three would save two of seven products, and add dQ up in memory at every visit.
    """
    by_query = _Grid.of(q_BKGTH, k_BKSH, tile, outer="queries")
    by_key = dataclasses.replace(by_query, outer="keys")
    q, d_out = by_query.queries(q_BKGTH), by_query.queries(d_out_BKGTH)
    k, v = by_query.keys(k_BKSH), by_query.keys(v_BKSH)
    rows = (stats_2BKGT[0], jnp.log(stats_2BKGT[1]), delta_BKGT)
    softmax = jnp.stack([by_query.to_rows(x) for x in rows], axis=3)

    def run(grid: _Grid, kernel: Callable, results: Sequence, scratch: Sequence) -> Arrays:
        operands = (
            (q, grid.query_block),
            (d_out, grid.query_block),
            (softmax, grid.row_block(3)),
            (k, grid.key_block),
            (v, grid.key_block),
        )
        return grid.run(
            functools.partial(kernel, grid, scale), (q_tokens, kv_tokens), operands, results, scratch
        )

    (dq,) = run(
        by_query, _dq_kernel, ((jnp.zeros(q.shape, jnp.float32), by_query.query_block),), (by_query.sum_shape,)
    )
    zeros = (jnp.zeros(k.shape, jnp.float32), by_key.key_block)
    dk, dv = run(by_key, _dkv_kernel, (zeros, zeros), ())
    return by_query.from_queries(dq, q_BKGTH), by_key.from_keys(dk, k_BKSH), by_key.from_keys(dv, k_BKSH)


# --- The kernels. Refs hold one visit's blocks: q_PGTH of P parts, k_KSH of the step's key/value heads. --------------


def _forward_kernel(
    grid: "_Grid",
    scale: float,
    visits_ref: Any,
    q_tokens_ref: Any,
    kv_tokens_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    stats_ref: Any,
    sum_ref: Any,
) -> None:
    visit = grid.visit(visits_ref, pl.program_id(1))

    @pl.when(visit.first)
    def _() -> None:
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        stats_ref[:, 0:1] = jnp.full((grid.parts, 1, grid.part_rows), tiles.UNSEEN, jnp.float32)
        stats_ref[:, 1:2] = jnp.zeros((grid.parts, 1, grid.part_rows), jnp.float32)

    def part(p: jax.Array, bias_ST: jax.Array | None) -> None:
        v_SH = v_ref[grid.head(p)]
        scores_SR = grid.scores(q_ref[p], k_ref[grid.head(p)], scale, bias_ST)
        peak_1R, total_1R = stats_ref[p, 0:1], stats_ref[p, 1:2]
        new_peak_1R = jnp.maximum(peak_1R, scores_SR.max(axis=0, keepdims=True))
        weights_SR = jnp.exp(scores_SR - new_peak_1R)
        shrink_1R = jnp.exp(peak_1R - new_peak_1R)
        stats_ref[p, 0:1] = new_peak_1R
        stats_ref[p, 1:2] = total_1R * shrink_1R + weights_SR.sum(axis=0, keepdims=True)
        add_HR = _dot(v_SH, weights_SR.astype(v_SH.dtype), contract=(0, 0))
        sum_ref[p] = sum_ref[p] * shrink_1R + add_HR

    grid.each_part(visit, part, q_tokens_ref, kv_tokens_ref)

    @pl.when(visit.last)
    def _() -> None:
        @pl.loop(0, grid.parts)
        def _(p: jax.Array) -> None:
            total_1R = stats_ref[p, 1:2]
            total_1R = jnp.where(total_1R == 0, 1, total_1R)
            stats_ref[p, 1:2] = total_1R
            out_ref[p] = (sum_ref[p] / total_1R).T.reshape(out_ref.shape[1:])


def _dq_kernel(
    grid: "_Grid",
    scale: float,
    visits_ref: Any,
    q_tokens_ref: Any,
    kv_tokens_ref: Any,
    q_ref: Any,
    d_out_ref: Any,
    softmax_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dq_ref: Any,
    sum_ref: Any,
) -> None:
    visit = grid.visit(visits_ref, pl.program_id(1))

    @pl.when(visit.first)
    def _() -> None:
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

    def part(p: jax.Array, bias_ST: jax.Array | None) -> None:
        k_SH, v_SH = k_ref[grid.head(p)], v_ref[grid.head(p)]
        scores_SR = grid.scores(q_ref[p], k_SH, scale, bias_ST)
        _, d_scores_SR = grid.softmax(scores_SR, softmax_ref[p], d_out_ref[p], v_SH)
        sum_ref[p] += _dot(k_SH, d_scores_SR.astype(k_SH.dtype), contract=(0, 0))

    grid.each_part(visit, part, q_tokens_ref, kv_tokens_ref)

    @pl.when(visit.last)
    def _() -> None:
        @pl.loop(0, grid.parts)
        def _(p: jax.Array) -> None:
            dq_ref[p] = (sum_ref[p] * scale).T.reshape(dq_ref.shape[1:])


def _dkv_kernel(
    grid: "_Grid",
    scale: float,
    visits_ref: Any,
    q_tokens_ref: Any,
    kv_tokens_ref: Any,
    q_ref: Any,
    d_out_ref: Any,
    softmax_ref: Any,
    k_ref: Any,
    v_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    visit = grid.visit(visits_ref, pl.program_id(1))

    @pl.when(visit.first)
    def _() -> None:
        dk_ref[...] = jnp.zeros(dk_ref.shape, jnp.float32)
        dv_ref[...] = jnp.zeros(dv_ref.shape, jnp.float32)

    def part(p: jax.Array, bias_ST: jax.Array | None) -> None:
        head = grid.head(p)
        scores_SR = grid.scores(q_ref[p], k_ref[head], scale, bias_ST)
        weights_SR, d_scores_SR = grid.softmax(scores_SR, softmax_ref[p], d_out_ref[p], v_ref[head])
        q_RH, d_out_RH = grid.rows(q_ref[p]), grid.rows(d_out_ref[p])
        dk_ref[head] += _dot(d_scores_SR.astype(q_RH.dtype), q_RH, contract=(1, 0)) * scale
        dv_ref[head] += _dot(weights_SR.astype(d_out_RH.dtype), d_out_RH, contract=(1, 0))

    grid.each_part(visit, part, q_tokens_ref, kv_tokens_ref)


# --- The grid ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Visit:
    """One step of the grid: places (row of the batch, tile of queries, tile of keys), and what is known of it."""

    row: jax.Array
    q_tile: jax.Array
    kv_tile: jax.Array
    full: jax.Array
    first: jax.Array
    """Of the visits to its outer tile (a tile of queries or of keys): the sums begin here."""
    last: jax.Array


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The shapes of a call, its blocks, and the list of visits.

    A key/value head's query heads are split into `share` parts, so that a part's rows fit one product:
    q is held as q_BPGTH, P = K * share parts of G heads.
    """

    batch: int
    kv_heads: int
    share: int
    part_heads: int
    q_tiles: int
    kv_tiles: int
    tile: int
    head_dim: int
    step_heads: int
    outer: str

    @classmethod
    def of(cls, q_BKGTH: jax.Array, k_BKSH: jax.Array, tile: int, outer: str) -> "_Grid":
        B, K, G, T, H = q_BKGTH.shape
        tile = _round_up(tile, LANES)
        part_heads = max(n for n in range(1, G + 1) if G % n == 0 and (n == 1 or n * tile <= PRODUCT_ROWS))
        head_dim = _round_up(H, LANES)
        grid = cls(
            batch=B,
            kv_heads=K,
            share=G // part_heads,
            part_heads=part_heads,
            q_tiles=-(-T // tile),
            kv_tiles=-(-k_BKSH.shape[2] // tile),
            tile=tile,
            head_dim=head_dim,
            step_heads=1,
            outer=outer,
        )
        # A v5p device is two cores, which share the heads; one core takes several heads a step.
        fitting = [n for n in range(1, max(K // 2, 1) + 1) if K % n == 0 and n <= 4]
        return dataclasses.replace(grid, step_heads=max(fitting))

    @property
    def parts(self) -> int:
        """Of one step."""
        return self.step_heads * self.share

    @property
    def part_rows(self) -> int:
        return self.part_heads * self.tile

    # Arrays to and from the shapes of the kernels.

    def queries(self, x_BKGTH: jax.Array) -> jax.Array:
        x_BKGTH = _pad(_pad(x_BKGTH, 3, self.q_tiles * self.tile), 4, self.head_dim)
        return x_BKGTH.reshape(self.batch, -1, self.part_heads, *x_BKGTH.shape[3:])

    def from_queries(self, x_BPGTH: jax.Array, like_BKGTH: jax.Array) -> jax.Array:
        B, K, G, T, H = like_BKGTH.shape
        return x_BPGTH.reshape(B, K, G, *x_BPGTH.shape[3:])[:, :, :, :T, :H]

    def keys(self, x_BKSH: jax.Array) -> jax.Array:
        return _pad(_pad(x_BKSH, 2, self.kv_tiles * self.tile), 3, self.head_dim)

    def from_keys(self, x_BKSH: jax.Array, like_BKSH: jax.Array) -> jax.Array:
        return x_BKSH[:, :, : like_BKSH.shape[2], : like_BKSH.shape[3]]

    def to_rows(self, x_BKGT: jax.Array) -> jax.Array:
        """A number of each row, [B, P, tile of queries, R]: heads of a part one after the other, as in its scores."""
        x_BKGT = _pad(x_BKGT, 3, self.q_tiles * self.tile)
        x = x_BKGT.reshape(self.batch, -1, self.part_heads, self.q_tiles, self.tile).swapaxes(2, 3)
        return x.reshape(*x.shape[:3], self.part_rows)

    def from_rows(self, x_BPNR: jax.Array, like_BKGTH: jax.Array) -> jax.Array:
        B, K, G, T, _ = like_BKGTH.shape
        x = x_BPNR.reshape(*x_BPNR.shape[:3], self.part_heads, self.tile).swapaxes(2, 3)
        return x.reshape(B, K, G, -1)[:, :, :, :T]

    @property
    def rows_shape(self) -> tuple[int, ...]:
        return (self.batch, self.kv_heads * self.share, self.q_tiles, 1, self.part_rows)

    @property
    def sum_shape(self) -> Any:
        return pltpu.VMEM((self.parts, self.head_dim, self.part_rows), jnp.float32)

    # Blocks: what a step fetches of each array.

    @property
    def query_block(self) -> pl.BlockSpec:
        shape = (None, self.parts, self.part_heads, self.tile, self.head_dim)
        return pl.BlockSpec(shape, self._index(lambda heads, visit: (visit.row, heads, 0, visit.q_tile, 0)))

    @property
    def key_block(self) -> pl.BlockSpec:
        shape = (None, self.step_heads, self.tile, self.head_dim)
        return pl.BlockSpec(shape, self._index(lambda heads, visit: (visit.row, heads, visit.kv_tile, 0)))

    def row_block(self, numbers: int) -> pl.BlockSpec:
        shape = (None, self.parts, None, numbers, self.part_rows)
        return pl.BlockSpec(shape, self._index(lambda heads, visit: (visit.row, heads, visit.q_tile, 0, 0)))

    @property
    def token_blocks(self) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        shape = (None, 2, self.tile)
        return (
            pl.BlockSpec(shape, self._index(lambda _, visit: (visit.row, 0, visit.q_tile))),
            pl.BlockSpec(shape, self._index(lambda _, visit: (visit.row, 0, visit.kv_tile))),
        )

    def _index(self, place: Callable[[Any, _Visit], tuple]) -> Callable:
        return lambda heads, step, visits_ref: place(heads, self.visit(visits_ref, step))

    # The list of visits: each is one int32, of the bits (row, outer tile, inner tile, full).

    @property
    def _sizes(self) -> tuple[int, int]:
        """Tiles of the outer and the inner side."""
        sizes = (self.q_tiles, self.kv_tiles)
        return sizes if self.outer == "queries" else sizes[::-1]

    @property
    def _bits(self) -> tuple[int, int]:
        outer, inner = self._sizes
        return (outer - 1).bit_length(), (inner - 1).bit_length()

    def visit(self, visits_ref: Any, step: Any) -> _Visit:
        outer_bits, inner_bits = self._bits

        def outer(place: Any) -> Any:
            return visits_ref[place] >> (inner_bits + 1)

        this = visits_ref[step + 1]  # the list has one more at either end
        outer_tile = (this >> (inner_bits + 1)) & ((1 << outer_bits) - 1)
        inner_tile = (this >> 1) & ((1 << inner_bits) - 1)
        by_query = self.outer == "queries"
        return _Visit(
            row=this >> (outer_bits + inner_bits + 1),
            q_tile=outer_tile if by_query else inner_tile,
            kv_tile=inner_tile if by_query else outer_tile,
            full=(this & 1) == 1,
            first=outer(step) != outer(step + 1),
            last=outer(step + 2) != outer(step + 1),
        )

    def visits(self, q_tokens: Tokens, kv_tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """The lists of visits, int32 [calls, LISTED_VISITS + 2], and their lengths, int32 [calls]."""
        outer_bits, inner_bits = self._bits
        outer_tiles, inner_tiles = self._sizes
        q = tiles.Bounds(*(x[:, :, None] for x in tiles.bounds(q_tokens, self.tile)))
        kv = tiles.Bounds(*(x[:, None, :] for x in tiles.bounds(kv_tokens, self.tile)))
        full, empty = tiles.full(q, kv), tiles.empty(q, kv)
        if self.outer == "keys":
            full, empty = full.swapaxes(1, 2), empty.swapaxes(1, 2)
        row, outer, inner = (lax.broadcasted_iota(jnp.int32, full.shape, axis) for axis in range(3))
        visits = ((((row << outer_bits) | outer) << inner_bits | inner) << 1) | full
        visits = jnp.where(empty, NO_VISIT, visits).reshape(-1, inner_tiles)

        # All the visits of an outer tile are in one list.
        rows = min(max(LISTED_VISITS // inner_tiles, 1), self.batch * outer_tiles)
        visits = _pad(visits, 0, _round_up(len(visits), rows), value=NO_VISIT).reshape(-1, rows * inner_tiles)
        lengths = (visits != NO_VISIT).sum(axis=1, dtype=jnp.int32)
        ends = functools.partial(jnp.full, (len(visits), 1), dtype=jnp.int32)
        return jnp.concatenate((ends(-1), jnp.sort(visits, axis=1), ends(NO_VISIT)), axis=1), lengths

    def run(
        self,
        kernel: Callable,
        tokens: tuple[Tokens, Tokens],
        operands: Sequence[tuple[jax.Array, pl.BlockSpec]],
        results: Sequence[tuple[jax.Array, pl.BlockSpec]],
        scratch: Sequence[Any],
    ) -> Arrays:
        """The results (array and block each) after all visits: `kernel` is called for every visit and step of heads.

        Each result begins as the array given, and the tiles that are visited are replaced.
        """
        q_tokens, kv_tokens = (
            Tokens(*(_pad(x, 1, count * self.tile) for x in side))
            for side, count in zip(tokens, (self.q_tiles, self.kv_tiles), strict=True)
        )
        token_arrays = (jnp.stack(q_tokens, axis=1), jnp.stack(kv_tokens, axis=1))
        arrays, blocks = (*token_arrays, *(x for x, _ in operands)), (*self.token_blocks, *(x for _, x in operands))
        result_blocks = [x for _, x in results]

        def body(*refs: Any) -> None:
            inputs = 1 + len(arrays)
            kernel(*refs[:inputs], *refs[inputs + len(results) :])  # the results as they were are not read

        def call(results: Arrays, visits: Arrays) -> tuple[Arrays, None]:
            listed, length = visits
            return pl.pallas_call(
                body,
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=(self.kv_heads // self.step_heads, length),
                    in_specs=[*blocks, *(pl.BlockSpec(memory_space=pl.ANY) for _ in results)],
                    out_specs=result_blocks,
                    scratch_shapes=scratch,
                ),
                out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results),
                input_output_aliases={1 + len(arrays) + n: n for n in range(len(results))},
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
                ),
            )(listed, *arrays, *results), None

        return lax.scan(call, tuple(x for x, _ in results), self.visits(q_tokens, kv_tokens))[0]

    # In the kernels.

    def each_part(self, visit: _Visit, part: Callable, q_tokens_ref: Any, kv_tokens_ref: Any) -> None:
        """Runs `part(p, bias_ST)` for all parts of the step; a full tile has no bias."""

        @pl.when(visit.full)
        def _() -> None:
            lax.fori_loop(0, self.parts, lambda p, _: part(p, None), None)

        @pl.when(jnp.logical_not(visit.full))
        def _() -> None:
            kv_S2 = kv_tokens_ref[...].T
            keys, queries = Tokens(kv_S2[:, 0:1], kv_S2[:, 1:2]), Tokens(q_tokens_ref[0:1], q_tokens_ref[1:2])
            seen = (queries.segments == keys.segments) & (keys.segments != 0) & (queries.positions >= keys.positions)
            bias_ST = jnp.where(seen, jnp.float32(0), jnp.float32(tiles.MASKED))
            lax.fori_loop(0, self.parts, lambda p, _: part(p, bias_ST), None)

    def head(self, p: jax.Array) -> jax.Array:
        return lax.div(p, jnp.int32(self.share))

    def rows(self, x_GTH: jax.Array) -> jax.Array:
        return x_GTH.reshape(self.part_rows, self.head_dim)

    def scores(self, q_GTH: jax.Array, k_SH: jax.Array, scale: float, bias_ST: jax.Array | None) -> jax.Array:
        scores_SR = _dot(k_SH, self.rows(q_GTH), contract=(1, 1)) * scale
        return scores_SR if bias_ST is None else scores_SR + jnp.concatenate([bias_ST] * self.part_heads, axis=1)

    def softmax(
        self, scores_SR: jax.Array, softmax_3R: jax.Array, d_out_GTH: jax.Array, v_SH: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The weights and the gradient of the scores, from each row's peak, log of the total, and delta."""
        peak_1R, log_total_1R, delta_1R = softmax_3R[0:1], softmax_3R[1:2], softmax_3R[2:3]
        weights_SR = jnp.exp((scores_SR - peak_1R) - log_total_1R)
        d_weights_SR = _dot(v_SH, self.rows(d_out_GTH), contract=(1, 1))
        return weights_SR, weights_SR * (d_weights_SR - delta_1R)


def _dot(x: jax.Array, y: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A product of matrices over one dim of each, summed in float32; float32 is computed as float32."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """`x` with `axis` of `size`; of tokens, what is added is padding."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)
