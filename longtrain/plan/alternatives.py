"""What else the same config could do: keys that save memory, and the other attention strategies."""

from collections.abc import Sequence
from dataclasses import dataclass

from longtrain.errors import ConfigError
from longtrain.plan import traffic
from longtrain.plan.estimate import Plan, replanned
from longtrain.plan.traffic import STRATEGIES, Transfer

WORTH_TELLING = 0.01
"""Share of the memory that a change must save to be named."""

SMALL_MLP_CHUNK, SMALL_LOSS_CHUNK = 2048, 256


@dataclass(frozen=True)
class Change:
    """Some keys set otherwise, and the plan with them."""

    overrides: tuple[str, ...]
    plan: Plan


def savings(plan: Plan) -> list[Change]:
    """What would need less memory: single keys on the same devices, all of these together, twice the devices."""
    singles = _changes(plan, _saving_overrides(plan))
    together = tuple(override for change in singles for override in change.overrides)
    all_of_them = _changes(plan, [together]) if len(singles) > 1 else []
    doubled = [(f"mesh.{axis}={2 * plan.share.mesh.axes[axis]}",) for axis in ("context", "fsdp", "tensor")]
    return singles + all_of_them + _changes(plan, doubled, devices=2 * plan.share.devices)


def _saving_overrides(plan: Plan) -> list[tuple[str, ...]]:
    share, memory = plan.share, plan.config.memory
    overrides: list[tuple[str, ...]] = []
    if memory.remat == "none":
        overrides.append(("memory.remat=attention_saved",))
    if memory.remat == "attention_saved":
        overrides.append(("memory.remat=full",))
    if (memory.mlp_chunk or share.length) > SMALL_MLP_CHUNK:
        overrides.append((f"memory.mlp_chunk={SMALL_MLP_CHUNK}",))
    if memory.loss_chunk > SMALL_LOSS_CHUNK:
        overrides.append((f"memory.loss_chunk={SMALL_LOSS_CHUNK}",))
    if share.rows > 1:
        overrides.append((f"batch.accumulation={share.rows * share.micro_batches}",))
    return overrides


def _changes(plan: Plan, candidates: Sequence[tuple[str, ...]], devices: int | None = None) -> list[Change]:
    """Those that the config allows and that save enough, the best first."""
    found = []
    for overrides in candidates:
        try:
            changed = replanned(plan, *overrides, devices=devices)
        except ConfigError:
            continue
        if changed.memory.total < (1 - WORTH_TELLING) * plan.memory.total:
            found.append(Change(overrides, changed))
    return sorted(found, key=lambda change: change.plan.memory.total)


@dataclass(frozen=True)
class Choice:
    """An attention strategy for the same config: the plan and what then travels, or why it cannot serve."""

    strategy: str
    plan: Plan | None
    transfers: tuple[Transfer, ...]
    refusal: str


def strategies(plan: Plan) -> list[Choice]:
    """Every attention strategy, on the same mesh."""
    choices = []
    for strategy in STRATEGIES:
        try:
            other = replanned(plan, f"attention.strategy={strategy}")
        except ConfigError as error:
            choices.append(Choice(strategy, None, (), error.problems[0].message))
            continue
        moved = traffic.attention(other.share, strategy, other.assumed, other.timing.pace)
        choices.append(Choice(strategy, other, tuple(moved), ""))
    return choices
