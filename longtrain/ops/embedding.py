"""Token embedding from a table that no device ever holds whole.

The table's D is cut over fsdp x context. Instead of gathering the table (1 GB for Llama 3 8B in bfloat16) each device looks
up its own slice of D for the tokens of all devices that share the table, and one all-to-all turns slices of D into
shares of tokens. The gradient takes the way back and is summed in the table's own dtype, in place.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from longtrain.parallel.sharding import ACTIVATION, PARAMETER, PARAMETER_AXES, spec


def embed(table_VD: jax.Array, tokens_BS: jax.Array, mesh: Mesh, dtype: jax.typing.DTypeLike) -> jax.Array:
    """The tokens' embeddings, [B, S, D] in `dtype`. Ids must lie in the vocabulary: the data pipeline checks them."""
    local = functools.partial(_local_embed, tensor_shards=mesh.shape["tensor"], dtype=dtype)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(spec("VD", PARAMETER), spec("BS", ACTIVATION)),
        out_specs=spec("BSD", ACTIVATION),
        check_vma=False,
    )(table_VD, tokens_BS)


def _local_embed(table_VD: jax.Array, tokens_BT: jax.Array, *, tensor_shards: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    tokens_XBT = jax.lax.all_gather(tokens_BT, PARAMETER_AXES)  # X: the devices that share the table
    if tensor_shards > 1:
        rows = table_VD.shape[0]
        row_XBT = tokens_XBT - jax.lax.axis_index("tensor") * rows
        here_XBT = (row_XBT >= 0) & (row_XBT < rows)
        x_XBTD = jnp.where(here_XBT[..., None], table_VD[jnp.where(here_XBT, row_XBT, 0)], 0)
        x_XBTD = jax.lax.psum(x_XBTD.astype(dtype), "tensor")
    else:
        x_XBTD = table_VD[tokens_XBT].astype(dtype)
    return jax.lax.all_to_all(x_XBTD, PARAMETER_AXES, split_axis=0, concat_axis=3, tiled=True)[0]
