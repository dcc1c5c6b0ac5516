"""Llama 3 (arXiv 2407.21783) in flax nnx: abstract first, born sharded, layers stacked and scanned.

A parameter's name ends in its dims (`q_DNH`), which is all the sharding table needs. The layers' parameters are stacked
along a leading L, so that the program is one layer's, however many there are.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from longtrain.config import ModelConfig
from longtrain.layout import Deal
from longtrain.ops.attention import SAVED_NAMES, attention
from longtrain.ops.embedding import embed
from longtrain.ops.loss import token_losses
from longtrain.ops.mlp import swiglu
from longtrain.ops.norm import rms_norm
from longtrain.ops.rope import phases, rotate
from longtrain.parallel.sharding import PARAMETER, constrain, gathered, sharding

Params = dict[str, Any]
"""Parameters as a plain tree of dicts: what is trained, sharded, saved and exported."""

ATTENTION_INPUTS = "attention_inputs"

# What a layer keeps for its backward pass besides its input. Every policy keeps attention's (out, lse): the ring is
# never run again. `none` recomputes nothing at all.
REMAT_KEEPS = {
    "attention_saved": (*SAVED_NAMES, ATTENTION_INPUTS),
    "full": SAVED_NAMES,
}


@dataclass(frozen=True)
class Execution:
    """How the model is computed, as opposed to what it is: nothing here changes a result beyond rounding."""

    mesh: Mesh
    strategy: str
    layout: str
    kernel: str
    one_document: bool
    """Each row is one document in order, with padding at its end only."""
    ulysses_degree: int
    two_way: bool
    unroll: bool
    remat: str
    offload: str
    loss_chunk: int
    mlp_chunk: int | None
    compute_dtype: str

    @property
    def deal(self) -> Deal:
        """How rows are dealt to the context shards."""
        context = self.mesh.shape["context"]
        return Deal(self.layout, context, self.ulysses_degree, self.two_way, self.strategy)


class Block(nnx.Module):
    """One decoder layer; as built its parameters hold all layers, along a leading L."""

    def __init__(self, config: ModelConfig, make: Callable[[str, tuple[int, ...]], nnx.Param]):
        layers, embed, mlp, head = config.num_layers, config.embed_dim, config.mlp_dim, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.epsilon = config.norm_eps
        self.attention_norm_D = make("attention_norm_D", (layers, embed))
        self.q_DNH = make("q_DNH", (layers, embed, heads, head))
        self.k_DKH = make("k_DKH", (layers, embed, kv_heads, head))
        self.v_DKH = make("v_DKH", (layers, embed, kv_heads, head))
        self.out_NHD = make("out_NHD", (layers, heads, head, embed))
        self.mlp_norm_D = make("mlp_norm_D", (layers, embed))
        self.gate_DF = make("gate_DF", (layers, embed, mlp))
        self.up_DF = make("up_DF", (layers, embed, mlp))
        self.down_FD = make("down_FD", (layers, mlp, embed))

    def __call__(
        self,
        x_BSD: jax.Array,
        positions_BS: jax.Array,
        segments_BS: jax.Array,
        phases_BSP: tuple[jax.Array, jax.Array],
        how: Execution,
    ) -> jax.Array:
        """The layer's output, [B, S, D]; `self` holds one layer's parameters."""

        def weight(name: str) -> jax.Array:
            return gathered(getattr(self, name)[...], name.rsplit("_", 1)[1], how.mesh, how.compute_dtype)

        h_BSD = rms_norm(x_BSD, self.attention_norm_D[...], self.epsilon)
        q_BSNH = rotate(jnp.einsum("bsd,dnh->bsnh", h_BSD, weight("q_DNH")), phases_BSP)
        k_BSKH = rotate(jnp.einsum("bsd,dkh->bskh", h_BSD, weight("k_DKH")), phases_BSP)
        v_BSKH = jnp.einsum("bsd,dkh->bskh", h_BSD, weight("v_DKH"))
        q_BSNH, k_BSKH, v_BSKH = checkpoint_name((q_BSNH, k_BSKH, v_BSKH), ATTENTION_INPUTS)
        out_BSNH = attention(
            q_BSNH,
            k_BSKH,
            v_BSKH,
            positions_BS=positions_BS,
            segments_BS=segments_BS,
            mesh=how.mesh,
            strategy=how.strategy,
            layout=how.layout,
            kernel=how.kernel,
            one_document=how.one_document,
            ulysses_degree=how.ulysses_degree,
            two_way=how.two_way,
            unroll=how.unroll,
        )
        x_BSD = x_BSD + constrain(jnp.einsum("bsnh,nhd->bsd", out_BSNH, weight("out_NHD")), "BSD", how.mesh)
        h_BSD = rms_norm(x_BSD, self.mlp_norm_D[...], self.epsilon)
        h_BSD, gate_DF, up_DF, down_FD = _differentiated_together(
            (h_BSD, weight("gate_DF"), weight("up_DF"), weight("down_FD"))
        )
        return x_BSD + swiglu(h_BSD, gate_DF, up_DF, down_FD, how.mesh, how.mlp_chunk)


@jax.custom_vjp
def _differentiated_together(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same arrays. Going back, none of their gradients is used before all are there.

    Left to itself XLA computes the gradients of the MLP's weights last, after attention's backward pass, and keeps all
    that they are made of (four times [B, S, F]) until then.
    """
    return arrays


