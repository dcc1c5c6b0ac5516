"""The one table from logical dims to mesh axes, and what is built from it.

A dim is the capital letter that names it everywhere (`q_BSNH` has dims B, S, N, H). An array is sharded by looking each
of its dims up, once for activations and once for parameters: parameters (and with them gradients and optimizer state)
are cut over fsdp x context besides tensor, and are gathered layer by layer where they are used.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

BATCH_AXES = ("data", "fsdp")
PARAMETER_AXES = ("fsdp", "context")

Axes = str | tuple[str, ...] | None

ACTIVATION: dict[str, Axes] = {
    "B": BATCH_AXES, "S": "context", "D": None, "N": "tensor", "K": "tensor", "H": None, "F": "tensor", "V": "tensor",
}  # fmt: skip
PARAMETER: dict[str, Axes] = ACTIVATION | {"D": PARAMETER_AXES, "L": None}
# A parameter as a layer computes with it: whole over fsdp and context, still cut over tensor.
GATHERED: dict[str, Axes] = ACTIVATION | {"L": None}


def spec(dims: str, table: dict[str, Axes]) -> P:
    """The partition spec of an array with these dims, e.g. `spec("BSD", ACTIVATION)`."""
    return P(*(table[dim] for dim in dims))


def axes_size(axes: Axes, mesh: Mesh) -> int:
    """How many parts `axes` cut a dim into."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    size = 1
    for name in names:
        size *= mesh.shape[name]
    return size


def sharding(dims: str, shape: tuple[int, ...], mesh: Mesh, table: dict[str, Axes]) -> NamedSharding:
    """The sharding of an array of this shape; a dim that its axes do not divide is an error, but for K.

    With more tensor shards than kv heads each kv head is held by several shards (K is then replicated, not cut).

    Raises:
      ValueError: naming the dim, its size and the axes, when the axes do not divide the dim.
    """
    axes_of_dims: list[Axes] = []
    for dim, size in zip(dims, shape, strict=True):
        axes = table[dim]
        parts = axes_size(axes, mesh)
        if dim == "K" and parts > size and parts % size == 0:
            axes, parts = None, 1
        if size % parts:
            raise ValueError(f"dim {dim} of size {size} cannot be cut into {parts} parts by mesh axes {axes}")
        axes_of_dims.append(axes)
    return NamedSharding(mesh, P(*axes_of_dims))


def constrain(x: jax.Array, dims: str, mesh: Mesh) -> jax.Array:
    """Holds an activation to the table's sharding inside a compiled function."""
    return jax.lax.with_sharding_constraint(x, sharding(dims, x.shape, mesh, ACTIVATION))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gathered(parameter: jax.Array, dims: str, mesh: Mesh, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A parameter shard, cast to `dtype` and then gathered over fsdp x context for use in a layer.

    Casting first halves the bytes that travel. The gradient is held to the parameter's own sharding, so that it is
    reduce-scattered where it is made instead of being summed whole on every device.
    """
    return _gathered_forward(parameter, dims, mesh, dtype)[0]


def _gathered_forward(
    parameter: jax.Array, dims: str, mesh: Mesh, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    whole = sharding(dims, parameter.shape, mesh, GATHERED)
    # A scalar carries the parameter's dtype to the backward pass: the gradient must come back in it.
    return jax.lax.with_sharding_constraint(parameter.astype(dtype), whole), jnp.zeros((), parameter.dtype)


def _gathered_backward(
    dims: str, mesh: Mesh, _: jax.typing.DTypeLike, like: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    cut = sharding(dims, gradient.shape, mesh, PARAMETER)
    return (jax.lax.with_sharding_constraint(gradient, cut).astype(like.dtype),)


gathered.defvjp(_gathered_forward, _gathered_backward)
