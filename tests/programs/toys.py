"""Small programs whose collectives and FLOPs can be counted by hand, on a mesh of fsdp 2 x context 4."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from longtrain.ops.kernels import FORWARD_SCOPE

MESH = {"data": 1, "fsdp": 2, "context": 4, "tensor": 1}
CONTEXT = MESH["context"]

TOKENS, WIDTH = 4096, 512
"""Of a device's block, bfloat16: 4 MiB."""

LAYERS = 3


def mesh(devices: Sequence[jax.Device]) -> Mesh:
    shape = tuple(MESH.values())
    return Mesh(np.array(devices).reshape(shape), tuple(MESH), axis_types=(AxisType.Auto,) * len(shape))


def _shift(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "context", [(i, (i + 1) % CONTEXT) for i in range(CONTEXT)])


def _attend(q_TH: jax.Array, k_TH: jax.Array) -> jax.Array:
    """Two products: 2 * 2 * T * T * H FLOPs."""
    return jnp.tanh(q_TH @ k_TH.T) @ k_TH


def ring(q_TH: jax.Array, k_TH: jax.Array) -> jax.Array:
    """Blocks travel round: each is sent on before it is computed with. 3 shifts, 4 blocks."""

    def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        block_TH, out_TH = carry
        return (_shift(block_TH), out_TH + _attend(q_TH, block_TH)), None

    (k_TH, out_TH), _ = lax.scan(step, (k_TH, jnp.zeros_like(q_TH)), length=CONTEXT - 1)
    return out_TH + _attend(q_TH, k_TH)


def sabotaged_ring(q_TH: jax.Array, k_TH: jax.Array) -> jax.Array:
    """The same, but what travels depends on the compute of its own step."""

    def step(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        block_TH, out_TH = carry
        add_TH = _attend(q_TH, block_TH)
        return (_shift(block_TH + 1e-6 * add_TH), out_TH + add_TH), None

    (k_TH, out_TH), _ = lax.scan(step, (k_TH, jnp.zeros_like(q_TH)), length=CONTEXT - 1)
    return out_TH + _attend(q_TH, k_TH)


def _attend_in_tiles(q_TH: jax.Array, k_TH: jax.Array) -> jax.Array:
    """The same as `_attend` in the scope of an attention kernel, a loop over tiles."""
    with jax.named_scope(FORWARD_SCOPE):
        return lax.map(lambda q: _attend(q, k_TH), q_TH.reshape(-1, 256, WIDTH)).reshape(q_TH.shape)


def pair(q_TH: jax.Array, k_TH: jax.Array) -> jax.Array:
    """A ring of which two steps are written out: one shift, beside the first block's compute."""
    other_TH = _shift(k_TH)
    return _attend_in_tiles(q_TH, k_TH) + _attend_in_tiles(q_TH, other_TH)


def sabotaged_pair(q_TH: jax.Array, k_TH: jax.Array) -> jax.Array:
    """The same, but what travels depends on the first block's compute."""
    out_TH = _attend_in_tiles(q_TH, k_TH)
    return out_TH + _attend_in_tiles(q_TH, _shift(k_TH + 1e-6 * out_TH))


def layers(x_TH: jax.Array, w_LHH: jax.Array) -> jax.Array:
    """In each of 3 layers: weights gathered over fsdp x context, one product, a sum over context; then one reduce-
    scatter over context and one all-to-all over fsdp."""

    def layer(x_TH: jax.Array, w_HH: jax.Array) -> tuple[jax.Array, None]:
        whole_HH = lax.all_gather(w_HH, ("fsdp", "context"), axis=0, tiled=True)
        x_TH = jnp.tanh(x_TH @ whole_HH)
        return x_TH + lax.psum(x_TH, "context"), None

    x_TH, _ = lax.scan(layer, x_TH, w_LHH)
    part = lax.psum_scatter(x_TH, "context", scatter_dimension=0, tiled=True)
    return lax.all_to_all(part, "fsdp", split_axis=1, concat_axis=0, tiled=True)


def lowered(devices: Sequence[jax.Device]) -> dict[str, jax.stages.Lowered]:
    """Each program for these eight devices."""
    on = mesh(devices)
    blocks, stacked = P(("fsdp", "context")), P(None, ("fsdp", "context"))

    def arrays(*shapes: tuple[tuple[int, ...], P]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(on, cut)) for s, cut in shapes]

    def lower(function: Callable[..., jax.Array], *shapes: tuple[tuple[int, ...], P]) -> jax.stages.Lowered:
        specs = tuple(cut for _, cut in shapes)
        mapped = jax.shard_map(function, mesh=on, in_specs=specs, out_specs=blocks, check_vma=False)
        return jax.jit(mapped).lower(*arrays(*shapes))

    block = ((8 * TOKENS, WIDTH), blocks)
    return {
        "ring": lower(ring, block, block),
        "sabotaged_ring": lower(sabotaged_ring, block, block),
        "pair": lower(pair, block, block),
        "sabotaged_pair": lower(sabotaged_pair, block, block),
        "layers": lower(layers, block, ((LAYERS, WIDTH, WIDTH), stacked)),
    }
