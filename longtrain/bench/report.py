"""The tables of `longtrain bench collectives`."""

import functools
from importlib import resources
from typing import Any

import yaml
from rich.table import Table

from longtrain.bench import Timed
from longtrain.bench.dry import Compiled
from longtrain.plan.report import GIB, console, new_table


@functools.cache
def published() -> dict[str, Any]:
    """Source and rows of what was published: see published.yaml."""
    found: dict[str, Any] = yaml.safe_load(resources.files("longtrain.bench").joinpath("published.yaml").read_text())
    return found


def faster_as_published(one: Timed) -> str:
    """The published gain of NVSHMEM over NCCL for such a config, in words; "" where none is known."""
    config = one.config
    for row in published()["rows"]:
        same = row["sequence_length"] == config.sequence_length and row["tensor"] == config.mesh.tensor
        if one.backend == "nvshmem" and same and config.mesh.size in row["devices"]:
            least, most = row["faster_percent"]
            return f"{least:+.1f} %" if least == most else f"{least:+.1f} to {most:+.1f} %"
    return ""


def faster(one: Timed, first: Timed) -> float | None:
    """How much faster than `first`, per cent; None where one of them was not timed."""
    return 100 * (first.median / one.median - 1) if one.median and first.median and one is not first else None


def show(timed: list[Timed]) -> None:
    """Prints what was timed, each config's backends against the first of them."""
    columns = ("config", "devices", "backend", "s a step", "tokens/s/device", "faster", "published")
    table = new_table("Train steps by backend of the collectives", *columns)
    first: dict[str, Timed] = {}
    for one in timed:
        gain = faster(one, first.setdefault(one.path, one))
        median, rate = one.median, one.tokens_per_second_per_device
        table.add_row(
            one.name,
            str(one.devices or one.config.mesh.size or ""),
            one.backend,
            "refused" if one.refused else "failed" if one.failed else "" if median is None else f"{median:.4g}",
            "" if rate is None else f"{rate:,.0f}",
            "" if gain is None else f"{gain:+.1f} %",
            faster_as_published(one),
        )
    notes = [f"{one.name} on {one.backend}: {line}" for one in timed for line in one.collectives]
    _print(table, "faster: than the first backend of the config, by medians", timed, notes)


def show_compiled(compiled: list[Compiled]) -> None:
    """Prints what was compiled."""
    columns = ("config", "backend", "permutes on", "GiB", "step s", "waiting s", "published")
    table = new_table("Train steps by backend of the collectives, compiled", *columns)
    for one in compiled:
        found, schedule = one.found, one.found.schedule if one.found else None
        memory = "" if found is None else "too much" if found.needed is None else f"{found.needed / GIB:.1f}"
        table.add_row(
            one.timed.name,
            one.timed.backend,
            "refused" if one.timed.refused else one.permutes,
            memory if found is None or found.fits else f"{memory}, no fit",
            f"{schedule.seconds:.3g}" if schedule else "",
            f"{schedule.exposed_seconds:.3g}" if schedule else "",
            faster_as_published(one.timed),
        )
    meaning = "GiB: of a device; a step's seconds, and of them waiting for transfers: modelled over XLA's schedule"
    _print(table, meaning, [one.timed for one in compiled], [])


def _print(table: Table, meaning: str, timed: list[Timed], notes: list[str]) -> None:
    out = console()
    out.print(table)
    out.print(f"{meaning}; published: NVSHMEM over NCCL, {published()['source']}")
    reasons: dict[str, str] = {one.backend: one.refused for one in timed if one.refused}
    notes += [f"{one.name} on {one.backend} failed: {one.failed}" for one in timed if one.failed]
    for note in (*notes, *(f"{name} is refused: {reason}" for name, reason in reasons.items())):
        out.print(note)
