"""Ulysses attention: an all-to-all turns shards of the sequence into shards of the heads, and back.

Between the two each context shard attends over whole rows, for its share of the key/value heads and their query
heads. So no layout is needed for balance; but there can be no more shards than key/value heads, and the
transfers are not hidden behind compute.

Forward: q, k and v go out in one all-to-all, out and its statistics come home. Backward: q, k, v, the gradient of
out and the statistics go out; dq, dk and dv come home in float32, each already complete.
"""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from longtrain.ops.all_gather import gather_tokens
from longtrain.ops.kernels import Kernel
from longtrain.ops.tiles import Tokens


def forward(
    kernel: Kernel, axis: str, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """out_BKGTH and stats_2BKGT (float32) of this shard's queries over the keys of all shards."""
    row_tokens = gather_tokens(tokens, axis)
    q_BKGSH, kv_BK2SH = _to_heads(axis, q_BKGTH, jnp.stack((k_BKTH, v_BKTH), axis=2))
    k_BKSH, v_BKSH = kv_BK2SH[:, :, 0], kv_BK2SH[:, :, 1]
    out_BKGSH, stats_2BKGS = kernel.forward(q_BKGSH, k_BKSH, v_BKSH, row_tokens, row_tokens)
    (out_BKGTH,) = _to_sequence(axis, out_BKGSH)
    return out_BKGTH, jnp.stack(_to_sequence(axis, *stats_2BKGS))


def backward(
    kernel: Kernel,
    axis: str,
    q_BKGTH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    d_out_BKGTH: jax.Array,
    stats_2BKGT: jax.Array,
    delta_BKGT: jax.Array,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq_BKGTH, dk_BKTH and dv_BKTH of this shard, float32."""
    row_tokens = gather_tokens(tokens, axis)
    kv_BK2TH = jnp.stack((k_BKTH, v_BKTH), axis=2)
    q_BKGSH, d_out_BKGSH, kv_BK2SH = _to_heads(axis, q_BKGTH, d_out_BKGTH, kv_BK2TH)
    *stats, delta_BKGS = _to_heads(axis, *stats_2BKGT, delta_BKGT)
    k_BKSH, v_BKSH = kv_BK2SH[:, :, 0], kv_BK2SH[:, :, 1]
    dq_BKGSH, dk_BKSH, dv_BKSH = kernel.backward(
        q_BKGSH, k_BKSH, v_BKSH, d_out_BKGSH, jnp.stack(stats), delta_BKGS, row_tokens, row_tokens
    )
    dq_BKGTH, d_kv_BK2TH = _to_sequence(axis, dq_BKGSH, jnp.stack((dk_BKSH, dv_BKSH), axis=2))
    return dq_BKGTH, d_kv_BK2TH[:, :, 0], d_kv_BK2TH[:, :, 1]


def _to_heads(axis: str, *arrays_BKGT: jax.Array) -> list[jax.Array]:
    """[B, K, G, T, ...] -> [B, K / shards, G, S, ...]: fewer heads, the whole sequence. One message for all."""
    return _exchange(axis, arrays_BKGT, split_axis=1, concat_axis=3)


def _to_sequence(axis: str, *arrays_BKGS: jax.Array) -> list[jax.Array]:
    """[B, K / shards, G, S, ...] -> [B, K, G, T, ...]: the way back."""
    return _exchange(axis, arrays_BKGS, split_axis=3, concat_axis=1)


def _exchange(axis: str, arrays: tuple[jax.Array, ...], split_axis: int, concat_axis: int) -> list[jax.Array]:
    """One all-to-all of several arrays, joined along the dim G of query heads and parted again."""
    joined = lax.all_to_all(jnp.concatenate(arrays, axis=2), axis, split_axis, concat_axis, tiled=True)
    ends = list(itertools.accumulate(x.shape[2] for x in arrays))
    return jnp.split(joined, ends[:-1], axis=2)
