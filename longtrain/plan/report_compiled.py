"""The compiled half of a plan as a person reads it."""

from rich.table import Table

from longtrain.plan.audit import CompiledPlan
from longtrain.plan.report import GIB, Units, console, new_table
from longtrain.plan.targets import CPU


def show(found: CompiledPlan) -> None:
    """Prints what the compiler says."""
    out = console()
    out.print()
    for line in _heading(found):
        out.print(line)
    for part in (_memory(found), _buffers(found), _collectives(found), _lint(found)):
        if part is not None:
            out.print()
            out.print(part)


def verdict(found: CompiledPlan) -> str:
    """Whether the compiled step fits, in one sentence."""
    usable = found.plan.usable_bytes / GIB
    if found.needed is None:
        return f"the compiled step does not fit into the {usable:.1f} GiB usable a device: {found.findings[0].message}"
    need = found.needed / GIB
    if found.fits:
        return f"the compiled step fits: {need:.1f} GiB of the {usable:.1f} usable a device"
    return (
        f"the compiled step does not fit: {need:.1f} GiB, of {usable:.1f} usable a device, {need - usable:.1f} too much"
    )


def _heading(found: CompiledPlan) -> list[str]:
    compiled = found.compiled
    lines = [f"Compiled for {compiled.devices} x {compiled.device_kind} by jaxlib {compiled.jaxlib}"]
    if found.target.platform == CPU:
        lines[0] = (
            f"[bold]An estimate by the CPU's compiler[/] (jaxlib {compiled.jaxlib}): of the memory alone, mostly 0 to "
            "15 % above the accelerator's own, seen up to 83 % above it; nothing is said of collectives"
        )
    lines += compiled.choices
    text = verdict(found)
    lines.append(f"[bold {'green' if found.fits else 'red'}]{text[0].upper()}{text[1:]}[/]")
    if found.needed is not None:
        estimate = found.plan.memory.total
        lines.append(f"The formulas above say {estimate / GIB:.1f} GiB, {estimate / found.needed - 1:+.0%}")
    if found.flops is not None:
        lines.append(f"{found.flops:.4g} FLOPs a device, what is computed again among them")
    if found.schedule is not None:
        exposed, step = found.schedule.exposed_seconds, found.schedule.seconds
        lines.append(f"Modelled over XLA's schedule: {step:.3g} s a step, {exposed:.3g} s of it waiting for transfers")
    return lines


def _memory(found: CompiledPlan) -> Table | None:
    memory, units = found.compiled.memory, Units.of(found.plan)
    if memory is None:
        return None
    table = new_table("Memory of a device, by the compiler", units.memory, "what")
    rows = {"arguments": memory.argument, "results": memory.output, "donated (in both)": -memory.alias}
    for what, size in (rows | {"temporaries": memory.temp, "in all": memory.needed}).items():
        table.add_row(units.bytes(size), what)
    if memory.host:
        table.add_row(units.bytes(memory.host), "on the host")
    return table


def _buffers(found: CompiledPlan) -> Table | None:
    if not found.buffers:
        return None
    units = Units.of(found.plan)
    table = new_table("Largest buffers at the peak", units.memory, "times", "array", "what")
    for one in found.buffers:
        table.add_row(units.bytes(one.bytes), str(one.count), str(one.array), f"{one.source} {one.scope}".strip())
    return table


def _collectives(found: CompiledPlan) -> Table | None:
    if not found.groups:
        return None
    units = Units.of(found.plan)
    columns = (units.memory, "times", units.time, "exposed", "kind", "over", "backend", "beside it")
    table = new_table("Collectives of a step, as compiled", *columns)
    for group in found.groups:
        table.add_row(
            units.bytes(group.bytes),
            f"{group.count:,.0f}",
            units.seconds(group.seconds),
            units.seconds(group.exposed_seconds),
            group.kind,
            " x ".join(group.axes),
            group.backend,
            (group.beside or "nothing") if group.asynchronous else "synchronous",
        )
    return table


def _lint(found: CompiledPlan) -> Table | None:
    if not found.findings:
        return None
    table = new_table("Lint", "rule", "what")
    for finding in found.findings:
        table.add_row(finding.rule, finding.message)
    return table
