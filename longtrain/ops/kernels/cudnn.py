"""cuDNN's flash attention on NVIDIA GPUs, for rows of one document whose stretches are dealt whole.

cuDNN masks by array index alone: the first `kv_length` keys, or those of them up to the query's own index. That is
enough where a row is one document. A stretch of it (one of the blocks that `zigzag` or `contiguous` deals) sees of any
ascending keys

    a prefix    the keys before the stretch's first token       no mask but the number of keys
    its own     the stretch's own keys, if they are among them  causal

and each is one call. The number of keys is data, not shape, so that every step of a ring runs the same program: of
the shards before its own a stretch sees all, of those behind it none, and no branch stands round a kernel. Lengths of
none are not given to cuDNN: it gets 1, and the result is set to nothing.

Whoever chooses this kernel promises that rows are so (`one_document`). The tokens are looked at all the same: a row
that breaks the promise comes out as NaN, never as a wrong number.

Two things are made to fit. cuDNN forms delta = sum over H of out * d_out itself, so it is given instead of out the one
vector along d_out that has this product. And its results are in the inputs' dtype: those of the stretches and of a
ring's steps are rounded before they are summed in float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from longtrain.ops import tiles
from longtrain.ops.kernels import cudnn_internals
from longtrain.ops.kernels.workload import Settings, Workload
from longtrain.ops.tiles import Tokens

LARGEST_HEAD_DIM = 128
HEAD_DIM_STEP = 8
DTYPES = ("bfloat16", "float16")
LAYOUTS = ("zigzag", "contiguous")
CAPABILITY = (8, 0)


def limits(work: Workload) -> str | None:
    """Why it cannot serve this workload; None where it can."""
    if work.platform != "gpu":
        return f"it is NVIDIA's, not for {work.platform}"
    if not work.has_capability(CAPABILITY):
        return f"compute capability {work.capability}: it needs {'.'.join(map(str, CAPABILITY))} (Ampere) or later"
    if not work.one_document:
        return "it serves rows of one document each (data.packing one) only"
    if work.layout not in ("auto", *LAYOUTS):
        return f"layout {work.layout}: it needs stretches dealt whole, {' or '.join(LAYOUTS)}"
    if work.dtype not in DTYPES:
        return f"dtype {work.dtype}: one of {', '.join(DTYPES)}"
    if work.head_dim > LARGEST_HEAD_DIM or work.head_dim % HEAD_DIM_STEP:
        return f"head_dim {work.head_dim}: at most {LARGEST_HEAD_DIM} and a multiple of {HEAD_DIM_STEP}"
    return cudnn_internals.moved() or cudnn_internals.missing() or cudnn_internals.too_old(work.capability)


def forward(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """See the package; its stats are (lse, 1)."""
    B, K, G, T, H = q_BKGTH.shape
    q_BNTH = q_BKGTH.reshape(B, K * G, T, H)
    rank_BJ, kv_tokens = _ascending(kv_tokens, settings.block)
    k_BKSH, v_BKSH = _reordered(k_BKSH, rank_BJ), _reordered(v_BKSH, rank_BJ)
    outs, lses = [], []
    for stretch in _stretches(T, settings.block):
        view = _view(Tokens(*(x[:, stretch] for x in q_tokens)), kv_tokens)
        q_BNCH = q_BNTH[:, :, stretch]
        k_BKCH, v_BKCH = (_slice(x, view.prefix_B, settings.block) for x in (k_BKSH, v_BKSH))
        out_x, lse_x = _attend(q_BNCH, k_BKSH, v_BKSH, view, view.prefix_B, scale=settings.scale, causal=False)
        out_y, lse_y = _attend(q_BNCH, k_BKCH, v_BKCH, view, view.own_B, scale=settings.scale, causal=True)
        lse_BNC = jnp.logaddexp(lse_x, lse_y)
        out_BNCH = out_x * jnp.exp(lse_x - lse_BNC)[..., None] + out_y * jnp.exp(lse_y - lse_BNC)[..., None]
        outs.append(_or_nan(out_BNCH, view))
        lses.append(lse_BNC)
    lse_BKGT = jnp.concatenate(lses, axis=2).reshape(B, K, G, T)
    out_BKGTH = jnp.concatenate(outs, axis=2).reshape(B, K, G, T, H)
    return out_BKGTH, jnp.stack((lse_BKGT, jnp.ones_like(lse_BKGT)))


def backward(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    d_out_BKGTH: jax.Array,
    stats_2BKGT: jax.Array,
    delta_BKGT: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See the package. Each call's gradients are rounded to the inputs' dtype, and summed in float32."""
    B, K, G, T, H = q_BKGTH.shape
    out_BKGTH = _with_product(d_out_BKGTH, delta_BKGT)
    lse_BKGT = stats_2BKGT[0] + jnp.log(stats_2BKGT[1])
    queries = [x.reshape(B, K * G, *x.shape[3:]) for x in (q_BKGTH, out_BKGTH, lse_BKGT, d_out_BKGTH)]
    rank_BJ, kv_tokens = _ascending(kv_tokens, settings.block)
    k_BKSH, v_BKSH = _reordered(k_BKSH, rank_BJ), _reordered(v_BKSH, rank_BJ)
    dqs = []
    dk_BKSH, dv_BKSH = (jnp.zeros(x.shape, jnp.float32) for x in (k_BKSH, v_BKSH))
    for stretch in _stretches(T, settings.block):
        view = _view(Tokens(*(x[:, stretch] for x in q_tokens)), kv_tokens)
        own = [x[:, :, stretch] for x in queries]
        k_BKCH, v_BKCH = (_slice(x, view.prefix_B, settings.block) for x in (k_BKSH, v_BKSH))
        dq_x, dk_x, dv_x = _differentiate(
            *(own, k_BKSH, v_BKSH, view, view.prefix_B), scale=settings.scale, causal=False
        )
        dq_y, dk_y, dv_y = _differentiate(*(own, k_BKCH, v_BKCH, view, view.own_B), scale=settings.scale, causal=True)
        dqs.append(_or_nan(dq_x + dq_y, view))
        dk_BKSH = _or_nan(_add_slice(dk_BKSH + dk_x, dk_y, view.prefix_B), view)
        dv_BKSH = _or_nan(_add_slice(dv_BKSH + dv_x, dv_y, view.prefix_B), view)
    home_BJ = jnp.argsort(rank_BJ, axis=1)
    dq_BKGTH = jnp.concatenate(dqs, axis=2).reshape(B, K, G, T, H)
    return dq_BKGTH, _reordered(dk_BKSH, home_BJ), _reordered(dv_BKSH, home_BJ)


