"""All-gather attention: every context shard gathers the keys and values of all shards, then attends once.

The simplest strategy, and the one whose kernel calls are largest. It costs memory (K and V of the whole row,
and their float32 gradient in the backward pass) and the transfer is not hidden behind compute.

Forward: K and V (the key/value heads only) and their tokens are gathered, one kernel call. Backward: K and V
are gathered again rather than kept, and dK, dV of the whole row are summed over the shards in float32 while
each takes home its own stretch (reduce-scatter).
"""

import jax
import jax.numpy as jnp
from jax import lax

from longtrain.ops.kernels import Kernel
from longtrain.ops.tiles import Tokens

SEQUENCE = 3
"""The sequence's dim in a stack of K and V, [2, B, K, S, H]."""


def forward(
    kernel: Kernel, axis: str, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens
) -> tuple[jax.Array, jax.Array]:
    """out_BKGTH and stats_2BKGT (float32) of this shard's queries over the keys of all shards."""
    k_BKSH, v_BKSH = _gather(k_BKTH, v_BKTH, axis)
    return kernel.forward(q_BKGTH, k_BKSH, v_BKSH, tokens, gather_tokens(tokens, axis))


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
    k_BKSH, v_BKSH = _gather(k_BKTH, v_BKTH, axis)
    dq_BKGTH, dk_BKSH, dv_BKSH = kernel.backward(
        q_BKGTH, k_BKSH, v_BKSH, d_out_BKGTH, stats_2BKGT, delta_BKGT, tokens, gather_tokens(tokens, axis)
    )
    d_kv_2BKSH = jnp.stack((dk_BKSH, dv_BKSH))
    dk_BKTH, dv_BKTH = lax.psum_scatter(d_kv_2BKSH, axis, scatter_dimension=SEQUENCE, tiled=True)
    return dq_BKGTH, dk_BKTH, dv_BKTH


def _gather(k_BKTH: jax.Array, v_BKTH: jax.Array, axis: str) -> jax.Array:
    return lax.all_gather(jnp.stack((k_BKTH, v_BKTH)), axis, axis=SEQUENCE, tiled=True)


def gather_tokens(tokens: Tokens, axis: str) -> Tokens:
    """The tokens of all shards, [B, S], in the order of the shards."""
    return Tokens(*(lax.all_gather(x, axis, axis=1, tiled=True) for x in tokens))
