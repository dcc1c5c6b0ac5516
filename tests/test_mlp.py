"""SwiGLU in chunks and RMSNorm against plain formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import steps
from longtrain.ops.mlp import swiglu
from longtrain.ops.norm import rms_norm
from longtrain.parallel.mesh import make_mesh

B, S, D, F = 4, 16, 8, 12
ONE = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1}


def inputs() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    shapes = ((B, S, D), (D, F), (D, F), (F, D), (B, S, D))
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def reference(x, gate, up, down, d_out):
    """The value and the four gradients in float64, by hand."""
    x, gate, up, down, d_out = (np.float64(value) for value in (x, gate, up, down, d_out))
    a, b = x @ gate, x @ up
    sigmoid = 1 / (1 + np.exp(-a))
    d_hidden = d_out @ down.T
    da = d_hidden * b * (sigmoid + a * sigmoid * (1 - sigmoid))
    db = d_hidden * a * sigmoid
    along = "bsi,bsj->ij"
    return (
        (a * sigmoid * b) @ down,
        da @ gate.T + db @ up.T,
        np.einsum(along, x, da),
        np.einsum(along, x, db),
        np.einsum(along, a * sigmoid * b, d_out),
    )


@pytest.mark.parametrize(
    ("axes", "chunk"),
    [({}, None), ({}, 4), ({"fsdp": 2, "context": 2, "tensor": 2}, 2), ({"context": 4}, 1), ({"context": 4}, 100)],
    ids=str,
)
def test_values_and_gradients_in_chunks(axes, chunk):
    sizes = ONE | axes
    mesh = make_mesh(sizes, jax.devices()[: np.prod(list(sizes.values()))])

    def both(*arguments):
        *inner, d_out = arguments
        out, back = jax.vjp(lambda *inner: swiglu(*inner, mesh, chunk), *inner)
        return out, *back(d_out)

    results = jax.jit(both).lower(*inputs()).compile(steps.QUICK)(*inputs())
    for got, expected in zip(results, reference(*inputs()), strict=True):
        assert np.abs(got - expected).max() < 2e-6 * np.abs(expected).max()


def test_a_chunk_that_does_not_divide_is_refused():
    mesh = make_mesh(ONE | {"context": 2}, jax.devices()[:2])
    with pytest.raises(ValueError, match="a chunk of 3 tokens does not divide a device's 8 tokens"):
        swiglu(*inputs()[:4], mesh, 3)


def test_rms_norm_is_computed_in_float32():
    x, weight = np.random.default_rng(0).standard_normal((2, 3, 64)) * 0.5, np.linspace(0.5, 2, 64)
    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)):
        given = jnp.asarray(x, dtype)
        exact = np.asarray(given, np.float64)
        expected = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 0.1) * weight
        got = rms_norm(given, jnp.asarray(weight, jnp.float32), 0.1)
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=tolerance)
