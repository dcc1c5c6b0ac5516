"""Exact causal attention over packed documents, on any mesh: the one public function, `attention`.

Its parts, each in a file of its own: `kernels` (a block of queries over a block of keys, on one device), the
strategies `ring`, `all_gather` and `ulysses` (which blocks meet on which shard), `tiles` (the mask).
Here: the checks, the way onto the mesh and back, and the one derivative rule that all strategies share.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from longtrain import layout as layouts
from longtrain.ops import all_gather, kernels, ring, ulysses
from longtrain.ops.kernels.workload import Settings, Workload, interpreting
from longtrain.ops.strategy import Alone, Strategy
from longtrain.ops.tiles import Tokens
from longtrain.parallel import group
from longtrain.parallel.sharding import BATCH_AXES

STRATEGIES = ("ring", "all_gather", "ulysses")

SAVED_NAMES = ("attention_out", "attention_lse")
"""What a remat policy must save (both) so that the backward pass does not run attention's forward again."""


def attention(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    positions_BS: jax.Array,
    segments_BS: jax.Array,
    mesh: Mesh | None = None,
    strategy: str = "ring",
    layout: str = "contiguous",
    kernel: str = "auto",
    scale: float | None = None,
    one_document: bool = False,
    ulysses_degree: int = 1,
    two_way: bool = False,
    unroll: bool = False,
) -> jax.Array:
    """Attention of each query over its own document's keys up to its own position: out_BSNH, in q's dtype.

    Query i sees key j when their segments are equal and not 0 and positions[i] >= positions[j]. A query that
    sees nothing (padding, segment 0) gets exactly 0; padding takes part in no gradient, whatever it holds,
    NaN too. Query head n reads key/value head n // (N / K). Differentiable in q, k and v (reverse mode).

    The arrays are global, in the order of `layout` (the answer never depends on it; the speed does). With a
    mesh (of axes data, fsdp, context, tensor; those it lacks count as 1) they are computed with B over data x
    fsdp, S over context, N and K over tensor; fewer key/value heads than tensor shards are replicated.
    `scale` multiplies the scores: 1 / sqrt(H) unless given. `one_document` promises that each row is one document
    in order, from position 0, with padding at its end only: some kernels serve no other rows.

    Of strategy ring: `ulysses_degree` neighbouring context shards exchange heads for sequence, and the ring is
    over such groups; rows are then best dealt to the groups, `layout.order(layout, S, context / ulysses_degree)`.
    `two_way`: half of the key/value heads travels each way. Of ring and all_gather: `unroll`, their steps one after
    the other in the program instead of a loop.

    Raises ValueError, with the numbers, for arguments that do not fit each other or the mesh, and for a kernel that
    cannot serve them.
    """
    axis_sizes = {name: mesh.shape.get(name, 1) if mesh else 1 for name in (*BATCH_AXES, "context", "tensor")}
    _check(q_BSNH, k_BSKH, v_BSKH, positions_BS, segments_BS, axis_sizes, strategy, ulysses_degree, two_way, unroll)
    _, S, N, H = q_BSNH.shape
    shards = axis_sizes["context"]
    members = shards // ulysses_degree
    settings = Settings(
        scale=1 / math.sqrt(H) if scale is None else float(scale),
        tile=layouts.tile(layout, S, members),
        block=layouts.block(layout, S, members),
        interpret=interpreting(),
    )
    work = Workload.on(
        jax.devices()[0] if mesh is None else mesh.devices.flat[0],
        dtype=str(q_BSNH.dtype),
        head_dim=H,
        q_heads=N,
        kv_heads=k_BSKH.shape[2],
        tokens=S,
        context=shards,
        tensor=axis_sizes["tensor"],
        strategy=strategy,
        layout=layout,
        one_document=one_document,
        ulysses_degree=ulysses_degree,
    )
    block_kernel = kernels.Kernel(kernels.select(kernel, work)[0], settings)
    chosen = _strategy(strategy, block_kernel, shards, ulysses_degree, two_way, unroll)
    arrays = (q_BSNH, k_BSKH, v_BSKH, Tokens(positions_BS, segments_BS))
    if mesh is None:
        return _attention(chosen, None, *arrays)
    # Over explicit axes, which jax.make_mesh gives unless told otherwise, shard_map takes only arrays that are cut as
    # it wants them. So they are automatic inside, and arrays whose types name them are passed in and out accordingly.
    automatic = functools.partial(_attention, chosen, Mesh(mesh.devices, mesh.axis_names))
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))]
    if not any(AxisType.Explicit in each.axis_types for each in meshes):
        return automatic(*arrays)
    cut = NamedSharding(mesh, PartitionSpec(*_axes(mesh)))
    return jax.sharding.auto_axes(automatic, out_sharding=cut)(*arrays)


