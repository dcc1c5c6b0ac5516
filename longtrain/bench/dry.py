"""The same table without devices: every config on every backend compiled for hardware that is not there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longtrain import bench
from longtrain.bench import Say, Timed
from longtrain.plan import audit, estimate
from longtrain.plan.audit import CompiledPlan


@dataclass(frozen=True)
class Compiled:
    """A config on a backend, as compiled; `found` is None where it is refused."""

    timed: Timed
    found: CompiledPlan | None

    @property
    def permutes(self) -> str:
        """The backends of its CollectivePermutes."""
        groups = self.found.groups if self.found else []
        return ", ".join(sorted({group.backend for group in groups if group.kind == "collective-permute"})) or "none"

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.timed.name,
            "backend": self.timed.backend,
            "refused": self.timed.refused or None,
            "permutes": self.permutes if self.found else None,
            "compiled": self.found and self.found.to_json(),
        }


def compile_all(
    paths: Sequence[str],
    overrides: Sequence[str],
    backends: Sequence[str],
    kind: str | None,
    say: Say,
) -> list[Compiled]:
    """Each config on each backend, compiled for devices of a kind.

    Raises:
      ConfigError: for a config that is refused for another reason than its backend, or hardware that is not known.
      CheckFailed: where the compiler itself failed.
    """
    compiled = []
    for one in bench.configs(paths, overrides, backends):
        planned = estimate.plan(one.config, kind)
        if one.refused:
            compiled.append(Compiled(one, None))
            continue
        say(f"{one.name} on {one.backend}")
        compiled.append(Compiled(one, audit.audit(planned, "device", say=say)))
    return compiled
