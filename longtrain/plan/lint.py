"""What a compiled step does that it should not, and which key to set against it.

Each rule reads the program; none looks at the config beyond the shapes that its mesh gives a device. Small arrays are
let pass: `Shapes.smallest` bytes.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from longtrain.config import Config, MeshConfig
from longtrain.plan.hlo import NO_WORK, Array, Computation, Instruction
from longtrain.plan.program import Collective, Program
from longtrain.plan.schedule import Schedule, Transfer

MIB = 2**20
GIB = 2**30

PERMUTE_OF_JAX = "ppermute"
"""Ends the scope of a permute that the model asked for; XLA makes others of its own (a product in pieces, on TPU)."""

HIDDEN_ENOUGH = 0.25
"""Share of a permute that may be exposed before it counts as behind its compute."""

FLOATS = ("f", "bf")

_SCHEDULING = {
    "cuda": "Let more transfers run at a time: "
    "communication.xla_flags=[--xla_gpu_experimental_parallel_collective_overlap_limit=4]",
    "tpu": "XLA's scheduler does not know how long the compute takes: give the kernel a cost "
    "(ops/kernels/mosaic.py), or take attention.kernel=auto",
    "cpu": "The CPU's compiler hides nothing",
}
"""What to do about a permute that depends on nothing and yet stands behind its compute, by platform."""


@dataclass(frozen=True)
class Finding:
    """A rule's name, and what is wrong with what cures it."""

    rule: str
    message: str


@dataclass(frozen=True)
class Shapes:
    """What one device holds of a micro-batch and of the model: by these numbers arrays are known for what they are."""

    rows: int
    tokens: int
    """Of a row, this device's part."""
    sequence: int
    vocabulary: int
    heads: int
    widths: frozenset[int]
    """Dims of parameters as a layer computes with them: whole over fsdp and context, cut over tensor."""
    parameters: frozenset[int]
    """Their numbers of elements."""
    loss_chunk: int
    smallest: int = MIB

    @classmethod
    def of(cls, config: Config, mesh: MeshConfig) -> "Shapes":
        """The shapes of a config; `mesh` is its own with every axis known."""
        model, tensor = config.model, mesh.tensor
        rows = config.batch.sequences // (config.batch.accumulation * mesh.data * mesh.fsdp)
        embed, head = model.embed_dim, model.head_dim
        heads, kv_heads = model.num_heads // tensor, max(model.num_kv_heads // tensor, 1)
        mlp, vocabulary = model.mlp_dim // tensor, model.vocab_size // tensor
        widths = (embed, heads, kv_heads, head, heads * head, kv_heads * head, mlp, vocabulary)
        products = (heads * head, kv_heads * head, mlp, vocabulary, 1)
        return cls(
            rows=rows,
            tokens=config.sequence_length // mesh.context,
            sequence=config.sequence_length,
            vocabulary=vocabulary,
            heads=heads,
            widths=frozenset(widths),
            parameters=frozenset(embed * width for width in products),
            loss_chunk=config.memory.loss_chunk,
        )


@dataclass(frozen=True)
class Audit:
    """What the rules look at. `needed` and `memory` are a device's bytes, where both are known; `backend` is what
    `communication.backend` asks for."""

    program: Program
    schedule: Schedule
    shapes: Shapes
    backend: str
    needed: int | None = None
    memory: float | None = None


Way = Callable[[Instruction], list[Instruction]]
Rule = Callable[[Audit], Iterator[str]]
RULES: dict[str, Rule] = {}


