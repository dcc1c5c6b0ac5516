"""The plan as a person reads it: the verdict first, then memory, time, traffic, and what was assumed."""

from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from longtrain.plan import links
from longtrain.plan.alternatives import Change, longest_row, savings, search, strategies
from longtrain.plan.estimate import Plan
from longtrain.plan.links import FASTEST_FIRST
from longtrain.plan.memory import KINDS

GIB = 2**30
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
    whole_rows = plan.document_tokens == config.sequence_length
    filled = "one document each" if whole_rows else f"documents of {plan.document_tokens:,}"
    rows = f"{config.batch.sequences} rows of {config.sequence_length:,} tokens a step ({filled})"
    micro = f" in {share.micro_batches} micro-batches" if share.micro_batches > 1 else ""
    attention = f"attention {config.attention.strategy}, kernel {share.kernel}, remat {config.memory.remat}"
    mfu = "" if plan.mfu_causal is None else f", MFU (causal) {plan.mfu_causal:.1%}"
    lines = [
        f"{model.preset or 'The model'}, {plan.parameters / 1e9:.3g} B parameters; {rows}{micro}",
        f"{share.devices} x {plan.device.name}: {mesh}; {attention}",
        f"[bold {'green' if plan.fits else 'red'}]{verdict(plan).capitalize().replace('gib', 'GiB')}[/]",
        f"[bold]Step of {plan.timing.step:.3g} s: {plan.tokens_per_second_per_device:,.0f} tokens/s a device{mfu}[/]",
    ]
    if plan.device.platform == "gpu" and plan.fits and plan.memory.total > JAX_TAKES * plan.device.memory_bytes:
        allow = f"{1 - plan.assumed['memory_reserve']:.2f}"
        lines.append(f"Set XLA_PYTHON_CLIENT_MEM_FRACTION={allow}: JAX takes {JAX_TAKES:.0%} of the memory by default")
    return lines


def _memory(plan: Plan) -> Table:
    table = new_table(f"Memory of a device at the step's peak, {plan.memory.phase}", "GiB", "share", "", "what")
    total = plan.memory.total
    for kind in KINDS:
        of_kind = plan.memory.by_kind[kind]
        table.add_row(f"{of_kind / GIB:.2f}", f"{of_kind / total:.0%}", _bar(of_kind / total), f"[bold]{kind}[/]")
        for term in sorted(plan.memory.terms, key=lambda term: -term.bytes):
            if term.kind == kind:
                table.add_row(f"{term.bytes / GIB:.2f}", f"{term.bytes / total:.0%}", "", f"  {term.what}", style="dim")
    return table


def _time(plan: Plan) -> Table:
    timing = plan.timing
    table = new_table(f"Time of a step, of {plan.flops_per_step:.3g} FLOPs in all", "seconds", "share", "", "what")
    rows = {
        "matrix products": timing.matmul,
        f"attention, kernel {plan.share.kernel}": timing.attention,
        "memory traffic: norms, sums, the update": timing.memory,
        "communication that nothing hides": timing.exposed,
    }
    for what, seconds in rows.items():
        table.add_row(f"{seconds:.3f}", f"{seconds / timing.step:.0%}", _bar(seconds / timing.step), what)
    return table


def _traffic(plan: Plan) -> Table | None:
    """What travels, and on which link each axis of the mesh lies."""
    if not plan.timing.transfers:
        return None
    lies = ", ".join(_lies(plan, axis) for axis in FASTEST_FIRST if plan.share.mesh.axes[axis] > 1)
    title = f"What a device sends in a step; {lies}"
    table = new_table(title, "GiB", "times", "seconds", "exposed", "what", "over")
    for transfer in sorted(plan.timing.transfers, key=lambda transfer: -transfer.bytes):
        table.add_row(
            f"{transfer.bytes / GIB:.2f}",
            f"{transfer.count:,}",
            f"{transfer.seconds:.3f}",
            f"{transfer.exposed:.3f}",
            f"{transfer.kind}: {transfer.what}",
            " x ".join(axis for axis in transfer.axes if plan.share.mesh.axes[axis] > 1),
        )
    return table


