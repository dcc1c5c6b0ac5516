"""The plan as a person reads it: the verdict first, then memory, time, traffic, and what was assumed."""

from dataclasses import dataclass
from math import floor, log10
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from longtrain.plan import links
from longtrain.plan.alternatives import longest_row, row_step, savings, search, strategies
from longtrain.plan.estimate import Plan
from longtrain.plan.links import FASTEST_FIRST
from longtrain.plan.memory import KINDS

GIB, MIB = 2**30, 2**20
BAR = 24
WIDTH = 110
"""Columns where the output is no terminal."""

JAX_TAKES = 0.75
"""Share of a GPU's memory that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""

SEARCH_ROWS = 12
"""Meshes that a search shows."""

FAST_LINK = {"gpu": "NVLink", "tpu": "ICI"}


def show(plan: Plan) -> None:
    """Prints the whole plan."""
    out = console()
    for line in _heading(plan):
        out.print(line)
    tables = [_memory(plan), _time(plan), _traffic(plan), _strategies(plan), _savings(plan), _assumptions(plan)]
    for table in tables:
        if table is not None:
            out.print()
            out.print(table)


def console() -> Console:
    """The standard output, as wide as it is, or WIDTH where it is no terminal."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = WIDTH
    return out


@dataclass(frozen=True)
class Units:
    """What a plan's bytes and seconds are written in: one unit of each, that of its totals."""

    memory: str
    time: str

    @classmethod
    def of(cls, plan: Plan) -> "Units":
        return cls("GiB" if plan.memory.total >= GIB else "MiB", "s" if plan.timing.step >= 1 else "ms")

    def bytes(self, value: float) -> str:
        return f"{value / GIB:,.2f}" if self.memory == "GiB" else f"{value / MIB:,.2f}"

    def seconds(self, value: float) -> str:
        return significant(value if self.time == "s" else 1000 * value)


def significant(value: float) -> str:
    """Three digits, as many as a model of time deserves, and at most three decimals."""
    if value == 0:
        return "0"
    decimals = min(2 - floor(log10(value)), 3)
    return f"{round(value, decimals):,.{max(decimals, 0)}f}"


def verdict(plan: Plan) -> str:
    """Whether it fits and by how much, in one sentence."""
    need, usable = plan.memory.total / GIB, plan.usable_bytes / GIB
    whole = f"{plan.device.memory_bytes / GIB:.1f} less {plan.assumed['memory_reserve']:.0%} in reserve"
    if plan.fits:
        return f"fits: {need:.1f} GiB of the {usable:.1f} usable a device ({whole}), {usable - need:.1f} to spare"
    return f"does not fit: {need:.1f} GiB, of {usable:.1f} usable a device ({whole}), {need - usable:.1f} too much"


def _heading(plan: Plan) -> list[str]:
    config, share, model = plan.config, plan.share, plan.config.model
    mesh = " x ".join(f"{axis} {size}" for axis, size in share.mesh.axes.items() if size > 1) or "one device"
    rows = f"{config.batch.sequences} rows of {config.sequence_length:,} tokens a step"
    micro = f" in {share.micro_batches} micro-batches" if share.micro_batches > 1 else ""
    offload = "" if config.memory.offload == "none" else f", offload {config.memory.offload}"
    attention = f"{_attention(plan)}, kernel {share.kernel}, remat {config.memory.remat}{offload}"
    units, sentence = Units.of(plan), verdict(plan)
    rate = f"{plan.tokens_per_second_per_device:,.0f} tokens/s a device"
    mfu = "" if plan.mfu_causal is None else f", MFU (causal) {plan.mfu_causal:.1%}"
    lines = [
        f"{model.preset or 'The model'}, {_count(plan.parameters)} parameters; {rows}{micro}, {_documents(plan)}",
        f"{share.devices} x {plan.device.name}: {mesh}; {attention}",
        f"[bold {'green' if plan.fits else 'red'}]{sentence[0].upper()}{sentence[1:]}[/]",
        f"[bold]Step of {units.seconds(plan.timing.step)} {units.time}: {rate}{mfu}[/]",
    ]
    if plan.device.platform == "gpu" and plan.fits and plan.memory.total > JAX_TAKES * plan.device.memory_bytes:
        allow = f"{1 - plan.assumed['memory_reserve']:.2f}"
        lines.append(f"Set XLA_PYTHON_CLIENT_MEM_FRACTION={allow}: JAX takes {JAX_TAKES:.0%} of the memory by default")
    return lines