def _rule(name: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES[name] = rule
        return rule

    return register


def lint(audit: Audit) -> list[Finding]:
    """Everything that any rule finds, each once."""
    return [Finding(name, message) for name, rule in RULES.items() for message in dict.fromkeys(rule(audit))]


@_rule("synchronous-permute")
def _synchronous_permute(audit: Audit) -> Iterator[str]:
    for transfer in _ring_permutes(audit):
        if not transfer.collective.asynchronous:
            yield (
                f"{_described(transfer.collective)} is synchronous: nothing runs beside it. Take from "
                "communication.xla_flags what keeps XLA from scheduling around it, and shift a block before computing "
                "with it (attention.strategy=ring does)"
            )


@_rule("permute-behind-compute")
def _permute_behind_compute(audit: Audit) -> Iterator[str]:
    """A permute of which much is exposed although there is compute to hide it: it waits for the compute that it should
    run beside, or is scheduled behind it."""
    bodies = {loop.instruction.called["body"] for loop in audit.program.places if loop.instruction.opcode == "while"}
    homes = {place.instruction.name: place.computation for place in audit.program.places}
    for transfer in _ring_permutes(audit):
        collective, computation = transfer.collective, homes[transfer.collective.name]
        if transfer.exposed <= HIDDEN_ENOUGH * transfer.seconds:
            continue
        start = computation.by_name[collective.name]
        products = functools.partial(_multiplies, audit.program, computation)
        # Between two blocks of attention, with no other product between: no ring needs that.
        waits = all(
            any(audit.program.attention(one) for one in _reached(start, way, products))
            for way in (computation.operands, computation.uses)
        )
        handed_on = False
        if computation.name in bodies:
            heavy = _heavy(audit, computation)
            handed_on = bool(heavy) and computation.root in _reached(start, computation.uses, products)
            waits |= handed_on and any(one.name in heavy for one in _reached(start, computation.operands))
        if waits:
            yield (
                f"{_described(collective)} waits for the compute of its own step, so nothing hides it: shift the block "
                "before computing with it, and gradients one step late (attention.strategy=ring as it stands does)"
            )
        elif handed_on:
            yield (
                f"{_described(collective)} is scheduled behind the compute that could hide it. "
                f"{_SCHEDULING[audit.program.platform]}"
            )


@_rule("gathered-activations")
def _gathered_activations(audit: Audit) -> Iterator[str]:
    for collective in _large(audit, "all-gather"):
        if "_attention" in collective.scope:
            continue  # a strategy's own: all_gather and ulysses
        for array in collective.arrays:
            whole = math.prod(array.dims) * collective.devices
            if array.dtype.startswith(FLOATS) and whole not in audit.shapes.parameters and _large_array(audit, array):
                yield (
                    f"{_described(collective)} gathers {array} which is no parameter: an activation or logits that are "
                    "cut everywhere else. Constrain it to the table of parallel/sharding.py; logits stay in chunks "
                    f"with memory.loss_chunk={audit.shapes.loss_chunk}"
                )


@_rule("all-reduce-for-reduce-scatter")
def _all_reduce(audit: Audit) -> Iterator[str]:
    for collective in _large(audit, "all-reduce"):
        if {"fsdp", "context"} & set(collective.axes):
            yield (
                f"{_described(collective)} sums on every device what each needs only its own part of: twice the bytes "
                "of a reduce-scatter, and memory for the whole. Hold the gradient to its parameter's cut "
                "(parallel/sharding.py), or with fewer shards take mesh.data instead of mesh.fsdp"
            )


@_rule("backend")
def _backend(audit: Audit) -> Iterator[str]:
    yield from backend_mismatches(audit.program, audit.backend)


def backend_mismatches(program: Program, asked: str) -> list[str]:
    """Each kind of CollectivePermute that is not on the backend that `communication.backend` asks for."""
    if asked == "auto":
        return []
    wrong = {c.backend: c for c in program.collectives if c.kind == "collective-permute" and c.backend != asked}
    return [
        f"{_described(collective)} is carried by {got} and not by {asked}, which communication.backend asks for: "
        f"take communication.backend=auto for what there is, or a jaxlib that has {asked}"
        for got, collective in wrong.items()
    ]


@_rule("square-buffer")
def _square_buffer(audit: Audit) -> Iterator[str]:
    shapes = audit.shapes
    lengths = {shapes.tokens, shapes.sequence}
    for instruction, array in _buffers(audit):
        # Where a length happens to be a parameter's width, an activation has two such dims too.
        allowed = shapes.rows * shapes.tokens * max(shapes.widths) if lengths & shapes.widths else 0
        square = sum(dim in lengths for dim in array.dims) >= 2
        if square and math.prod(array.dims) >= shapes.tokens**2 and math.prod(array.dims) > allowed:
            yield (
                f"{array} ({_place(audit, instruction)}) grows with the square of the sequence: attention scores or a "
                "mask are made whole. Take a kernel that works in tiles: attention.kernel=auto"
            )


@_rule("whole-logits")
def _whole_logits(audit: Audit) -> Iterator[str]:
    shapes = audit.shapes
    if shapes.loss_chunk >= shapes.tokens:
        return  # one chunk was asked for
    for instruction, array in _buffers(audit):
        rest = math.prod(array.dims) // shapes.vocabulary
        whole = {shapes.tokens, shapes.rows * shapes.tokens, shapes.sequence, shapes.rows * shapes.sequence}
        more = rest > shapes.rows * shapes.loss_chunk and rest not in shapes.widths
        if shapes.vocabulary in array.dims and rest in whole and more:
            yield (
                f"{array} ({_place(audit, instruction)}) holds the logits of all of a device's tokens, "
                f"{array.bytes / GIB:.1f} GiB: memory.loss_chunk={shapes.loss_chunk} does not reach it"
            )


@_rule("loop-saved-masks")
def _loop_saved_masks(audit: Audit) -> Iterator[str]:
    """A loop's results (of all its steps, one after the other) that are truth values."""
    for place in audit.program.places:
        if place.instruction.opcode == "while":
            trips = audit.program.module.trips(place.instruction, place.computation)
            for array in place.instruction.arrays:
                if array.dtype == "pred" and array.dims[:1] == (trips,) and _large_array(audit, array):
                    yield (
                        f"{array} ({_place(audit, place.instruction)}) is a mask saved for every step of a loop, "
                        f"{array.bytes / GIB:.1f} GiB: JAX takes it for known ahead of the loop. Tie what it is made "
                        "from to the data with lax.optimization_barrier, as ops/attention.py does, or memory.remat=none"
                    )


@_rule("memory")
def _memory(audit: Audit) -> Iterator[str]:
    if audit.needed is not None and audit.memory is not None and audit.needed > audit.memory:
        yield (
            f"the step needs {audit.needed / GIB:.1f} GiB of a device's {audit.memory / GIB:.1f} GiB: "
            "memory.remat=full, more shards (mesh.fsdp, mesh.context), a memory.mlp_chunk, a smaller memory.loss_chunk"
        )


def _ring_permutes(audit: Audit) -> Iterable[Transfer]:
    """The model's own permutes of a size that matters."""
    for transfer in audit.schedule.transfers:
        collective = transfer.collective
        large = collective.kind == "collective-permute" and collective.held >= audit.shapes.smallest
        if large and collective.scope.endswith(PERMUTE_OF_JAX):
            yield transfer


def _large(audit: Audit, kind: str) -> Iterable[Collective]:
    for collective in audit.program.collectives:
        if collective.kind == kind and any(_large_array(audit, array) for array in collective.arrays):
            yield collective


def _large_array(audit: Audit, array: Array) -> bool:
    return array.bytes >= audit.shapes.smallest


def _buffers(audit: Audit) -> Iterator[tuple[Instruction, Array]]:
    """Large arrays that an instruction makes."""
    for place in audit.program.places:
        if place.instruction.opcode not in NO_WORK and place.instruction.opcode != "while":
            for array in place.instruction.arrays:
                if _large_array(audit, array):
                    yield place.instruction, array


def _heavy(audit: Audit, computation: Computation) -> set[str]:
    """Instructions that hold most of a computation's compute: the least number that makes half of it."""
    seconds = {one.name: audit.schedule.compute.get(one.name, 0.0) for one in computation.instructions}
    total, reached, chosen = sum(seconds.values()), 0.0, set()
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True):
        if reached >= total / 2 or not seconds[name]:
            break
        chosen.add(name)
        reached += seconds[name]
    return chosen


