"""Which pairs of tokens see each other, and which tiles of such pairs are worth computing.

The rule of the mask: query i sees key j when their segments are equal and not 0, and position i >= position j.
It is read from the tokens' own segments and positions, never from array indices, so any order of the tokens is
right.

Scores are computed tile by tile. From the least and greatest token of each tile, a pair of tiles is one of

    full      every query sees every key, no mask needed
    empty     no query sees any key, never computed
    partial   anything else, masked element by element

For any input "full" and "empty" are certain, and "partial" is always safe. For tiles that each cover one stretch
of a row (which the layouts arrange) the three are exact: a pair called partial has a visible pair in it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LEAST, GREATEST = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max

MASKED = -1e30
"""Added to a score that must not be seen: far below UNSEEN, so that its exponential is exactly 0."""

UNSEEN = -1e29
"""Greatest score of a row that sees nothing: finite, so that nothing ever meets inf - inf."""


class Tokens(NamedTuple):
    """What the mask knows of each token: int32 arrays of one shape."""

    positions: jax.Array
    segments: jax.Array


class Bounds(NamedTuple):
    """The least and the greatest real token of each tile, by segment, then position: int32 [..., tile]."""

    first_segment: jax.Array
    first_position: jax.Array
    last_segment: jax.Array
    last_position: jax.Array
    one_segment: jax.Array
    """bool: every token is real and of one and the same segment."""


def bounds(tokens: Tokens, size: int) -> Bounds:
    """Bounds of each tile of `size` tokens, int32 [B, T / size]. A tile of padding alone has first > last."""
    positions, segments = (x.reshape(x.shape[0], -1, size) for x in tokens)
    real = segments != 0
    first_segment = jnp.min(segments, axis=-1, where=real, initial=GREATEST)
    last_segment = jnp.max(segments, axis=-1, where=real, initial=LEAST)
    is_first = real & (segments == first_segment[..., None])
    is_last = real & (segments == last_segment[..., None])
    return Bounds(
        first_segment=first_segment,
        first_position=jnp.min(positions, axis=-1, where=is_first, initial=GREATEST),
        last_segment=last_segment,
        last_position=jnp.max(positions, axis=-1, where=is_last, initial=LEAST),
        one_segment=real.all(axis=-1) & (first_segment == last_segment),
    )


def full(q: Bounds, kv: Bounds) -> jax.Array:
    """bool: every query of the tile sees every key of the tile."""
    same = q.one_segment & kv.one_segment & (q.first_segment == kv.first_segment)
    return same & (q.first_position >= kv.last_position)


def empty(q: Bounds, kv: Bounds) -> jax.Array:
    """bool: no query of the tile can see any key of the tile."""
    apart = (q.first_segment > kv.last_segment) | (kv.first_segment > q.last_segment)
    # A visible pair has (segment, position) of the query at or after the key's.
    return apart | ((q.last_segment == kv.first_segment) & (q.last_position < kv.first_position))


class Visits(NamedTuple):
    """Tiles of keys that one tile of queries visits: `tiles[:full]` unmasked, `tiles[full:stop]` masked."""

    tiles: jax.Array
    full: jax.Array
    stop: jax.Array


def visits(q: Bounds, kv: Bounds) -> Visits:
    """The visits of one tile of queries (bounds of shape []) to all tiles of keys (shape [tiles])."""
    is_full, is_empty = full(q, kv), empty(q, kv)
    tiles = jnp.argsort(jnp.where(is_full, 0, jnp.where(is_empty, 2, 1)))
    return Visits(tiles, is_full.sum(dtype=jnp.int32), (~is_empty).sum(dtype=jnp.int32))


class Spans(NamedTuple):
    """What each of I tiles visits of the other side's: tiles start..stop (exclusive), of which full_start..full_stop
    need no mask. int32 [B, I]; an empty span where nothing is to be visited.
    """

    start: jax.Array
    full_start: jax.Array
    full_stop: jax.Array
    stop: jax.Array


def spans(q: Bounds, kv: Bounds, *, of: str) -> Spans:
    """The spans of the tiles of `of` ("queries" or "keys") over the tiles of the other side; bounds [B, tiles].

    The numbers alone, for kernels that have no use for lists: tiles that see each other are neighbours wherever tokens
    ascend, and so are the full ones among them. In any other order a span holds empty tiles too, and full ones
    outside full_start..full_stop: right all the same, since those are masked.
    """
    q, kv = Bounds(*(x[:, :, None] for x in q)), Bounds(*(x[:, None] for x in kv))
    is_full, is_visited = full(q, kv), ~empty(q, kv)
    if of == "keys":
        is_full, is_visited = is_full.swapaxes(1, 2), is_visited.swapaxes(1, 2)
    count = is_full.shape[-1]
    tile = jnp.arange(count, dtype=jnp.int32)
    stop = jnp.max(jnp.where(is_visited, tile + 1, 0), axis=-1)
    start = jnp.minimum(jnp.min(jnp.where(is_visited, tile, count), axis=-1), stop)
    full_start = jnp.minimum(jnp.min(jnp.where(is_full, tile, count), axis=-1), stop)
    ends = ~is_full & (tile >= full_start[..., None])
    return Spans(start, full_start, jnp.minimum(jnp.min(jnp.where(ends, tile, count), axis=-1), stop), stop)


def seen(queries: Tokens, keys: Tokens) -> jax.Array:
    """The rule of the mask: bool, by broadcasting."""
    same = (queries.segments == keys.segments) & (queries.segments != 0)
    return same & (queries.positions >= keys.positions)


def bias(rows: Tokens, columns: Tokens, *, queries: str) -> jax.Array:
    """The mask as a number to add to the scores: float32 [rows, columns], 0 where seen and MASKED elsewhere.

    Both token arrays are [T] of one row. `queries` says which side holds the queries: "rows" or "columns".
    """
    rows, columns = Tokens(*(x[:, None] for x in rows)), Tokens(*(x[None, :] for x in columns))
    is_seen = seen(rows, columns) if queries == "rows" else seen(columns, rows)
    # Without the barrier XLA redoes the comparisons for every head inside the exponential: up to 1.6x the
    # time.
    return jax.lax.optimization_barrier(jnp.where(is_seen, jnp.float32(0), jnp.float32(MASKED)))
