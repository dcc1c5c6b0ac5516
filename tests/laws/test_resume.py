"""Law 3: a run that is stopped and started again, however and however often, is the run that never was.

On the same mesh everything that a run computes is the same to the last bit; on another, to rounding. The runs here
accumulate gradients over two parts of the batch and cross the border of an epoch.
"""

import random
import shutil
import signal
from typing import Any

import numpy as np
import pytest

import runs
from longtrain.config import load
from longtrain.data import prepare
from longtrain.data.rows import RowIndex
from runs import Workspace

STEPS = 40
SETTINGS = ("batch.accumulation=2",)
# What depends on the clock; and the compilations, which are those of a process.
OF_THE_PROCESS = (
    "step_seconds",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "mfu_causal",
    "data_wait_seconds",
    "checkpoint_stall_seconds",
)


@pytest.fixture(scope="module")
def straight(workspace: Workspace) -> list[dict[str, Any]]:
    """The lines of a run of `STEPS` steps in one go, named `straight`, with every second step saved."""
    workspace.train("straight", *SETTINGS, f"run.steps={STEPS}")
    return workspace.lines("straight")


def computed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines without what the clock says."""
    return [{name: value for name, value in line.items() if name not in OF_THE_PROCESS} for line in lines]


def assert_same_run(workspace: Workspace, name: str, straight: list[dict[str, Any]], steps: int) -> None:
    """Each step once, all that was computed the same, and so the state in every checkpoint that both have."""
    assert [line["step"] for line in workspace.lines(name)] == list(range(1, steps + 1))
    assert computed(workspace.lines(name)) == computed(straight[:steps])
    runs.same_arrays(workspace.state(name, steps), workspace.state("straight", steps))


def test_the_runs_cross_an_epoch(workspace: Workspace, straight: list[dict[str, Any]]):
    config = load(workspace.folder / "config.yaml", [f"data.sources.0.path={workspace.folder}/corpus"])
    config = config.model_copy(
        update={"data": config.data.model_copy(update={"prepared_dir": f"{workspace.folder}/prepared"})}
    )
    index = RowIndex.of(config, prepare.ensure(config, log=print), "train")
    # Past the first epoch in the runs of 6 steps, past several in the longer ones.
    assert index.rows_per_epoch < 6 * config.batch.sequences
    tokens_seen = np.cumsum([line["valid_tokens"] for line in straight])
    assert [line["tokens_seen"] for line in straight] == tokens_seen.tolist()
    assert len({line["batch_hash"] for line in straight}) == STEPS


@pytest.mark.slow
def test_three_processes(workspace: Workspace, straight: list[dict[str, Any]]):
    for steps in (2, 4, 6):
        workspace.train("thirds", *SETTINGS, f"run.steps={steps}")
        assert_same_run(workspace, "thirds", straight, steps)
    assert {line["compilations"] for line in workspace.lines("thirds")} == {1}


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=lambda number: number.name,
)
def test_told_to_stop(workspace: Workspace, straight: list[dict[str, Any]], number: signal.Signals):
    name = f"told-{number.name}"
    told = ("train", "config.yaml", f"run.name={name}", *SETTINGS, f"run.steps={STEPS}", "checkpoint.every_steps=100")
    process = workspace.start(*told)
    runs.wait_until(lambda: len(workspace.lines(name)) >= 3, process)
    process.send_signal(number)
    text = runs.finish(process, 75)
    stopped = workspace.lines(name)[-1]["step"]
    assert 3 <= stopped < STEPS
    assert f"stopped by {number.name} after step {stopped}" in text
    assert workspace.checkpoints(name) == [str(stopped)]  # saved, once, and nothing left over
    assert f"resuming after step {stopped}" in workspace.run(*told)
    assert_same_run(workspace, name, straight, STEPS)


def is_saving(workspace: Workspace, name: str) -> bool:
    folder = workspace.run_dir(name) / "checkpoints"
    return folder.exists() and any(folder.glob("*orbax-checkpoint-tmp*"))


def test_killed_at_any_moment_and_while_saving(workspace: Workspace, straight: list[dict[str, Any]]):
    command = ("train", "config.yaml", "run.name=killed", *SETTINGS, f"run.steps={STEPS}")
    moment = random.randrange(1, STEPS // 2)

    process = workspace.start(*command)
    runs.wait_until(lambda: len(workspace.lines("killed")) >= moment, process)
    process.kill()
    runs.finish(process, -signal.SIGKILL)

    process = workspace.start(*command)
    runs.wait_until(lambda: is_saving(workspace, "killed"), process)
    process.kill()
    runs.finish(process, -signal.SIGKILL)
    assert is_saving(workspace, "killed"), "the kill came too late to leave half a checkpoint"

    workspace.run(*command)
    assert_same_run(workspace, "killed", straight, STEPS)
    assert workspace.checkpoints("killed") == workspace.checkpoints("straight")  # the half one is gone


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(workspace: Workspace, straight: list[dict[str, Any]]):
    command = ("train", "config.yaml", "run.name=early", *SETTINGS, "run.steps=6", "checkpoint.every_steps=6")
    process = workspace.start(*command)
    runs.wait_until(lambda: len(workspace.lines("early")) >= 1, process)
    process.kill()
    runs.finish(process, -signal.SIGKILL)
    workspace.run(*command)
    assert_same_run(workspace, "early", straight, 6)


@pytest.mark.parametrize(
    "mesh",
    [
        ("mesh.context=1", "mesh.fsdp=2", "batch.accumulation=1", "attention.layout=contiguous"),
        pytest.param(
            ("mesh.context=4", "attention.strategy=all_gather", "attention.layout=zigzag"), marks=pytest.mark.slow
        ),
        pytest.param(("mesh.context=1", "mesh.tensor=2", "batch.accumulation=4"), marks=pytest.mark.slow),
        pytest.param(("mesh.context=2", "mesh.data=2", "batch.accumulation=1"), marks=pytest.mark.slow),
        pytest.param(("mesh.context=1",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_on_another_mesh(workspace: Workspace, straight: list[dict[str, Any]], mesh: tuple[str, ...]):
    name = "-".join(mesh).replace("=", "").replace(".", "")
    folder = workspace.run_dir(name)
    shutil.copytree(workspace.run_dir("straight"), folder)
    for step in workspace.checkpoints(name):
        if int(step) > 4:
            shutil.rmtree(folder / "checkpoints" / step)
    said = workspace.train(name, *SETTINGS, "run.steps=8", *mesh)
    assert "changed since that checkpoint" in said
    lines = workspace.lines(name)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[:4] == straight[:4]
    for line, expected in zip(lines[4:], straight[4:8], strict=True):
        for exact in ("batch_hash", "valid_tokens", "tokens_seen", "documents", "learning_rate"):
            assert line[exact] == expected[exact]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
