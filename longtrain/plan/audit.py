"""The compiled half of a plan: what the compiler's own program says of memory, FLOPs and collectives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longtrain.plan import buffers, compiling, links, lint, schedule, targets, timeline, timing
from longtrain.plan.buffers import Buffer
from longtrain.plan.estimate import Plan
from longtrain.plan.lint import Audit, Finding, Shapes
from longtrain.plan.program import BACKWARD_SCOPE, FORWARD_SCOPE, Collective, Program
from longtrain.plan.schedule import Rates, Schedule, Transfer
from longtrain.plan.targets import CPU, Target
from longtrain.plan.worker import Compiled

BUFFERS = 12
"""Largest buffers that are reported."""


@dataclass(frozen=True)
class Group:
    """Collectives of one kind over the same axes, carried alike."""

    kind: str
    axes: tuple[str, ...]
    backend: str
    asynchronous: bool
    transfers: tuple[Transfer, ...]

    @property
    def count(self) -> float:
        return sum(transfer.collective.times for transfer in self.transfers)

    @property
    def bytes(self) -> float:
        """That a device sends in a step."""
        return sum(transfer.collective.times * transfer.collective.bytes for transfer in self.transfers)

    @property
    def seconds(self) -> float:
        return sum(transfer.collective.times * transfer.seconds for transfer in self.transfers)

    @property
    def exposed_seconds(self) -> float:
        return sum(transfer.exposed_seconds for transfer in self.transfers)

    @property
    def beside(self) -> str:
        """What the longest compute is that runs while the group's largest transfers are under way."""
        busiest = max(self.transfers, key=lambda transfer: transfer.collective.times * transfer.seconds)
        return busiest.longest.op_name.rsplit("/", 1)[-1] if busiest.longest is not None else ""


@dataclass(frozen=True)
class CompiledPlan:
    """A plan's config as compiled. `schedule` is None where there is no program, or one of the CPU's compiler, which
    says nothing of another's collectives."""

    plan: Plan
    target: Target
    compiled: Compiled
    program: Program | None
    schedule: Schedule | None
    findings: tuple[Finding, ...]
    buffers: tuple[Buffer, ...]

    @property
    def needed(self) -> int | None:
        """Bytes of a device's memory that the step needs; None where the compiler gave up for want of it."""
        return self.compiled.memory.needed if self.compiled.memory else None

    @property
    def fits(self) -> bool:
        return self.needed is not None and self.needed <= self.plan.usable_bytes

    @property
    def flops(self) -> float | None:
        """A device's FLOPs: the products of the program, and those inside attention kernels by their formula."""
        if self.program is None:
            return None
        inside = _attention_flops(self.plan) if self.program.attention_calls else 0.0
        return self.program.flops + inside

    @property
    def groups(self) -> list[Group]:
        """The collectives, those that send most first."""
        found: dict[tuple[str, tuple[str, ...], str, bool], list[Transfer]] = {}
        for transfer in self.schedule.transfers if self.schedule else ():
            one: Collective = transfer.collective
            found.setdefault((one.kind, one.axes, one.backend, one.asynchronous), []).append(transfer)
        groups = [Group(*key, transfers=tuple(transfers)) for key, transfers in found.items()]
        return sorted(groups, key=lambda group: -group.bytes)

    def timeline(self) -> str | None:
        """The step in time, as SVG; None where there is no schedule."""
        if self.program is None or self.schedule is None:
            return None
        program, share = self.program, self.plan.share
        places = [(place.instruction, place.computation) for place in program.places]
        mesh = " x ".join(f"{axis} {size}" for axis, size in share.mesh.axes.items() if size > 1) or "one device"
        name, length = self.plan.config.model.preset or "model", self.plan.config.sequence_length
        return timeline.svg(
            self.schedule,
            f"{name}, rows of {length:,} tokens, {share.devices} x {self.target.kind}, {mesh}",
            products=frozenset(one.name for one, inside in places if program.matmul_flops(one, inside)),
            attention=frozenset(one.name for one, _ in places if program.attention(one)),
        )

    def to_json(self) -> dict[str, Any]:
        """The contract's `compiled`, and more."""
        memory = self.compiled.memory
        return {
            "compiler": self.target.kind,
            "jaxlib": self.compiled.jaxlib,
            "choices": list(self.compiled.choices),
            "fits": self.fits,
            "memory_bytes": self.needed,
            "memory": memory
            and {
                "arguments": memory.argument,
                "outputs": memory.output,
                "donated": memory.alias,
                "temporaries": memory.temp,
                "host": memory.host,
            },
            "out_of_memory": self.compiled.out_of_memory,
            "flops_per_device": self.flops,
            "collectives": [
                {
                    "kind": group.kind,
                    "axes": list(group.axes),
                    "count": group.count,
                    "bytes": group.bytes,
                    "backend": group.backend,
                    "asynchronous": group.asynchronous,
                    "seconds": group.seconds,
                    "exposed_seconds": group.exposed_seconds,
                    "beside": group.beside,
                }
                for group in self.groups
            ],
            "exposed_seconds": self.schedule and self.schedule.exposed_seconds,
            "modelled_step_seconds": self.schedule and self.schedule.seconds,
            "largest_buffers": [
                {"array": str(one.array), "bytes": one.bytes, "count": one.count, "source": one.source, "of": one.scope}
                for one in self.buffers
            ],
            "lint": [{"rule": finding.rule, "message": finding.message} for finding in self.findings],
        }


