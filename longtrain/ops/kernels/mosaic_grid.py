"""The grid of the TPU kernel: which blocks meet in which step, and how arrays are cut into blocks.

A visit is one tile of queries meeting one tile of keys in one row of the batch. Which visits there are depends on the
tokens: they are listed on the device, the list goes to scalar memory ahead of the kernel, the length of the grid is
the length of the list, and the blocks that a step fetches are looked up in it. So an empty tile is neither fetched,
computed nor stepped over, and the next visit's blocks are on their way while one computes.

A list is sorted by its outer side, the one whose sums the pass makes (queries, or keys): these stay in vector memory
from the first visit to the last and are written once. Tiles that are not visited keep what the result began with.
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
"""Rows (queries x heads) of one matrix product, at most: keeps a tile of scores at 1 MiB. By the compiler's schedule
for v5p half as many make the backward passes 8 to 13 % longer, and the forward pass no shorter."""

LISTED_VISITS = 1 << 16
"""Visits in one list, at most: a quarter of the scalar memory. Where there may be more, the kernel is called again."""

VMEM_BYTES = 48 << 20
"""Vector memory that a kernel may use: a core of v5p has 64 MiB, of v5e and v6e 128 MiB, of v2 to v4 16 MiB."""

STEP_HEADS = 4
"""Key/value heads of one step, at most: enough work to hide what a step costs and what it fetches."""

VISIT_BITS = 30
"""Of a visit's number, at most: with all 31 of an int32 the last outer tile would begin like NO_VISIT, and not end."""

NO_VISIT = jnp.iinfo(jnp.int32).max

Arrays = tuple[jax.Array, ...]
Block = tuple[jax.Array, pl.BlockSpec]
"""An array and how it is cut."""


@dataclasses.dataclass(frozen=True)
class Visit:
    """What a step does, read from the list."""

    row: Any
    q_tile: Any
    kv_tile: Any
    full: Any
    """Every query sees every key."""
    first: Any
    """Of the visits to this outer tile: its sums begin."""
    last: Any


