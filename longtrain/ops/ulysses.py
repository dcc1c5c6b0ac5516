"""Ulysses attention: an all-to-all turns shards of the sequence into shards of the heads, and back.

Each context shard then attends over whole rows for its share of the key/value heads (and their query heads),
so no layout is needed for balance. At most as many shards as there are key/value heads on a tensor shard, and
all four transfers of a training step stand between computes.

Forward: q, k and v go out in one all-to-all, out comes back in another. Backward: q, k, v and the gradient of
out (and delta, float32) go out; dq, dk and dv, each already the sum over all it has to be summed over, come
back in float32.
"""

import jax
import jax.numpy as jnp
from jax import lax

from longtrain.ops.all_gather import gather_tokens
from longtrain.ops.kernels import Kernel
from longtrain.ops.tiles import Tokens


def forward(
    kernel: Kernel, axis: str, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """out_BKGTH and lse_BKGT (float32) of this shard's queries over the keys of all shards."""
    group = q_BKGTH.shape[2]
    row_tokens = gather_tokens(tokens, axis)
    qkv = _to_heads(jnp.concatenate((q_BKGTH, k_BKTH[:, :, None], v_BKTH[:, :, None]), axis=2), axis)
    q_BKGSH, k_BKSH, v_BKSH = qkv[:, :, :group], qkv[:, :, group], qkv[:, :, group + 1]
    out_BKGSH, lse_BKGS = kernel.forward(q_BKGSH, k_BKSH, v_BKSH, row_tokens, row_tokens)
    return _to_sequence(out_BKGSH, axis), _to_sequence(lse_BKGS, axis)


def backward(
    kernel: Kernel,
    axis: str,
    q_BKGTH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    d_out_BKGTH: jax.Array,
    lse_BKGT: jax.Array,
    delta_BKGT: jax.Array,
    tokens: Tokens,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq_BKGTH, dk_BKTH and dv_BKTH of this shard, float32."""
    group = q_BKGTH.shape[2]
    row_tokens = gather_tokens(tokens, axis)
    arrays = jnp.concatenate((q_BKGTH, d_out_BKGTH, k_BKTH[:, :, None], v_BKTH[:, :, None]), axis=2)
    q_BKGSH, d_out_BKGSH, kv_BK2SH = jnp.split(_to_heads(arrays, axis), (group, 2 * group), axis=2)
    lse_BKGS, delta_BKGS = _to_heads(jnp.stack((lse_BKGT, delta_BKGT), axis=-1), axis).transpose(
        4, 0, 1, 2, 3
    )
    dq_BKGSH, dk_BKSH, dv_BKSH = kernel.backward(
        q_BKGSH,
        kv_BK2SH[:, :, 0],
        kv_BK2SH[:, :, 1],
        d_out_BKGSH,
        lse_BKGS,
        delta_BKGS,
        row_tokens,
        row_tokens,
    )
    grads = _to_sequence(jnp.concatenate((dq_BKGSH, dk_BKSH[:, :, None], dv_BKSH[:, :, None]), axis=2), axis)
    return grads[:, :, :group], grads[:, :, group], grads[:, :, group + 1]


def _to_heads(x_BKGT: jax.Array, axis: str) -> jax.Array:
    """[B, K, G, T, ...] -> [B, K / shards, G, S, ...]: fewer heads, the whole sequence."""
    return lax.all_to_all(x_BKGT, axis, split_axis=1, concat_axis=3, tiled=True)


def _to_sequence(x_BKGS: jax.Array, axis: str) -> jax.Array:
    """[B, K / shards, G, S, ...] -> [B, K, G, T, ...]: the way back."""
    return lax.all_to_all(x_BKGS, axis, split_axis=3, concat_axis=1, tiled=True)
