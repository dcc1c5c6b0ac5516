"""Ulysses attention: an all-to-all turns shards of the sequence into shards of the heads, and back.

Between the two each shard of the group has the group's whole stretch of the row, for its share of the key/value heads
and their query heads, and attends as it would have without. Where the group is the whole context axis, that stretch is
the whole row and the block kernel does the rest: no layout is needed for balance, but there can be no more shards than
key/value heads, and the transfers are not hidden behind compute. In a smaller group a ring does the rest, in fewer
steps with longer blocks:

    8 shards, groups of 2     0 1 | 2 3 | 4 5 | 6 7      heads for sequence among neighbours
    rings of 4                0 2 4 6 | 1 3 5 7          each over one half of the heads

Forward: q, k and v go out in one all-to-all, out and its statistics come home. Backward: q, k, v, the gradient of
out and the statistics go out; dq, dk and dv come home in float32, each already complete.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from longtrain.ops.ring import Ring
from longtrain.ops.strategy import Alone, Gradients, Result, gather_tokens
from longtrain.ops.tiles import Tokens
from longtrain.parallel.group import Group


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """Exchanges heads for sequence in `group`; `inner` attends to what the group then holds."""

    group: Group
    inner: Alone | Ring

    def forward(self, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens) -> Result:
        """See `strategy.Strategy`."""
        group_tokens = gather_tokens(self.group, tokens)
        q_BKGSH, kv_BK2SH = self._to_heads(q_BKGTH, jnp.stack((k_BKTH, v_BKTH), axis=2))
        k_BKSH, v_BKSH = kv_BK2SH[:, :, 0], kv_BK2SH[:, :, 1]
        out_BKGSH, stats_2BKGS = self.inner.forward(q_BKGSH, k_BKSH, v_BKSH, group_tokens)
        (out_BKGTH,) = self._to_sequence(out_BKGSH)
        return out_BKGTH, jnp.stack(self._to_sequence(*stats_2BKGS))

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
        group_tokens = gather_tokens(self.group, tokens)
        kv_BK2TH = jnp.stack((k_BKTH, v_BKTH), axis=2)
        q_BKGSH, d_out_BKGSH, kv_BK2SH = self._to_heads(q_BKGTH, d_out_BKGTH, kv_BK2TH)
        *stats, delta_BKGS = self._to_heads(*stats_2BKGT, delta_BKGT)
        k_BKSH, v_BKSH = kv_BK2SH[:, :, 0], kv_BK2SH[:, :, 1]
        dq_BKGSH, dk_BKSH, dv_BKSH = self.inner.backward(
            q_BKGSH, k_BKSH, v_BKSH, d_out_BKGSH, jnp.stack(stats), delta_BKGS, group_tokens
        )
        dq_BKGTH, d_kv_BK2TH = self._to_sequence(dq_BKGSH, jnp.stack((dk_BKSH, dv_BKSH), axis=2))
        return dq_BKGTH, d_kv_BK2TH[:, :, 0], d_kv_BK2TH[:, :, 1]

    def _to_heads(self, *arrays_BKGT: jax.Array) -> list[jax.Array]:
        """[B, K, G, T, ...] -> [B, K / size, G, S, ...]: fewer heads, the group's sequence. One message for all."""
        return self._exchange(arrays_BKGT, part=1, join=3)

    def _to_sequence(self, *arrays_BKGS: jax.Array) -> list[jax.Array]:
        """[B, K / size, G, S, ...] -> [B, K, G, T, ...]: the way back."""
        return self._exchange(arrays_BKGS, part=3, join=1)

    def _exchange(self, arrays: tuple[jax.Array, ...], part: int, join: int) -> list[jax.Array]:
        """One all-to-all of several arrays, joined along the dim G of query heads and parted again."""
        joined = self.group.exchange(jnp.concatenate(arrays, axis=2), part, join)
        ends = list(itertools.accumulate(x.shape[2] for x in arrays))
        return jnp.split(joined, ends[:-1], axis=2)
