"""The sharding table: how a parameter is gathered for use, and how its gradient comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from longtrain.parallel.mesh import AXES, make_mesh
from longtrain.parallel.sharding import GATHERED, PARAMETER, gathered, sharding

MESH = {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}


def test_the_mesh_leaves_no_device_unused():
    assert make_mesh(MESH).axis_names == AXES
    with pytest.raises(ValueError, match="4 places for 8 devices"):
        make_mesh(MESH | {"tensor": 1}, jax.devices())


def test_neighbouring_devices_share_tensor_then_context():
    ids = np.vectorize(lambda device: device.id)(make_mesh(MESH).devices)
    assert ids[0, 0, 0].tolist() == [0, 1]
    assert ids[0, 0, :, 0].tolist() == [0, 2]
    assert ids[0, :, 0, 0].tolist() == [0, 4]


def test_a_gathered_parameter_is_whole_but_over_tensor_and_its_gradient_comes_back_cut():
    mesh = make_mesh(MESH)
    cut, whole = (sharding("DF", (16, 12), mesh, table) for table in (PARAMETER, GATHERED))
    random = np.random.default_rng(0)
    weight = jax.device_put(random.standard_normal((16, 12)).astype(np.float32), cut)
    x = random.standard_normal((8, 16)).astype(np.float32)

    def product(weight, dtype):
        used = gathered(weight, "DF", mesh, dtype)
        return (x.astype(dtype) @ used).astype(jnp.float32), used

    def step(weight, dtype):
        out, back, used = jax.vjp(lambda weight: product(weight, dtype), weight, has_aux=True)
        return used, back(jnp.ones_like(out))[0]

    for dtype, tolerance in ((jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)):
        used, gradient = jax.jit(step, static_argnums=1)(weight, jnp.dtype(dtype))
        assert used.dtype == dtype
        assert used.sharding.shard_shape(used.shape) == whole.shard_shape(used.shape) == (16, 6)
        np.testing.assert_array_equal(used, weight.astype(dtype))
        assert gradient.dtype == jnp.float32
        assert gradient.sharding.shard_shape(gradient.shape) == cut.shard_shape(gradient.shape) == (4, 6)
        sums = np.asarray(x.astype(dtype), np.float64).sum(0)
        assert np.abs(gradient - sums[:, None]).max() < tolerance * np.abs(sums).max()


@pytest.mark.parametrize(("kv_heads", "parts"), [(4, 2), (2, 2), (1, 1)])
def test_kv_heads_are_cut_over_tensor_where_there_are_enough(kv_heads, parts):
    shape = (16, kv_heads, 8)
    assert sharding("DKH", shape, make_mesh(MESH), PARAMETER).shard_shape(shape) == (4, kv_heads // parts, 8)


def test_what_does_not_divide_is_an_error_with_the_numbers():
    mesh = make_mesh(MESH)
    with pytest.raises(ValueError, match=r"dim D of size 18 cannot be cut into 4 parts .*\('fsdp', 'context'\)"):
        sharding("DF", (18, 12), mesh, PARAMETER)
    with pytest.raises(ValueError, match=r"dim K of size 3 cannot be cut into 2 parts"):
        sharding("DKH", (16, 3, 8), mesh, PARAMETER)