def _documents(plan: Plan) -> str:
    """What fills the rows."""
    if plan.document_tokens < plan.config.sequence_length:
        return f"of documents of {plan.document_tokens:,}"
    if plan.config.data.packing == "one":
        return "one document each"
    return "as if each were one document (--document-tokens N for packed ones)"


def _attention(plan: Plan) -> str:
    """How it attends over context."""
    keys, share = plan.config.attention, plan.share
    if share.mesh.context == 1:
        return "attention whole"
    groups = f" over ulysses groups of {keys.ulysses_degree}" if keys.ulysses_degree > 1 else ""
    return f"attention {keys.strategy}{groups}{', two ways' if keys.two_way else ''}"


def _memory(plan: Plan) -> Table:
    units, total = Units.of(plan), plan.memory.total
    title = f"Memory of a device at the step's peak, {plan.memory.phase}"
    table = new_table(title, units.memory, "share", "", "what")
    for kind in KINDS:
        of_kind = plan.memory.by_kind[kind]
        table.add_row(units.bytes(of_kind), f"{of_kind / total:.0%}", _bar(of_kind / total), f"[bold]{kind}[/]")
        for term in sorted(plan.memory.terms, key=lambda term: -term.bytes):
            if term.kind == kind:
                table.add_row(units.bytes(term.bytes), f"{term.bytes / total:.0%}", "", f"  {term.what}", style="dim")
    return table


def _time(plan: Plan) -> Table:
    timing, units = plan.timing, Units.of(plan)
    table = new_table(f"Time of a step, of {plan.flops_per_step:.3g} FLOPs in all", units.time, "share", "", "what")
    rows = {
        "matrix products": timing.matmul,
        f"attention, kernel {plan.share.kernel}": timing.attention,
        "memory traffic: norms, sums, the update": timing.memory,
        "communication and copies that nothing hides": timing.exposed,
    }
    for what, seconds in rows.items():
        table.add_row(units.seconds(seconds), f"{seconds / timing.step:.0%}", _bar(seconds / timing.step), what)
    return table


def _traffic(plan: Plan) -> Table | None:
    """What travels, and on which link each axis of the mesh lies."""
    if not plan.timing.transfers:
        return None
    lies = ", ".join(_lies(plan, axis) for axis in FASTEST_FIRST if plan.share.mesh.axes[axis] > 1)
    title = "What a device sends in a step" + (lies and f"; {lies}")
    units = Units.of(plan)
    table = new_table(title, units.memory, "times", units.time, "exposed", "what", "over")
    for transfer in sorted(plan.timing.transfers, key=lambda transfer: -transfer.bytes):
        table.add_row(
            units.bytes(transfer.bytes),
            f"{transfer.count:,}",
            units.seconds(transfer.seconds),
            units.seconds(transfer.exposed),
            f"{transfer.kind}: {transfer.what}",
            " x ".join(axis for axis in transfer.axes if plan.share.mesh.axes[axis] > 1) or "host",
        )
    return table


def _lies(plan: Plan, axis: str) -> str:
    over = links.link(plan.share.mesh, (axis,), plan.assumed)
    fast = FAST_LINK[plan.device.platform]
    return f"{axis} on {fast}" if over.fast else f"{axis} on the network ({over.inside} of {over.size} on one {fast})"


