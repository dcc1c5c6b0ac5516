"""Ring attention: the keys and values travel round the context shards, the queries stay at home.

                  shard  0 1 2 3
    step 0  holds keys   0 1 2 3        In step t shard i holds the keys of shard i - t. It sends them on
    step 1               3 0 1 2        to shard i + 1 *before* it computes with them, so that the transfer
    step 2               2 3 0 1        runs beside the compute. With n shards, n - 1 shifts show every block
    step 3               1 2 3 0        to every shard.

Forward: each step gives the attention over its block alone, with its softmax's statistics; two such results
merge into the result over both blocks exactly (`merge`). Nothing is kept of a block that has passed,
so memory is that of the local sequence.

Backward: the keys make the same round again, and their gradient follows in float32 one step behind: what the
steps before have summed for a block moves while the next step computes, and no transfer waits for its own
step's compute. Every block's sum ends on the shard before its home; one last shift brings it there, the n-th.

Only the key/value heads travel, K and V in one message. Which tokens a block holds (two int32 each, 8 MB for
a million tokens) is told to all shards at once ahead of the ring, so that a step is a single message.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from longtrain.ops import tiles
from longtrain.ops.kernels import Kernel
from longtrain.ops.tiles import Tokens

Result = tuple[jax.Array, jax.Array]
"""Attention over some of the keys: out_BKGTH and stats_2BKGT (peak, total), float32."""


def forward(
    kernel: Kernel, axis: str, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens
) -> Result:
    """This shard's queries over the keys of all shards. Call in shard_map; `axis` is the ring's mesh axis."""
    shards = lax.axis_size(axis)
    block_tokens = _gather_tokens(tokens, axis)

    def attend(step: jax.Array | int, kv_2BKTH: jax.Array) -> Result:
        k_BKTH, v_BKTH = kv_2BKTH
        return kernel.forward(q_BKGTH, k_BKTH, v_BKTH, tokens, block_tokens(step))

    Carry = tuple[jax.Array, Result]

    def shift_and_attend(carry: Carry, step: jax.Array) -> tuple[Carry, None]:
        kv_2BKTH, result = carry
        next_kv_2BKTH = _shift(kv_2BKTH, axis)
        return (next_kv_2BKTH, merge(result, attend(step, kv_2BKTH))), None

    unseen = jnp.full(q_BKGTH.shape[:-1], tiles.UNSEEN, jnp.float32)
    nothing = (jnp.zeros(q_BKGTH.shape, jnp.float32), jnp.stack((unseen, jnp.ones_like(unseen))))
    carry = (jnp.stack((k_BKTH, v_BKTH)), nothing)
    (kv_2BKTH, result), _ = lax.scan(shift_and_attend, carry, jnp.arange(shards - 1))
    return merge(result, attend(shards - 1, kv_2BKTH))


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
    """dq_BKGTH, dk_BKTH and dv_BKTH of this shard, float32. `stats` are over the keys of all shards."""
    shards = lax.axis_size(axis)
    block_tokens = _gather_tokens(tokens, axis)

    def differentiate(step: jax.Array | int, kv_2BKTH: jax.Array) -> tuple[jax.Array, jax.Array]:
        k_BKTH, v_BKTH = kv_2BKTH
        dq_BKGTH, dk_BKTH, dv_BKTH = kernel.backward(
            q_BKGTH, k_BKTH, v_BKTH, d_out_BKGTH, stats_2BKGT, delta_BKGT, tokens, block_tokens(step)
        )
        return dq_BKGTH, jnp.stack((dk_BKTH, dv_BKTH))

    Carry = tuple[jax.Array, jax.Array, jax.Array]

    def shift_and_differentiate(carry: Carry, step: jax.Array) -> tuple[Carry, None]:
        kv_2BKTH, d_kv_2BKTH, dq_BKGTH = carry
        next_kv_2BKTH, d_kv_2BKTH = _shift(kv_2BKTH, axis), _shift(d_kv_2BKTH, axis)
        add_dq_BKGTH, add_d_kv_2BKTH = differentiate(step, kv_2BKTH)
        return (next_kv_2BKTH, d_kv_2BKTH + add_d_kv_2BKTH, dq_BKGTH + add_dq_BKGTH), None

    # The first step has no gradient to shift yet and the last no more keys: they are outside the loop.
    kv_2BKTH = jnp.stack((k_BKTH, v_BKTH))
    next_kv_2BKTH = _shift(kv_2BKTH, axis)
    dq_BKGTH, d_kv_2BKTH = differentiate(0, kv_2BKTH)

    carry = (next_kv_2BKTH, d_kv_2BKTH, dq_BKGTH)
    (kv_2BKTH, d_kv_2BKTH, dq_BKGTH), _ = lax.scan(shift_and_differentiate, carry, jnp.arange(1, shards - 1))

    d_kv_2BKTH = _shift(d_kv_2BKTH, axis)
    add_dq_BKGTH, add_d_kv_2BKTH = differentiate(shards - 1, kv_2BKTH)
    dk_BKTH, dv_BKTH = _shift(d_kv_2BKTH + add_d_kv_2BKTH, axis)
    return dq_BKGTH + add_dq_BKGTH, dk_BKTH, dv_BKTH


def merge(x: Result, y: Result) -> Result:
    """Attention over two disjoint sets of keys, from the attention over each.

    The greater peak is subtracted from both, so nothing overflows. A row that saw nothing on one side (out 0, peak
    UNSEEN) keeps the other side's result to the bit.
    """
    (out_x, (peak_x, total_x)), (out_y, (peak_y, total_y)) = x, y
    peak = jnp.maximum(peak_x, peak_y)
    total_x, total_y = total_x * jnp.exp(peak_x - peak), total_y * jnp.exp(peak_y - peak)
    total = total_x + total_y
    out = out_x * (total_x / total)[..., None] + out_y * (total_y / total)[..., None]
    return out, jnp.stack((peak, total))


def _shift(x: jax.Array, axis: str) -> jax.Array:
    """From every shard to the next one round the ring."""
    shards = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % shards) for i in range(shards)])


def _gather_tokens(tokens: Tokens, axis: str) -> Callable[[jax.Array | int], Tokens]:
    """A function of the step: the tokens whose keys this shard then holds."""
    everyones = Tokens(*(lax.all_gather(x, axis) for x in tokens))
    me, shards = lax.axis_index(axis), lax.axis_size(axis)
    return lambda step: Tokens(*(x[(me - step) % shards] for x in everyones))