def audit(plan: Plan, compiler: str, *, say: Callable[[str], None] = lambda message: None) -> CompiledPlan:
    """Compiles a plan's config and reads the program.

    Args:
      compiler: "device" for the hardware's own; "cpu" for the CPU's, which estimates the memory and no more.

    Raises:
      ConfigError, CheckFailed: as `compiling.compiled` does.
    """
    target = targets.target(CPU if compiler == CPU else plan.device.name, plan.share.devices)
    config = plan.config
    compiled, text = compiling.compiled(config, target, say=say)
    if text is None:
        return CompiledPlan(plan, target, compiled, None, None, tuple(_too_large(compiled)), ())
    program = Program.read(text, plan.share.mesh.axes, target.platform)
    simulated = schedule.simulate(program, rates(plan, program))
    memory, shapes = compiled.memory, Shapes.of(config, plan.share.mesh)
    needed = memory.needed if memory else None
    whole = Audit(program, simulated, shapes, config.communication.backend, needed, plan.usable_bytes)
    by_device = target.platform != CPU
    findings = [one for one in lint.lint(whole) if by_device or one.rule == "memory"]
    held = buffers.largest(program, BUFFERS)
    return CompiledPlan(plan, target, compiled, program, simulated if by_device else None, tuple(findings), tuple(held))


def rates(plan: Plan, program: Program) -> Rates:
    """What things take, by the plan's assumptions. Attention takes what the estimate says of it in all."""
    share, assumed, pace = plan.share, plan.assumed, plan.timing.pace
    calls, layers = program.attention_calls, share.micro_batches * share.config.model.num_layers
    whole = {FORWARD_SCOPE: layers * pace.attention_forward, BACKWARD_SCOPE: layers * pace.attention_backward}

    def transfer(collective: Collective) -> float:
        axes = [axis for axis in links.FASTEST_FIRST if axis in collective.axes] or list(links.FASTEST_FIRST)
        link = links.link(share.mesh, axes, assumed)
        held = collective.held
        match collective.kind:
            case "all-gather":
                return link.gather(held * collective.devices)
            case "reduce-scatter":
                return link.gather(held)
            case "all-reduce":
                return link.reduce(held)
            case "all-to-all" | "ragged-all-to-all":
                return link.all_to_all(held)
        return link.hop(held)

    return Rates(
        flops=timing.peak_flops(share, assumed) * assumed["matmul_efficiency"],
        memory=plan.device.memory_bandwidth * assumed["memory_efficiency"],
        attention={scope: whole[scope] / count for scope, count in calls.items()},
        transfer=transfer,
    )


def _attention_flops(plan: Plan) -> float:
    share = plan.share
    layers = share.micro_batches * share.config.model.num_layers
    products = timing.PRODUCTS_FORWARD + timing.PRODUCTS_BACKWARD
    return layers * products * timing.attention_product(share, plan.document_tokens)


def _too_large(compiled: Compiled) -> list[Finding]:
    said = (compiled.out_of_memory or "").splitlines()
    return [Finding("memory", f"the compiler finds no room for the step: {said[0] if said else 'no reason given'}")]