def _strategies(plan: Plan) -> Table | None:
    if plan.share.mesh.context == 1:
        return None
    title = "Attention over context: what each way costs"
    units = Units.of(plan)
    sent, held, step = f"{units.memory} sent", f"{units.memory} held", f"step {units.time}"
    table = new_table(title, "", "way", sent, units.time, "exposed", "hidden", step, held)
    refused = []
    for choice in strategies(plan):
        if choice.plan is None:
            refused.append(f"{choice}: {choice.refusal}")
            continue
        taken = _way(choice.plan) == _way(plan)
        moved, exposed = sum(t.seconds for t in choice.transfers), sum(t.exposed for t in choice.transfers)
        table.add_row(
            "▶" if taken else "",
            str(choice),
            units.bytes(sum(t.bytes for t in choice.transfers)),
            units.seconds(moved),
            units.seconds(exposed),
            f"{1 - exposed / moved:.0%}",
            units.seconds(choice.plan.timing.step),
            units.bytes(choice.plan.memory.total),
        )
    if refused:
        table.caption, table.caption_justify = "\n".join(refused), "left"
    return table


def _way(plan: Plan) -> tuple[int, int]:
    """What tells ways of attending over context apart: a ring over groups of all shards is ulysses."""
    return plan.share.ring, plan.share.ulysses_degree


def _savings(plan: Plan) -> Table | None:
    """What to change; where the plan fits, nothing needs to."""
    if plan.fits:
        return None
    units = Units.of(plan)
    table = new_table("What needs less memory", units.memory, "fits", f"step {units.time}", "devices", "change")
    for change in savings(plan):
        other = change.plan
        table.add_row(
            units.bytes(other.memory.total),
            "yes" if other.fits else "no",
            units.seconds(other.timing.step),
            str(other.share.devices),
            str(change),
            style="green" if other.fits else "",
        )
    return table


def show_search(plan: Plan) -> None:
    """Prints the fastest meshes of as many devices."""
    found, units = search(plan), Units.of(plan)
    title = f"The fastest of {len(found)} meshes of {plan.share.devices} x {plan.device.name} that fit"
    table = new_table(title, f"step {units.time}", "tokens/s", units.memory, "change")
    for change in found[:SEARCH_ROWS]:
        table.add_row(
            units.seconds(change.plan.timing.step),
            f"{change.plan.tokens_per_second_per_device:,.0f}",
            units.bytes(change.plan.memory.total),
            str(change) or "as it is",
        )
    console().print(table)


def show_longest_row(plan: Plan) -> None:
    """Prints the longest row that fits."""
    longest = longest_row(plan)
    if longest is None:
        console().print(f"No row of {row_step(plan):,} tokens or more fits: see what needs less memory")
        return
    units = Units.of(longest.plan)
    need, step = units.bytes(longest.plan.memory.total), units.seconds(longest.plan.timing.step)
    speed = f"{need} {units.memory}, {step} {units.time} a step"
    console().print(f"Longest row that fits: {longest.plan.config.sequence_length:,} tokens ({longest}): {speed}")


def _assumptions(plan: Plan) -> Table:
    table = new_table("Assumed (--assumptions FILE replaces entries)", "value", "entry", "why")
    for name, entry in plan.assumed.entries.items():
        value = "null" if entry.value is None else f"{entry.value:g}"
        table.add_row(value, name, entry.why if entry.source == "shipped" else f"{entry.source}: {entry.why}")
    return table


def _count(number: int) -> str:
    """A count as people say it."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _bar(share: float) -> str:
    return "█" * round(BAR * share)


def new_table(title: str, *columns: str) -> Table:
    """A plain table. Numbers stand to the right; only sentences wrap."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    words = ("", "way", "fits", "entry", "over", "array", "kind", "backend", "rule", "config", "permutes on")
    sentences = ("what", "why", "change", "beside it")
    for column in columns:
        side: Literal["left", "right"] = "left" if column in words + sentences else "right"
        table.add_column(column, justify=side, no_wrap=column not in sentences, overflow="fold")
    return table
