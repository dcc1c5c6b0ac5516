"""A process's start: what must be in the environment before JAX is imported, and joining the cluster after.

`prepare_environment` runs first and imports no jax; `join_cluster` imports it and checks that what the config counts on
is really there, so that a run never goes on with other devices than it was written for.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

from longtrain.config import Config
from longtrain.errors import ClusterError, ConfigError, Problem
from longtrain.parallel import backend
from longtrain.parallel.cluster import find_cluster, wait_for_coordinator

# Simulated devices share the host's cores, so a peer may be minutes late in a collective without being dead.
COLLECTIVE_WAIT_SECONDS = 1800
COLLECTIVE_TIMEOUT_FLAGS_SINCE = (0, 8, 3)

# How long a process waits for the slowest of the others to compile and restore.
START_SECONDS = 3600
# How long process 0, whose end ends all, leaves the others to say what they failed of themselves.
FAREWELL_SECONDS = 5


def jaxlib_version() -> backend.Version:
    """The installed jaxlib's version, e.g. (0, 10, 2), without importing it."""
    return tuple(int(part) for part in importlib.metadata.version("jaxlib").split(".")[:3])


def simulated_device_count(config: Config) -> int | None:
    """Simulated CPU devices over all processes, or None for real ones."""
    simulate = config.mesh.simulate_devices
    return config.mesh.size if simulate == "auto" else simulate


def prepare_environment(config: Config, environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Puts this run's XLA flags into the environment, after the user's own; returns those it added.

    Raises:
      ConfigError: when `communication.backend` cannot be had.
      ClusterError: when the processes do not divide the simulated devices, or the cluster's variables are incomplete.
    """
    jaxlib = jaxlib_version()
    simulated = simulated_device_count(config)
    flags = backend.flags(config.communication.backend, jaxlib, simulated=simulated is not None)
    if simulated is not None:
        cluster = find_cluster(config, environment)
        processes = cluster.processes if cluster else 1
        if simulated % processes:
            raise ClusterError(
                f"mesh.simulate_devices = {config.mesh.simulate_devices}: {simulated} simulated devices cannot be "
                f"shared evenly by {processes} processes"
            )
        environment["JAX_PLATFORMS"] = "cpu"
        flags.append(f"--xla_force_host_platform_device_count={simulated // processes}")
        if jaxlib >= COLLECTIVE_TIMEOUT_FLAGS_SINCE:
            flags.append(f"--xla_cpu_collective_call_terminate_timeout_seconds={COLLECTIVE_WAIT_SECONDS}")
            flags.append(f"--xla_cpu_collective_call_warn_stuck_timeout_seconds={COLLECTIVE_WAIT_SECONDS // 10}")
    _check_flags(config.communication.xla_flags)
    flags.extend(config.communication.xla_flags)
    environment["XLA_FLAGS"] = " ".join([environment.get("XLA_FLAGS", ""), *flags]).strip()
    return flags


def _check_flags(flags: Sequence[str]) -> None:
    """Tries the user's flags in a process of its own: one that jaxlib does not know ends the process it is in.

    Raises:
      ConfigError: with what XLA said.
    """
    if not flags:
        return
    environment = os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    tried = subprocess.run(command, env=environment, capture_output=True, text=True)
    if tried.returncode:
        said = [line for line in tried.stderr.splitlines() if "XLA_FLAGS" in line] or tried.stderr.splitlines()[-1:]
        message = f"jaxlib {'.'.join(map(str, jaxlib_version()))} does not take these flags: {' '.join(said)}"
        raise ConfigError([Problem("communication.xla_flags", list(flags), message)])


def join_cluster(config: Config) -> None:
    """Starts JAX, in a cluster where there is one, and checks that the devices are the ones the config asks for.

    Raises:
      ClusterError: when the cluster cannot be joined, or JAX found other devices than the config counts on.
      ConfigError: when `communication.backend` needs another number of processes.
    """
    import jax

    cluster = find_cluster(config, os.environ)
    try:
        if cluster is not None:
            seconds = config.cluster.timeout_seconds
            place = f"process {cluster.process} of {cluster.processes}, as {cluster.told_by} say"
            print(f"joining the cluster at {cluster.coordinator} as {place}", file=sys.stderr, flush=True)
            wait_for_coordinator(cluster, seconds)
            jax.distributed.initialize(
                cluster.coordinator,
                cluster.processes,
                cluster.process,
                initialization_timeout=seconds,
                heartbeat_timeout_seconds=seconds,
            )
        devices = jax.devices()
    except (RuntimeError, ValueError) as error:
        raise ClusterError(f"the cluster cannot start: {error}") from error
    backend.check_processes(config.communication.backend, devices[0].platform, jax.local_device_count())
    simulated = simulated_device_count(config)
    if simulated is None and devices[0].platform == "cpu":
        raise ClusterError(
            "mesh.simulate_devices = null asks for real devices, but JAX finds only the CPU. Install the device's jax "
            "(extras: gpu, tpu), or set mesh.simulate_devices=auto to simulate devices on the CPU"
        )
    if simulated is not None and len(devices) != simulated:
        raise ClusterError(
            f"mesh.simulate_devices asks for {simulated} simulated devices, but JAX has {len(devices)}: "
            "JAX was started before, or XLA_FLAGS sets another count"
        )


def is_first() -> bool:
    """Whether this is the process that speaks for the run."""
    import jax

    return jax.process_index() == 0


def host_count() -> int:
    """Hosts that the cluster's processes run on, told apart by name. A collective: all processes must call it."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    name = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return len(np.unique(process_allgather(name))) if jax.process_count() > 1 else 1


def differing(value: str) -> list[int]:
    """The processes whose value is not that of process 0. A collective: all processes must call it."""
    import jax
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    if jax.process_count() == 1:
        return []
    values = process_allgather(np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint32))
    return np.flatnonzero((values != values[0]).any(axis=1)).tolist()


