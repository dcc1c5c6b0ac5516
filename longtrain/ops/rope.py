"""Rotary position phases, exact far out, and the ways of stretching them to longer contexts.

`positions * frequencies` in float32 is off by 0.06 radians at position 1,000,000. Instead a position is split into
`high * 1024 + low`, each part's cosine and sine are read from tables computed in float64, and the two are joined by the
addition theorems: the result is right to float32 rounding at any position.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from longtrain.config import RopeConfig

LOW_POSITIONS = 1024


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians a position for each pair of head dims, float64 [H/2].

    Without scaling `theta ** (-2i/H)` (RoFormer, arXiv 2104.09864). `linear` divides all by `factor` (arXiv
    2306.15595); `llama3` divides the slow ones only, with a ramp between two wavelengths (Llama 3.1, arXiv 2407.21783);
    `yarn` likewise with the ramp over dims (arXiv 2309.00071, equations 17 to 23).
    """
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        turns = scaling.original_length * frequencies / (2 * math.pi)  # rotations within the original context
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:

        def dim_of(rotations: float) -> float:
            wavelength = scaling.original_length / (rotations * 2 * math.pi)
            return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

        first = max(math.floor(dim_of(scaling.beta_fast)), 0)
        last = min(math.ceil(dim_of(scaling.beta_slow)), head_dim - 1)
        keep = 1 - (np.arange(head_dim // 2) - first) / max(last - first, 0.001)
    keep = np.clip(keep, 0, 1)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def amplitude(rope: RopeConfig) -> float:
    """What cosine and sine are multiplied by: YaRN's attention temperature (arXiv 2309.00071, equation 22), else 1."""
    scaling = rope.scaling
    if scaling is None or scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def phases(positions_BS: jax.Array, rope: RopeConfig, head_dim: int, longest: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angles, float32 [B, S, H/2]; `longest` bounds the positions (exclusive)."""
    frequencies = inverse_frequencies(rope, head_dim)

    def table(positions: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> jax.Array:
        return jnp.asarray(function(positions[:, None] * frequencies), jnp.float32)

    high = np.arange(-(-longest // LOW_POSITIONS), dtype=np.float64) * LOW_POSITIONS
    low = np.arange(LOW_POSITIONS, dtype=np.float64)
    high_BS, low_BS = positions_BS // LOW_POSITIONS, positions_BS % LOW_POSITIONS
    cos_high, sin_high = table(high, np.cos)[high_BS], table(high, np.sin)[high_BS]
    cos_low, sin_low = table(low, np.cos)[low_BS], table(low, np.sin)[low_BS]
    scale = amplitude(rope)
    cos = scale * (cos_high * cos_low - sin_high * sin_low)
    sin = scale * (sin_high * cos_low + cos_high * sin_low)
    return cos, sin


def rotate(x_BSNH: jax.Array, phases_BSP: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]) by its phase, in float32; the half-split pairing of Hugging Face's Llama."""
    cos, sin = (phase[:, :, None, :] for phase in phases_BSP)
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSNH.dtype)
