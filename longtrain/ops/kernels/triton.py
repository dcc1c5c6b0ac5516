"""Flash attention for NVIDIA GPUs, as Pallas kernels compiled by Triton: any layout, any packing, any dtype.

One program computes one tile of results and loops over the tiles it meets: first those that every token of both
sides sees, without a mask, then the others with it. Which tiles those are is found beforehand from the tiles' bounds
(`tiles.spans`), so empty tiles cost nothing, in both passes:

    forward     a tile of queries of one head               loops over keys
    backward    a tile of queries of one head -> dq         loops over keys
                a tile of keys -> dk, dv                    loops over its G query heads, and over queries

K and V are never repeated: the G query heads of a key/value head read the same ones. No two programs write to one
place, so a result does not depend on their order. Products take the inputs' dtype and sum in float32; float32 inputs
are multiplied as float32, not as TF32, without the tensor cores: for checks, not for speed.

Why it is our own: of the library's kernels none serves rows of several documents in both passes. jax's
`pallas.ops.gpu.attention` has one array of segments for queries and keys, no positions, no groups of heads, and is
deprecated in favour of tokamax. tokamax 0.0.17 takes a range of keys for each query, but the backward pass of its
Triton kernel builds the whole mask in memory and gives dk and dv for each query head, and that of its Mosaic kernel
computes the tiles that the mask hides. cuDNN has `cudnn.py`.

jax 0.12 calls Pallas' Triton route deprecated in favour of Mosaic GPU, whose kernels are written for one generation of
GPUs each and cannot be interpreted without one. The day jax drops it, `tests/test_kernels_gpu.py` fails.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from longtrain.ops import tiles
from longtrain.ops.kernels.workload import Settings, Workload
from longtrain.ops.tiles import Tokens

FORWARD_SIDES = {2: (128, 64), 4: (32, 16)}
BACKWARD_SIDES = {2: (128, 32), 4: (32, 16)}
"""Tokens along a tile by the dtype's bytes: of the side whose results a program computes, of the side it loops over.
As large as leaves every register in its place: with head_dim 128 and twice the second side, ptxas spills on GB200."""

COMPILER = plgpu.CompilerParams(num_warps=8, num_stages=2)

SMALLEST = 16
"""Along each side of a matrix product of Triton's; every side is a power of two."""

LARGEST_HEAD_DIM = 128
DTYPES = ("bfloat16", "float16", "float32")
CAPABILITY = (8, 0)

Arrays = tuple[jax.Array, ...]
Refs = tuple[Any, ...]


def limits(work: Workload) -> str | None:
    """Why it cannot serve this workload; None where it can."""
    if not work.interpret and work.platform != "gpu":
        return f"it compiles for NVIDIA GPUs, not for {work.platform}"
    if not work.interpret and not work.has_capability(CAPABILITY):
        return f"compute capability {work.capability}: it needs {'.'.join(map(str, CAPABILITY))} (Ampere) or later"
    if work.head_dim > LARGEST_HEAD_DIM:
        return f"head_dim {work.head_dim}: at most {LARGEST_HEAD_DIM}"
    if work.dtype not in DTYPES:
        return f"dtype {work.dtype}: one of {', '.join(DTYPES)}"
    return None


