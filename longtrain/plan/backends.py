"""Which backend the collectives of a run's own compiled step got, told and held against the one asked for.

XLA takes a flag and may yet do without it: what counts is what the program says.
"""

from collections import defaultdict
from collections.abc import Callable

import jax

from longtrain.build import Build
from longtrain.errors import ConfigError, Problem
from longtrain.plan.lint import backend_mismatches
from longtrain.plan.program import Program


def check(built: Build, step: jax.stages.Compiled, say: Callable[[str], None]) -> None:
    """Says which backend each kind of collective is on. Only GPUs have a choice: elsewhere it says nothing.

    Raises:
      ConfigError: where a CollectivePermute is not on the backend that `communication.backend` asks for.
    """
    if built.mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return
    program = Program.read(step.as_text() or "", built.mesh.shape, "cuda")
    for line in _lines(program):
        say(line)
    asked = built.config.communication.backend
    if wrong := backend_mismatches(program, asked):
        raise ConfigError([Problem("communication.backend", asked, message) for message in wrong], "the compiled step")


def _lines(program: Program) -> list[str]:
    """One line a kind and backend: how many, and the largest message."""
    found: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for one in program.collectives:
        found[one.kind, one.backend].append((one.times, one.held))
    return [
        f"{kind} on {backend}: {sum(times for times, _ in each):,.0f} a step, of up to "
        f"{max(held for _, held in each) / 2**20:,.1f} MiB a device"
        for (kind, backend), each in sorted(found.items())
    ]
