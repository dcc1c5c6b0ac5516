"""The constants that the plan assumes: one table, `assumptions.yaml`, whose entries a user's file may replace."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from longtrain.config import reading
from longtrain.errors import ConfigError, Problem
from longtrain.hardware import Device

TABLE = "assumptions.yaml"

MAY_BE_NULL = ("domain_devices",)


@dataclass(frozen=True)
class Assumption:
    """What is assumed for a device and an attention kernel; why; and the file that says so."""

    value: float | None
    why: str
    source: str


@dataclass(frozen=True)
class Assumptions:
    """The table as it holds for a device and an attention kernel."""

    entries: Mapping[str, Assumption]
    device: Device

    def __getitem__(self, name: str) -> float:
        value = self.entries[name].value
        assert value is not None, f"{name} may be null: ask for what it stands for"
        return value

    @property
    def domain(self) -> int:
        """Devices joined by the fast links."""
        return int(self.entries["domain_devices"].value or self.device.domain)


def load(device: Device, kernel: str, path: Path | None = None) -> Assumptions:
    """The shipped table for this device and attention kernel, with the entries of the file at `path` in their place.

    Raises:
      ConfigError: for a file that cannot be read, an unknown entry, or a value that is no number >= 0.
    """
    shipped = reading.parse(resources.files("longtrain.plan").joinpath(TABLE).read_text(encoding="utf-8"))
    own = {} if path is None else reading.values(reading.read_file(path))
    problems = [
        Problem(name, value, f"no such assumption; legal: {', '.join(shipped)}")
        for name, value in own.items()
        if name not in shipped
    ]
    entries = {}
    for name, entry in shipped.items():
        source, given = (str(path), own[name]) if name in own else ("shipped", entry)
        given = given if isinstance(given, dict) and "value" in given else {"value": given}
        value = _for(given["value"], kernel, device.name)
        if not _legal(name, value):
            legal = "a number >= 0, or such by name with a default" + (", or null" if name in MAY_BE_NULL else "")
            problems.append(Problem(name, given["value"], f"must be {legal}"))
        entries[name] = Assumption(value, given.get("why", ""), source)
    if problems:
        raise ConfigError(problems, source=str(path))
    return Assumptions(entries, device)


def _for(value: Any, *names: str) -> Any:
    """Of values by name, that of the first of `names` that has one, else the default; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return value.get(next((name for name in names if name in value), "default"), "no default")


def _legal(name: str, value: Any) -> bool:
    if value is None:
        return name in MAY_BE_NULL
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