def wait_for_all(name: str, seconds: int = START_SECONDS) -> None:
    """Returns when every process of the cluster has come to the place of this name.

    A collective would do, but not wait: gloo's first one fails where a peer comes half a minute late, and the processes
    of a cluster do not compile equally long, least of all where one finds the program in its cache.
    """
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    get_barrier_sync_fn()(key=name, timeout_ms=1000 * seconds)


def publish(key: str, value: str) -> None:
    """Tells the other processes of the cluster this process's value under a key, in place of the one before; nothing
    where there are no others."""
    if (client := _client()) is not None:
        import jax

        client.key_value_set(f"{key}/{jax.process_index()}", value, allow_overwrite=True)


def published(key: str) -> dict[int, str]:
    """What each process has published under a key, by its number; nothing where the cluster's service is gone."""
    import jax

    if (client := _client()) is None:
        return {}
    try:
        return {int(name.rsplit("/", 1)[1]): value for name, value in client.key_value_dir_get(key)}
    except jax.errors.JaxRuntimeError:
        return {}


def _client() -> Any:
    """Of JAX's coordination service, which has no public door; None for a single process."""
    from jax._src import distributed

    return distributed.global_state.client


_LOST = re.compile(r"gloo|nccl|nvshmem|connection|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED", re.IGNORECASE)
"""What the errors of collectives and barriers say when a peer is gone; an array too large says something else."""


@contextlib.contextmanager
def naming_lost_peers(config: Config) -> Iterator[None]:
    """Where the block fails because a peer is gone, waits for JAX's service to find out which: it ends this process
    within `cluster.timeout_seconds` and leaves the name to the supervisor.

    Raises:
      ClusterError: it did not.
    """
    import jax

    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # the second where gloo fails as it is called
        if jax.process_count() == 1 or not _LOST.search(str(error)):
            raise
        lost = f"a peer died or is stuck: {str(error).strip().splitlines()[0]}"
        print(f"longtrain: {lost}; waiting to be told which", file=sys.stderr, flush=True)
        time.sleep(config.cluster.timeout_seconds + FAREWELL_SECONDS)
        raise ClusterError(f"{lost} (JAX's coordination service does not say which)") from error


def leave_cluster(exit_code: int) -> None:
    """Ends this process, which failed, if it is one of a cluster: with its own exit code, and not waiting for the rest.

    JAX's own farewell would wait for the others, which may hang in a collective with this one, and then abort it.
    """
    if "jax" not in sys.modules:
        return
    import jax

    if not jax.distributed.is_initialized():
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if is_first():
        time.sleep(FAREWELL_SECONDS)
    os._exit(exit_code)