def forward(
    q_BKGTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """See the package."""
    B, K, G, length, head_dim = q_BKGTH.shape
    row_side, column_side = _sides(FORWARD_SIDES, q_BKGTH, k_BKSH)
    q_BKGTH = _pad(q_BKGTH, {3: row_side, 4: None})
    k_BKSH, v_BKSH = (_pad(x, {2: column_side, 3: None}) for x in (k_BKSH, v_BKSH))
    q_tokens, kv_tokens = _pad_tokens(q_tokens, row_side), _pad_tokens(kv_tokens, column_side)
    spans_BI4 = _spans(q_tokens, row_side, kv_tokens, column_side, of="queries")
    T, H = q_BKGTH.shape[3:]

    row_TH, row_T, tokens_T, tokens_S, span_4, whole_SH = _query_specs(q_BKGTH, k_BKSH, row_side)
    out_BKGTH, peak_BKGT, total_BKGT = pl.pallas_call(
        functools.partial(_forward_program, scale=settings.scale, side=column_side),
        grid=(T // row_side, K * G, B),
        in_specs=[span_4, tokens_T, tokens_T, tokens_S, tokens_S, row_TH, whole_SH, whole_SH],
        out_specs=[row_TH, row_T, row_T],
        out_shape=_float32((B, K, G, T, H), (B, K, G, T), (B, K, G, T)),
        compiler_params=COMPILER,
        interpret=settings.interpret,
        name="attention_forward",
    )(spans_BI4, *q_tokens, *kv_tokens, q_BKGTH, k_BKSH, v_BKSH)
    return out_BKGTH[:, :, :, :length, :head_dim], jnp.stack((peak_BKGT, total_BKGT))[..., :length]


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
    """See the package. Two kernels, each of which rebuilds the softmax's tiles from its global statistics."""
    B, K, G, length, head_dim = q_BKGTH.shape
    kv_length = k_BKSH.shape[2]
    row_side, column_side = _sides(BACKWARD_SIDES, q_BKGTH, k_BKSH)
    # Both sides are padded for both kernels: the larger side is a multiple of the smaller.
    both = max(row_side, column_side)
    q_BKGTH, d_out_BKGTH = (_pad(x, {3: both, 4: None}) for x in (q_BKGTH, d_out_BKGTH))
    k_BKSH, v_BKSH = (_pad(x, {2: both, 3: None}) for x in (k_BKSH, v_BKSH))
    rows = [_pad(x, {3: both}) for x in (stats_2BKGT[0], jnp.log(stats_2BKGT[1]), delta_BKGT)]
    q_tokens, kv_tokens = _pad_tokens(q_tokens, both), _pad_tokens(kv_tokens, both)
    T, H = q_BKGTH.shape[3:]
    S = k_BKSH.shape[2]

    row_TH, row_T, tokens_T, tokens_S, span_4, whole_SH = _query_specs(q_BKGTH, k_BKSH, row_side)
    dq_BKGTH = pl.pallas_call(
        functools.partial(_dq_program, scale=settings.scale, side=column_side),
        grid=(T // row_side, K * G, B),
        in_specs=[span_4, *[tokens_T] * 2, *[tokens_S] * 2, *[row_TH] * 2, *[row_T] * 3, *[whole_SH] * 2],
        out_specs=row_TH,
        out_shape=_float32((B, K, G, T, H))[0],
        compiler_params=COMPILER,
        interpret=settings.interpret,
        name="attention_backward_q",
    )(
        _spans(q_tokens, row_side, kv_tokens, column_side, of="queries"),
        *(*q_tokens, *kv_tokens, q_BKGTH, d_out_BKGTH, *rows, k_BKSH, v_BKSH),
    )

    # The same sides, swapped: a program owns `row_side` keys and loops over `column_side` queries.
    own_SH = pl.BlockSpec((None, None, row_side, H), lambda i, k, b: (b, k, i, 0))
    own_S = pl.BlockSpec((None, row_side), lambda i, k, b: (b, i))
    all_GTH = pl.BlockSpec((None, None, G, T, H), lambda i, k, b: (b, k, 0, 0, 0))
    all_GT = pl.BlockSpec((None, None, G, T), lambda i, k, b: (b, k, 0, 0))
    all_T = pl.BlockSpec((None, T), lambda i, k, b: (b, 0))
    dk_BKSH, dv_BKSH = pl.pallas_call(
        functools.partial(_dkv_program, scale=settings.scale, side=column_side),
        grid=(S // row_side, K, B),
        in_specs=[
            pl.BlockSpec((None, None, 4), lambda i, k, b: (b, i, 0)),
            *(*[all_T] * 2, *[own_S] * 2, *[all_GTH] * 2, *[all_GT] * 3, *[own_SH] * 2),
        ],
        out_specs=[own_SH] * 2,
        out_shape=_float32((B, K, S, H), (B, K, S, H)),
        compiler_params=COMPILER,
        interpret=settings.interpret,
        name="attention_backward_kv",
    )(
        _spans(q_tokens, column_side, kv_tokens, row_side, of="keys"),
        *(*q_tokens, *kv_tokens, q_BKGTH, d_out_BKGTH, *rows, k_BKSH, v_BKSH),
    )
    return (
        dq_BKGTH[:, :, :, :length, :head_dim],
        dk_BKSH[:, :, :kv_length, :head_dim],
        dv_BKSH[:, :, :kv_length, :head_dim],
    )


# --- The programs: R tokens of the tile a program owns, C of a tile it visits -----------------------------------------


def _forward_program(spans_ref: Any, *refs: Any, scale: float, side: int) -> None:
    *token_refs, q_ref, k_ref, v_ref, out_ref, peak_ref, total_ref = refs
    q_RH = q_ref[...]
    queries, keys_at = _tokens(token_refs, queries="own")
    R, H = q_RH.shape

    def visit(j: jax.Array, carry: Arrays, masked: bool) -> Arrays:
        sum_RH, total_R, peak_R = carry
        at = pl.ds(j * side, side)
        scores_RC = _dot(q_RH, k_ref[at, :].T) * scale
        if masked:
            scores_RC = jnp.where(tiles.seen(queries, keys_at(at)), scores_RC, tiles.MASKED)
        new_peak_R = jnp.maximum(peak_R, scores_RC.max(axis=1))
        weights_RC = jnp.exp(scores_RC - new_peak_R[:, None])
        shrink_R = jnp.exp(peak_R - new_peak_R)
        v_CH = v_ref[at, :]
        add_RH = _dot(weights_RC.astype(v_CH.dtype), v_CH)
        return sum_RH * shrink_R[:, None] + add_RH, total_R * shrink_R + weights_RC.sum(axis=1), new_peak_R

    # The peak starts at UNSEEN, far above any masked score: a row that has seen nothing sums exact zeros.
    carry = (_zeros(R, H), _zeros(R), jnp.full((R,), tiles.UNSEEN, jnp.float32))
    sum_RH, total_R, peak_R = _visit(spans_ref, visit, carry)
    total_R = jnp.where(total_R == 0, 1.0, total_R)
    out_ref[...] = sum_RH / total_R[:, None]
    peak_ref[...], total_ref[...] = peak_R, total_R


def _dq_program(spans_ref: Any, *refs: Any, scale: float, side: int) -> None:
    *token_refs, q_ref, d_out_ref, peak_ref, log_total_ref, delta_ref, k_ref, v_ref, dq_ref = refs
    q_RH, d_out_RH = q_ref[...], d_out_ref[...]
    peak_R1, log_total_R1, delta_R1 = (x[...][:, None] for x in (peak_ref, log_total_ref, delta_ref))
    queries, keys_at = _tokens(token_refs, queries="own")

    def visit(j: jax.Array, dq_RH: jax.Array, masked: bool) -> jax.Array:
        at = pl.ds(j * side, side)
        k_CH, v_CH = k_ref[at, :], v_ref[at, :]
        scores_RC = _dot(q_RH, k_CH.T) * scale
        if masked:
            scores_RC = jnp.where(tiles.seen(queries, keys_at(at)), scores_RC, tiles.MASKED)
        weights_RC = jnp.exp((scores_RC - peak_R1) - log_total_R1)
        d_scores_RC = weights_RC * (_dot(d_out_RH, v_CH.T) - delta_R1)
        return dq_RH + _dot(d_scores_RC.astype(k_CH.dtype), k_CH)

    dq_ref[...] = _visit(spans_ref, visit, _zeros(*q_RH.shape)) * scale


def _dkv_program(spans_ref: Any, *refs: Any, scale: float, side: int) -> None:
    *token_refs, q_ref, d_out_ref, peak_ref, log_total_ref, delta_ref, k_ref, v_ref, dk_ref, dv_ref = refs
    k_RH, v_RH = k_ref[...], v_ref[...]
    keys, queries_at = _tokens(token_refs, queries="visited")

    def query_head(g: jax.Array, carry: Arrays) -> Arrays:
        def visit(j: jax.Array, carry: Arrays, masked: bool) -> Arrays:
            dk_RH, dv_RH = carry
            at = pl.ds(j * side, side)
            q_CH, d_out_CH = q_ref[g, at, :], d_out_ref[g, at, :]
            scores_RC = _dot(k_RH, q_CH.T) * scale
            if masked:
                scores_RC = jnp.where(tiles.seen(queries_at(at), keys), scores_RC, tiles.MASKED)
            weights_RC = jnp.exp((scores_RC - peak_ref[g, at][None]) - log_total_ref[g, at][None])
            dv_RH += _dot(weights_RC.astype(d_out_CH.dtype), d_out_CH)
            d_scores_RC = weights_RC * (_dot(v_RH, d_out_CH.T) - delta_ref[g, at][None])
            return dk_RH + _dot(d_scores_RC.astype(q_CH.dtype), q_CH), dv_RH

        return _visit(spans_ref, visit, carry)

    carry = (_zeros(*k_RH.shape), _zeros(*v_RH.shape))
    dk_RH, dv_RH = lax.fori_loop(0, q_ref.shape[0], query_head, carry)
    dk_ref[...], dv_ref[...] = dk_RH * scale, dv_RH


def _visit(spans_ref: Any, visit: Callable[..., Any], carry: Any) -> Any:
    """Runs `visit(tile, carry, masked)` over the full tiles without a mask, then over the others of the span."""
    start, full_start, full_stop, stop = (spans_ref[i] for i in range(4))
    full = full_stop - full_start

    def visit_masked(n: jax.Array, carry: Any) -> Any:
        return visit(jnp.where(n < full_start, n, n + full), carry, masked=True)

    carry = lax.fori_loop(full_start, full_stop, functools.partial(visit, masked=False), carry)
    return lax.fori_loop(start, stop - full, visit_masked, carry)


def _tokens(refs: list[Any], *, queries: str) -> tuple[Tokens, Callable[[Any], Tokens]]:
    """The tokens of a program's own tile as a column, and of a visited one as a row. `queries`: which side they are."""
    q_refs, kv_refs = refs[:2], refs[2:]
    own, visited = (q_refs, kv_refs) if queries == "own" else (kv_refs, q_refs)
    return Tokens(*(x[...][:, None] for x in own)), lambda at: Tokens(*(x[at][None] for x in visited))


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(x, y, preferred_element_type=jnp.float32, precision=precision)


def _zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.float32)


# --- What is handed to them -------------------------------------------------------------------------------------------


def _sides(sides: dict[int, tuple[int, int]], q_BKGTH: jax.Array, k_BKSH: jax.Array) -> tuple[int, int]:
    """Tokens of the tile a program owns, and of a tile it visits; short sequences take smaller ones."""
    longest = pl.next_power_of_2(max(q_BKGTH.shape[3], k_BKSH.shape[2], SMALLEST))
    own, visited = sides[q_BKGTH.dtype.itemsize]
    return min(own, longest), min(visited, longest)


def _spans(q_tokens: Tokens, q_side: int, kv_tokens: Tokens, kv_side: int, *, of: str) -> jax.Array:
    spans = tiles.spans(tiles.bounds(q_tokens, q_side), tiles.bounds(kv_tokens, kv_side), of=of)
    return jnp.stack(spans, axis=-1)


def _query_specs(q_BKGTH: jax.Array, k_BKSH: jax.Array, side: int) -> tuple[pl.BlockSpec, ...]:
    """Of a grid (tile of queries, query head, row): a tile of queries, a number for each of them, the tokens of the
    tile and of all keys, the tile's span, all keys of the head.
    """
    G, H, S = q_BKGTH.shape[2], q_BKGTH.shape[4], k_BKSH.shape[2]
    return (
        pl.BlockSpec((None, None, None, side, H), lambda i, n, b: (b, n // G, n % G, i, 0)),
        pl.BlockSpec((None, None, None, side), lambda i, n, b: (b, n // G, n % G, i)),
        pl.BlockSpec((None, side), lambda i, n, b: (b, i)),
        pl.BlockSpec((None, S), lambda i, n, b: (b, 0)),
        pl.BlockSpec((None, None, 4), lambda i, n, b: (b, i, 0)),
        pl.BlockSpec((None, None, S, H), lambda i, n, b: (b, n // G, 0, 0)),
    )


def _float32(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def _pad(x: jax.Array, axes: dict[int, int | None]) -> jax.Array:
    """Zeros after the end of each axis, up to a multiple; None: up to a power of two."""
    widths = [(0, 0)] * x.ndim
    for axis, multiple in axes.items():
        size = x.shape[axis]
        widths[axis] = (0, -size % multiple if multiple else max(pl.next_power_of_2(size), SMALLEST) - size)
    return jnp.pad(x, widths)


def _pad_tokens(tokens: Tokens, side: int) -> Tokens:
    return Tokens(*(_pad(x, {1: side}) for x in tokens))
