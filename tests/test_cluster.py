"""Several processes on this machine, joined by `jax.distributed` over loopback, with simulated devices each."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import runs
from documents import batch_hash
from longtrain.config import load
from longtrain.data.prepare import ensure
from longtrain.data.rows import RowIndex
from runs import Workspace

MESH = ("mesh.fsdp=2", "mesh.context=2")


def start(
    workspace: Workspace, processes: int, *arguments: str, own: Callable[[int], tuple[str, ...]] = lambda process: ()
) -> list[subprocess.Popen[str]]:
    """The processes of one `longtrain ARGUMENTS OWN`, which share the config's simulated devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
    return [
        workspace.start(*arguments, *own(process), environment=cluster | {"JAX_PROCESS_ID": str(process)})
        for process in range(processes)
    ]


def finish(processes: list[subprocess.Popen[str]], code: int) -> list[str]:
    return [runs.finish(process, code) for process in processes]


@pytest.fixture(scope="module")
def alone(workspace: Workspace) -> list[dict]:
    """The lines of the run of one process."""
    workspace.train("alone", *MESH, "run.steps=6", "eval.every_steps=2")
    return workspace.lines("alone")


def assert_same_run(lines: list[dict], expected: list[dict]) -> None:
    assert [line["step"] for line in lines] == list(range(1, len(expected) + 1))
    for line, other in zip(lines, expected, strict=True):
        for exact in ("batch_hash", "valid_tokens", "tokens_seen", "documents", "learning_rate", "eval_tokens"):
            assert line.get(exact) == other.get(exact)
        for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("eval_loss", 1e-4)):
            if name in other:
                assert line[name] == pytest.approx(other[name], rel=tolerance)


def test_two_processes_are_one_run(workspace: Workspace, alone: list[dict]):
    command = ("train", "config.yaml", "run.name=two", *MESH, "eval.every_steps=2")
    first, second = finish(start(workspace, 2, *command, "run.steps=4"), 0)
    assert "on 4 x cpu, 2 process(es)" in first and "done: 4 steps" in first
    assert "measured at start, 1 host(s)" in first  # the processes share this machine, and so its rate
    assert "joining the cluster" in second and "step 4/4" not in second  # one speaks for all
    assert_same_run(workspace.lines("two"), alone[:4])
    assert {line["compilations"] for line in workspace.lines("two")} == {1}
    # One process goes on with what two have saved.
    assert "resuming after step 4, at row 16" in workspace.run(*command, "run.steps=6")
    assert_same_run(workspace.lines("two"), alone)


@pytest.mark.slow
def test_a_signal_to_one_stops_all_at_the_same_step(workspace: Workspace, alone: list[dict]):
    command = ("train", "config.yaml", "run.name=told", *MESH, "run.steps=400", "checkpoint.every_steps=1000")
    processes = start(workspace, 2, *command)
    runs.wait_until(lambda: len(workspace.lines("told")) >= 3, processes[0])
    processes[1].send_signal(signal.SIGTERM)
    first, second = finish(processes, 75)
    stopped = workspace.lines("told")[-1]["step"]
    assert 3 <= stopped < 400
    assert f"stopped by a signal to another process after step {stopped}" in first
    assert f"stopped by SIGTERM after step {stopped}" in second
    assert workspace.checkpoints("told") == [str(stopped)]
    workspace.run(*command, f"run.steps={stopped + 2}")
    lines = workspace.lines("told")
    assert [line["step"] for line in lines] == list(range(1, stopped + 3))
    assert [line["loss"] for line in lines[:6]] == pytest.approx([line["loss"] for line in alone], rel=1e-4)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_by_all(workspace: Workspace):
    command = ("train", "config.yaml", "run.name=damaged", *MESH)
    finish(start(workspace, 2, *command), 0)
    for file in (workspace.run_dir("damaged") / "checkpoints" / "4" / "parameters").rglob("d/*"):
        file.write_bytes(b"")
    first, second = finish(start(workspace, 2, *command, "run.steps=2"), 0)
    assert "checkpoints/4 cannot be read and is passed over" in first and "complete, 2 of" in first
    assert workspace.checkpoints("damaged") == ["2", "damaged-4"]


def test_what_is_wrong_for_all_is_told_by_all(workspace: Workspace):
    for text in finish(start(workspace, 2, "train", "config.yaml", *MESH, "data.sources.0.path=nowhere"), 3):
        assert "nowhere" in text


@pytest.mark.slow
def test_one_that_fails_alone_keeps_its_code_and_ends_the_others(workspace: Workspace):
    """Here process 0; JAX's own service ends the others by signal, which their supervisors put into words."""
    (workspace.folder / "blocked" / "run" / "config.yaml").mkdir(parents=True)
    first, second = start(workspace, 2, "train", "config.yaml", *MESH, "run.output_dir=blocked")
    assert "blocked/run/config.yaml" in runs.finish(first, 5)
    assert "a peer died or is stuck: process 0" in runs.finish(second, 6)


