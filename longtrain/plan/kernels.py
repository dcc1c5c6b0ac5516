"""The attention kernel that a run on a kind of device will get, told without jax.

`ops/kernels` decides, by asking each kernel for its limits, which takes jax. What stands here is its order of
preference and the limits that depend on the config alone, not on what is installed; a test holds the two together.
"""

from longtrain.config import Config

PREFERRED = {"gpu": ("cudnn", "triton"), "tpu": ("mosaic",)}
"""By platform, the kernels made for it."""

LARGEST_HEAD_DIM = {"cudnn": 128, "triton": 128, "mosaic": 256}


def expected(config: Config, platform: str) -> str:
    """The kernel that `attention.kernel` names, or that `auto` takes on this platform."""
    if config.attention.kernel != "auto":
        return config.attention.kernel
    return next((kernel for kernel in PREFERRED[platform] if _serves(kernel, config)), "xla")


def _serves(kernel: str, config: Config) -> bool:
    """Whether the kernel's limits allow this config."""
    model = config.model
    if model.head_dim > LARGEST_HEAD_DIM[kernel]:
        return False
    if kernel != "cudnn":
        return True
    one_document = config.data.packing == "one" and config.attention.layout != "dealt"
    return one_document and model.compute_dtype == "bfloat16" and model.head_dim % 8 == 0
