"""Root-mean-square normalisation (arXiv 1910.07467)."""

import jax
import jax.numpy as jnp


def rms_norm(x_BSD: jax.Array, weight_D: jax.Array, epsilon: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last dim, computed in float32, returned in x's dtype."""
    x = x_BSD.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return (x * weight_D.astype(jnp.float32)).astype(x_BSD.dtype)
