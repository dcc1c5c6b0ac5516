"""The attention kernel that a run on a kind of device will get, told without jax.

`ops/kernels` decides, by asking each kernel for its limits, which takes jax. What stands here is its order of
preference and the one limit that depends on the config rather than on what is installed; a test holds the two together.
"""

from typing import get_args

from longtrain.config import AttentionConfig, Config

PREFERRED = {"gpu": ("cudnn", "triton"), "tpu": ("mosaic",)}
"""By platform, the kernels made for it, those that this version has not yet among them."""

OF_ONE_DOCUMENT = ("cudnn",)
"""Kernels that serve rows of one document each only."""


def expected(config: Config, platform: str) -> str:
    """The kernel that `attention.kernel` names, or that `auto` takes on this platform."""
    if config.attention.kernel != "auto":
        return config.attention.kernel
    written = get_args(AttentionConfig.model_fields["kernel"].annotation)
    one_document = config.data.packing == "one" and config.attention.layout != "dealt"
    for kernel in PREFERRED[platform]:
        if kernel in written and (one_document or kernel not in OF_ONE_DOCUMENT):
            return kernel
    return "xla"
