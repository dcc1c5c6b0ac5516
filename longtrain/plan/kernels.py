"""The attention kernel that a run on a kind of device will get, told without jax.

`ops/kernels` decides, by asking each kernel for its limits, which takes jax. What stands here is its order of
preference and the limits that depend on config and mesh alone, not on what is installed; a test holds the two together.
"""

from longtrain import layout
from longtrain.config import Config, MeshConfig
from longtrain.errors import ConfigError, Problem
from longtrain.hardware import Device

KERNELS = ("xla", "triton", "cudnn", "mosaic")

PREFERRED = {"gpu": ("cudnn", "triton"), "tpu": ("mosaic",)}
"""By platform, the kernels made for it."""

LARGEST_HEAD_DIM = {"cudnn": 128, "triton": 128, "mosaic": 256}

TPU_LANES = 128
TPU_VECTOR_MEMORY = 48 << 20
"""Of a TPU core, what a kernel may take."""


def expected(config: Config, mesh: MeshConfig, device: Device) -> str:
    """The kernel that `attention.kernel` names, or that `auto` takes on this device.

    Raises:
      ConfigError: for a kernel that cannot serve there.
    """
    asked = config.attention.kernel
    if asked == "auto":
        return _automatic(config, mesh, device)
    if limit := _limit(asked, config, mesh, device):
        message = f"cannot serve here: {limit}; auto would take {_automatic(config, mesh, device)}"
        raise ConfigError([Problem("attention.kernel", asked, message)], source="the plan")
    return asked


def _automatic(config: Config, mesh: MeshConfig, device: Device) -> str:
    own = PREFERRED[device.platform]
    return next((kernel for kernel in own if _limit(kernel, config, mesh, device) is None), "xla")


def _limit(kernel: str, config: Config, mesh: MeshConfig, device: Device) -> str | None:
    """Why a kernel cannot serve; None where it can."""
    if kernel == "xla":
        return None
    if kernel not in PREFERRED[device.platform]:
        return f"it is not for {device.name}, whose kernels are {', '.join((*PREFERRED[device.platform], 'xla'))}"
    head_dim, largest = config.model.head_dim, LARGEST_HEAD_DIM[kernel]
    if head_dim > largest:
        return f"model.head_dim {head_dim}: at most {largest}"
    if kernel == "cudnn":
        return _cudnn_limit(config)
    return _mosaic_limit(config, mesh) if kernel == "mosaic" else None


def _cudnn_limit(config: Config) -> str | None:
    if config.data.packing != "one":
        return "it serves rows of one document each (data.packing one) only"
    if config.attention.layout == "dealt":
        return "attention.layout dealt: it needs stretches dealt whole, zigzag or contiguous"
    if config.model.compute_dtype != "bfloat16":
        return f"model.compute_dtype {config.model.compute_dtype}: bfloat16 only"
    return f"model.head_dim {config.model.head_dim}: a multiple of 8 only" if config.model.head_dim % 8 else None


def _mosaic_limit(config: Config, mesh: MeshConfig) -> str | None:
    """The blocks of one key/value head and its query heads, each held twice, must fit half the vector memory."""
    model = config.model
    group = (model.num_heads // mesh.tensor) // max(model.num_kv_heads // mesh.tensor, 1)
    width = 2 if model.compute_dtype == "bfloat16" else 4
    head_dim = -(-model.head_dim // TPU_LANES) * TPU_LANES
    a_query_head = 2 * (2 * width + 4) + 4  # q, d_out and dQ, and the sums once
    blocks = layout.TILE * head_dim * (group * a_query_head + 4 * width)
    if blocks > TPU_VECTOR_MEMORY // 2:
        return f"{group} query heads for each key/value head: a tile of theirs does not fit the vector memory"
    return None