def worker_of(process: subprocess.Popen[str]) -> int:
    """The process that a supervisor has started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stuck"])
@pytest.mark.parametrize("where", ["in a collective", "between"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_peer_that_is_lost(workspace: Workspace, victim: int, where: str, number: signal.Signals):
    """Within the set time every process has ended with exit code 6, and the others name the one that was lost."""
    name = f"lost-{victim}-{number.name}-{where.replace(' ', '-')}"
    # Between: on the way to the first step, where each compiles for itself and waits for the others.
    command = ("train", "config.yaml", f"run.name={name}", *MESH, "run.steps=100000", "cluster.timeout_seconds=15")
    processes = start(workspace, 2, *command)
    if where == "between":
        read_until(processes[0], "compiled in" if victim else "an epoch")
    else:
        runs.wait_until(lambda: len(workspace.lines(name)) >= 3, processes[0])
    os.kill(worker_of(processes[victim]), number)
    began = time.monotonic()
    said = finish(processes, 6)
    assert time.monotonic() - began < 60
    assert f"a peer died or is stuck: process {victim}" in said[1 - victim]
    own = "ended by SIGKILL" if number == signal.SIGKILL else "no sign of life for 15 s"
    assert f"process {victim} of 2: its worker" in said[victim] and own in said[victim]


@pytest.mark.slow
def test_four_processes_lose_one_and_fewer_go_on(workspace: Workspace, alone: list[dict]):
    """Four, then two, then one, on 4, 4 and 2 devices: each goes on from what the others left."""
    lasting = ("train", "config.yaml", "run.name=fewer", *MESH, "run.steps=100000", "cluster.timeout_seconds=20")
    processes = start(workspace, 4, *lasting)
    runs.wait_until(lambda: len(workspace.lines("fewer")) >= 5, processes[0])
    os.kill(worker_of(processes[2]), signal.SIGKILL)
    said = finish(processes, 6)
    assert all("a peer died or is stuck: process 2" in said[other] for other in (0, 1, 3))
    saved = max(int(name) for name in workspace.checkpoints("fewer") if name.isdigit())
    assert saved >= 2

    command = ("train", "config.yaml", "run.name=fewer")
    first, _ = finish(start(workspace, 2, *command, *MESH, f"run.steps={saved + 2}"), 0)
    assert f"resuming after step {saved}" in first
    text = workspace.run(*command, "mesh.fsdp=2", "mesh.context=1", f"run.steps={saved + 4}")
    assert f"resuming after step {saved + 2}" in text and "mesh.context 2 -> 1" in text
    lines = workspace.lines("fewer")
    assert [line["step"] for line in lines] == list(range(1, saved + 5))
    unevaluated = [{name: value for name, value in line.items() if not name.startswith("eval_")} for line in alone]
    assert_same_run(lines[: len(alone)], unevaluated[: len(lines)])


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    while words not in (line := process.stdout.readline()):
        assert line, process.communicate()


@pytest.mark.slow
def test_a_process_that_never_comes(workspace: Workspace):
    first, second = start(workspace, 2, "train", "config.yaml", *MESH, "cluster.timeout_seconds=6")
    second.kill()
    assert "not all processes came in time" in runs.finish(first, 6)


def test_an_address_at_which_nobody_answers(workspace: Workspace):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        for place in (address, "no-such-host.invalid:1234"):
            cluster = {"JAX_COORDINATOR_ADDRESS": place, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
            text = workspace.run("train", "config.yaml", "cluster.timeout_seconds=1", environment=cluster, code=6)
            assert f"process 0 does not answer at {place} (JAX's variables)" in text and "tried for 1 s" in text


@pytest.mark.slow
def test_any_number_of_processes_reads_the_same(workspace: Workspace):
    """Two, then three, then one go on with one run, each on rows cut over the context axis."""
    sizes = ("sequence_length=96", "model.embed_dim=96", "mesh.fsdp=2", "mesh.context=3")
    for number, steps in ((2, 2), (3, 3), (1, 4)):
        command = ("train", "config.yaml", *sizes, "run.name=many", f"run.steps={steps}")
        finish(start(workspace, number, *command), 0)
    here = (f"data.prepared_dir={workspace.folder}/prepared", f"data.sources.0.path={workspace.folder}/corpus")
    config = load(workspace.folder / "config.yaml", [*sizes, *here])
    index = RowIndex.of(config, ensure(config, print), "train")
    hashes = [batch_hash(index, first, 4) for first in range(0, 16, 4)]
    assert [line["batch_hash"] for line in workspace.lines("many")] == hashes


@pytest.mark.slow
def test_on_disks_of_their_own_each_prepares_the_same(workspace: Workspace, alone: list[dict]):
    def run(name: str, sources: tuple[str, str], code: int) -> list[str]:
        def own(process: int) -> tuple[str, ...]:
            return f"data.prepared_dir=disk-{process}", f"data.sources.0.path={sources[process]}"

        command = ("train", "config.yaml", *MESH, f"run.name={name}", "eval.every_steps=2")
        return finish(start(workspace, 2, *command, own=own), code)

    corpus = str(workspace.folder / "corpus")
    run("own", (corpus, corpus), 0)
    assert len(list(workspace.folder.glob("disk-*/*/manifest.json"))) == 2
    assert_same_run(workspace.lines("own"), alone[: len(workspace.lines("own"))])
    other = workspace.folder / "other"
    other.mkdir()
    (other / "a.txt").write_text("another text " * 500)
    for text in run("others", (corpus, str(other)), 3):
        assert "processes 1 have other data than process 0 in data.prepared_dir = disk-" in text


@pytest.mark.slow
def test_data_that_ends_ends_for_all_at_the_same_step(workspace: Workspace):
    """About 15 rows in batches of 4, an epoch and no more: the last whole batch is the third."""
    command = ("train", "config.yaml", *MESH, "run.name=ends", "data.repeat=false", "run.steps=50")
    for text in finish(start(workspace, 2, *command), 3):
        assert re.search(r"the data is exhausted: the train split has \d+ rows, \d+ are taken", text)
    lines = workspace.lines("ends")
    config = load(
        workspace.folder / "config.yaml",
        [f"data.prepared_dir={workspace.folder}/prepared", f"data.sources.0.path={workspace.folder}/corpus"],
    )
    rows = RowIndex.of(config, ensure(config, print), "train").rows_per_epoch
    assert [line["step"] for line in lines] == list(range(1, rows // 4 + 1))
    assert workspace.checkpoints("ends")[-1] == str(rows // 4)
