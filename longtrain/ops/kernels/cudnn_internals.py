"""jax's private cuDNN flash attention, wrapped: the one file that knows its internals.

What is public, `jax.nn.dot_product_attention`, rounds the log-sum-exp to the inputs' dtype and differentiates itself
alone: no use to a ring, which needs the statistics in float32 and a backward pass that takes those of all keys. The
primitives below both do, and are private: they are bound by name, and `moved` tells before anything is traced whether
they still are what is written here.
"""

import ctypes.util
import functools
import importlib.util
import inspect
from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax._src.cudnn import fused_attention_stablehlo as internals
except ImportError:  # `moved` says so
    internals = None  # type: ignore[assignment]

_ARRAYS = ("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets")
_PAGES = ("page_table_k", "page_table_v")
_RESIDUALS = ("activation", "fwd_output", "grad_output")
_SETTINGS = ("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length")

# Blackwell Ultra, and the first cuDNN whose flash attention knows it, as cuDNN numbers its versions.
_LATE_CAPABILITY, _LATE_CUDNN = "10.3", 91100

# The parameters of (forward, backward) by release of jax: the first of 0.10, the second of 0.12.
_KNOWN = (
    ((*_ARRAYS, *_PAGES, *_SETTINGS, "is_training"), (*_ARRAYS, *_PAGES, *_RESIDUALS, *_SETTINGS)),
    (
        (*_ARRAYS, *_PAGES, "score_mod_args", *_SETTINGS, "score_mod", "is_training"),
        (*_ARRAYS, *_PAGES, *_RESIDUALS, "score_mod_args", *_SETTINGS, "score_mod"),
    ),
)


def moved() -> str | None:
    """What of jax's internals is not as this file knows it; None where all is."""
    try:
        if _parameters() in _KNOWN:
            return None
    except AttributeError as error:
        return f"jax {jax.__version__} has no private cuDNN attention as in 0.10 to 0.12: {error}"
    return f"jax {jax.__version__} calls its private cuDNN attention with other parameters than 0.10 to 0.12 did"


def missing() -> str | None:
    """Why cuDNN cannot be loaded here; None where it can be."""
    wheel = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
    if wheel or ctypes.util.find_library("cudnn"):
        return None
    return "cuDNN is not installed here: pip install nvidia-cudnn-cu13"


def too_old(capability: str | None) -> str | None:
    """Why the cuDNN that jax's plug-in has loaded cannot serve this compute capability, as jax's public function tests
    it; None where it can, or where no plug-in says which cuDNN it is.
    """
    if capability != _LATE_CAPABILITY or internals.cuda_versions is None:
        return None
    version = internals.cuda_versions.cudnn_get_version()
    if version >= _LATE_CUDNN:
        return None
    return f"compute capability {capability} needs cuDNN {_LATE_CUDNN} (9.11) or later: here is {version}"


def forward(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    q_lengths_B: jax.Array,
    kv_lengths_B: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array]:
    """out_BNTH in q's dtype and lse_BNT (float32, base e) of the first `q_lengths` queries over the first
    `kv_lengths` keys; the rest is not defined. `causal`: query i sees keys 0..i.
    """
    none = jnp.zeros(0, q_BNTH.dtype)
    out_BNTH, lse_BNT = internals._dot_product_attention_fwd_p_wrapper.bind(
        *(q_BNTH, k_BKSH, v_BKSH, none, q_lengths_B, kv_lengths_B, none, none, none, none),
        **_settings(scale, causal),
        is_training=True,
    )
    return out_BNTH, lse_BNT


def backward(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    out_BNTH: jax.Array,
    lse_BNT: jax.Array,
    d_out_BNTH: jax.Array,
    q_lengths_B: jax.Array,
    kv_lengths_B: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq_BNTH, dk_BKSH, dv_BKSH in q's dtype, for the softmax whose statistics and output are given."""
    none = jnp.zeros(0, q_BNTH.dtype)
    dq_BNTH, dk_BKSH, dv_BKSH = internals._dot_product_attention_bwd_p_wrapper.bind(
        *(q_BNTH, k_BKSH, v_BKSH, none, q_lengths_B, kv_lengths_B, none, none, none, none),
        *(lse_BNT, out_BNTH, d_out_BNTH),
        **_settings(scale, causal),
    )
    return dq_BNTH, dk_BKSH, dv_BKSH


def _settings(scale: float, causal: bool) -> dict[str, Any]:
    mask = internals.MaskType.PADDING_CAUSAL if causal else internals.MaskType.PADDING
    settings = {
        "scale": scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # neither a bias nor its gradient
        "mask_type": mask,
        "layout": internals.AttentionLayout.BNTH.value,
        "sliding_window_length": None,
    }
    return settings | ({"score_mod": None} if _parameters() == _KNOWN[1] else {})


@functools.cache
def _parameters() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the parameters of the two primitives, as their implementations take them."""
    internals._dot_product_attention_fwd_p_wrapper, internals._dot_product_attention_bwd_p_wrapper  # noqa: B018
    internals.MaskType.PADDING, internals.MaskType.PADDING_CAUSAL, internals.AttentionLayout.BNTH  # noqa: B018
    forward, backward = internals._dot_product_attention_fwd_impl, internals._dot_product_attention_bwd_impl
    return tuple(inspect.signature(forward).parameters), tuple(inspect.signature(backward).parameters)
