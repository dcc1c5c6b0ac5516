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
      ConfigError: where a CollectivePermute is not on the backend that `communication.backend` asks for, or that cannot
        be known because XLA wrote the program in a form that is new to the reader.
    """
    if built.mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return
    asked = built.config.communication.backend
    try:
        program = Program.read(step.as_text() or "", built.mesh.shape, "cuda")
        lines, wrong = _lines(program), backend_mismatches(program, asked)
    except (ValueError, LookupError) as error:
        unread = f"which backend the collectives are on cannot be read from the compiled step: {error}"
        if asked != "auto":
            raise _refused(asked, [f"{unread}; communication.backend=auto goes on without knowing"]) from error
        lines, wrong = [unread], []
    for line in lines:
        say(line)
    if wrong:
        raise _refused(asked, wrong)


def _refused(asked: str, messages: list[str]) -> ConfigError:
    return ConfigError([Problem("communication.backend", asked, message) for message in messages], "the compiled step")


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