def _axes(mesh: Mesh) -> tuple[tuple[str, ...] | None, ...]:
    """The axes of the mesh that cut rows, sequence and heads."""
    cuts = (BATCH_AXES, ("context",), ("tensor",))
    return tuple(tuple(name for name in names if name in mesh.shape) or None for names in cuts)


def _strategy(
    name: str, kernel: kernels.Kernel, shards: int, ulysses_degree: int, two_way: bool, unroll: bool
) -> Strategy:
    """The strategy of this name over so many context shards."""
    alone = Alone(kernel)
    if shards == 1:
        return alone
    everyone = group.Group("context", shards)
    if name == "all_gather":
        return all_gather.AllGather(kernel, everyone, unroll)
    if name == "ulysses" or ulysses_degree == shards:
        return ulysses.Ulysses(everyone, alone)
    if ulysses_degree == 1:
        return ring.Ring(kernel, everyone, two_way, unroll)
    neighbours = group.Group("context", ulysses_degree)
    over_groups = group.Group("context", shards // ulysses_degree, stride=ulysses_degree)
    return ulysses.Ulysses(neighbours, ring.Ring(kernel, over_groups, two_way, unroll))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attention(
    strategy: Strategy, mesh: Mesh | None, q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, tokens: Tokens
) -> jax.Array:
    if mesh is None:
        return _on_shard(strategy, q_BSNH, k_BSKH, v_BSKH, tokens)
    rows, sequence, heads = _axes(mesh)
    kv_heads, tensor = k_BSKH.shape[2], mesh.shape.get("tensor", 1)
    on_shard = functools.partial(_on_shard, strategy)
    kv_spec = PartitionSpec(rows, sequence, heads)
    if kv_heads < tensor:
        # All key/value heads are on every tensor shard, which takes the one its query heads read. Their
        # gradients are summed over the shards by shard_map: in float32, because they go in as float32.
        kv_spec = PartitionSpec(rows, sequence)
        k_BSKH, v_BSKH = k_BSKH.astype(jnp.float32), v_BSKH.astype(jnp.float32)
        on_shard = functools.partial(_on_replicated_shard, strategy, tensor // kv_heads)
    # With check_vma every loop carry would need a cast to varying; the specs say all that is needed.
    return jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(PartitionSpec(rows, sequence, heads), kv_spec, kv_spec, PartitionSpec(rows, sequence)),
        out_specs=PartitionSpec(rows, sequence, heads),
        check_vma=False,
    )(q_BSNH, k_BSKH, v_BSKH, tokens)


def _on_replicated_shard(
    strategy: Strategy, sharers: int, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, tokens: Tokens
) -> jax.Array:
    """`_on_shard` where `sharers` tensor shards share one key/value head."""
    head = lax.axis_index("tensor") // sharers
    k_BT1H, v_BT1H = (lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k_BTKH, v_BTKH))
    return _on_shard(strategy, q_BTNH, k_BT1H, v_BT1H, tokens)


def _on_shard(strategy: Strategy, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, tokens: Tokens) -> jax.Array:
    """One shard's part: heads before the sequence, query heads grouped by the key/value head they read."""
    B, T, N, H = q_BTNH.shape
    K = k_BTKH.shape[2]
    q_BTNH, k_BTKH, v_BTKH = (_blank_padding(x, tokens) for x in (q_BTNH, k_BTKH, v_BTKH))
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BKTH, v_BKTH = k_BTKH.transpose(0, 2, 1, 3), v_BTKH.transpose(0, 2, 1, 3)
    out_BKGTH = _differentiable(strategy, q_BKGTH, k_BKTH, v_BKTH, tokens)
    return _blank_padding(out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H), tokens)


