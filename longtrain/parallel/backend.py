"""Which library carries the collectives, as XLA flags of the installed jaxlib. No jax is imported here.

The flags act only on GPUs and must be in the environment before JAX starts. What each jaxlib does with them was read
from compiled programs: up to 0.10.1 the NVSHMEM flag puts every CollectivePermute on NVSHMEM; 0.10.2 accepts the flag
and ignores it; from 0.11 on it is unknown and ends the process. Its successor is one-sided NCCL on symmetric memory.
"""

from longtrain.errors import ConfigError, Problem

Version = tuple[int, ...]

NVSHMEM_FIRST, NVSHMEM_LAST = (0, 6, 2), (0, 10, 1)
SYMMETRIC_FIRST = (0, 12)


def check_choice(backend: str, platform: str, kind: str) -> None:
    """Only GPUs have a choice of backends; `kind` names the devices to the user.

    Raises:
      ConfigError: for a choice other than `auto` on another platform.
    """
    if platform not in ("gpu", "cuda") and backend != "auto":
        raise ConfigError([Problem("communication.backend", backend, f"{kind} has one backend; legal: auto")])


def check_processes(backend: str, platform: str, local_devices: int) -> None:
    """NVSHMEM wants one process for each GPU.

    Raises:
      ConfigError: where this process has several.
    """
    if backend == "nvshmem" and platform in ("gpu", "cuda") and local_devices > 1:
        message = (
            f"NVSHMEM needs one process for each GPU, and this one has {local_devices}: start as many processes "
            "as GPUs (scripts/slurm/train.sbatch does), or take auto or nccl"
        )
        raise ConfigError([Problem("communication.backend", backend, message)])


def flags(backend: str, jaxlib: Version, *, simulated: bool) -> list[str]:
    """XLA flags for `communication.backend` under this jaxlib; none for `auto` and `nccl` (XLA's own choice on GPU).

    Raises:
      ConfigError: where the backend cannot serve: on simulated CPU devices, or under this jaxlib.
    """

    def refuse(reason: str) -> ConfigError:
        return ConfigError([Problem("communication.backend", backend, reason)])

    if backend == "auto":
        return []
    if simulated:
        raise refuse("simulated CPU devices have no GPU collectives; legal here: auto")
    installed = ".".join(map(str, jaxlib))
    if backend == "nvshmem":
        if not NVSHMEM_FIRST <= jaxlib <= NVSHMEM_LAST:
            raise refuse(
                f"jaxlib {installed} cannot put collectives on NVSHMEM (0.6.2 to 0.10.1 can; 0.10.2 ignores the flag, "
                "later ones abort on it); legal here: auto, nccl"
                + (", nccl_symmetric" if jaxlib >= SYMMETRIC_FIRST else "")
            )
        return ["--xla_gpu_experimental_enable_nvshmem=true"]
    if backend == "nccl_symmetric":
        if jaxlib < SYMMETRIC_FIRST:
            raise refuse(f"jaxlib {installed} has no symmetric permutes (0.12 and later have); legal here: auto, nccl")
        return ["--xla_gpu_collective_permute_mode=symmetric"]
    return []
