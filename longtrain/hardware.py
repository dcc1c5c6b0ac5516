"""What the data sheets say of each kind of device: dense peaks, memory, links.

Peaks are dense: vendors also print figures with structured sparsity, twice as high, which no training
reaches. A kind that is not in the table, the CPU among them, has no peak here, and MFU against it is unknown,
not guessed; who has measured or knows a peak gives it where MFU is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

TERA = 1e12
GIGA = 1e9
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Device:
    """One device as jax counts them.

    Attributes:
      name: short name, as `--hardware` takes it. peak_flops: dense peak FLOP/s of matrix products by the data
      type they are computed in: bfloat16, float8,
        float32 (true float32 products) and tf32 (float32 operands rounded to TF32, what NVIDIA's libraries do
        with float32 unless told otherwise). What a vendor does not publish is not there.
      memory_bytes: of the device's own memory. memory_bandwidth: bytes/s. link_bandwidth: bytes/s one way to
      the other devices of its domain, all links together. network_bandwidth: bytes/s one way to devices beyond
      them, one device's share. host_bandwidth: bytes/s one way between a device and its host's memory.
      platform: "gpu" or "tpu". domain: devices of a domain, which reach each other over the fast links: the node
      or NVLink domain; of a TPU, the largest slice. links: how many links `link_bandwidth` is the sum of where a
      transfer to one neighbour takes only one of them; 1 where a switch gives it all.
    """

    name: str
    platform: str
    domain: int
    links: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float

    def peak(self, dtype: str) -> float | None:
        """Dense peak FLOP/s of matrix products computed in `dtype`; None where the vendor publishes none."""
        return self.peak_flops.get(dtype)

    @property
    def neighbour_bandwidth(self) -> float:
        """Bytes/s one way to one device of the domain, as a ring uses it."""
        return self.link_bandwidth / self.links


# The network figure of the NVIDIA kinds is one adapter a GPU, as in the vendor's own systems: 200 Gbit/s
# (ConnectX-6) beside A100, 400 Gbit/s (ConnectX-7) beside Hopper and Blackwell. The NVLink domain is the eight GPUs
# of a DGX or HGX node, 72 of a GB200 NVL72 rack. A TPU "device" is a chip.
#
# The memory of the NVIDIA kinds is what CUDA reports as the device's total, which is neither the sheet's GB nor its GiB
# (80 GB: 79.1 GiB): `device_memory_size` of OpenXLA's target configurations (xla/backends/gpu/target_config/specs); of
# H200, whose entry there is a round 141 GiB, the 143156 MiB that CUDA programs print on it (139.8 GiB).
#
# The host figure is PCIe x16 one way, of generation 4 beside A100 and 5 beside Hopper and B200; of GB200 its part of
# NVLink-C2C, 900 GB/s both ways together between a Grace and its two GPUs; of TPUs PCIe by "How to Scale Your Model"
# (Google DeepMind, part 2): 1.5e10 bytes/s a chip, 32 GB/s on v6e.
A100_40GB = Device(
    # NVIDIA A100 Tensor Core GPU data sheet (SXM): 312 TFLOPS BF16, 156 TF32, 19.5 FP32 (all dense), no FP8;
    # 40 GB at 1555 GB/s; NVLink 600 GB/s both ways together. DGX A100: eight 200 Gbit/s adapters for eight
    # GPUs.
    name="A100-40GB",
    platform="gpu",
    domain=8,
    links=1,
    peak_flops={"bfloat16": 312 * TERA, "tf32": 156 * TERA, "float32": 19.5 * TERA},
    memory_bytes=42331013120,
    memory_bandwidth=1555 * GIGA,
    link_bandwidth=300 * GIGA,
    network_bandwidth=25 * GIGA,
    host_bandwidth=32 * GIGA,
)
A100_80GB = Device(
    # The same data sheet: 80 GB at 2039 GB/s (SXM).
    name="A100-80GB",
    platform="gpu",
    domain=8,
    links=1,
    peak_flops={"bfloat16": 312 * TERA, "tf32": 156 * TERA, "float32": 19.5 * TERA},
    memory_bytes=85100068864,
    memory_bandwidth=2039 * GIGA,
    link_bandwidth=300 * GIGA,
    network_bandwidth=25 * GIGA,
    host_bandwidth=32 * GIGA,
)
H100 = Device(
    # NVIDIA H100 data sheet (SXM), printed with sparsity: 1979 TFLOPS BF16, 989 TF32, 3958 FP8, so half of
    # each; 67 FP32; 80 GB at 3.35 TB/s; NVLink 900 GB/s both ways together. DGX H100: a 400 Gbit/s adapter a
    # GPU.
    name="H100",
    platform="gpu",
    domain=8,
    links=1,
    peak_flops={"bfloat16": 989.5 * TERA, "tf32": 494.5 * TERA, "float32": 67 * TERA, "float8": 1979 * TERA},
    memory_bytes=84942979072,
    memory_bandwidth=3350 * GIGA,
    link_bandwidth=450 * GIGA,
    network_bandwidth=50 * GIGA,
    host_bandwidth=64 * GIGA,
)
H200 = Device(
    # NVIDIA H200 data sheet (SXM): compute and NVLink as the H100; 141 GB at 4.8 TB/s.
    name="H200",
    platform="gpu",
    domain=8,
    links=1,
    peak_flops={"bfloat16": 989.5 * TERA, "tf32": 494.5 * TERA, "float32": 67 * TERA, "float8": 1979 * TERA},
    memory_bytes=143156 * MIB,
    memory_bandwidth=4800 * GIGA,
    link_bandwidth=450 * GIGA,
    network_bandwidth=50 * GIGA,
    host_bandwidth=64 * GIGA,
)
B200 = Device(
    # NVIDIA HGX B200 / DGX B200 data sheets, per GPU: 4.5 PFLOPS BF16, 2.2 TF32, 9 FP8 with sparsity, so half
    # of each; 75 TFLOPS FP32; 180 GB at 7.7 to 8 TB/s; NVLink 1.8 TB/s both ways together; 400 Gbit/s a GPU.
    name="B200",
    platform="gpu",
    domain=8,
    links=1,
    peak_flops={"bfloat16": 2250 * TERA, "tf32": 1100 * TERA, "float32": 75 * TERA, "float8": 4500 * TERA},
    memory_bytes=191514411008,
    memory_bandwidth=7700 * GIGA,
    link_bandwidth=900 * GIGA,
    network_bandwidth=50 * GIGA,
    host_bandwidth=64 * GIGA,
)
GB200 = Device(
    # NVIDIA GB200 NVL72 data sheet, over its 72 GPUs: 360 PFLOPS BF16, 180 TF32, 720 FP8 with sparsity, so
    # half of each; 5760 TFLOPS FP32; 13.4 TB at 576 TB/s; NVLink 130 TB/s both ways together. 400 Gbit/s a
    # GPU.
    name="GB200",
    platform="gpu",
    domain=72,
    links=1,
    peak_flops={"bfloat16": 2500 * TERA, "tf32": 1250 * TERA, "float32": 80 * TERA, "float8": 5000 * TERA},
    memory_bytes=197897748480,
    memory_bandwidth=8000 * GIGA,
    link_bandwidth=900 * GIGA,
    network_bandwidth=50 * GIGA,
    host_bandwidth=225 * GIGA,
)
TPU_V5E = Device(
    # Google Cloud TPU v5e and v6e documentation, per chip: 197 TFLOPS BF16, 16 GB at 819 GB/s, interchip
    # links of 1600 Gbit/s (four of 400, one way), slices of up to 256; a host of 8 chips has two 100 Gbit/s
    # adapters. Float32 is not published.
    name="v5e",
    platform="tpu",
    domain=256,
    links=4,
    peak_flops={"bfloat16": 197 * TERA},
    memory_bytes=16 * GIB,
    memory_bandwidth=819 * GIGA,
    link_bandwidth=200 * GIGA,
    network_bandwidth=3.125 * GIGA,
    host_bandwidth=15 * GIGA,
)
TPU_V5P = Device(
    # Google Cloud TPU v5p documentation, per chip: 459 TFLOPS BF16 and FP8, 95 GiB at 2765 GB/s, interchip
    # links of 1200 GB/s both ways together (six of 800 Gbit/s one way), pods of 8960; data center network of 50 Gbit/s.
    name="v5p",
    platform="tpu",
    domain=8960,
    links=6,
    peak_flops={"bfloat16": 459 * TERA, "float8": 459 * TERA},
    memory_bytes=95 * GIB,
    memory_bandwidth=2765 * GIGA,
    link_bandwidth=600 * GIGA,
    network_bandwidth=6.25 * GIGA,
    host_bandwidth=15 * GIGA,
)
TPU_V6E = Device(
    # Google Cloud TPU v6e documentation, per chip: 918 TFLOPS BF16, 32 GB at 1640 GB/s, interchip links of
    # 3584 Gbit/s one way (four of them), slices of up to 256; a host of 8 chips has four 200 Gbit/s adapters.
    name="v6e",
    platform="tpu",
    domain=256,
    links=4,
    peak_flops={"bfloat16": 918 * TERA},
    memory_bytes=32 * GIB,
    memory_bandwidth=1640 * GIGA,
    link_bandwidth=448 * GIGA,
    network_bandwidth=12.5 * GIGA,
    host_bandwidth=32 * GIGA,
)

DEVICES = {
    device.name: device
    for device in (A100_40GB, A100_80GB, H100, H200, B200, GB200, TPU_V5E, TPU_V5P, TPU_V6E)
}
"""By name, as `--hardware` takes them."""

# jax's `device.device_kind`. Cards of the same chip with other limits (PCIe, NVL) are other kinds, and not
# here.
_DEVICE_KINDS = {
    "NVIDIA A100-SXM4-40GB": A100_40GB,
    "NVIDIA A100-SXM4-80GB": A100_80GB,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H200": H200,
    "NVIDIA B200": B200,
    "NVIDIA GB200": GB200,
    "TPU v5 lite": TPU_V5E,
    "TPU v5e": TPU_V5E,
    "TPU v5": TPU_V5P,
    "TPU v5p": TPU_V5P,
    "TPU v6 lite": TPU_V6E,
    "TPU v6e": TPU_V6E,
}


def lookup(device_kind: str) -> Device | None:
    """The device of a jax `device_kind` or of a name in the table; None for one that is not in it."""
    kinds = DEVICES | _DEVICE_KINDS
    return {kind.lower(): device for kind, device in kinds.items()}.get(device_kind.strip().lower())


def device_kind(device: Device) -> str:
    """The jax `device_kind` of a device of the table."""
    return next(kind for kind, known in _DEVICE_KINDS.items() if known == device)
