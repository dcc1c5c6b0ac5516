"""Runs as a user starts them: `python -m longtrain ...` in a folder with a small corpus and a config."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

CHECKOUT = Path(__file__).parent.parent
DEADLINE_SECONDS = 300

TREE: dict[str, Any] = {
    "run": {"steps": 4},
    "model": {"preset": "tiny", "num_layers": 1, "compute_dtype": "float32"},
    "sequence_length": 64,
    "batch": {"sequences": 4},
    "mesh": {"context": 2, "simulate_devices": "auto"},
    # A rate that does not depend on run.steps: raising them is going on, and the step compiles to the same program.
    "optimizer": {"learning_rate": 1e-2, "warmup_steps": 2, "decay": "constant"},
    "data": {"sources": [{"path": "corpus"}], "tokenizer": "bytes", "eval_fraction": 0.25},
    "checkpoint": {"every_steps": 2, "keep": 1000},
    "eval": {"sequences": 4},
    "metrics": {"log_every": 1},
}


class Workspace:
    """A folder with `corpus/` (about 15 rows of 64 byte tokens to train on) and `config.yaml`.

    Its processes share a cache of compiled programs, so that one program is compiled once a test session. They see
    none of what pytest's own process has put into the environment for JAX.
    """

    def __init__(self, folder: Path, cache: Path):
        self.folder, self.cache = folder, cache
        (folder / "corpus").mkdir()
        words = random.Random(0)
        for number in range(12):
            length = words.randrange(5, 30)
            text = " ".join(words.choice(("alpha", "beta", "gamma", "delta")) for _ in range(length))
            (folder / "corpus" / f"{number:02}.txt").write_text(text)
        (folder / "config.yaml").write_text(yaml.safe_dump(TREE))

    def start(
        self,
        *arguments: object,
        environment: dict[str, str] | None = None,
        largest_file: int | None = None,
        own_group: bool = False,
    ) -> subprocess.Popen[str]:
        """`longtrain ARGUMENTS`, under way. `largest_file`: bytes beyond which no file can grow. `own_group`: its
        process leads a group, to which a signal can be sent."""
        ours = {name: text for name, text in os.environ.items() if not name.startswith(("JAX_", "XLA_", "SLURM_"))}
        ours |= {
            "PYTHONPATH": str(CHECKOUT),
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        limit = ["prlimit", f"--fsize={largest_file}"] if largest_file is not None else []
        return subprocess.Popen(
            [*limit, sys.executable, "-m", "longtrain", *map(str, arguments)],
            cwd=self.folder,
            env=ours | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=own_group,
        )

    def run(self, *arguments: object, code: int = 0, environment: dict[str, str] | None = None) -> str:
        """`longtrain ARGUMENTS`, which must end with exit code `code`: its stdout and stderr."""
        return finish(self.start(*arguments, environment=environment), code)

    def train(self, name: str, *overrides: str, code: int = 0) -> str:
        """`longtrain train config.yaml` into the run `name`."""
        return self.run("train", "config.yaml", f"run.name={name}", *overrides, code=code)

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a run's metrics.jsonl; none while there is no file."""
        path = self.run_dir(name) / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def checkpoints(self, name: str) -> list[str]:
        """What lies in a run's checkpoint folder."""
        return sorted(path.name for path in (self.run_dir(name) / "checkpoints").iterdir())

    def state(self, name: str, step: int) -> dict[str, np.ndarray]:
        """Every array of a checkpoint, by the path of its item and its place in the tree."""
        import jax  # once conftest.py has set its devices up
        import orbax.checkpoint as ocp

        found = {}
        for item in ("parameters", "optimizer"):
            folder = self.run_dir(name) / "checkpoints" / str(step) / item
            with ocp.PyTreeCheckpointer() as reader:
                shapes = reader.metadata(folder).item_metadata.tree
                as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
                tree = reader.restore(folder, restore_args=as_numpy)
            for path, array in jax.tree_util.tree_leaves_with_path(tree):
                found[f"{item}{jax.tree_util.keystr(path)}"] = array
        return found


def finish(process: subprocess.Popen[str], code: int) -> str:
    """Waits for the process, which must end with this exit code; its stdout and stderr."""
    try:
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == code, f"exit {process.returncode}, not {code}\n{out}\n{err}"
    return out + err


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Polls until the condition holds; the process must be alive until then."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert process.poll() is None, f"exit {process.returncode} too early: {process.communicate()}"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def same_arrays(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Asserts that both hold the same arrays, bit for bit."""
    assert one.keys() == other.keys()
    different = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert not different


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, compilation_cache: Path) -> Workspace:
    return Workspace(tmp_path_factory.mktemp("workspace"), compilation_cache)
