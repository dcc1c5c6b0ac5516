"""How runs fail: the contract's exit code, words that name the cause, and nothing lost that was saved."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import runs
from runs import Workspace


@pytest.fixture(scope="module")
def trained(workspace: Workspace) -> Path:
    """The folder of a run with checkpoints of steps 2 and 4."""
    workspace.train("trained")
    return workspace.run_dir("trained")


@pytest.fixture
def copy(workspace: Workspace, trained: Path, request: pytest.FixtureRequest) -> str:
    """The name of a copy of that run."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)
    shutil.copytree(trained, workspace.run_dir(name))
    return name


# --- 3: data ---


def test_no_such_source(workspace: Workspace):
    assert "nowhere" in workspace.train("no-data", "data.sources.0.path=nowhere", code=3)


def test_the_data_ends_before_the_steps(workspace: Workspace):
    text = workspace.train("exhausted", "data.repeat=false", "run.steps=100", code=3)
    assert "exhausted" in text
    last = workspace.lines("exhausted")[-1]["step"]
    assert workspace.checkpoints("exhausted")[-1] == str(last)
    assert "resuming after step" in workspace.train("exhausted", "data.repeat=false", "run.steps=100", code=3)
    assert [line["step"] for line in workspace.lines("exhausted")] == list(range(1, last + 1))


# --- 4: numbers that are not finite ---


@pytest.mark.slow
def test_an_update_that_overflows(workspace: Workspace):
    text = workspace.train("overflow", "optimizer.learning_rate=1e38", "checkpoint.every_steps=1", code=4)
    assert "step 1: the loss, a gradient or the update is not finite" in text and "data inspect CONFIG --step 1" in text
    assert [line["step"] for line in workspace.lines("overflow")] == [1]
    assert workspace.checkpoints("overflow") == []


def test_a_loss_that_is_not_finite(workspace: Workspace):
    bad = ("optimizer.learning_rate=1e15", "optimizer.warmup_steps=0", "guard.max_bad_steps=2")
    text = workspace.train("nan", *bad, "run.steps=9", code=4)
    assert text.count("is not finite") == 3 and "3 in a row; guard.max_bad_steps = 2" in text
    # The rows are named as `data inspect` names them, which knows what step 2 was made of.
    workspace.run("data", "inspect", "config.yaml", "--step", 2, "--json", "rows.json")
    rows = json.loads((workspace.folder / "rows.json").read_text())["rows"]
    for number, row in enumerate(rows, start=4):
        documents = [f"{one['source']} {one['document']} {one['start']}:{one['end']}" for one in row["documents"]]
        assert f"  row {number}: {', '.join(documents)}\n" in text
    lines = workspace.lines("nan")  # as JSON, which knows no NaN
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["loss"] is not None and [line["loss"] for line in lines[1:]] == [None] * 3
    assert workspace.checkpoints("nan") == ["2"]  # what step 1 left, which is finite
    assert all((abs(array) < float("inf")).all() for array in workspace.state("nan", 2).values())


# --- 5 and 2: checkpoints ---


@pytest.mark.slow
def test_what_is_kept(workspace: Workspace):
    """The newest, every fourth, and the two best, those of the time before a resume included."""
    kept = ("checkpoint.every_steps=1", "checkpoint.keep=1", "checkpoint.keep_every=4", "checkpoint.keep_best=2")
    rising = ("optimizer.learning_rate=3", "eval.every_steps=1")  # so that not just the last are the best
    for steps in (5, 7):
        text = workspace.train("kept", *kept, *rising, f"run.steps={steps}")
    assert "resuming after step 5" in text
    losses = {line["step"]: line["eval_loss"] for line in workspace.lines("kept")}
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert min(best) < 4
    assert workspace.checkpoints("kept") == sorted(map(str, {*best, 4, 7}))
    stalls = [line["checkpoint_stall_seconds"] for line in workspace.lines("kept")]
    assert stalls[0] == stalls[5] == 0 and all(stall > 0 for stall in (*stalls[1:5], stalls[6]))


@pytest.mark.slow
def test_a_folder_removed_while_running(workspace: Workspace):
    process = workspace.start("train", "config.yaml", "run.name=removed", "run.steps=100000", "checkpoint.keep=1")
    runs.wait_until(lambda: len(workspace.lines("removed")) >= 3, process)
    while workspace.run_dir("removed").exists():
        shutil.rmtree(workspace.run_dir("removed"), ignore_errors=True)
    text = runs.finish(process, 5)
    assert re.search(r"longtrain: \S*runs/removed/checkpoints\S* (cannot|a checkpoint could not)", text)