def _blank_padding(x_BTNH: jax.Array, tokens: Tokens) -> jax.Array:
    """Zeros in place of padding, which may hold NaN; its transpose does the same for gradients."""
    return jnp.where((tokens.segments != 0)[:, :, None, None], x_BTNH, jnp.zeros((), x_BTNH.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(
    strategy: Strategy, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens
) -> jax.Array:
    """A shard's attention, in q's dtype, with one derivative rule for the whole distributed operation."""
    return _differentiable_forward(strategy, q_BKGTH, k_BKTH, v_BKTH, tokens)[0]


def _differentiable_forward(
    strategy: Strategy, q_BKGTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens
) -> tuple[jax.Array, tuple]:
    # Partial evaluation under jax.checkpoint takes what depends on the tokens alone for known, and would save
    # the masks of every loop step. The barrier ties them to q.
    q, k, v, known = lax.optimization_barrier((q_BKGTH, k_BKTH, v_BKTH, tokens))
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    out_BKGTH, stats_2BKGT = strategy.forward(q, k, v, known)
    # Named here, inside the rule: names on the outputs of a custom_vjp are no use to a remat policy.
    out_BKGTH = checkpoint_name(out_BKGTH.astype(q.dtype), SAVED_NAMES[0])
    stats_2BKGT = checkpoint_name(stats_2BKGT, SAVED_NAMES[1])
    return out_BKGTH, (q_BKGTH, k_BKTH, v_BKTH, tokens, out_BKGTH, stats_2BKGT)


def _differentiable_backward(strategy: Strategy, residuals: tuple, d_out_BKGTH: jax.Array) -> tuple:
    # The barrier keeps XLA from merging the backward's transfers of k and v with the forward's, which would
    # keep every received block alive in between.
    q, k, v, tokens, out, stats, d_out = lax.optimization_barrier((*residuals, d_out_BKGTH))
    delta_BKGT = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    grads = strategy.backward(q, k.astype(q.dtype), v.astype(q.dtype), d_out, stats, delta_BKGT, tokens)
    return (*(grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None)


_differentiable.defvjp(_differentiable_forward, _differentiable_backward)


def _check(
    q_BSNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    positions_BS: jax.Array,
    segments_BS: jax.Array,
    axis_sizes: dict[str, int],
    strategy: str,
    ulysses_degree: int,
    two_way: bool,
    unroll: bool,
) -> None:
    """Raises ValueError where shapes do not fit each other, the mesh or the strategy."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
    if q_BSNH.ndim != 4 or k_BSKH.ndim != 4 or k_BSKH.shape != v_BSKH.shape:
        got = f"{q_BSNH.shape}, {k_BSKH.shape} and {v_BSKH.shape}"
        raise ValueError(f"q, k and v must be [B, S, N, H], [B, S, K, H] and [B, S, K, H]: got {got}")
    B, S, N, H = q_BSNH.shape
    K = k_BSKH.shape[2]
    if k_BSKH.shape != (B, S, K, H):
        raise ValueError(f"q {q_BSNH.shape} and k {k_BSKH.shape} differ in rows, sequence length or head_dim")
    if positions_BS.shape != (B, S) or segments_BS.shape != (B, S):
        got = f"{positions_BS.shape} and {segments_BS.shape}"
        raise ValueError(f"positions and segments must be {(B, S)}, one for each of q's tokens: got {got}")
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} key/value heads")

    rows = axis_sizes["data"] * axis_sizes["fsdp"]
    context, tensor = axis_sizes["context"], axis_sizes["tensor"]
    if B % rows:
        raise ValueError(f"{B} rows are not a multiple of data x fsdp = {rows}")
    if N % tensor:
        raise ValueError(f"{N} query heads are not a multiple of tensor = {tensor}")
    if K % tensor and tensor % K:
        raise ValueError(f"{K} key/value heads can neither be split nor shared evenly over tensor = {tensor}")
    if S % context:
        raise ValueError(f"sequence length {S} is not a multiple of context = {context}")
    local_kv_heads = max(K // tensor, 1)
    held = f"{local_kv_heads} key/value heads ({K} over tensor = {tensor})"
    if strategy == "ulysses" and local_kv_heads % context:
        legal = ", ".join(map(str, _divisors(local_kv_heads)))
        raise ValueError(
            f"ulysses deals {held} to the {context} shards of context: legal for context are {legal}; "
            "or use strategy ring or all_gather"
        )
    if strategy != "ring" and (ulysses_degree != 1 or two_way):
        raise ValueError(f"ulysses_degree = {ulysses_degree} and two_way = {two_way}: only strategy ring takes them")
    if strategy == "ulysses" and unroll:
        raise ValueError("unroll: strategy ulysses has no steps to unroll; only ring and all_gather have")
    if ulysses_degree < 1 or math.gcd(context, local_kv_heads) % ulysses_degree:
        legal = ", ".join(map(str, _divisors(math.gcd(context, local_kv_heads))))
        raise ValueError(
            f"ulysses_degree = {ulysses_degree} must divide context = {context} and {held}: legal are {legal}"
        )
    if ulysses_degree == context > 1 and (two_way or unroll):
        raise ValueError(
            f"two_way = {two_way} and unroll = {unroll}: ulysses_degree = {ulysses_degree} = context leaves no ring"
        )
    if two_way and context > 1 and local_kv_heads // ulysses_degree % 2:
        raise ValueError(
            f"two_way sends half of the key/value heads each way: {held} over ulysses_degree = {ulysses_degree} "
            "are not an even number"
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
