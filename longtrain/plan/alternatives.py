"""What else the same config could do: keys that save memory, other attention strategies, other meshes, longer rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import lcm

from longtrain.errors import ConfigError
from longtrain.plan import traffic
from longtrain.plan.estimate import Plan, replanned
from longtrain.plan.memory import REMAT
from longtrain.plan.traffic import Transfer

WORTH_TELLING = 0.01
"""Share of the memory that a change must save to be named."""

SMALL_MLP_CHUNK, SMALL_LOSS_CHUNK = 2048, 256

LONGEST_ROW = 2**32
"""Tokens at which the search for the longest row gives up."""

Changes = Mapping[str, object]
"""Dotted key -> value."""


@dataclass(frozen=True)
class Change:
    """Some keys set otherwise, and the plan with them."""

    changes: Changes
    plan: Plan

    def __str__(self) -> str:
        """As overrides on a command line."""
        return " ".join(f"{key}={'null' if value is None else value}" for key, value in self.changes.items())


def savings(plan: Plan) -> list[Change]:
    """What would need less memory: single keys on the same devices, all of these together, twice the devices."""
    singles = _changed(plan, _saving_keys(plan))
    together: Changes = {key: value for change in singles for key, value in change.changes.items()}
    all_of_them = _changed(plan, [together]) if together not in [change.changes for change in singles] else []
    doubled = [{f"mesh.{axis}": 2 * plan.share.mesh.axes[axis]} for axis in ("context", "fsdp", "tensor")]
    return singles + all_of_them + _changed(plan, doubled, devices=2 * plan.share.devices)


def _saving_keys(plan: Plan) -> Iterator[Changes]:
    share, memory = plan.share, plan.config.memory
    for less in REMAT[REMAT.index(memory.remat) + 1 :]:
        yield {"memory.remat": less}
    if (memory.mlp_chunk or share.length) > SMALL_MLP_CHUNK:
        yield {"memory.mlp_chunk": SMALL_MLP_CHUNK}
    if memory.loss_chunk > SMALL_LOSS_CHUNK:
        yield {"memory.loss_chunk": SMALL_LOSS_CHUNK}
    if "attention" in _offloads(plan) and memory.offload == "none":
        yield {"memory.offload": "attention"}
    if share.rows > 1:
        yield {"batch.accumulation": share.rows * share.micro_batches}


def _offloads(plan: Plan) -> tuple[str, ...]:
    """What `memory.offload` may be: simulated devices have no memory but the host's."""
    return ("none", "attention") if plan.config.mesh.simulate_devices is None else ("none",)


def _changed(plan: Plan, candidates: Iterator[Changes] | Sequence[Changes], devices: int | None = None) -> list[Change]:
    """Those that the config allows and that save enough, the best last of each key."""
    found = []
    for changes in candidates:
        try:
            changed = replanned(plan, changes, devices)
        except ConfigError:
            continue
        if changed.memory.total < (1 - WORTH_TELLING) * plan.memory.total:
            found.append(Change(changes, changed))
    return sorted(found, key=lambda change: -change.plan.memory.total)


@dataclass(frozen=True)
class Choice:
    """A way of attending over context for the same config: the plan and what then travels, or why it cannot serve."""

    changes: Changes
    plan: Plan | None
    transfers: tuple[Transfer, ...]
    refusal: str

    def __str__(self) -> str:
        """In words."""
        degree = self.changes["attention.ulysses_degree"]
        over = f" over ulysses groups of {degree}" if degree != 1 else ""
        return f"{self.changes['attention.strategy']}{over}"


def strategies(plan: Plan) -> list[Choice]:
    """Every way of attending over context, on the same mesh: the strategies, and the ring over groups."""
    context, kv_heads = plan.share.mesh.context, plan.share.kv_heads
    degrees = [size for size in range(2, context) if context % size == 0 and kv_heads % size == 0]
    choices = []
    for strategy, degree in [("ring", 1), *(("ring", degree) for degree in degrees), ("all_gather", 1), ("ulysses", 1)]:
        changes: dict[str, object] = {"attention.strategy": strategy, "attention.ulysses_degree": degree}
        if strategy != "ring":
            changes["attention.two_way"] = False
        try:
            other = replanned(plan, changes)
        except ConfigError as error:
            choices.append(Choice(changes, None, (), error.problems[0].message))
            continue
        moved = traffic.attention(other.share, other.assumed, other.timing.pace)
        choices.append(Choice(changes, other, tuple(moved), ""))
    return choices


def search(plan: Plan) -> list[Change]:
    """The fastest plan of every mesh of as many devices that fits, the fastest first: by mesh, accumulation, remat,
    MLP chunk and offload. The batch and everything else stay."""
    best = [fastest for mesh in _meshes(plan.share.devices) if (fastest := _fastest(plan, mesh))]
    return sorted(best, key=lambda change: change.plan.timing.step)


def _meshes(devices: int) -> Iterator[dict[str, int]]:
    """Every way of laying four axes over a number of devices."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    for data in sizes:
        for fsdp in sizes:
            for context in sizes:
                tensor, left_over = divmod(devices, data * fsdp * context)
                if tensor and not left_over:
                    yield {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.context": context, "mesh.tensor": tensor}


def _fastest(plan: Plan, mesh: dict[str, int]) -> Change | None:
    """The fastest plan on this mesh that fits; None where there is none."""
    config, share = plan.config, plan.share
    present = {f"mesh.{axis}": size for axis, size in share.mesh.axes.items()} | {
        "batch.accumulation": share.micro_batches,
        "memory.remat": config.memory.remat,
        "memory.mlp_chunk": config.memory.mlp_chunk,
        "memory.offload": config.memory.offload,
    }
    rows = config.batch.sequences // (mesh["mesh.data"] * mesh["mesh.fsdp"])
    fastest: Change | None = None
    accumulations = [parts for parts in range(1, rows + 1) if rows % parts == 0]
    for accumulation, remat, chunk, offload in product(accumulations, REMAT, (None, SMALL_MLP_CHUNK), _offloads(plan)):
        changes = mesh | {
            "batch.accumulation": accumulation,
            "memory.remat": remat,
            "memory.mlp_chunk": chunk,
            "memory.offload": offload,
        }
        try:
            changed = replanned(plan, changes)
        except ConfigError:
            continue
        if changed.fits and (fastest is None or changed.timing.step < fastest.plan.timing.step):
            fastest = Change({key: value for key, value in changes.items() if value != present[key]}, changed)
    return fastest


def row_step(plan: Plan) -> int:
    """Tokens in whose multiples the search for the longest row goes: whole chunks, and 1,024 tokens, a device."""
    return plan.share.mesh.context * lcm(1024, plan.config.memory.mlp_chunk or 1)


def longest_row(plan: Plan) -> Change | None:
    """The longest row that fits with everything else as it is, in multiples of `row_step`; None if none does."""
    step = row_step(plan)

    def of(steps: int) -> Change:
        return Change({"sequence_length": steps * step}, replanned(plan, {"sequence_length": steps * step}))

    fits, too_long = 0, 1
    while (not fits or too_long * step <= LONGEST_ROW) and of(too_long).plan.fits:
        fits, too_long = too_long, 2 * too_long
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if of(middle).plan.fits else (fits, middle)
    return of(fits) if fits else None