@pytest.mark.slow
def test_a_history_of_norms_may_come_and_go(workspace: Workspace, copy: str):
    guarded = "guard.spike_deviations=4"
    assert "guard.spike_deviations None -> 4.0" in workspace.train(copy, guarded, "run.steps=6")
    assert [line.get("spike_skipped") for line in workspace.lines(copy)] == [None] * 4 + [0] * 2
    assert int(workspace.state(copy, 6)["optimizer['norms']['count']"]) == 2
    assert "resuming after step 6" in workspace.train(copy, "run.steps=8")
    assert not [name for name in workspace.state(copy, 8) if "norms" in name]


@pytest.mark.parametrize("place", ["runs", "runs/blocked", "runs/blocked/checkpoints"])
def test_a_file_in_the_way(workspace: Workspace, place: str):
    output = f"in-the-way-{place.count('/')}"
    way = workspace.folder / output / place
    way.parent.mkdir(parents=True)
    way.write_text("")
    text = workspace.train("blocked", f"run.output_dir={output}/runs", code=5)
    assert f"{output}/{place}" in text and "Traceback" not in text


def test_a_full_disk(workspace: Workspace, copy: str):
    """Files may not grow beyond a size that metrics and events stay below, and arrays do not."""
    process = workspace.start(
        "train", "config.yaml", f"run.name={copy}", "run.steps=8", "checkpoint.keep=1", largest_file=64 << 10
    )
    text = runs.finish(process, 5)
    # Not at a line's start: tensorstore's threads write about their own end to the same stderr.
    assert re.search(rf"longtrain: \S*/{copy}/checkpoints.*File too large", text)
    assert {"2", "4"} <= set(workspace.checkpoints(copy))  # what keep=1 would remove goes once the new one is complete
    assert "resuming after step 4" in workspace.train(copy, "run.steps=6")


def test_a_step_that_is_not_there(workspace: Workspace, copy: str):
    text = workspace.train(copy, "checkpoint.restore=3", code=5)
    assert "no complete checkpoint of step 3; there are: [2, 4]" in text


def test_a_chosen_step(workspace: Workspace, copy: str):
    """What comes after it is out of the way, and not lost."""
    text = workspace.train(copy, "checkpoint.restore=2")
    assert "resuming after step 2" in text and "set aside as superseded-4" in text
    assert workspace.checkpoints(copy) == ["2", "4", "superseded-4"]
    assert [line["step"] for line in workspace.lines(copy)] == [1, 2, 3, 4]
    runs.same_arrays(workspace.state(copy, 4), workspace.state("trained", 4))
    again = workspace.train(copy, "checkpoint.restore=2")
    assert "checkpoint.restore = 2 was done before: going on from the newest" in again and "complete, 4 of" in again
    assert workspace.checkpoints(copy) == ["2", "4", "superseded-4"]


def _truncate(checkpoint: Path) -> None:
    for file in (checkpoint / "parameters").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def _flip_a_bit(checkpoint: Path) -> None:
    """In the middle of the largest file of weights: Orbax restores such a checkpoint without a word."""
    file = max((checkpoint / "parameters").rglob("d/*"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit": _flip_a_bit,
    "truncated arrays": _truncate,
    "no optimizer": lambda checkpoint: shutil.rmtree(checkpoint / "optimizer"),
    "torn run object": lambda checkpoint: (checkpoint / "run" / "metadata").write_text('{"position": {"st'),
    "no array metadata": lambda checkpoint: (checkpoint / "optimizer" / "_METADATA").unlink(),
    "nothing in it": _empty,
}


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[] if name == "a flipped bit" else pytest.mark.slow) for name in DAMAGES]
)
def test_a_damaged_newest_checkpoint(workspace: Workspace, copy: str, damage: str):
    """It is named, set aside, and the one before it taken: here the run's last step, so nothing is compiled."""
    DAMAGES[damage](workspace.run_dir(copy) / "checkpoints" / "4")
    by_number = workspace.train(copy, "run.steps=2", "checkpoint.restore=4", code=5)
    assert "checkpoints/4: cannot be read" in by_number
    text = workspace.train(copy, "run.steps=2")
    assert "checkpoints/4 cannot be read and is passed over" in text and "set aside as damaged-4" in text
    assert "resuming after step 2" in text and "complete, 2 of" in text
    assert workspace.checkpoints(copy) == ["2", "damaged-4"]


