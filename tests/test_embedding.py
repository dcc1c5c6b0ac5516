"""The look-up from a table that is cut over every axis, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import steps
from longtrain.ops.embedding import embed
from longtrain.parallel.mesh import make_mesh
from longtrain.parallel.sharding import ACTIVATION, PARAMETER, spec

B, S, D, V = 4, 16, 8, 24


def look_up(axes: dict[str, int], tokens, dtype):
    """The embeddings and the table's gradient for a cotangent, on a mesh; and the inputs in numpy."""
    sizes = {"data": 1, "fsdp": 1, "context": 1, "tensor": 1} | axes
    on = make_mesh(sizes, jax.devices()[: np.prod(list(sizes.values()))])
    random = np.random.default_rng(0)
    table = random.standard_normal((V, D)).astype(np.float32)
    cotangent = jnp.asarray(random.standard_normal((*tokens.shape, D)), dtype)

    def both(table, tokens, cotangent):
        out, back = jax.vjp(lambda table: embed(table, tokens, on, dtype), table)
        return out, back(cotangent)[0]

    cuts = [NamedSharding(on, spec(*table)) for table in
            (("VD", PARAMETER), ("BS", ACTIVATION), ("BSD", ACTIVATION))]  # fmt: skip
    arguments = [jax.device_put(x, cut) for x, cut in zip((table, tokens, cotangent), cuts, strict=True)]
    out, gradient = jax.jit(both).lower(*arguments).compile(steps.QUICK)(*arguments)
    assert gradient.sharding.shard_shape(gradient.shape) == cuts[0].shard_shape(gradient.shape)
    assert out.sharding.shard_shape(out.shape) == cuts[2].shard_shape(out.shape)
    expected = np.zeros((V, D))
    np.add.at(expected, tokens, np.asarray(cotangent, np.float64))
    return out, gradient, table, expected


def tokens_with_repeats() -> np.ndarray:
    tokens = np.random.default_rng(1).integers(0, V, (B, S)).astype(np.int32)
    tokens[:, :6] = 7
    tokens[0, 6:8] = 0, V - 1
    return tokens


@pytest.mark.parametrize(
    "axes",
    [{}, {"tensor": 4}, {"fsdp": 2, "context": 2}, {"data": 2, "context": 2, "tensor": 2}, {"fsdp": 2, "tensor": 3}],
    ids=str,
)
def test_embeddings_and_their_gradient(axes):
    tokens = tokens_with_repeats()
    out, gradient, table, expected = look_up(axes, tokens, jnp.float32)
    np.testing.assert_array_equal(out, table[tokens])
    assert np.abs(gradient - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("axes", [{}, {"context": 2, "tensor": 2}, {"fsdp": 2, "context": 2}, {"tensor": 3}], ids=str)
def test_gradients_of_bfloat16_embeddings_are_summed_in_float32(axes):
    tokens = np.full((B, 4 * S), 7, np.int32)
    tokens[:, ::5] = 3
    out, gradient, table, expected = look_up(axes, tokens, jnp.bfloat16)
    assert (out.dtype, gradient.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(out, jnp.asarray(table[tokens], jnp.bfloat16))
    assert np.abs(gradient - expected).max() < 1e-6 * np.abs(expected).max()
