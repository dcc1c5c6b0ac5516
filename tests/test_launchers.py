"""What starts a run: several processes on this machine, and a job under SLURM, whose commands are stand-ins."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runs import CHECKOUT, Workspace

LOCAL = CHECKOUT / "scripts" / "launch_local.sh"
SLURM = CHECKOUT / "scripts" / "slurm" / "train.sbatch"
SCRIPTS = sorted(path for path in (CHECKOUT / "scripts").rglob("*") if path.suffix in (".sh", ".sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_sound_bash(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "-x", script], check=True, cwd=CHECKOUT)


def local(processes: object, program: str, **environment: str) -> subprocess.Popen[str]:
    # SIGINT as at a terminal, also where the tests run in the background, which ignores it.
    command = ["env", "--default-signal=INT", LOCAL, str(processes), sys.executable, "-c", program]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | environment)


def test_each_process_knows_its_place_and_the_others():
    told = (  # a line in one piece, so that no two are mixed
        "import os; names = ('PROCESS_ID', 'NUM_PROCESSES', 'COORDINATOR_ADDRESS')\n"
        "os.write(1, (' '.join(os.environ['JAX_' + name] for name in names) + '\\n').encode())"
    )
    process = local(3, told)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    lines = sorted(line.split() for line in out.splitlines())
    address = next(line[-1] for line in lines)
    assert address.startswith("127.0.0.1:")
    assert lines == [["0", "3", address], ["[1]", "1", "3", address], ["[2]", "2", "3", address]]


def test_the_first_failure_is_the_exit_code_and_the_stuck_are_killed():
    program = "import os, sys, time; i = int(os.environ['JAX_PROCESS_ID']); time.sleep(60 * (i == 0)); sys.exit(i + 4)"
    started = time.monotonic()
    process = local(2, program, GRACE="1")
    process.communicate(timeout=30)
    assert process.returncode == 5
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_goes_to_all_of_them(number):
    program = (
        "import os, signal, sys, time\n"
        "def stop(*_): os.write(1, b'told\\n'); sys.exit(75)\n"
        "for n in (signal.SIGTERM, signal.SIGUSR1): signal.signal(n, stop)\n"
        "os.write(1, b'ready\\n'); time.sleep(60)"
    )
    process = local(2, program)
    assert process.stdout is not None
    ready = [process.stdout.readline() for _ in range(2)]
    assert sorted(line.split()[-1] for line in ready) == ["ready", "ready"]
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert sorted(line.split()[-1] for line in out.splitlines()) == ["told", "told"]
    assert process.returncode == 75


@pytest.mark.parametrize("environment", [{"NODES": "2"}, {"NODES": "2", "NODE": "2"}, {"NODES": "two"}], ids=str)
def test_a_node_that_does_not_know_its_place_says_what_is_missing(environment):
    process = local(1, "", **environment)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "JAX_COORDINATOR_ADDRESS" in said if environment == {"NODES": "2"} else "NODE less than NODES" in said


@pytest.mark.parametrize("arguments", [[], ["2"], ["0", "true"], ["two", "true"]])
def test_a_wrong_call_says_how(arguments):
    done = subprocess.run([LOCAL, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and "usage:" in done.stderr


@pytest.mark.slow
def test_two_processes_train_as_one_run(workspace: Workspace):
    launched = [LOCAL, "2", sys.executable, "-m", "longtrain", "train", "config.yaml", "run.name=launched"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    environment["PYTHONPATH"] = str(CHECKOUT)
    done = subprocess.run(launched, cwd=workspace.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "2 process(es)" in done.stdout + done.stderr
    workspace.train("alone")

    def losses(name: str) -> list[float]:
        return [line["loss"] for line in workspace.lines(name) if "loss" in line]

    assert len(losses("launched")) == 4
    assert losses("launched") == pytest.approx(losses("alone"), rel=1e-5)


@pytest.fixture
def slurm(tmp_path: Path):
    """Runs the job's script where `srun` ends with a given code, and `scontrol` writes down what it is asked."""

    def run(code: int, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
        for name, text in {"srun": f'echo "srun $*"; exit {code}', "scontrol": 'echo "scontrol $*"'}.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
        done = subprocess.run([SLURM, *arguments], env=environment, capture_output=True, text=True)
        return done, done.stdout

    return run


def test_a_preempted_job_is_queued_again_and_a_failed_one_is_not(slurm):
    done, said = slurm(75, "config.yaml", "run.steps=9")
    assert done.returncode == 75
    assert "srun --wait=180 longtrain train config.yaml run.steps=9" in said and "scontrol requeue 17" in said
    for code in (0, 2, 5, 6):
        done, said = slurm(code, "config.yaml")
        assert done.returncode == code and "scontrol" not in said
    assert slurm(0)[0].returncode == 2


def test_the_job_asks_for_a_process_a_gpu_and_a_signal_before_its_end():
    asked = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in SLURM.read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert asked["signal"].startswith("USR1@")
    assert "requeue" in asked and asked["open-mode"] == "append"
