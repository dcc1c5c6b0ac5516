"""All-gather attention: every context shard gathers the keys and values of all shards, one key/value head at a time.

The kernel calls are large and few, and nothing is in lock-step. What it costs beside a ring is memory: K and V of the
whole row, and their float32 gradient in the backward pass. So the heads take turns: while one is computed the next one
is gathered, which hides the transfer and keeps the memory to two heads, however many there are. One head and no more at
a time, since more would take more memory, and a kernel call over a whole row of keys is large enough.

    forward     head 0        head 1        head 2           backward     head 0        head 1        head 2
    compute     out of 0      out of 1      out of 2                      d of 0        d of 1        d of 2        -
    gather      1             2             -                             1             2             -             -
    reduce      -             -             -                             -             dK,dV of 0    dK,dV of 1    of 2

Backward: K and V are gathered again rather than kept, and dK, dV of the whole row are summed over the shards in
float32 while each takes home its own stretch (reduce-scatter), one head behind, so that no step's transfer waits for
its own compute.
"""

import dataclasses

import jax
import jax.numpy as jnp

from longtrain.ops.kernels import Kernel
from longtrain.ops.strategy import Gradients, Result, gather_tokens, repeat
from longtrain.ops.tiles import Tokens
from longtrain.parallel.group import Group

SEQUENCE = 3
"""The sequence's dim in a stack of a head's K and V, [2, B, 1, S, H]."""


@dataclasses.dataclass(frozen=True)
class AllGather:
    """Gathers over `group`. `unroll`: the heads one after the other in the program, not in a loop."""

    kernel: Kernel
    group: Group
    unroll: bool = False

    def forward(self, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens) -> Result:
        """See `strategy.Strategy`."""
        row_tokens = gather_tokens(self.group, tokens)
        q_KB1GTH, kv_K2B1TH = _by_head(q_BKGTH, 1), _by_head(jnp.stack((k_BKTH, v_BKTH)), 2)

        def attend(kv_2B1SH: jax.Array, q_B1GTH: jax.Array) -> Result:
            k_B1SH, v_B1SH = kv_2B1SH
            return self.kernel.forward(q_B1GTH, k_B1SH, v_B1SH, tokens, row_tokens)

        def gather_and_attend(kv_2B1SH: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, Result]:
            q_B1GTH, next_kv_2B1TH = head
            return self._gather(next_kv_2B1TH), attend(kv_2B1SH, q_B1GTH)

        kv_2B1SH = self._gather(kv_K2B1TH[0])
        kv_2B1SH, results = repeat(gather_and_attend, kv_2B1SH, (q_KB1GTH[:-1], kv_K2B1TH[1:]), unroll=self.unroll)
        out_KB1GTH, stats_K2B1GT = _append(results, attend(kv_2B1SH, q_KB1GTH[-1]))
        return _heads_back(out_KB1GTH, 1), _heads_back(stats_K2B1GT, 2)

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
        row_tokens = gather_tokens(self.group, tokens)
        kv_K2B1TH = _by_head(jnp.stack((k_BKTH, v_BKTH)), 2)
        queries = (_by_head(q_BKGTH, 1), _by_head(d_out_BKGTH, 1), _by_head(stats_2BKGT, 2), _by_head(delta_BKGT, 1))

        def queries_of(heads: int | slice) -> tuple[jax.Array, ...]:
            return tuple(x[heads] for x in queries)

        def differentiate(kv_2B1SH: jax.Array, queries: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            k_B1SH, v_B1SH = kv_2B1SH
            q_B1GTH, d_out_B1GTH, stats_2B1GT, delta_B1GT = queries
            dq_B1GTH, dk_B1SH, dv_B1SH = self.kernel.backward(
                q_B1GTH, k_B1SH, v_B1SH, d_out_B1GTH, stats_2B1GT, delta_B1GT, tokens, row_tokens
            )
            return dq_B1GTH, jnp.stack((dk_B1SH, dv_B1SH))

        Carry = tuple[jax.Array, jax.Array]

        def gather_reduce_and_differentiate(carry: Carry, head: tuple) -> tuple[Carry, Carry]:
            kv_2B1SH, d_kv_2B1SH = carry
            next_kv_2B1TH, queries = head
            next_kv_2B1SH, d_kv_2B1TH = self._gather(next_kv_2B1TH), self._reduce(d_kv_2B1SH)
            dq_B1GTH, d_kv_2B1SH = differentiate(kv_2B1SH, queries)
            return (next_kv_2B1SH, d_kv_2B1SH), (dq_B1GTH, d_kv_2B1TH)

        # The first head has no gradient before it to reduce and the last no head after it: they are outside the loop.
        dq_B1GTH, d_kv_2B1SH = differentiate(self._gather(kv_K2B1TH[0]), queries_of(0))
        dq, d_kv = [dq_B1GTH[None]], []
        if len(kv_K2B1TH) > 1:
            carry, heads = (self._gather(kv_K2B1TH[1]), d_kv_2B1SH), (kv_K2B1TH[2:], queries_of(slice(1, -1)))
            carry, (dq_KB1GTH, d_kv_K2B1TH) = repeat(
                gather_reduce_and_differentiate, carry, heads, unroll=self.unroll
            )
            kv_2B1SH, d_kv_2B1SH = carry
            d_kv += [d_kv_K2B1TH, self._reduce(d_kv_2B1SH)[None]]
            dq_B1GTH, d_kv_2B1SH = differentiate(kv_2B1SH, queries_of(-1))
            dq += [dq_KB1GTH, dq_B1GTH[None]]
        d_kv.append(self._reduce(d_kv_2B1SH)[None])
        dk_BKTH, dv_BKTH = _heads_back(jnp.concatenate(d_kv), 2)
        return _heads_back(jnp.concatenate(dq), 1), dk_BKTH, dv_BKTH

    def _gather(self, kv_2B1TH: jax.Array) -> jax.Array:
        return self.group.join(kv_2B1TH, SEQUENCE)

    def _reduce(self, d_kv_2B1SH: jax.Array) -> jax.Array:
        return self.group.sum_and_part(d_kv_2B1SH, SEQUENCE)


def _by_head(x_BK: jax.Array, dim: int) -> jax.Array:
    """[..., K, ...] with K at `dim` -> [K, ..., 1, ...]."""
    return jnp.moveaxis(jnp.expand_dims(x_BK, dim + 1), dim, 0)


def _heads_back(x_KB1: jax.Array, dim: int) -> jax.Array:
    """The way back from `_by_head`."""
    return jnp.moveaxis(x_KB1, 0, dim).squeeze(dim + 1)


def _append(results: Result, result: Result) -> Result:
    """One more head's result after those of the heads before it."""
    (out_KB1GTH, stats_K2B1GT), (out_B1GTH, stats_2B1GT) = results, result
    return jnp.concatenate((out_KB1GTH, out_B1GTH[None])), jnp.concatenate((stats_K2B1GT, stats_2B1GT[None]))