def _reached(start: Instruction, way: Way, ends: Callable[[Instruction], bool] | None = None) -> list[Instruction]:
    """All that an instruction depends on, or that depends on it, but not by way of those where `ends` holds."""
    found: dict[str, Instruction] = {}
    waiting = [start]
    while waiting:
        one = waiting.pop()
        if ends is None or one is start or not ends(one):
            new = [following for following in way(one) if following.name not in found]
            found |= {following.name: following for following in new}
            waiting += new
    return list(found.values())


def _multiplies(program: Program, computation: Computation, one: Instruction) -> bool:
    """Whether an instruction makes matrix products, or runs what may."""
    runs = program.attention(one) or program.callees(one, computation)
    return bool(runs) or program.matmul_flops(one, computation) > 0


def _described(collective: Collective) -> str:
    axes = " x ".join(collective.axes) or "no axis"
    size = sum(array.bytes for array in collective.arrays)
    what = ", ".join(map(str, collective.arrays[:2])) + (", …" if len(collective.arrays) > 2 else "")
    where = f" ({collective.source})" if collective.source else ""
    return f"{collective.kind} over {axes} of {what}, {size / MIB:,.1f} MiB, {collective.times:,.0f} a step{where}"


def _place(audit: Audit, instruction: Instruction) -> str:
    return audit.program.module.source(instruction) or instruction.op_name.rsplit("/", 1)[-1] or instruction.name
