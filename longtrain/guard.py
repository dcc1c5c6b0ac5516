"""Spikes of the loss, told by the gradient norm before they are applied; decided on the devices, without a sync.

The logarithm of the norm is compared with a running mean and deviation of itself: norms are positive, and what is usual
for them is a factor. The mean follows by `1 / MEMORY_STEPS` a step, or by a plain mean of as many as there are so far.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

MEMORY_STEPS = 100
LEARNING_STEPS = 20
"""Norms seen before anything is called a spike."""
LEAST_DEVIATION = 0.05
"""Of the logarithm: norms that hardly vary at all make no spike of a change by some percent."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NormHistory:
    """Of the finite norms so far: how many, int32, and mean and variance of their logarithm, float32."""

    count: jax.Array
    mean: jax.Array
    variance: jax.Array

    @classmethod
    def empty(cls) -> "NormHistory":
        return cls(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))

    def judge(self, norm: jax.Array, deviations: float) -> tuple[jax.Array, "NormHistory"]:
        """Whether a step with this gradient norm is a spike, bool, and the history with the norm in it.

        A spike counts as the largest norm that is none, so that one does not raise the bar for the next, and norms
        that stay high become usual after a while. A norm that is 0 or not finite is no spike and changes nothing.

        Args:
          deviations: standard deviations above the mean from which on a norm is a spike.
        """
        usable = jnp.isfinite(norm) & (norm > 0)
        value = jnp.log(jnp.where(usable, norm, 1))
        limit = self.mean + deviations * jnp.maximum(jnp.sqrt(self.variance), LEAST_DEVIATION)
        spike = usable & (self.count >= LEARNING_STEPS) & (value > limit)
        value = jnp.where(spike, limit, value)
        count = self.count + 1
        share = 1 / jnp.minimum(count, MEMORY_STEPS).astype(jnp.float32)
        away = value - self.mean
        # The exponentially weighted mean and variance of West (1979), with a share that begins as a plain mean's.
        after = NormHistory(count, self.mean + share * away, (1 - share) * (self.variance + share * away**2))
        return spike, jax.tree.map(lambda new, old: jnp.where(usable, new, old), after, self)
