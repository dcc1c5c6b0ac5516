"""Train steps on one backend of collectives against the same steps on another.

A backend is chosen before JAX starts, so each is timed in a process of its own (`worker.py`), the backends in turn. On
a cluster every process runs this command: those it starts find each other as it would have itself.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longtrain.config import Config, load
from longtrain.errors import ConfigError
from longtrain.parallel import backend, process

BACKENDS = ("nccl", "nvshmem", "nccl_symmetric")
Say = Callable[[str], None]


@dataclass
class Timed:
    """One config on one backend. `refused`: why it cannot be had here; `failed`: why timing it ended; else ""."""

    path: str
    backend: str
    config: Config
    refused: str = ""
    failed: str = ""
    devices: int = 0
    step_seconds: list[float] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    """What the compiled step says of its collectives, a line for each kind; only GPUs have a choice."""

    @property
    def name(self) -> str:
        return Path(self.path).stem

    @property
    def median(self) -> float | None:
        """Seconds of a step; None where none was timed."""
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def tokens_per_second_per_device(self) -> float | None:
        tokens = self.config.batch.sequences * self.config.sequence_length
        return tokens / self.median / self.devices if self.median else None

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.name,
            "backend": self.backend,
            "refused": self.refused or None,
            "failed": self.failed or None,
            "devices": self.devices or None,
            "step_seconds": self.step_seconds,
            "median_step_seconds": self.median,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "collectives": self.collectives,
        }


def refusal(config: Config) -> str:
    """Why the installed jaxlib cannot give this config its backend, with the versions that can; "" where it can."""
    simulated = config.mesh.simulate_devices is not None
    try:
        backend.flags(config.communication.backend, process.jaxlib_version(), simulated=simulated)
    except ConfigError as error:
        return "; ".join(problem.message for problem in error.problems)
    return ""


def configs(paths: Iterable[str], overrides: Sequence[str], backends: Iterable[str]) -> list[Timed]:
    """Each config on each backend, not yet timed.

    Raises:
      ConfigError: for one that is refused for another reason than its backend.
    """
    found = []
    for path in dict.fromkeys(paths):
        for name in backends:
            config = load(path, [*overrides, f"communication.backend={name}"])
            found.append(Timed(path, name, config, refused=refusal(config)))
    return found


def measure(
    paths: Sequence[str],
    overrides: Sequence[str],
    backends: Sequence[str],
    *,
    warmup: int,
    steps: int,
    repeats: int,
    say: Say,
) -> list[Timed]:
    """Times each config on each backend, `repeats` times in turn, `steps` steps each after `warmup` that do not count.

    In a cluster the results are those of the first process; the others get none. One that fails is not tried again, and
    the others are.

    Raises:
      ConfigError: for a config that is refused for another reason than its backend.
    """
    timed = configs(paths, overrides, backends)
    for path in dict.fromkeys(paths):
        served = [one for one in timed if one.path == path and not one.refused]
        for repeat in range(repeats):
            for one in served:
                if not one.failed:
                    say(f"{one.name} on {one.backend}, {repeat + 1} of {repeats}")
                    _time(one, overrides, warmup, steps)
    return timed


def _time(one: Timed, overrides: Sequence[str], warmup: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        counts = ("--warmup", str(warmup), "--steps", str(steps), "--result", str(result))
        asked = (*overrides, f"communication.backend={one.backend}")
        command = [sys.executable, "-m", "longtrain.bench.worker", one.path, *asked, *counts]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            one.failed = f"exit {done.returncode}: " + "\n".join(done.stderr.strip().splitlines()[-5:])
        elif result.exists():  # else this is not the cluster's first process
            found = json.loads(result.read_text(encoding="utf-8"))
            one.devices, one.collectives = found["devices"], found["collectives"]
            one.step_seconds += found["step_seconds"]
