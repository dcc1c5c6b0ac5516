"""The supervisor by itself, around programs that stand in for a worker of longtrain: no jax in either."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longtrain import supervisor
from longtrain.errors import ClusterError
from longtrain.parallel.cluster import Cluster, find_cluster
from runs import CHECKOUT
from tiny import config

FIRST = Cluster("host:1234", 4, 0, "a test")
THIRD = Cluster("host:1234", 4, 2, "a test")

PARENT = """
import sys
from longtrain import supervisor
from longtrain.parallel.cluster import Cluster
supervisor.ROUND_SECONDS = 0.5
class Stand(supervisor._Worker):
    def __init__(self, command):
        super().__init__([sys.executable, "-c", sys.argv[1]])
supervisor._Worker = Stand
sys.exit(supervisor.supervise(["train"], Cluster("host:1234", 4, 2, "a test"), float(sys.argv[2])))
"""

ALIVE = "import os, signal, sys, time; from longtrain.parallel import lifeline; lifeline.hold()\n"


def start(program: str, silence: float = 60) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, program, str(silence)],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_the_end_of(process: int) -> None:
    """Gone, or a zombie that whoever inherited it has not looked at yet."""
    deadline = time.monotonic() + 10
    stat = Path(f"/proc/{process}/stat")
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("code", [0, 1, 5, 75])
def test_an_exit_code_and_both_streams_go_through(code: int):
    done = start(f"{ALIVE}print('out'); print('err', file=sys.stderr); sys.exit({code})")
    assert done.communicate(timeout=30) == ("out\n", "err\n")
    assert done.returncode == code


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_is_passed_on_once(name: str):
    told = f"{ALIVE}signal.signal(signal.{name}, lambda *_: os.write(1, b'told\\n')); print('ready', flush=True)\n"
    process = start(f"{told}time.sleep(1); sys.exit(75)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    assert process.communicate(timeout=30)[0] == "told\n"
    assert process.returncode == 75


def test_who_dies_of_a_signal_passed_on_dies_of_it():
    process = start(f"{ALIVE}print('ready', flush=True); time.sleep(60)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


def test_one_that_is_killed_is_told_of():
    process = start(f"{ALIVE}os.kill(os.getpid(), signal.SIGKILL)")
    assert "process 2 of 4: its worker was ended by SIGKILL (out of memory?)" in process.communicate(timeout=30)[1]
    assert process.returncode == 6


def test_one_that_is_stopped_is_killed_and_its_children_too():
    child = "child = __import__('subprocess').Popen(['sleep', '600']); print(child.pid, flush=True)\n"
    process = start(f"{ALIVE}{child}os.kill(os.getpid(), signal.SIGSTOP)", silence=1)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 6 and "no sign of life for 1 s" in err
    wait_for_the_end_of(int(out))


def test_a_worker_ends_with_its_supervisor():
    process = start(f"{ALIVE}print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=30)
    wait_for_the_end_of(worker)


SAID = (
    "F1201 client.h:80] Terminating process because the JAX distributed service detected fatal errors. absl::Status: "
)


@pytest.mark.parametrize(
    ("cluster", "words", "says"),
    [
        (
            FIRST,
            ["UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n", "1\n", "3\n", "The …\n"],
            "processes 1, 3 (",
        ),
        (
            FIRST,
            ["INTERNAL: Shutdown barrier has failed.\n", "UNAVAILABLE: Task 1 heartbeat timeout.\n"],
            "process 1 (",
        ),
        (THIRD, ["UNAVAILABLE: Failed to send RPC to coordination service. Either the leader\n"], "process 0, whose"),
        (THIRD, ["DEADLINE_EXCEEDED\n", "RPC: /xla.coordination.CoordinationService/Heartbeat\n"], "process 0, whose"),
        (FIRST, ["DEADLINE_EXCEEDED\n", "RPC: /xla.coordination.CoordinationService/RegisterTask\n"], "came in time"),
        (THIRD, ["something new\n"], "does not say which"),
    ],
)
def test_what_the_service_says_names_the_peer(cluster: Cluster, words: list[str], says: str):
    assert says in supervisor._cause(signal.SIGABRT, [SAID, *words], cluster)


def test_an_abort_that_is_not_the_services_is_no_peers_death():
    assert "ended by SIGABRT" in supervisor._cause(signal.SIGABRT, ["free(): invalid pointer\n"], THIRD)


JOBSET = {
    "JOBSET_NAME": "llama",
    "REPLICATED_JOB_NAME": "workers",
    "JOB_INDEX": "1",
    "PROCESSES_IN_JOB": "4",
    "JOB_COMPLETION_INDEX": "2",
    "JAX_NUM_PROCESSES": "8",
}
SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "n[07-08],x"}
JAX = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (JAX, ("host:1", 2, 1)),
        (JOBSET, ("llama-workers-0-0.llama:8476", 8, 6)),
        (JOBSET | {"JAX_COORDINATOR_ADDRESS": "host:1"}, ("host:1", 8, 6)),
        (SLURM, ("n07:61441", 8, 3)),
        (SLURM | {"SLURM_STEP_NODELIST": "a-1,b"}, ("a-1:61441", 8, 3)),
        (SLURM | {"SLURM_STEP_NODELIST": "n[5,7]"}, ("n5:61441", 8, 3)),
        (SLURM | JAX, ("host:1", 2, 1)),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
    ],
)
def test_a_cluster_is_found(environment: dict[str, str], place: tuple[str, int, int] | None):
    found = find_cluster(config(), environment)
    assert (found and (found.coordinator, found.processes, found.process)) == place


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"JOBSET_NAME": "llama"}, "JOB_COMPLETION_INDEX, JAX_NUM_PROCESSES is not"),
        (JOBSET | {"JOB_INDEX": "2"}, "process 10 of 8 (the JobSet's variables): must be 0 to 7"),
        (JOBSET | {"JOB_INDEX": "two"}, "JOB_INDEX = 'two': must be whole numbers"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NUM_TASKS is set but SLURM_STEP_NODELIST is not"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "host"}, "'host' (JAX's variables): must be host:port"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "host:99999"}, "must be host:port"),
        (JAX | {"JAX_PROCESS_ID": ""}, "JAX_PROCESS_ID is not"),
    ],
)
def test_a_wrong_cluster_is_refused(environment: dict[str, str], says: str):
    with pytest.raises(ClusterError) as refused:
        find_cluster(config(), environment)
    assert says in str(refused.value)
