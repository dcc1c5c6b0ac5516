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
from longtrain.errors import ConfigError, LongtrainError
from longtrain.parallel import backend, process

BACKENDS = ("nccl", "nvshmem", "nccl_symmetric")
Say = Callable[[str], None]


class TimingFailed(LongtrainError):
    """A process that timed has failed, in its own words and with its own exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code if exit_code > 0 else 1  # below 0: ended by a signal


@dataclass
class Timed:
    """One config on one backend. `refused`: why it cannot be had here, else ""."""

    name: str
    backend: str
    config: Config
    refused: str = ""
    devices: int = 0
    step_seconds: list[float] = field(default_factory=list)
    collectives: list[str] = field(default_factory=list)
    """What the compiled step says of its collectives, a line for each kind; only GPUs have a choice."""

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
    for path in paths:
        for name in backends:
            config = load(path, [*overrides, f"communication.backend={name}"])
            found.append(Timed(Path(path).stem, name, config, refused=refusal(config)))
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

    In a cluster the results are those of the first process; the others get none.

    Raises:
      ConfigError: for a config that is refused for another reason than its backend.
      TimingFailed: a process that timed has failed; also where permutes are on another backend than asked.
    """
    timed = configs(paths, overrides, backends)
    places = {(one.name, one.backend): path for path in paths for one in timed if one.name == Path(path).stem}
    for path in paths:
        served = [one for one in timed if one.name == Path(path).stem and not one.refused]
        for repeat in range(repeats):
            for one in served:
                say(f"{one.name} on {one.backend}, {repeat + 1} of {repeats}")
                _time(one, places[one.name, one.backend], overrides, warmup, steps)
    return timed


def _time(one: Timed, path: str, overrides: Sequence[str], warmup: int, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        counts = ("--warmup", str(warmup), "--steps", str(steps), "--result", str(result))
        asked = (*overrides, f"communication.backend={one.backend}")
        command = [sys.executable, "-m", "longtrain.bench.worker", path, *asked, *counts]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            said = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise TimingFailed(f"{one.name} on {one.backend} could not be timed: {said}", done.returncode)
        if result.exists():  # else this is not the cluster's first process
            found = json.loads(result.read_text(encoding="utf-8"))
            one.devices, one.collectives = found["devices"], found["collectives"]
            one.step_seconds += found["step_seconds"]
