"""Blockwise attention in plain jax.numpy: runs on every platform, and made to be fast on CPU.

One loop over tiles of queries; within it one loop over the tiles of keys they fully see and one over those
they partly see, with trip counts that depend on the data, so that empty tiles cost nothing. The G query heads
of a key/value head are folded into the rows of a tile (R = G * tile), so that k and v are never repeated.

What makes it fast on XLA:CPU (measured): no matrix product has a transposed left operand (3 to 5 times
slower, and a run-time failure in bfloat16). The forward therefore works on scores [R, keys] and the backward
on their transpose [keys, R], with dQ accumulated transposed. And masks are added, not selected: see
`tiles.bias`.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from longtrain.ops import tiles
from longtrain.ops.kernels.workload import Settings, Workload
from longtrain.ops.tiles import Tokens

SMALLEST_TILE = 64
"""Shorter tiles are padded. XLA:CPU rounds smaller matrix products differently in the forward's orientation and in
the backward's; where scores reach 1e3, the gradients would feel it."""

Arrays = tuple[jax.Array, ...]


def limits(work: Workload) -> str | None:
    """None: it serves every workload, on every platform."""
    return None


def forward(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """See the package. Softmax in one pass: each tile rescales what the tiles before it have summed."""
    tile = max(settings.tile, SMALLEST_TILE)
    length = q_BKGTH.shape[3]
    q_BKGTH, scale = _fold_scale(q_BKGTH, settings.scale)
    q_BKGTH, k_BKSH, v_BKSH = _pad(q_BKGTH, 3, tile), _pad(k_BKSH, 2, tile), _pad(v_BKSH, 2, tile)
    q_tokens, kv_tokens = _pad_tokens(q_tokens, tile), _pad_tokens(kv_tokens, tile)
    q_bounds, kv_bounds = tiles.bounds(q_tokens, tile), tiles.bounds(kv_tokens, tile)
    B, K, G, T, H = q_BKGTH.shape
    R = G * tile

    def query_tile(index: jax.Array, results: Arrays) -> Arrays:
        out_BKGTH, peak_BKGT, total_BKGT = results
        b, i = index // (T // tile), index % (T // tile)
        q_KRH = _take(q_BKGTH, b, i, 3, tile).reshape(K, R, H)
        rows = Tokens(*(_take(x, b, i, 1, tile) for x in q_tokens))
        visits = tiles.visits(_row(q_bounds, b, i), _row(kv_bounds, b))

        def key_tile(n: jax.Array, carry: Arrays, masked: bool) -> Arrays:
            sum_KRH, total_KR, peak_KR = carry
            j = visits.tiles[n]
            k_KSH, v_KSH = _take(k_BKSH, b, j, 2, tile), _take(v_BKSH, b, j, 2, tile)
            scores_KRS = _scaled(_dot("krh,ksh->krs", q_KRH, k_KSH), scale)
            if masked:
                columns = Tokens(*(_take(x, b, j, 1, tile) for x in kv_tokens))
                bias_TS = tiles.bias(rows, columns, queries="rows")
                scores_KRS = (scores_KRS.reshape(K, G, tile, tile) + bias_TS).reshape(K, R, tile)
            new_peak_KR = jnp.maximum(peak_KR, scores_KRS.max(axis=-1))
            weights_KRS = jnp.exp(scores_KRS - new_peak_KR[..., None])
            shrink_KR = jnp.exp(peak_KR - new_peak_KR)
            total_KR = total_KR * shrink_KR + weights_KRS.sum(axis=-1)
            add_KRH = _dot("krs,ksh->krh", weights_KRS.astype(v_KSH.dtype), v_KSH)
            return sum_KRH * shrink_KR[..., None] + add_KRH, total_KR, new_peak_KR

        # The peak starts at UNSEEN, far above any masked score: a row that has seen nothing sums exact zeros.
        carry = (_zeros(K, R, H), _zeros(K, R), jnp.full((K, R), tiles.UNSEEN, jnp.float32))
        sum_KRH, total_KR, peak_KR = _visit(visits, key_tile, carry)
        total_KR = jnp.where(total_KR == 0, 1, total_KR)
        out_KGTH = (sum_KRH / total_KR[..., None]).reshape(K, G, tile, H)
        peak_BKGT = _put(peak_BKGT, peak_KR.reshape(K, G, tile), b, i, 3, tile)
        total_BKGT = _put(total_BKGT, total_KR.reshape(K, G, tile), b, i, 3, tile)
        return _put(out_BKGTH, out_KGTH, b, i, 3, tile), peak_BKGT, total_BKGT

    results = (_zeros(B, K, G, T, H), _zeros(B, K, G, T), _zeros(B, K, G, T))
    out_BKGTH, *stats = lax.fori_loop(0, B * (T // tile), query_tile, results)
    return out_BKGTH[:, :, :, :length], jnp.stack(stats)[..., :length]


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
    """See the package. The softmax is rebuilt tile by tile from its global statistics."""
    tile = max(settings.tile, SMALLEST_TILE)
    length, kv_length = q_BKGTH.shape[3], k_BKSH.shape[2]
    q_BKGTH, rest = _fold_scale(q_BKGTH, settings.scale)
    peak_BKGT, log_total_BKGT = stats_2BKGT[0], jnp.log(stats_2BKGT[1])
    q_BKGTH, d_out_BKGTH, peak_BKGT, log_total_BKGT, delta_BKGT = (
        _pad(x, 3, tile) for x in (q_BKGTH, d_out_BKGTH, peak_BKGT, log_total_BKGT, delta_BKGT)
    )
    k_BKSH, v_BKSH = _pad(k_BKSH, 2, tile), _pad(v_BKSH, 2, tile)
    q_tokens, kv_tokens = _pad_tokens(q_tokens, tile), _pad_tokens(kv_tokens, tile)
    q_bounds, kv_bounds = tiles.bounds(q_tokens, tile), tiles.bounds(kv_tokens, tile)
    B, K, G, T, H = q_BKGTH.shape
    R = G * tile
    # Transposed once, here: the barrier keeps XLA from folding the transpose into each product.
    k_BKHS = lax.optimization_barrier(k_BKSH.swapaxes(2, 3))

    def query_tile(index: jax.Array, grads: Arrays) -> Arrays:
        dq_BKHGT, dk_BKSH, dv_BKSH = grads
        b, i = index // (T // tile), index % (T // tile)
        q_KRH, d_out_KRH = (_take(x, b, i, 3, tile).reshape(K, R, H) for x in (q_BKGTH, d_out_BKGTH))
        peak_KR, log_total_KR, delta_KR = (
            _take(x, b, i, 3, tile).reshape(K, R) for x in (peak_BKGT, log_total_BKGT, delta_BKGT)
        )
        columns = Tokens(*(_take(x, b, i, 1, tile) for x in q_tokens))
        visits = tiles.visits(_row(q_bounds, b, i), _row(kv_bounds, b))

        def key_tile(n: jax.Array, carry: Arrays, masked: bool) -> Arrays:
            dq_KHR, dk_BKSH, dv_BKSH = carry
            j = visits.tiles[n]
            k_KSH, v_KSH = _take(k_BKSH, b, j, 2, tile), _take(v_BKSH, b, j, 2, tile)
            k_KHS = _take(k_BKHS, b, j, 3, tile)
            scores_KSR = _scaled(_dot("ksh,krh->ksr", k_KSH, q_KRH), rest)
            if masked:
                rows = Tokens(*(_take(x, b, j, 1, tile) for x in kv_tokens))
                bias_ST = tiles.bias(rows, columns, queries="columns")
                scores_KSR = (scores_KSR.reshape(K, tile, G, tile) + bias_ST[:, None]).reshape(K, tile, R)
            weights_KSR = jnp.exp((scores_KSR - peak_KR[:, None]) - log_total_KR[:, None])
            d_weights_KSR = _dot("ksh,krh->ksr", v_KSH, d_out_KRH)
            d_scores_KSR = (weights_KSR * (d_weights_KSR - delta_KR[:, None])).astype(q_KRH.dtype)
            dk_KSH = _dot("ksr,krh->ksh", d_scores_KSR, q_KRH)
            dv_KSH = _dot("ksr,krh->ksh", weights_KSR.astype(d_out_KRH.dtype), d_out_KRH)
            dq_KHR = dq_KHR + _dot("khs,ksr->khr", k_KHS, d_scores_KSR)
            return dq_KHR, _add(dk_BKSH, dk_KSH, b, j, tile), _add(dv_BKSH, dv_KSH, b, j, tile)

        dq_KHR, dk_BKSH, dv_BKSH = _visit(visits, key_tile, (_zeros(K, H, R), dk_BKSH, dv_BKSH))
        return _put(dq_BKHGT, dq_KHR.reshape(K, H, G, tile), b, i, 4, tile), dk_BKSH, dv_BKSH

    grads = (_zeros(B, K, H, G, T), _zeros(*k_BKSH.shape), _zeros(*v_BKSH.shape))
    dq_BKHGT, dk_BKSH, dv_BKSH = lax.fori_loop(0, B * (T // tile), query_tile, grads)
    dq_BKGTH = dq_BKHGT.transpose(0, 1, 3, 4, 2)[:, :, :, :length]
    return dq_BKGTH * settings.scale, _scaled(dk_BKSH, rest)[:, :, :kv_length], dv_BKSH[:, :, :kv_length]


def _visit(visits: tiles.Visits, key_tile: Callable[..., Arrays], carry: Arrays) -> Arrays:
    """Runs `key_tile(n, carry, masked)` over the full tiles without a mask, then over the partial ones."""
    carry = lax.fori_loop(0, visits.full, functools.partial(key_tile, masked=False), carry)
    return lax.fori_loop(visits.full, visits.stop, functools.partial(key_tile, masked=True), carry)


def _fold_scale(q: jax.Array, scale: float) -> tuple[jax.Array, float]:
    """q times the scale, and what is left to multiply the scores with: nothing, where that is as exact."""
    if q.dtype == jnp.float32 or math.frexp(scale)[0] == 0.5:  # a power of two scales any dtype exactly
        return q * jnp.asarray(scale, q.dtype), 1.0
    return q, scale


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x if scale == 1 else x * scale


def _zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


def _dot(expression: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(expression, x, y, preferred_element_type=jnp.float32, precision=_precision(x.dtype))


def _precision(dtype: jnp.dtype) -> lax.Precision | None:
    """float32 is computed as float32 on accelerators too, whose default is coarser."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _pad(x: jax.Array, axis: int, tile: int) -> jax.Array:
    """Zeros after the end of `axis`, up to whole tiles."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % tile)
    return jnp.pad(x, widths)


def _pad_tokens(tokens: Tokens, tile: int) -> Tokens:
    return Tokens(*(_pad(x, 1, tile) for x in tokens))


def _row(bounds: tiles.Bounds, *index: jax.Array) -> tiles.Bounds:
    return tiles.Bounds(*(x[index] for x in bounds))


def _start(x: jax.Array, b: jax.Array, i: jax.Array, axis: int, tile: int) -> list[jax.Array | int]:
    start: list[jax.Array | int] = [0] * x.ndim
    start[0], start[axis] = b, i * tile
    return start


def _take(x: jax.Array, b: jax.Array, i: jax.Array, axis: int, tile: int) -> jax.Array:
    """Tile i along `axis` of row b, without the row dim."""
    sizes = [1, *x.shape[1:]]
    sizes[axis] = tile
    return lax.dynamic_slice(x, _start(x, b, i, axis, tile), sizes)[0]


def _put(x: jax.Array, value: jax.Array, b: jax.Array, i: jax.Array, axis: int, tile: int) -> jax.Array:
    return lax.dynamic_update_slice(x, value[None], _start(x, b, i, axis, tile))


def _add(x_BKSH: jax.Array, value_KSH: jax.Array, b: jax.Array, j: jax.Array, tile: int) -> jax.Array:
    return _put(x_BKSH, _take(x_BKSH, b, j, 2, tile) + value_KSH, b, j, 2, tile)