def test_only_damaged_checkpoints(workspace: Workspace, copy: str):
    """The same command again must not take the folder for an empty one and begin anew."""
    for step in (2, 4):
        _truncate(workspace.run_dir(copy) / "checkpoints" / str(step))
    for _ in range(2):
        assert "none of the checkpoints [2, 4] can be read" in workspace.train(copy, code=5)
    assert "cannot be read" in workspace.run("eval", "config.yaml", f"run.name={copy}", code=5)


def test_half_a_checkpoint_is_not_the_newest(workspace: Workspace, copy: str):
    folder = workspace.run_dir(copy) / "checkpoints"
    shutil.copytree(folder / "4", folder / "6.orbax-checkpoint-tmp")
    assert "resuming after step 4" in workspace.train(copy)
    assert workspace.checkpoints(copy) == ["2", "4"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("checkpoint.restore=none", "holds steps [2, 4]"),
        ("data.packing=concat", "data plan"),
        ("run.seed=1", "data plan"),
        ("model.mlp_dim=128", "model.mlp_dim = 128: the checkpoint was made with 192"),
        (
            "model.rope.scaling={type: linear, factor: 2}",
            "model.rope.scaling = {'type': 'linear', 'factor': 2.0}: the checkpoint was made with None",
        ),
        ("model.rope.theta=1e6", "model.rope.theta = 1000000.0: the checkpoint was made with 500000.0"),
        ("optimizer.name=lion", "optimizer.name = 'lion': the checkpoint was made with 'adamw'"),
    ],
)
def test_a_checkpoint_of_another_run(workspace: Workspace, trained: Path, override: str, says: str):
    """Refused, and the sound checkpoints stay as they are."""
    assert says in workspace.train("trained", override, code=2)
    assert workspace.checkpoints("trained") == ["2", "4"]


# --- 6: the cluster ---


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID is not"),
        (
            {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "whole numbers",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "process 2 of 2",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "0"},
            "2 simulated devices cannot be shared evenly by 3 processes",
        ),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID"),
    ],
    ids=["incomplete", "no-number", "too-high", "uneven", "slurm"],
)
def test_a_cluster_that_cannot_be(workspace: Workspace, environment: dict[str, str], says: str):
    assert says in workspace.run("train", "config.yaml", environment=environment, code=6)


def test_a_step_that_does_not_end(workspace: Workspace, tmp_path: Path):
    """Here the main thread hangs as it writes the line of step 3."""
    (tmp_path / "tensorboardX.py").write_text(
        "import time\n"
        "class SummaryWriter:\n"
        "    def __init__(self, *_, **__): pass\n"
        "    def flush(self): pass\n"
        "    def add_scalar(self, name, value, step): hang_here(step)\n"
        "def hang_here(step): time.sleep(600 if step == 3 else 0)\n"
    )
    hanging = {"PYTHONPATH": f"{tmp_path}:{runs.CHECKOUT}"}
    command = ("train", "config.yaml", "run.name=hung", "guard.step_timeout_seconds=6")
    text = workspace.run(*command, environment=hanging, code=6)
    assert "step 4 has not ended in 6 s (guard.step_timeout_seconds)" in text and "in hang_here" in text
    assert workspace.checkpoints("hung") == ["2"]


def test_real_devices_that_are_not_there(workspace: Workspace):
    cpu_alone = {"JAX_PLATFORMS": "cpu"}
    text = workspace.run("train", "config.yaml", "mesh.simulate_devices=null", environment=cpu_alone, code=6)
    assert "finds only the CPU" in text and "mesh.simulate_devices=auto" in text


def test_a_flag_that_xla_does_not_know(workspace: Workspace):
    text = workspace.run("train", "config.yaml", "communication.xla_flags=[--xla_no_such_flag=1]", code=2)
    assert "communication.xla_flags" in text and "xla_no_such_flag" in text


# --- 75, 1 ---


@pytest.mark.parametrize("said", ["mesh: ", "an epoch: ", "compiled in "])
def test_stopped_before_the_first_step(workspace: Workspace, said: str):
    process = workspace.start("train", "config.yaml", "run.name=not-begun", "sequence_length=128")
    assert process.stdout is not None
    while said not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM before the first step" in runs.finish(process, 75)
    assert workspace.lines("not-begun") == []


def test_an_error_nobody_foresaw_shows_where(workspace: Workspace, trained: Path, tmp_path: Path):
    (tmp_path / "tensorboardX.py").write_text("raise RuntimeError('not foreseen')\n")
    broken = {"PYTHONPATH": f"{tmp_path}:{runs.CHECKOUT}"}
    text = workspace.run("train", "config.yaml", "run.name=broken", environment=broken, code=1)
    assert "Traceback" in text and "not foreseen" in text
