"""The devices a config is compiled for where none is there: a kind of hardware and a number of them.

A target says what must be in the environment before jax is imported, and then gives abstract devices that compile
but do not run. GPUs and TPUs each need their compile-only plug-in (`pip install 'longtrain[plan]'`); no driver, no
CUDA library and no device.

A GPU is described to XLA by a text proto of its limits. The proto here holds only fields that every plug-in since
0.9 knows, since a parser refuses one it does not. Memory and its bandwidth are those of `hardware.py`; the limits
of a multiprocessor are the table "technical specifications per compute capability" of NVIDIA's CUDA C++
programming guide; counts of multiprocessors, clocks and L2 are those that the devices themselves report, as
recorded in OpenXLA's target configurations (xla/backends/gpu/target_config).
"""

import importlib.metadata
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from longtrain import hardware
from longtrain.errors import ConfigError, Problem

if TYPE_CHECKING:
    import jax

CPU = "cpu"
"""The kind that stands for no accelerator: simulated devices, whose compiler says something of memory alone."""

EXTRA = "pip install 'longtrain[plan]'"
BY_CPU = f"or --compiler {CPU} for an estimate of the memory alone, by the CPU's compiler"


@dataclass(frozen=True)
class Target:
    """What to compile for.

    Attributes:
      device: its entry of the hardware table; None for the CPU. platform: jax's name of it, also as a plug-in.
      topology, options: what jax's `get_topology_desc` takes. environment, flags: what must be set before jax is
        imported; `flags` are XLA flags.
    """

    kind: str
    devices: int
    device: hardware.Device | None
    platform: str
    topology: str = ""
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    flags: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int | None:
        """A device's memory; None for the CPU."""
        return self.device.memory_bytes if self.device else None

    def abstract_devices(self) -> "list[jax.Device]":
        """The devices, in jax's order. Call it in a process whose environment was set before jax was imported."""
        import jax
        from jax.experimental import topologies

        if self.platform == CPU:
            return jax.devices(CPU)
        description = topologies.get_topology_desc(self.topology, platform=self.platform, **self.options)
        return list(description.devices)


def target(kind: str, devices: int) -> Target:
    """The target of a `--hardware` kind.

    Raises:
      ConfigError: for a kind that is not known, a number of devices that no slice of it has, or where the plug-in
        that compiles for it is not installed, or not this jaxlib's.
    """
    device = hardware.lookup(kind)
    if kind.lower() == CPU:
        flags = (f"--xla_force_host_platform_device_count={devices}",)
        return Target(CPU, devices, None, CPU, environment={"JAX_PLATFORMS": CPU}, flags=flags)
    if device is not None and device.name in _GPUS:
        return _gpu_target(device, devices)
    if device is not None and device.name in _TPUS:
        return _tpu_target(device, devices)
    legal = ", ".join((*_GPUS, *_TPUS, CPU))
    raise ConfigError([Problem("--hardware", kind, f"not a kind that can be compiled for; legal: {legal}")], "plan")


@dataclass(frozen=True)
class _Gpu:
    """One GPU's limits: (major, minor) compute capability; multiprocessors, FP32 lanes of each; boost clock in GHz;
    bytes of L2, and of shared memory by multiprocessor and by block; GPUs on a host."""

    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    clock_ghz: float
    l2_bytes: int
    shared_bytes: int
    block_shared_bytes: int
    per_host: int


_KIB, _MIB = 2**10, 2**20
_AMPERE = _Gpu((8, 0), 108, 64, 1.41, 40 * _MIB, 164 * _KIB, 163 * _KIB, per_host=8)
_HOPPER = _Gpu((9, 0), 132, 128, 1.98, 50 * _MIB, 228 * _KIB, 227 * _KIB, per_host=8)
_GPUS = {
    "A100-40GB": _AMPERE,
    "A100-80GB": _AMPERE,
    "H100": _HOPPER,
    "H200": _HOPPER,
    "B200": _Gpu((10, 0), 148, 128, 1.965, 132644864, 228 * _KIB, 227 * _KIB, per_host=8),
    "GB200": _Gpu((10, 0), 152, 128, 2.062, 135528448, 228 * _KIB, 227 * _KIB, per_host=4),
}

# From Hopper on, a device offers instructions of its own architecture (sm_90a, sm_100a); the proto must say so.
_FIRST_ACCELERATED = 9

_GPU_PROTO = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_bytes}
  shared_memory_per_block_optin: {gpu.block_shared_bytes}
  threads_per_core_limit: 2048
  core_count: {gpu.multiprocessors}
  fpus_per_core: {gpu.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {device.memory_bandwidth:.0f}
  l2_cache_size: {gpu.l2_bytes}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {device.memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""

# Name of the plug-in's package and how jax calls it, newest CUDA first.
_GPU_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def _gpu_target(device: hardware.Device, devices: int) -> Target:
    plugin = next((name for name in _GPU_PLUGINS if _version(name)), None)
    if plugin is None:
        raise _refused(device.name, f"compiling for it needs {_GPU_PLUGINS[0]}: {EXTRA}; {BY_CPU}")
    installed, jaxlib = _version(plugin), _version("jaxlib")
    if installed != jaxlib:
        pjrt = plugin.replace("plugin", "pjrt")
        message = f"{plugin} {installed} is not jaxlib's {jaxlib}: pip install {plugin}=={jaxlib} {pjrt}=={jaxlib}"
        raise _refused(device.name, message)
    gpu = _GPUS[device.name]
    major, minor = gpu.capability
    config = _GPU_PROTO.format(
        gpu=gpu,
        device=device,
        major=major,
        minor=minor,
        features="ACCELERATED_FEATURES" if major >= _FIRST_ACCELERATED else "NONE",
        name=hardware.device_kind(device),
    )
    on_host = math.gcd(devices, gpu.per_host)
    options = {"topology": f"1x{devices // on_host}x{on_host}", "target_config": config}
    return Target(device.name, devices, device, "cuda", "ahead-of-time", options, {"JAX_PLATFORMS": CPU})


# Google's name of the type, how many of what that name counts a chip has (v5p: cores), a slice's dims, its most chips.
_TPUS = {"v5e": ("v5litepod", 1, 2, 256), "v5p": ("v5p", 2, 3, 4096), "v6e": ("v6e", 1, 2, 256)}


def _tpu_target(device: hardware.Device, devices: int) -> Target:
    if importlib.util.find_spec("libtpu") is None:
        raise _refused(device.name, f"compiling for it needs libtpu: {EXTRA}; {BY_CPU}")
    accelerator, per_chip, dims, largest = _TPUS[device.name]
    exponent = devices.bit_length() - 1
    if devices != 1 << exponent or devices > largest:
        message = f"{devices} chips are no slice of it: a power of two, at most {largest}"
        raise _refused(device.name, message)
    # As equal as can be, the longest last; within one host of 2x2(x1) chips the longest first.
    sides = sorted((1 << ((exponent + i) // dims) for i in range(dims)), reverse=devices <= 4)
    if dims == 2:
        sides.sort()
    environment = {
        "JAX_PLATFORMS": CPU,
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{accelerator}-{devices * per_chip}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    name = f"{device.name}:{'x'.join(map(str, sides))}"
    return Target(device.name, devices, device, "tpu", name, {}, environment)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _refused(kind: str, message: str) -> ConfigError:
    return ConfigError([Problem("--hardware", kind, message)], "plan")
