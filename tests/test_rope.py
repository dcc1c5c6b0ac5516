"""Rotary phases far out, and scaled frequencies, against formulas written down a second time."""

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter

import reference_llama
from longtrain.config import RopeConfig
from longtrain.config.schema import Scaling
from longtrain.ops.rope import amplitude, inverse_frequencies, phases, rotate

SCALINGS = [
    None,
    {"type": "linear", "factor": 4.0},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192},
    {"type": "yarn", "factor": 32.0, "original_length": 4096},
    {"type": "yarn", "factor": 16.0, "original_length": 8192, "beta_fast": 16.0, "attention_factor": 1.5},
]


def rope(scaling: dict | None, theta: float = 500000.0) -> RopeConfig:
    return RopeConfig(theta=theta, scaling=scaling and TypeAdapter(Scaling).validate_python(scaling))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("theta", "head_dim"), [(500000.0, 128), (10000.0, 64), (10000.0, 2)])
def test_frequencies_and_amplitude_are_the_papers(scaling, theta, head_dim):
    config = rope(scaling, theta)
    expected = reference_llama.frequencies(config, head_dim)
    np.testing.assert_allclose(inverse_frequencies(config, head_dim), expected, rtol=1e-12)
    assert amplitude(config) == pytest.approx(reference_llama.amplitude(config), rel=1e-12)


def test_llama3_scaling_keeps_fast_dims_and_divides_slow_ones():
    plain, scaled = (inverse_frequencies(rope(scaling), 128) for scaling in (None, SCALINGS[2]))
    ratio = plain / scaled
    wavelength = 2 * np.pi / plain
    assert (ratio[wavelength < 8192 / 4] == 1).all()
    assert ratio[wavelength > 8192] == pytest.approx(8)
    between = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert between.sum() > 3
    assert (np.diff(ratio[between]) > 0).all()


@pytest.mark.parametrize("scaling", SCALINGS[:4], ids=str)
def test_phases_at_a_million_are_exact(scaling):
    config, head_dim = rope(scaling), 128
    positions = np.array([[0, 1, 1023, 1024, 65_537, 524_287, 999_999, 1_000_000]], np.int32)
    cos, sin = phases(jnp.asarray(positions), config, head_dim, longest=1_000_001)
    assert cos.dtype == sin.dtype == jnp.float32
    angles = positions[..., None] * np.array(reference_llama.frequencies(config, head_dim))
    scale = reference_llama.amplitude(config)
    assert np.abs(cos - scale * np.cos(angles)).max() < 1e-6
    assert np.abs(sin - scale * np.sin(angles)).max() < 1e-6
    # What the tables are for: the plain product in float32 is far off.
    naive = np.cos(np.float32(positions)[..., None] * np.float32(inverse_frequencies(config, head_dim)))
    assert np.abs(naive - np.cos(angles)).max() > 1e-3


def test_rotation_turns_pairs_in_float32_and_keeps_the_dtype():
    random = np.random.default_rng(0)
    x = random.standard_normal((1, 3, 2, 8))
    angles = random.standard_normal((1, 3, 4))
    got = rotate(jnp.asarray(x, jnp.float32), (jnp.cos(angles), jnp.sin(angles)))
    pairs = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)[:, :, None]
    np.testing.assert_allclose(got, np.concatenate([pairs.real, pairs.imag], -1), atol=1e-6)
    rounded = rotate(jnp.asarray(x, jnp.bfloat16), (jnp.cos(angles), jnp.sin(angles)))
    assert rounded.dtype == jnp.bfloat16
    exact = rotate(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32), (jnp.cos(angles), jnp.sin(angles)))
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))  # rounded once, at the end
