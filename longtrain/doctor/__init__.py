"""Does the run this config asks for compute what a plain run computes, and is all there that it needs?

`shrink` makes the config small, `agreement` holds its gradients against those of plainer runs, `surroundings` looks at
devices, clocks, flags and the disk.
"""

import itertools
from collections.abc import Callable
from typing import Any

from longtrain.config import Config
from longtrain.doctor import agreement, surroundings
from longtrain.doctor.checks import Check
from longtrain.errors import CheckFailed

__all__ = ["Check", "examine", "to_json", "verdict"]


def examine(config: Config, say: Callable[[str], None]) -> list[Check]:
    """Every check of this config, each told as it ends. JAX must be started; every process of a cluster must call it.

    Raises:
      ConfigError: when the config does not fit the devices, or an explicit choice cannot serve.
    """
    checks = []
    for found in itertools.chain(surroundings.checks(config), agreement.checks(config)):
        say(str(found))
        checks.append(found)
    return checks


def to_json(checks: list[Check]) -> dict[str, Any]:
    return {
        "ok": all(check.ok for check in checks),
        "checks": [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in checks],
    }


def verdict(checks: list[Check]) -> str:
    """One line when all hold.

    Raises:
      CheckFailed: naming those that do not.
    """
    failed = [check.name for check in checks if not check.ok]
    if failed:
        raise CheckFailed(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")
    return f"all {len(checks)} checks hold"