def _lies(plan: Plan, axis: str) -> str:
    over = links.link(plan.share.mesh, (axis,), plan.assumed)
    fast = FAST_LINK[plan.device.platform]
    return f"{axis} on {fast}" if over.fast else f"{axis} on the network ({over.inside} of {over.size} on one {fast})"


def _strategies(plan: Plan) -> Table | None:
    if plan.share.mesh.context == 1:
        return None
    title = "Attention over context: the three strategies"
    table = new_table(title, "", "strategy", "GiB sent", "seconds", "exposed", "step s", "GiB held", "why")
    for choice in strategies(plan):
        mark = "▶" if choice.strategy == plan.config.attention.strategy else ""
        if choice.plan is None:
            table.add_row(mark, choice.strategy, "", "", "", "", "", choice.refusal, style="dim")
            continue
        moved, exposed = sum(t.seconds for t in choice.transfers), sum(t.exposed for t in choice.transfers)
        table.add_row(
            mark,
            choice.strategy,
            f"{sum(t.bytes for t in choice.transfers) / GIB:.1f}",
            f"{moved:.3f}",
            f"{exposed:.3f}",
            f"{choice.plan.timing.step:.3f}",
            f"{choice.plan.memory.total / GIB:.1f}",
            f"{1 - exposed / moved:.0%} of its transfers hide behind compute",
        )
    return table


def _savings(plan: Plan) -> Table | None:
    """What to change; where the plan fits, nothing needs to."""
    if plan.fits:
        return None
    table = new_table("What needs less memory", "GiB", "fits", "step s", "devices", "change")
    for change in savings(plan):
        other = change.plan
        table.add_row(
            f"{other.memory.total / GIB:.1f}",
            "yes" if other.fits else "no",
            f"{other.timing.step:.3f}",
            str(other.share.devices),
            str(change),
            style="green" if other.fits else "",
        )
    return table


def show_search(plan: Plan) -> None:
    """Prints the fastest meshes of as many devices."""
    found = search(plan)
    title = f"The fastest of {len(found)} meshes of {plan.share.devices} x {plan.device.name} that fit"
    table = new_table(title, "step s", "tokens/s", "GiB", "change")
    for change in found[:SEARCH_ROWS]:
        table.add_row(*_speed(change), str(change) or "as it is")
    console().print(table)


def show_longest_row(plan: Plan) -> None:
    """Prints the longest row that fits."""
    longest = longest_row(plan)
    if longest is None:
        console().print("No row fits, however short: see what needs less memory")
        return
    step, rate, gib = _speed(longest)
    length = longest.plan.config.sequence_length
    console().print(
        f"Longest row that fits: {length:,} tokens ({longest}): {gib} GiB, {step} s a step, {rate} tokens/s"
    )


def _speed(change: Change) -> tuple[str, str, str]:
    """Seconds a step, tokens a second and device, GiB of a device."""
    timing, rate = change.plan.timing, change.plan.tokens_per_second_per_device
    return f"{timing.step:.3f}", f"{rate:,.0f}", f"{change.plan.memory.total / GIB:.1f}"


def _assumptions(plan: Plan) -> Table:
    table = new_table("Assumed (--assumptions FILE replaces entries)", "value", "entry", "why")
    for name, entry in plan.assumed.entries.items():
        value = "null" if entry.value is None else f"{entry.value:g}"
        table.add_row(value, name, entry.why if entry.source == "shipped" else f"{entry.source}: {entry.why}")
    return table


def _bar(share: float) -> str:
    return "█" * round(BAR * share)


def new_table(title: str, *columns: str) -> Table:
    """A plain table. Numbers stand to the right; only sentences wrap."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    words = ("", "strategy", "fits", "entry", "over", "array", "kind", "backend", "rule")
    sentences = ("what", "why", "change", "beside it")
    for column in columns:
        side: Literal["left", "right"] = "left" if column in words + sentences else "right"
        table.add_column(column, justify=side, no_wrap=column not in sentences, overflow="fold")
    return table
