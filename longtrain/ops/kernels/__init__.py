"""Block kernels: attention of a block of queries over a block of keys, on one device. The one place where
platforms differ.

Every kernel is a module with three functions of this shape (dims: B rows, K key/value heads, G query heads per
key/value head, T queries, S keys, H head_dim):

    limits(work)
        -> None where it can serve this workload, or in a few words why not and what it could serve
    forward(q_BKGTH, k_BKSH, v_BKSH, q_tokens, kv_tokens, settings)
        -> out_BKGTH, stats_2BKGT
    backward(q_BKGTH, k_BKSH, v_BKSH, d_out_BKGTH, stats_2BKGT, delta_BKGT, q_tokens, kv_tokens, settings)
        -> dq_BKGTH, dk_BKSH, dv_BKSH

All results are float32, and so are stats and delta; q, k, v and d_out share the compute dtype.

`forward` is a softmax over this block of keys alone. Its stats are each row's greatest score and the sum of the
exponentials relative to it; a row that sees none of the keys has out 0 and stats (`tiles.UNSEEN`, 1). The usual
single number, the log-sum-exp, is peak + log(total); kept apart, the two lose nothing where scores are large (a
float32 near 1e4 is good to 1e-3 only), and a kernel that has only the sum can give (lse, 1).

`backward` is given the stats over *all* keys, and delta = sum over H of out * d_out, so that the gradients of
several blocks of keys simply add up. Tokens of segment 0 must hold finite numbers.

Which kernel serves is decided here, by `select`, before anything is compiled.
"""

import dataclasses
from types import ModuleType

import jax

from longtrain.ops.kernels import cudnn, mosaic, triton, xla
from longtrain.ops.kernels.workload import Settings, Workload
from longtrain.ops.tiles import Tokens

_MODULES: dict[str, ModuleType] = {"xla": xla, "triton": triton, "cudnn": cudnn, "mosaic": mosaic}

_FUSED: dict[str, tuple[str, ...]] = {"cpu": (), "gpu": ("cudnn", "triton"), "tpu": ("mosaic",)}
"""Of each platform the kernels made for it, the one to prefer first. Where none serves there is `xla`."""

KERNELS = tuple(_MODULES)

FORWARD_SCOPE, BACKWARD_SCOPE = "attention_forward", "attention_backward"
"""Names in a compiled program by which its reader and a profile know the kernels."""


def select(kernel: str, work: Workload) -> tuple[str, str]:
    """The kernel to use for the config's `attention.kernel`, and the reason in a few words.

    `auto` takes the first of the platform's own kernels that can serve; where there are some and none can, the
    blockwise one, and the reason says loudly what that means. Raises ValueError for a name that is neither `auto`
    nor a kernel, and for a kernel that cannot serve this workload, with the reason and what `auto` would take.
    """
    if kernel == "auto":
        return _automatic(work)
    if kernel not in KERNELS:
        raise ValueError(f"kernel {kernel!r} is not one of {', '.join(('auto', *KERNELS))}")
    if limit := limits(kernel, work):
        name, why = _automatic(work)
        raise ValueError(f"kernel {kernel!r} cannot serve here: {limit}; auto would take {name} ({why})")
    return kernel, "asked for"


def limits(kernel: str, work: Workload) -> str | None:
    """Why a kernel cannot serve a workload, and what it could serve; None where it can."""
    return _MODULES[kernel].limits(work)


def _automatic(work: Workload) -> tuple[str, str]:
    if work.platform not in _FUSED:
        return "xla", f"the blockwise kernel runs on every platform, {work.platform} too"
    refused: list[str] = []
    for name in _FUSED[work.platform]:
        limit = limits(name, work)
        if limit is None:
            return name, "; ".join([f"the fused kernel for {work.platform} that serves", *refused])
        refused.append(f"not {name}: {limit}")
    if work.platform == "cpu":
        return "xla", "the blockwise kernel is the fast one on CPU"
    why = "; ".join(refused) or "none is written yet"
    slow = f"and the blockwise one sends its scores through the {work.platform.upper()}'s memory"
    return "xla", f"NO FUSED KERNEL SERVES, {slow}: {why}"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A block kernel with its static settings."""

    name: str
    settings: Settings

    def forward(
        self, q_BKGTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, q_tokens: Tokens, kv_tokens: Tokens
    ) -> tuple[jax.Array, jax.Array]:
        with jax.named_scope(FORWARD_SCOPE):
            return _MODULES[self.name].forward(q_BKGTH, k_BKSH, v_BKSH, q_tokens, kv_tokens, self.settings)

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
        arrays = (q_BKGTH, k_BKSH, v_BKSH, d_out_BKGTH, stats_2BKGT, delta_BKGT)
        with jax.named_scope(BACKWARD_SCOPE):
            return _MODULES[self.name].backward(*arrays, q_tokens, kv_tokens, self.settings)
