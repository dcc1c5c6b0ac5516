"""SwiGLU (arXiv 2002.05202), whole or in chunks of the sequence."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from longtrain.parallel.sharding import BATCH_AXES, constrain


def swiglu(
    x_BSD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array, mesh: Mesh, chunk: int | None
) -> jax.Array:
    """`(silu(x @ gate) * (x @ up)) @ down`.

    With `chunk` the [.., F] intermediates exist for that many tokens of each device's part of the sequence at a time,
    in the backward pass as well, where a chunk is computed again.

    Raises:
      ValueError: when `chunk` does not divide a device's part of the sequence.
    """

    def whole(x: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(jnp.einsum("...d,df->...f", x, gate_DF)) * jnp.einsum("...d,df->...f", x, up_DF)
        return jnp.einsum("...f,fd->...d", hidden, down_FD)

    batch, length, width = x_BSD.shape
    shards = mesh.shape["context"]
    if chunk is None or chunk >= length // shards:
        return constrain(whole(x_BSD), "BSD", mesh)
    if length // shards % chunk:
        raise ValueError(f"a chunk of {chunk} tokens does not divide a device's {length // shards} tokens")

    # [B, S, D] -> [chunks, B, shards, chunk, D]: every device cuts its own part, nothing moves between devices.
    chunks = jnp.moveaxis(x_BSD.reshape(batch, shards, -1, chunk, width), 2, 0)
    cut = jax.NamedSharding(mesh, P(None, BATCH_AXES, "context", None, None))
    chunks = jax.lax.with_sharding_constraint(chunks, cut)
    out = jax.lax.with_sharding_constraint(jax.lax.map(jax.checkpoint(whole), chunks), cut)
    return constrain(jnp.moveaxis(out, 0, 2).reshape(x_BSD.shape), "BSD", mesh)
