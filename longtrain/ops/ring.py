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

Two ways: with `two_way` one half of the key/value heads travels forward and the other half back, each in half the
messages' size, which uses both directions of links that have two (TPU ICI). The halves are rows of their own to
all that is written here, and only a shift and a block's tokens tell them apart.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from longtrain.ops import tiles
from longtrain.ops.kernels import Kernel
from longtrain.ops.strategy import Gradients, Result, repeat
from longtrain.ops.tiles import Tokens
from longtrain.parallel.group import Group


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring over `group`, of at least 2 shards. `unroll`: its steps one after the other in the program, not a loop."""

    kernel: Kernel
    group: Group
    two_way: bool = False
    unroll: bool = False

    def forward(self, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens) -> Result:
        """See `strategy.Strategy`."""
        shards = self.group.size
        block_tokens = self._gather_tokens(tokens)
        tokens = self._for_each_way(tokens)
        q_BKGTH, k_BKTH, v_BKTH = (self._part(x) for x in (q_BKGTH, k_BKTH, v_BKTH))

        def attend(step: jax.Array | int, kv_2BKTH: jax.Array) -> Result:
            k_BKTH, v_BKTH = kv_2BKTH
            return self.kernel.forward(q_BKGTH, k_BKTH, v_BKTH, tokens, block_tokens(step))

        Carry = tuple[jax.Array, Result]

        def shift_and_attend(carry: Carry, step: jax.Array) -> tuple[Carry, None]:
            kv_2BKTH, result = carry
            next_kv_2BKTH = self._shift(kv_2BKTH)
            return (next_kv_2BKTH, merge(result, attend(step, kv_2BKTH))), None

        unseen = jnp.full(q_BKGTH.shape[:-1], tiles.UNSEEN, jnp.float32)
        nothing = (jnp.zeros(q_BKGTH.shape, jnp.float32), jnp.stack((unseen, jnp.ones_like(unseen))))
        carry = (jnp.stack((k_BKTH, v_BKTH)), nothing)
        (kv_2BKTH, result), _ = repeat(shift_and_attend, carry, jnp.arange(shards - 1), unroll=self.unroll)
        out_BKGTH, stats_2BKGT = merge(result, attend(shards - 1, kv_2BKTH))
        return self._join(out_BKGTH), jnp.stack([self._join(x) for x in stats_2BKGT])

    def backward(
        self,
        q_BKGTH: jax.Array,
        k_BKTH: jax.Array,
        v_BKTH: jax.Array,
        d_out_BKGTH: jax.Array,
        stats_2BKGT: jax.Array,
        delta_BKGT: jax.Array,
        tokens: Tokens,
    ) -> Gradients:
        """See `strategy.Strategy`."""
        shards = self.group.size
        block_tokens = self._gather_tokens(tokens)
        tokens = self._for_each_way(tokens)
        q_BKGTH, k_BKTH, v_BKTH, d_out_BKGTH, delta_BKGT, *stats = (
            self._part(x) for x in (q_BKGTH, k_BKTH, v_BKTH, d_out_BKGTH, delta_BKGT, *stats_2BKGT)
        )
        stats_2BKGT = jnp.stack(stats)

        def differentiate(step: jax.Array | int, kv_2BKTH: jax.Array) -> tuple[jax.Array, jax.Array]:
            k_BKTH, v_BKTH = kv_2BKTH
            dq_BKGTH, dk_BKTH, dv_BKTH = self.kernel.backward(
                q_BKGTH, k_BKTH, v_BKTH, d_out_BKGTH, stats_2BKGT, delta_BKGT, tokens, block_tokens(step)
            )
            return dq_BKGTH, jnp.stack((dk_BKTH, dv_BKTH))

        Carry = tuple[jax.Array, jax.Array, jax.Array]

        def shift_and_differentiate(carry: Carry, step: jax.Array) -> tuple[Carry, None]:
            kv_2BKTH, d_kv_2BKTH, dq_BKGTH = carry
            next_kv_2BKTH, d_kv_2BKTH = self._shift(kv_2BKTH), self._shift(d_kv_2BKTH)
            add_dq_BKGTH, add_d_kv_2BKTH = differentiate(step, kv_2BKTH)
            return (next_kv_2BKTH, d_kv_2BKTH + add_d_kv_2BKTH, dq_BKGTH + add_dq_BKGTH), None

        # The first step has no gradient to shift yet and the last no more keys: they are outside the loop.
        kv_2BKTH = jnp.stack((k_BKTH, v_BKTH))
        next_kv_2BKTH = self._shift(kv_2BKTH)
        dq_BKGTH, d_kv_2BKTH = differentiate(0, kv_2BKTH)

        carry = (next_kv_2BKTH, d_kv_2BKTH, dq_BKGTH)
        carry, _ = repeat(shift_and_differentiate, carry, jnp.arange(1, shards - 1), unroll=self.unroll)
        kv_2BKTH, d_kv_2BKTH, dq_BKGTH = carry

        d_kv_2BKTH = self._shift(d_kv_2BKTH)
        add_dq_BKGTH, add_d_kv_2BKTH = differentiate(shards - 1, kv_2BKTH)
        dk_BKTH, dv_BKTH = self._shift(d_kv_2BKTH + add_d_kv_2BKTH)
        return self._join(dq_BKGTH + add_dq_BKGTH), self._join(dk_BKTH), self._join(dv_BKTH)

    @property
    def _ways(self) -> tuple[int, ...]:
        """Places that each part of the key/value heads moves on in a step."""
        return (1, -1) if self.two_way else (1,)

    def _shift(self, x_2BKTH: jax.Array) -> jax.Array:
        """From every shard to the next one round the ring, each way."""
        parts = jnp.split(x_2BKTH, len(self._ways), axis=1)
        return jnp.concatenate([self.group.shift(x, way) for x, way in zip(parts, self._ways, strict=True)], axis=1)

    def _gather_tokens(self, tokens: Tokens) -> Callable[[jax.Array | int], Tokens]:
        """A function of the step: the tokens whose keys this shard then holds, each way."""
        everyones = [self.group.all_gather(x) for x in tokens]
        me, shards = self.group.index(), self.group.size

        def block_tokens(step: jax.Array | int) -> Tokens:
            return Tokens(*(jnp.concatenate([x[(me - way * step) % shards] for way in self._ways]) for x in everyones))

        return block_tokens

    def _for_each_way(self, tokens: Tokens) -> Tokens:
        return Tokens(*(jnp.tile(x, (len(self._ways), 1)) for x in tokens))

    def _part(self, x_BK: jax.Array) -> jax.Array:
        """[B, K, ...] -> [ways x B, K / ways, ...]: the heads that go each way as rows of their own."""
        (B, K, *rest), ways = x_BK.shape, len(self._ways)
        return x_BK.reshape(B, ways, K // ways, *rest).swapaxes(0, 1).reshape(ways * B, K // ways, *rest)

    def _join(self, x_BK: jax.Array) -> jax.Array:
        """[ways x B, K / ways, ...] -> [B, K, ...]."""
        (rows, heads, *rest), ways = x_BK.shape, len(self._ways)
        return x_BK.reshape(ways, rows // ways, heads, *rest).swapaxes(0, 1).reshape(rows // ways, ways * heads, *rest)


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
