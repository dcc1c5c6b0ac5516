"""Token embedding from a table that no device ever holds whole.

The table's D is cut over fsdp x context. Instead of gathering the table (1 GB for Llama 3 8B in bfloat16) each device
looks up its own slice of D for the tokens of all devices that share the table, and one all-to-all turns slices of D
into shares of tokens. The gradient takes the same way back and is summed in float32, whatever dtype it travels in.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from longtrain.parallel.sharding import ACTIVATION, PARAMETER, PARAMETER_AXES, spec

TABLE_SPEC, TOKEN_SPEC, X_SPEC = spec("VD", PARAMETER), spec("BS", ACTIVATION), spec("BSD", ACTIVATION)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def embed(table_VD: jax.Array, tokens_BS: jax.Array, mesh: Mesh, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The tokens' embeddings, [B, S, D] in `dtype`. Ids must lie in the vocabulary: the data pipeline checks them."""
    return jax.shard_map(
        functools.partial(_local_embed, dtype=dtype),
        mesh=mesh,
        in_specs=(TABLE_SPEC, TOKEN_SPEC),
        out_specs=X_SPEC,
        check_vma=False,
    )(table_VD, tokens_BS)


def _forward(
    table_VD: jax.Array, tokens_BS: jax.Array, mesh: Mesh, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return embed(table_VD, tokens_BS, mesh, dtype), (table_VD, tokens_BS)


def _backward(
    mesh: Mesh, _: jax.typing.DTypeLike, residuals: tuple[jax.Array, jax.Array], dx_BSD: jax.Array
) -> tuple[jax.Array, None]:
    dtable_VD = jax.shard_map(
        _local_gradient, mesh=mesh, in_specs=(TABLE_SPEC, TOKEN_SPEC, X_SPEC), out_specs=TABLE_SPEC, check_vma=False
    )(*residuals, dx_BSD)
    return dtable_VD, None


embed.defvjp(_forward, _backward)


def _rows(tokens_BT: jax.Array, held: int) -> tuple[jax.Array, jax.Array]:
    """For the tokens of all X devices that share the table, [X, B, T]: the row of this tensor shard's `held` ones, and
    whether it is here at all; where it is not, the row is 0."""
    tokens_XBT = jax.lax.all_gather(tokens_BT, PARAMETER_AXES)
    row_XBT = tokens_XBT - jax.lax.axis_index("tensor") * held
    here_XBT = (row_XBT >= 0) & (row_XBT < held)
    return jnp.where(here_XBT, row_XBT, 0), here_XBT


def _local_embed(table_VD: jax.Array, tokens_BT: jax.Array, *, dtype: jax.typing.DTypeLike) -> jax.Array:
    row_XBT, here_XBT = _rows(tokens_BT, table_VD.shape[0])
    x_XBTD = jnp.where(here_XBT[..., None], table_VD[row_XBT], 0).astype(dtype)
    x_XBTD = jax.lax.psum(x_XBTD, "tensor")  # one shard has the row, the others zeros
    return jax.lax.all_to_all(x_XBTD, PARAMETER_AXES, split_axis=0, concat_axis=3, tiled=True)[0]


def _local_gradient(table_VD: jax.Array, tokens_BT: jax.Array, dx_BTD: jax.Array) -> jax.Array:
    row_XBT, here_XBT = _rows(tokens_BT, table_VD.shape[0])
    dx_XBTD = jax.lax.all_to_all(dx_BTD[None], PARAMETER_AXES, split_axis=3, concat_axis=0, tiled=True)
    dx_XBTD = jnp.where(here_XBT[..., None], dx_XBTD, 0).astype(jnp.float32)
    dtable_VD = jnp.zeros(table_VD.shape, jnp.float32).at[row_XBT].add(dx_XBTD)
    return jax.lax.psum(dtable_VD, "data").astype(table_VD.dtype)