def _attend(
    q_BNCH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    view: "_View",
    keys_B: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """One call: out_BNCH and lse_BNC (float32) of a stretch's queries over the first `keys_B` keys."""
    lengths = (jnp.maximum(view.queries_B, 1), jnp.maximum(keys_B, 1))
    out_BNCH, lse_BNC = cudnn_internals.forward(q_BNCH, k_BKSH, v_BKSH, *lengths, scale=scale, causal=causal)
    sees_B1C = (view.real_BC & (keys_B > 0)[:, None])[:, None]
    return jnp.where(sees_B1C[..., None], out_BNCH.astype(jnp.float32), 0), jnp.where(sees_B1C, lse_BNC, tiles.UNSEEN)


def _differentiate(
    queries: list[jax.Array],
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    view: "_View",
    keys_B: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One call: dq_BNCH, dk_BKSH and dv_BKSH in float32. `queries`: q, out, lse and d_out of a stretch."""
    q_BNCH, out_BNCH, lse_BNC, d_out_BNCH = queries
    lse_BNC = jnp.where(view.real_BC[:, None], lse_BNC, 0)
    lengths = (jnp.maximum(view.queries_B, 1), jnp.maximum(keys_B, 1))
    arrays = (q_BNCH, k_BKSH, v_BKSH, out_BNCH, lse_BNC, d_out_BNCH)
    dq_BNCH, dk_BKSH, dv_BKSH = cudnn_internals.backward(*arrays, *lengths, scale=scale, causal=causal)
    q_sees_BC = view.real_BC & (keys_B > 0)[:, None]
    k_seen_BS = (jnp.arange(k_BKSH.shape[2]) < keys_B[:, None]) & (view.queries_B > 0)[:, None]
    return _kept(dq_BNCH, q_sees_BC), _kept(dk_BKSH, k_seen_BS), _kept(dv_BKSH, k_seen_BS)


def _kept(x_BKSH: jax.Array, keep_BS: jax.Array) -> jax.Array:
    """float32, and 0 where cuDNN's results mean nothing, whatever they hold."""
    return jnp.where(keep_BS[:, None, :, None], x_BKSH.astype(jnp.float32), 0)


def _stretches(tokens: int, block: int) -> list[slice]:
    return [slice(start, start + block) for start in range(0, tokens, block)]


class _View(NamedTuple):
    """What one stretch of queries sees of ascending keys."""

    queries_B: jax.Array
    """Real tokens of the stretch, which come first in it."""
    prefix_B: jax.Array
    """Keys before the stretch, all of which it sees."""
    own_B: jax.Array
    """Keys of the stretch itself among them: all of them, right after the prefix, or none."""
    real_BC: jax.Array
    """bool: the real ones of the stretch."""
    as_promised_B: jax.Array
    """bool: the tokens are such that these numbers are the mask."""


def _view(queries: Tokens, keys: Tokens) -> _View:
    """int32 [B] and bool [B, ...], from the tokens of a stretch and those of ascending keys."""
    q_real_BC, k_real_BS = queries.segments != 0, keys.segments != 0
    q_count_B, k_count_B = q_real_BC.sum(1, dtype=jnp.int32), k_real_BS.sum(1, dtype=jnp.int32)
    first_B1 = queries.positions[:, :1]
    q_index, k_index = (jnp.arange(x.shape[1], dtype=jnp.int32) for x in (q_real_BC, k_real_BS))
    prefix_B = (k_real_BS & (keys.positions < first_B1)).sum(1, dtype=jnp.int32)
    within_BS = k_real_BS & (keys.positions >= first_B1) & (keys.positions < first_B1 + q_count_B[:, None])
    own_B = within_BS.sum(1, dtype=jnp.int32)

    segment_B1 = jnp.maximum(queries.segments.max(1), keys.segments.max(1))[:, None]
    promised = (
        ((q_index < q_count_B[:, None]) == q_real_BC)
        & (~q_real_BC | ((queries.segments == segment_B1) & (queries.positions == first_B1 + q_index))),
        ((k_index < k_count_B[:, None]) == k_real_BS) & (~k_real_BS | (keys.segments == segment_B1)),
        ~k_real_BS[:, 1:] | (keys.positions[:, 1:] > keys.positions[:, :-1]),
        # Of the stretch's own keys all, right after the prefix and whole with its padding, or none.
        ((own_B == 0) | ((own_B == q_count_B) & (prefix_B + q_index.size <= k_index.size)))[:, None],
    )
    as_promised_B = jnp.stack([x.all(axis=1) for x in promised]).all(axis=0) | (q_count_B == 0)
    return _View(q_count_B, jnp.where(q_count_B > 0, prefix_B, 0), own_B, q_real_BC, as_promised_B)


def _or_nan(x_BKSH: jax.Array, view: _View) -> jax.Array:
    return jnp.where(view.as_promised_B[:, None, None, None], x_BKSH, jnp.nan)


def _ascending(tokens: Tokens, block: int) -> tuple[jax.Array, Tokens]:
    """The order of the stretches of some shards' keys by their first position, int32 [B, stretches], padding last;
    and their tokens in it. A shard's own are in order already; those of several, gathered, are not.
    """
    first_BJ, segments_BJ = tokens.positions[:, ::block], tokens.segments[:, ::block]
    rank_BJ = jnp.argsort(jnp.where(segments_BJ != 0, first_BJ, tiles.GREATEST), axis=1)
    return rank_BJ, Tokens(*(_reordered(x[:, None, :, None], rank_BJ)[:, 0, :, 0] for x in tokens))


def _reordered(x_BKSH: jax.Array, rank_BJ: jax.Array) -> jax.Array:
    """The stretches along S in another order."""
    B, K, S, H = x_BKSH.shape
    stretches = rank_BJ.shape[1]
    if stretches == 1:
        return x_BKSH
    x_BKJCH = x_BKSH.reshape(B, K, stretches, S // stretches, H)
    return jnp.take_along_axis(x_BKJCH, rank_BJ[:, None, :, None, None], axis=2).reshape(B, K, S, H)


def _slice(x_BKSH: jax.Array, start_B: jax.Array, size: int) -> jax.Array:
    """`size` keys of each row from its own start on, or the last ones."""
    return jax.vmap(lambda x_KSH, start: lax.dynamic_slice_in_dim(x_KSH, start, size, axis=1))(x_BKSH, start_B)


def _add_slice(x_BKSH: jax.Array, add_BKCH: jax.Array, start_B: jax.Array) -> jax.Array:
    """Adds where `_slice` took."""
    size = add_BKCH.shape[2]

    def add(x_KSH: jax.Array, add_KCH: jax.Array, start: jax.Array) -> jax.Array:
        old = lax.dynamic_slice_in_dim(x_KSH, start, size, axis=1)
        return lax.dynamic_update_slice_in_dim(x_KSH, old + add_KCH, start, axis=1)

    return jax.vmap(add)(x_BKSH, add_BKCH, start_B)


def _with_product(d_out_BKGTH: jax.Array, delta_BKGT: jax.Array) -> jax.Array:
    """The vector along d_out whose product with it is delta, in its dtype: no longer than the out that gave delta."""
    size_BKGT1 = jnp.abs(d_out_BKGTH.astype(jnp.float32)).max(axis=-1, keepdims=True)
    size_BKGT1 = jnp.where(size_BKGT1 == 0, 1, size_BKGT1)
    unit_BKGTH = d_out_BKGTH.astype(jnp.float32) / size_BKGT1
    length_BKGT1 = jnp.maximum((unit_BKGTH**2).sum(axis=-1, keepdims=True), 1)
    return (unit_BKGTH * (delta_BKGT[..., None] / size_BKGT1 / length_BKGT1)).astype(d_out_BKGTH.dtype)
