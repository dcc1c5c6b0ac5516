"""Cross-entropy with the output head, in chunks of the sequence: whole logits never exist, forward or backward.

Per token: `loss = logsumexp(x @ head) - (x @ head)[target]`, in float32. The backward pass recomputes a chunk's logits
and adds the chunk's share of the head's gradient to one float32 accumulator. With a vocabulary cut over `tensor` only a
maximum, a sum and the target's logit cross that axis.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from longtrain.parallel.sharding import ACTIVATION, PARAMETER, PARAMETER_AXES, spec

X_SPEC, HEAD_SPEC, TOKEN_SPEC = spec("BSD", ACTIVATION), spec("DV", PARAMETER), spec("BS", ACTIVATION)

Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""What the backward pass needs: x_BSD, head_DV, targets_BS and the log-sum-exp lse_BS."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def token_losses(x_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, mesh: Mesh, chunk: int) -> jax.Array:
    """Every token's cross-entropy in nats, float32 [B, S].

    Args:
      x_BSD: final hidden states; their dtype is the compute dtype of the matrix products.
      head_DV: the output head in its own dtype, cut as the table in `parallel/sharding.py` says; its gradient comes
        back in that dtype, summed in float32.
      targets_BS: int32, each in [0, V).
      mesh: the mesh all three are cut over.
      chunk: tokens of a device's own part of the sequence whose logits exist at a time.
    """
    return _forward(x_BSD, head_DV, targets_BS, mesh, chunk)[0]


def _forward(
    x_BSD: jax.Array, head_DV: jax.Array, targets_BS: jax.Array, mesh: Mesh, chunk: int
) -> tuple[jax.Array, Residuals]:
    losses_BS, lse_BS = jax.shard_map(
        functools.partial(_local_forward, chunk=chunk),
        mesh=mesh,
        in_specs=(X_SPEC, HEAD_SPEC, TOKEN_SPEC),
        out_specs=(TOKEN_SPEC, TOKEN_SPEC),
        check_vma=False,
    )(x_BSD, head_DV, targets_BS)
    return losses_BS, (x_BSD, head_DV, targets_BS, lse_BS)


def _backward(
    mesh: Mesh, chunk: int, residuals: Residuals, gradient_BS: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_BSD, head_DV, targets_BS, lse_BS = residuals
    dx_BSD, dhead_DV = jax.shard_map(
        functools.partial(_local_backward, chunk=chunk),
        mesh=mesh,
        in_specs=(X_SPEC, HEAD_SPEC, TOKEN_SPEC, TOKEN_SPEC, TOKEN_SPEC),
        out_specs=(X_SPEC, HEAD_SPEC),
        check_vma=False,
    )(x_BSD, head_DV, targets_BS, lse_BS, gradient_BS)
    return dx_BSD, dhead_DV, None


token_losses.defvjp(_forward, _backward)


def _chunks(array_BT: jax.Array, chunk: int) -> jax.Array:
    """[B, T, ...] -> [T / chunk, B, chunk, ...], T padded with zeros to a whole number of chunks."""
    batch, length, *rest = array_BT.shape
    count = -(-length // chunk)
    padded = jnp.pad(array_BT, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(padded.reshape(batch, count, chunk, *rest), 1, 0)


def _joined(chunks_CBT: jax.Array, length: int) -> jax.Array:
    """The inverse of `_chunks`."""
    count, batch, chunk, *rest = chunks_CBT.shape
    return jnp.moveaxis(chunks_CBT, 0, 1).reshape(batch, count * chunk, *rest)[:, :length]


def _gather_head(head_DV: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return jax.lax.all_gather(head_DV.astype(dtype), PARAMETER_AXES, axis=0, tiled=True)


def _logits(x_BTD: jax.Array, head_DV: jax.Array) -> jax.Array:
    return jnp.einsum("btd,dv->btv", x_BTD, head_DV, preferred_element_type=jnp.float32)


def _is_target(targets_BT: jax.Array, vocabulary: int) -> jax.Array:
    """[B, T, V] bool, true at the target where this tensor shard holds it. Fused into its use, never stored."""
    first = jax.lax.axis_index("tensor") * vocabulary
    return jnp.arange(vocabulary) == (targets_BT - first)[..., None]


def _local_forward(
    x_BTD: jax.Array, head_DV: jax.Array, targets_BT: jax.Array, *, chunk: int
) -> tuple[jax.Array, jax.Array]:
    head_DV = _gather_head(head_DV, x_BTD.dtype)

    def one_chunk(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        x, targets = inputs
        logits = _logits(x, head_DV)
        top = jax.lax.pmax(logits.max(-1), "tensor")
        total = jax.lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "tensor")
        at_target = jnp.where(_is_target(targets, logits.shape[-1]), logits, 0).sum(-1)
        lse = top + jnp.log(total)
        return None, (lse - jax.lax.psum(at_target, "tensor"), lse)

    length = x_BTD.shape[1]
    chunk = min(chunk, length)
    _, (losses, lse) = jax.lax.scan(one_chunk, None, (_chunks(x_BTD, chunk), _chunks(targets_BT, chunk)))
    return _joined(losses, length), _joined(lse, length)


def _local_backward(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    lse_BT: jax.Array,
    gradient_BT: jax.Array,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    whole_DV = _gather_head(head_DV, x_BTD.dtype)

    def one_chunk(dhead_DV: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, targets, lse, gradient = inputs
        logits = _logits(x, whole_DV)
        dlogits = jnp.exp(logits - lse[..., None]) - _is_target(targets, logits.shape[-1])
        dlogits = (dlogits * gradient[..., None]).astype(x.dtype)
        dx = jnp.einsum("btv,dv->btd", dlogits, whole_DV, preferred_element_type=jnp.float32)
        dhead = jnp.einsum("btd,btv->dv", x, dlogits, preferred_element_type=jnp.float32)
        return dhead_DV + dhead, jax.lax.psum(dx, "tensor").astype(x.dtype)

    length = x_BTD.shape[1]
    chunk = min(chunk, length)
    inputs = tuple(_chunks(array, chunk) for array in (x_BTD, targets_BT, lse_BT, gradient_BT))
    dhead_DV, dx = jax.lax.scan(one_chunk, jnp.zeros(whole_DV.shape, jnp.float32), inputs)
    dhead_DV = jax.lax.psum_scatter(dhead_DV, PARAMETER_AXES, scatter_dimension=0, tiled=True)
    # The layers' backward pass waits for the scatter: left to itself XLA puts it off and keeps the whole until then.
    dx, dhead_DV = jax.lax.optimization_barrier((dx, dhead_DV))
    return _joined(dx, length), jax.lax.psum(dhead_DV, "data").astype(head_DV.dtype)