_differentiated_together.defvjp(
    lambda arrays: (arrays, None),
    lambda _, gradients: (lax.optimization_barrier(gradients),),
)


class Llama(nnx.Module):
    """The decoder: embedding, stacked layers, final norm, head (the embedding's transpose when tied)."""

    def __init__(self, config: ModelConfig, key: jax.Array):
        self.config = config

        def make(name: str, shape: tuple[int, ...]) -> nnx.Param:
            return nnx.Param(_initial(config, key, name, shape))

        self.embed_VD = make("embed_VD", (config.vocab_size, config.embed_dim))
        self.layers = Block(config, make)
        self.final_norm_D = make("final_norm_D", (config.embed_dim,))
        if not config.tie_embeddings:
            self.head_DV = make("head_DV", (config.embed_dim, config.vocab_size))

    def hidden(
        self, tokens_BS: jax.Array, positions_BS: jax.Array, segments_BS: jax.Array, how: Execution
    ) -> jax.Array:
        """Final hidden states, [B, S, D] in the compute dtype, sharded like the tokens."""
        x_BSD = embed(self.embed_VD[...], tokens_BS, how.mesh, how.compute_dtype)
        phases_BSP = phases(positions_BS, self.config.rope, self.config.head_dim, longest=tokens_BS.shape[1])
        graph, stacked = nnx.split(self.layers)

        def layer(x_BSD: jax.Array, parameters: nnx.State) -> tuple[jax.Array, None]:
            block: Block = nnx.merge(graph, parameters)
            return block(x_BSD, positions_BS, segments_BS, phases_BSP, how), None

        if how.remat != "none":
            # A scan needs no barrier of its own.
            layer = jax.checkpoint(layer, policy=_kept(how.remat, how.offload), prevent_cse=False)
        x_BSD, _ = jax.lax.scan(layer, x_BSD, stacked)
        return rms_norm(x_BSD, self.final_norm_D[...], self.config.norm_eps)

    def head(self) -> jax.Array:
        """The output head [D, V]."""
        return self.embed_VD[...].T if self.config.tie_embeddings else self.head_DV[...]

    def losses(self, batch: dict[str, jax.Array], how: Execution) -> jax.Array:
        """Every token's cross-entropy against its target, float32 [B, S]; weights are the caller's business."""
        x_BSD = self.hidden(batch["tokens"], batch["positions"], batch["segments"], how)
        return token_losses(x_BSD, self.head(), batch["targets"], how.mesh, how.loss_chunk)


def _kept(remat: str, offload: str) -> Callable[..., Any]:
    """The policy that keeps what REMAT_KEEPS names, what is offloaded in the host's memory."""
    names = REMAT_KEEPS[remat]
    if offload == "none":
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in names if name not in SAVED_NAMES],
        names_which_can_be_offloaded=list(SAVED_NAMES),
        offload_src="device",
        offload_dst="pinned_host",
    )


def _initial(config: ModelConfig, key: jax.Array, name: str, shape: tuple[int, ...]) -> jax.Array:
    """A parameter's first value: norms 1; matrices normal with variance 1 / fan-in, those that write into the residual
    stream divided by sqrt(2 L) (GPT-2's rule); the embedding normal with variance 1, so that the layers' first outputs
    do not drown the token, or 1 / D where it is the head too."""
    if "norm" in name:
        return jnp.ones(shape, config.param_dtype)
    fan_in = {"out_NHD": config.num_heads * config.head_dim, "down_FD": config.mlp_dim}.get(name, config.embed_dim)
    scale = 1 / math.sqrt(fan_in)
    if name == "embed_VD" and not config.tie_embeddings:
        scale = 1.0
    if name in ("out_NHD", "down_FD"):
        scale /= math.sqrt(2 * config.num_layers)
    # The name picks the key, so that adding a parameter changes no other's value.
    key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return (scale * jax.random.normal(key, shape, jnp.float32)).astype(config.param_dtype)


def abstract(config: ModelConfig) -> tuple[nnx.GraphDef[Llama], Params]:
    """The model's structure and its parameters as shapes and dtypes: nothing is computed or allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, jax.random.key(0))))
    return graph, nnx.to_pure_dict(state)


def dims(path: tuple[str, ...]) -> str:
    """The dims of the parameter at this path, e.g. "LDNH" for ("layers", "q_DNH")."""
    return ("L" if path[0] == "layers" else "") + path[-1].rsplit("_", 1)[1]


def shardings(parameters: Params, mesh: Mesh) -> Params:
    """The sharding of every parameter, in the tree's own structure."""

    def of(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:
        return sharding(dims(tuple(key.key for key in path)), leaf.shape, mesh, PARAMETER)

    return jax.tree_util.tree_map_with_path(of, parameters)


def initialise(config: ModelConfig, seed: jax.typing.ArrayLike) -> Params:
    """First values of all parameters; the same whatever the sharding it is compiled with."""
    return nnx.to_pure_dict(nnx.split(Llama(config, jax.random.key(seed)))[1])
