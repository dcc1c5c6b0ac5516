"""The constants that the plan assumes: one table, `assumptions.yaml`, whose entries a user's file may replace."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from longtrain.config import reading
from longtrain.errors import ConfigError, Problem
from longtrain.hardware import DEVICES, Device
from longtrain.plan.kernels import KERNELS

TABLE = "assumptions.yaml"

SHIPPED = "shipped"
"""The source of the table's own entries."""


@dataclass(frozen=True)
class Range:
    """What an entry may be, and in words."""

    holds: Callable[[float | None], bool]
    words: str


_EFFICIENCY = Range(lambda value: value is not None and 0 < value <= 1, "a number above 0 and at most 1")
_SHARE = Range(lambda value: value is not None and 0 <= value <= 1, "a number from 0 to 1")
_RESERVE = Range(lambda value: value is not None and 0 <= value < 1, "a number of at least 0 and below 1")
_SECONDS = Range(lambda value: value is not None and 0 <= value <= 60, "a number from 0 to 60")
_DEVICES = Range(lambda value: value is None or value >= 1 and value % 1 == 0, "a whole number >= 1, or null")

RANGES = {
    "matmul_efficiency": _EFFICIENCY,
    "attention_forward_efficiency": _EFFICIENCY,
    "attention_backward_efficiency": _EFFICIENCY,
    "link_efficiency": _EFFICIENCY,
    "network_efficiency": _EFFICIENCY,
    "host_efficiency": _EFFICIENCY,
    "memory_efficiency": _EFFICIENCY,
    "collective_latency": _SECONDS,
    "hidden_share": _SHARE,
    "host_hidden_share": _SHARE,
    "memory_reserve": _RESERVE,
    "domain_devices": _DEVICES,
}
"""Of every entry of the table."""

NAMES = (*DEVICES, *KERNELS, "default")
"""By which an entry may have several values."""


@dataclass(frozen=True)
class Assumption:
    """What is assumed for a device and an attention kernel; why; and the file that says so."""

    value: float | None
    why: str
    source: str


@dataclass(frozen=True)
class Entry:
    """An entry as it is written: a value, or values by name; why; and the file that says so."""

    given: Any
    why: str
    source: str

    def of(self, *names: str) -> Assumption:
        """Of values by name, that of the first of `names` that has one, else the default."""
        value = self.given
        if isinstance(value, dict):
            value = value[next((name for name in names if name in value), "default")]
        return Assumption(value, self.why, self.source)


@dataclass(frozen=True)
class Assumptions:
    """The table as it holds for a device and an attention kernel."""

    table: Mapping[str, Entry]
    device: Device
    entries: Mapping[str, Assumption]

    @classmethod
    def of(cls, table: Mapping[str, Entry], device: Device, kernel: str) -> "Assumptions":
        return cls(table, device, {name: entry.of(kernel, device.name) for name, entry in table.items()})

    def with_kernel(self, kernel: str) -> "Assumptions":
        """The same table for another attention kernel."""
        return Assumptions.of(self.table, self.device, kernel)

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
      ConfigError: for a file that cannot be read, an unknown entry, or a value outside its entry's range.
    """
    shipped = reading.parse(resources.files("longtrain.plan").joinpath(TABLE).read_text(encoding="utf-8"))
    table = {name: Entry(entry["value"], entry["why"], SHIPPED) for name, entry in shipped.items()}
    if path is not None:
        table |= _own(path, table)
    return Assumptions.of(table, device, kernel)


def _own(path: Path, shipped: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of a user's file."""

    def refused(*problems: Problem) -> ConfigError:
        return ConfigError(list(problems), source=str(path))

    try:
        tree = reading.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise refused(Problem("--assumptions", str(path), message)) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        message = f"is not a YAML file that can be read: {' '.join(str(error).split())}"
        raise refused(Problem("--assumptions", str(path), message)) from None
    if not isinstance(tree, dict | None):
        message = f"must be a mapping of entries, is a {type(tree).__name__}"
        raise refused(Problem("--assumptions", str(path), message))
    entries, problems = {}, []
    for name, given in (tree or {}).items():
        if name not in shipped:
            problems.append(Problem(name, given, f"no such assumption; legal: {', '.join(shipped)}"))
            continue
        full = given if isinstance(given, dict) and ("value" in given or "why" in given) else {"value": given}
        if wrong := _wrong(name, full):
            problems.append(Problem(name, given, wrong))
            continue
        why = full.get("why") or f"in place of {_told(shipped[name].given)}: {shipped[name].why}"
        entries[name] = Entry(full["value"], why, str(path))
    if problems:
        raise refused(*problems)
    return entries


def _wrong(name: str, entry: Mapping[str, Any]) -> str | None:
    """What is wrong with an entry of a user's file."""
    legal = RANGES[name]
    if "value" not in entry or entry.keys() - {"value", "why"}:
        return "must be a value, or a mapping of value and why"
    if not isinstance(entry.get("why", ""), str):
        return "why must be text"
    values = entry["value"] if isinstance(entry["value"], dict) else {"default": entry["value"]}
    if unknown := [each for each in values if each not in NAMES]:
        return f"{', '.join(unknown)}: neither hardware nor kernel; legal: {', '.join(NAMES)}"
    if "default" not in values:
        return f"must be {legal.words}, or such by name with a default"
    for value in values.values():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number or value is None) or not legal.holds(value):
            return f"must be {legal.words}, or such by name with a default"
    return None


def _told(given: Any) -> str:
    if isinstance(given, dict):
        return ", ".join(f"{name} {_told(value)}" for name, value in given.items())
    return "null" if given is None else f"{given:g}"
