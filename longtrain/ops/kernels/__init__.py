"""Block kernels: attention of a block of queries over a block of keys, on one device. The one place where
platforms differ.

Every kernel is a module with two functions of this shape (dims: B rows, K key/value heads, G query heads per
key/value head, T queries, S keys, H head_dim):

    forward(q_BKGTH, k_BKSH, v_BKSH, q_tokens, kv_tokens, *, scale, tile)
        -> out_BKGTH, stats_2BKGT
    backward(q_BKGTH, k_BKSH, v_BKSH, d_out_BKGTH, stats_2BKGT, delta_BKGT, q_tokens, kv_tokens, *, scale, tile)
        -> dq_BKGTH, dk_BKSH, dv_BKSH

All results are float32, and so are stats and delta; q, k, v and d_out share the compute dtype.

`forward` is a softmax over this block of keys alone. Its stats are each row's greatest score and the sum of the
exponentials relative to it; a row that sees none of the keys has out 0 and stats (`tiles.UNSEEN`, 1). The usual
single number, the log-sum-exp, is peak + log(total); kept apart, the two lose nothing where scores are large (a
float32 near 1e4 is good to 1e-3 only), and a kernel that has only the sum can give (lse, 1).

`backward` is given the stats over *all* keys, and delta = sum over H of out * d_out, so that the gradients of
several blocks of keys simply add up. Tokens of segment 0 must hold finite numbers.
"""

import dataclasses
from types import ModuleType

import jax

from longtrain.ops.kernels import xla
from longtrain.ops.tiles import Tokens

_MODULES: dict[str, ModuleType] = {"xla": xla}

KERNELS = tuple(_MODULES)


def select(kernel: str) -> tuple[str, str]:
    """The kernel to use for the config's `attention.kernel`, and the reason in a few words.

    Raises ValueError for a name that is neither `auto` nor a kernel.
    """
    if kernel == "auto":
        return "xla", "the blockwise kernel runs on every platform, and is the only one so far"
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is not one of {', '.join(('auto', *KERNELS))}")
    return kernel, "asked for"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A block kernel with its static settings: score scale and tokens along a tile's side."""

    name: str
    scale: float
    tile: int

    def forward(
        self, q_BKGTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, q_tokens: Tokens, kv_tokens: Tokens
    ) -> tuple[jax.Array, jax.Array]:
        module = _MODULES[self.name]
        return module.forward(q_BKGTH, k_BKSH, v_BKSH, q_tokens, kv_tokens, scale=self.scale, tile=self.tile)

    def backward(
        self,
        q_BKGTH: jax.Array,
        k_BKSH: jax.Array,
        v_BKSH: jax.Array,
        d_out_BKGTH: jax.Array,
        stats_2BKGT: jax.Array,
        delta_BKGT: jax.Array,
        q_tokens: Tokens,
        kv_tokens: Tokens,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        module = _MODULES[self.name]
        arrays = (q_BKGTH, k_BKSH, v_BKSH, d_out_BKGTH, stats_2BKGT, delta_BKGT)
        return module.backward(*arrays, q_tokens, kv_tokens, scale=self.scale, tile=self.tile)
