"""What the strategies share: the shape of a strategy, and the one for a shard that holds whole rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax import lax

from longtrain.ops.kernels import Kernel
from longtrain.ops.tiles import Tokens
from longtrain.parallel.group import Group

Result = tuple[jax.Array, jax.Array]
"""Attention over some of the keys: out_BKGTH and stats_2BKGT (peak, total), float32."""

Gradients = tuple[jax.Array, jax.Array, jax.Array]
"""dq_BKGTH, dk_BKTH and dv_BKTH, float32."""


class Strategy(Protocol):
    """Which blocks of keys meet a shard's queries, and how they come there. Hashable; called in shard_map."""

    def forward(self, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens) -> Result:
        """This shard's queries over the keys of all shards."""

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
        """This shard's gradients. `stats` are over the keys of all shards, `delta` is sum over H of out * d_out."""


@dataclasses.dataclass(frozen=True)
class Alone:
    """Every key is here: the block kernel, once."""

    kernel: Kernel

    def forward(self, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens) -> Result:
        return self.kernel.forward(q_BKGTH, k_BKTH, v_BKTH, tokens, tokens)

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
        return self.kernel.backward(q_BKGTH, k_BKTH, v_BKTH, d_out_BKGTH, stats_2BKGT, delta_BKGT, tokens, tokens)


def gather_tokens(group: Group, tokens: Tokens) -> Tokens:
    """The tokens of all shards of the group, [B, S], in the order of the shards."""
    return Tokens(*(group.join(x, 1) for x in tokens))


def repeat(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, items: Any, *, unroll: bool) -> tuple[Any, Any]:
    """`lax.scan`; with `unroll` its steps stand one after the other in the program.

    The barrier holds a step until the one before is done, as a loop does. Without it the transfers, which wait for
    nothing but each other, may all be made first, and every block be alive at once.
    """

    def step(carry: Any, item: Any) -> tuple[Any, Any]:
        return lax.optimization_barrier(body(carry, item))

    return lax.scan(step if unroll else body, carry, items, unroll=unroll)