@dataclasses.dataclass(frozen=True)
class Grid:
    """The sizes of a call, its blocks, and its visits.

    A key/value head's G query heads are cut into `share` parts whose rows (queries x heads) fit one product. So q is
    held as q_BPGTH: P = K * share parts, G now the heads of a part.
    """

    batch: int
    kv_heads: int
    step_heads: int
    share: int
    part_heads: int
    q_tiles: int
    kv_tiles: int
    tile: int
    head_dim: int
    outer: str
    """The side that is summed for: `queries` or `keys`."""

    @classmethod
    def of(cls, q_BKGTH: jax.Array, k_BKSH: jax.Array, tile: int, outer: str) -> "Grid":
        B, K, G, T, H = q_BKGTH.shape
        tile = _round_up(tile, LANES)
        part_heads = max(n for n in _divisors(G) if n == 1 or n * tile <= PRODUCT_ROWS)
        grid = cls(
            batch=B,
            kv_heads=K,
            step_heads=step_heads(K, G, H, tile, q_BKGTH.dtype),
            share=G // part_heads,
            part_heads=part_heads,
            q_tiles=-(-T // tile),
            kv_tiles=-(-k_BKSH.shape[2] // tile),
            tile=tile,
            head_dim=_round_up(H, LANES),
            outer=outer,
        )
        if bits_of(B, grid.q_tiles, grid.kv_tiles) > VISIT_BITS:
            what = f"{B} rows of {T} queries and {k_BKSH.shape[2]} keys"
            raise ValueError(f"{what} are more tiles than {VISIT_BITS} bits number")
        return grid

    @property
    def parts(self) -> int:
        """Of one step."""
        return self.step_heads * self.share

    @property
    def part_rows(self) -> int:
        return self.part_heads * self.tile

    def head(self, part: jax.Array) -> jax.Array:
        """The key/value head of a part."""
        return lax.div(part, jnp.int32(self.share))

    # --- Arrays, to the shapes of the kernels and back.

    def cut_queries(self, x_BKGTH: jax.Array) -> jax.Array:
        """[B, P, G, T, H], padded to whole tiles and lanes."""
        x_BKGTH = _pad(_pad(x_BKGTH, 3, self.q_tiles * self.tile), 4, self.head_dim)
        return x_BKGTH.reshape(self.batch, -1, self.part_heads, *x_BKGTH.shape[3:])

    def join_queries(self, x_BPGTH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        B, K, G, T, H = shape
        return x_BPGTH.reshape(B, K, G, *x_BPGTH.shape[3:])[:, :, :, :T, :H]

    def cut_keys(self, x_BKSH: jax.Array) -> jax.Array:
        """[B, K, S, H], padded to whole tiles and lanes."""
        return _pad(_pad(x_BKSH, 2, self.kv_tiles * self.tile), 3, self.head_dim)

    def join_keys(self, x_BKSH: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return x_BKSH[:, :, : shape[2], : shape[3]]

    def cut_rows(self, *numbers_BKGT: jax.Array) -> jax.Array:
        """Numbers that each row has, [B, P, tiles, numbers, R]: R the rows of a part's tile, in the scores' order."""
        x_BKGTN = _pad(jnp.stack(numbers_BKGT, axis=-1), 3, self.q_tiles * self.tile)
        x = x_BKGTN.reshape(self.batch, -1, self.part_heads, self.q_tiles, self.tile, len(numbers_BKGT))
        return x.transpose(0, 1, 3, 5, 2, 4).reshape(*self.rows_shape(len(numbers_BKGT)))

    def join_rows(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The numbers first again: [numbers, B, K, G, T]."""
        B, K, G, T, _ = shape
        numbers = x.shape[3]
        x = x.reshape(*x.shape[:4], self.part_heads, self.tile).transpose(3, 0, 1, 4, 2, 5)
        return x.reshape(numbers, B, K, G, -1)[..., :T]

    def rows_shape(self, numbers: int) -> tuple[int, ...]:
        return (self.batch, self.kv_heads * self.share, self.q_tiles, numbers, self.part_rows)

    @property
    def query_sums(self) -> Any:
        """Scratch for the sums of a tile of queries, f32 [parts, H, R]."""
        return pltpu.VMEM((self.parts, self.head_dim, self.part_rows), jnp.float32)

    # --- Blocks: what a step holds of each array.

    @property
    def query_block(self) -> pl.BlockSpec:
        shape = (None, self.parts, self.part_heads, self.tile, self.head_dim)
        return self._block(shape, lambda visit, heads: (visit.row, heads, 0, visit.q_tile, 0))

    @property
    def key_block(self) -> pl.BlockSpec:
        shape = (None, self.step_heads, self.tile, self.head_dim)
        return self._block(shape, lambda visit, heads: (visit.row, heads, visit.kv_tile, 0))

    def row_block(self, numbers: int) -> pl.BlockSpec:
        shape = (None, self.parts, None, numbers, self.part_rows)
        return self._block(shape, lambda visit, heads: (visit.row, heads, visit.q_tile, 0, 0))

    def _block(self, shape: tuple[int | None, ...], place: Callable[[Visit, Any], tuple]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda heads, step, visits_ref: place(self.visit(visits_ref, step), heads))

    # --- Visits: each is an int32 of the bits (row, outer tile, inner tile, full).

    @property
    def _sides(self) -> tuple[int, int]:
        """Tiles of the outer and of the inner side."""
        return (self.q_tiles, self.kv_tiles) if self.outer == "queries" else (self.kv_tiles, self.q_tiles)

    def visit(self, visits_ref: Any, step: Any) -> Visit:
        outer_bits, inner_bits = (_bits(side) for side in self._sides)
        before, this, after = (visits_ref[step + n] for n in range(3))  # the list has one more at either end
        outer_of_row = this >> (inner_bits + 1)
        outer, inner = outer_of_row & ((1 << outer_bits) - 1), (this >> 1) & ((1 << inner_bits) - 1)
        q_tile, kv_tile = (outer, inner) if self.outer == "queries" else (inner, outer)
        return Visit(
            row=outer_of_row >> outer_bits,
            q_tile=q_tile,
            kv_tile=kv_tile,
            full=(this & 1) == 1,
            first=(before >> (inner_bits + 1)) != outer_of_row,
            last=(after >> (inner_bits + 1)) != outer_of_row,
        )

    def list_visits(self, q_tokens: Tokens, kv_tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        """The lists, int32 [lists, length + 2], each ascending, and how many visits each holds, int32 [lists]."""
        outer_bits, inner_bits = (_bits(side) for side in self._sides)
        outer_side, inner_side = self._sides
        q = tiles.Bounds(*(x[:, :, None] for x in tiles.bounds(q_tokens, self.tile)))
        kv = tiles.Bounds(*(x[:, None, :] for x in tiles.bounds(kv_tokens, self.tile)))
        full, empty = tiles.full(q, kv), tiles.empty(q, kv)
        if self.outer == "keys":
            full, empty = full.swapaxes(1, 2), empty.swapaxes(1, 2)
        row, outer, inner = (lax.broadcasted_iota(jnp.int32, full.shape, axis) for axis in range(3))
        visits = ((((row << outer_bits) | outer) << inner_bits | inner) << 1) | full
        visits = jnp.where(empty, NO_VISIT, visits).reshape(self.batch * outer_side, inner_side)

        # The visits of an outer tile stay in one list.
        outer_a_list = min(max(LISTED_VISITS // inner_side, 1), len(visits))
        visits = _pad(visits, 0, _round_up(len(visits), outer_a_list), NO_VISIT).reshape(-1, outer_a_list * inner_side)
        end = functools.partial(jnp.full, (len(visits), 1), dtype=jnp.int32)
        lists = jnp.concatenate((end(-1), jnp.sort(visits, axis=1, stable=False), end(NO_VISIT)), axis=1)
        return lists, (visits != NO_VISIT).sum(axis=1, dtype=jnp.int32)

    # --- The call.

    def run(
        self,
        name: str,
        kernel: Callable[..., None],
        q_tokens: Tokens,
        kv_tokens: Tokens,
        operands: Sequence[Block],
        results: Sequence[Block],
        *,
        scratch: Sequence[Any] = (),
        products: int,
        interpret: bool,
    ) -> Arrays:
        """The results: as they are given, but for the tiles that are visited.

        For each visit and group of heads `kernel(visit, bias_ST, *refs)` runs, with refs of the operands, the results
        and the scratch. bias_ST is a function: the mask as a number to add to the scores of a tile that is not full.
        `products` of matrices for each part of a visit are what the compiler reckons with, to hide transfers behind.
        """
        q_tokens_B2T, kv_tokens_B2S = _cut_tokens(q_tokens, self.tile), _cut_tokens(kv_tokens, self.tile)
        q_tokens, kv_tokens = (Tokens(x[:, 0], x[:, 1]) for x in (q_tokens_B2T, kv_tokens_B2S))
        token_block = functools.partial(self._block, (None, 2, self.tile))
        inputs: list[Block] = [
            (q_tokens_B2T, token_block(lambda visit, _: (visit.row, 0, visit.q_tile))),
            (kv_tokens_B2S, token_block(lambda visit, _: (visit.row, 0, visit.kv_tile))),
            *operands,
        ]

        def body(visits_ref: Any, q_tokens_ref: Any, kv_tokens_ref: Any, *refs: Any) -> None:
            visit = self.visit(visits_ref, pl.program_id(1))
            after = len(operands) + len(results)  # the results as they were are not read
            bias_ST = functools.partial(_bias, q_tokens_ref, kv_tokens_ref)
            kernel(visit, bias_ST, *refs[: len(operands)], *refs[after:])

        def call(values: Arrays, visits: Arrays) -> tuple[Arrays, None]:
            visit_list, length = visits
            kept = pl.BlockSpec(memory_space=pl.ANY)
            return pl.pallas_call(
                body,
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=1,
                    grid=(self.kv_heads // self.step_heads, length),
                    in_specs=[*(block for _, block in inputs), *(kept for _ in results)],
                    out_specs=[block for _, block in results],
                    scratch_shapes=scratch,
                ),
                out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values),
                input_output_aliases={1 + len(inputs) + n: n for n in range(len(results))},
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
                ),
                cost_estimate=self._cost(products, [x for x, _ in (*inputs, *results)]),
                interpret=interpret,
                name=name,
            )(visit_list, *(x for x, _ in inputs), *values), None

        return lax.scan(call, tuple(x for x, _ in results), self.list_visits(q_tokens, kv_tokens))[0]

    def _cost(self, products: int, arrays: Sequence[jax.Array]) -> pl.CostEstimate:
        """As for one document, whose visits are half of all tiles."""
        rows = self.batch * self.kv_heads * self.share * self.part_heads * self.q_tiles * self.tile
        scores = rows * self.kv_tiles * self.tile // 2
        return pl.CostEstimate(
            flops=products * 2 * scores * self.head_dim,
            transcendentals=scores,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        )


def step_heads(kv_heads: int, group: int, head_dim: int, tile: int, dtype: jnp.dtype) -> int:
    """Key/value heads that one step takes: 0 where even one does not fit.

    A v5p device is two cores, which share the heads; so a step takes half of them at most.
    """
    most = min(max(kv_heads // 2, 1), STEP_HEADS, VMEM_BYTES // 2 // head_bytes(group, head_dim, tile, dtype))
    return max((n for n in _divisors(kv_heads) if n <= most), default=0)


def head_bytes(group: int, head_dim: int, tile: int, dtype: jnp.dtype) -> int:
    """Vector memory for the blocks of one key/value head and its group: those of the pass for dQ, which has the most.

    Blocks are held twice, to fetch the next beside the present; q, d_out and dQ, k and v, and the sums once.
    """
    size = jnp.dtype(dtype).itemsize
    head_dim, tile = _round_up(head_dim, LANES), _round_up(tile, LANES)
    return tile * head_dim * (group * (2 * (2 * size + 4) + 4) + 2 * 2 * size)


def bits_of(rows: int, q_tiles: int, kv_tiles: int) -> int:
    """Bits of the number of a visit."""
    return _bits(rows) + _bits(q_tiles) + _bits(kv_tiles) + 1


def _bias(q_tokens_ref: Any, kv_tokens_ref: Any) -> jax.Array:
    kv_S2 = kv_tokens_ref[...].T
    queries, keys = Tokens(q_tokens_ref[0:1], q_tokens_ref[1:2]), Tokens(kv_S2[:, 0:1], kv_S2[:, 1:2])
    return jnp.where(tiles.seen(queries, keys), jnp.float32(0), jnp.float32(tiles.MASKED))


def _cut_tokens(tokens: Tokens, tile: int) -> jax.Array:
    """Positions and segments, [B, 2, T], padded with padding to whole tiles."""
    tokens_B2T = jnp.stack(tokens, axis=1)
    return _pad(tokens_B2T, 2, _round_up(tokens_B2T.shape[2], tile))


def _bits(count: int) -> int:
    """To number `count` things."""
    return (count - 1).bit_length()


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """`x` with `axis` of `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)
