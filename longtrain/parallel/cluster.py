"""Which cluster this process belongs to, told by the config or the environment, and whether its process 0 answers.

Nothing here imports jax: what is missing or wrong is said at once, before anything could wait for it.
"""

import re
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from longtrain.config import Config
from longtrain.errors import ClusterError

JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
JOBSET = ("REPLICATED_JOB_NAME", "JOB_INDEX", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX", "JAX_NUM_PROCESSES")
"""Beside JOBSET_NAME. Kubernetes sets JOB_COMPLETION_INDEX, the manifest the others, from JobSet's labels."""

JOBSET_PORT = 8476
RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Cluster:
    """This process's place among the cluster's; `told_by` says in words where that stands."""

    coordinator: str
    processes: int
    process: int
    told_by: str

    def __post_init__(self) -> None:
        if not 0 <= self.process < self.processes:
            raise ClusterError(
                f"process {self.process} of {self.processes} ({self.told_by}): must be 0 to {self.processes - 1}"
            )
        host, _, port = self.coordinator.rpartition(":")
        if not host or not re.fullmatch(r"\d+", port) or not 0 < int(port) < 65536:
            raise ClusterError(f"the address of process 0 is {self.coordinator!r} ({self.told_by}): must be host:port")


def find_cluster(config: Config, environment: Mapping[str, str]) -> Cluster | None:
    """The cluster this process belongs to: the config's, else that of JAX's variables, of a Kubernetes JobSet's, of a
    SLURM step's; None for a single process.

    Raises:
      ClusterError: when some but not all of the variables are set, one is no number, or the process's is too high.
    """
    section = config.cluster
    if section.coordinator_address is not None:
        assert section.num_processes is not None and section.process_id is not None  # the config's own check
        return Cluster(section.coordinator_address, section.num_processes, section.process_id, "the section cluster")
    if environment.get("JOBSET_NAME"):
        return _jobset(environment)
    if any(environment.get(name) for name in JAX):
        address, processes, process = _all_of(JAX, environment, [name for name in JAX if environment.get(name)])
        count, number = _numbers({JAX[1]: processes, JAX[2]: process})
        return Cluster(address, count, number, "JAX's variables")
    if environment.get("SLURM_STEP_NUM_TASKS"):
        return _slurm(environment)
    return None


def _jobset(environment: Mapping[str, str]) -> Cluster:
    """Pods of a JobSet have names of their own: NAME-JOB-INDEX-POD.NAME, the last its headless service."""
    values = _all_of(JOBSET, environment, ["JOBSET_NAME"])
    job, pods, pod, total = _numbers(dict(zip(JOBSET[1:], values[1:], strict=True)))
    name = environment["JOBSET_NAME"]
    address = environment.get("JAX_COORDINATOR_ADDRESS") or f"{name}-{values[0]}-0-0.{name}:{JOBSET_PORT}"
    return Cluster(address, total, job * pods + pod, "the JobSet's variables")


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    (tasks,) = _numbers({"SLURM_STEP_NUM_TASKS": environment["SLURM_STEP_NUM_TASKS"]})
    if tasks == 1:
        return None
    job, nodes, process = _all_of(SLURM, environment, ["SLURM_STEP_NUM_TASKS"])
    job_number, number = _numbers({"SLURM_JOB_ID": job, "SLURM_PROCID": process})
    # `node7`, `node[007-012,20],other` or a mix: the first host. A port of its own for each job that shares the node.
    first = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    if first is None:
        raise ClusterError(f"SLURM_STEP_NODELIST = {nodes!r}: no host can be read from it")
    return Cluster(f"{first[1]}{first[2] or ''}:{61440 + job_number % 4096}", tasks, number, "SLURM's variables")


def _all_of(names: Iterable[str], environment: Mapping[str, str], given: list[str]) -> list[str]:
    names = list(names)
    if missing := [name for name in names if not environment.get(name)]:
        raise ClusterError(
            f"{', '.join(given)} is set but {', '.join(missing)} is not: set all of them, or none, or the config's "
            "section cluster"
        )
    return [environment[name] for name in names]


def _numbers(values: Mapping[str, str]) -> list[int]:
    wrong = [f"{name} = {text!r}" for name, text in values.items() if not re.fullmatch(r"\d+", text)]
    if wrong:
        raise ClusterError(f"{', '.join(wrong)}: must be whole numbers")
    return [int(text) for text in values.values()]


def wait_for_coordinator(cluster: Cluster, seconds: float) -> None:
    """Returns when process 0 takes connections; process 0 itself only looks its own name up.

    JAX, left to itself with an address at which nobody answers, aborts the process after minutes.

    Raises:
      ClusterError: it did not within that time; the message holds the last answer.
    """
    host, _, port = cluster.coordinator.rpartition(":")
    deadline = time.monotonic() + seconds
    while True:
        try:
            left = max(deadline - time.monotonic(), RETRY_SECONDS)
            if cluster.process == 0:
                socket.getaddrinfo(host.strip("[]"), int(port))
            else:
                socket.create_connection((host.strip("[]"), int(port)), timeout=left).close()
            return
        except OSError as error:  # a name may be unknown for a while too: a pod's, before the pod is there
            if time.monotonic() + RETRY_SECONDS >= deadline:
                raise ClusterError(
                    f"process 0 does not answer at {cluster.coordinator} ({cluster.told_by}): {error.strerror or error}"
                    f"; tried for {seconds:g} s (cluster.timeout_seconds) as process {cluster.process} of "
                    f"{cluster.processes}. Is process 0 running there, the address right, the port open?"
                ) from error
        time.sleep(RETRY_SECONDS)
