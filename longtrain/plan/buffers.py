"""What is alive in memory when a compiled step needs most of it, read from the program's schedule.

A buffer lives from the instruction that makes it to the last that uses it; what a loop carries is one buffer, whatever
the number of its steps. XLA's own assignment also fits buffers into each other's gaps and keeps room for its libraries,
so the sum here is not its figure, which is reported beside it: this says which arrays it is made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from longtrain.plan.hlo import Array, Computation, Instruction
from longtrain.plan.program import Program

_SAME_BUFFERS = ("bitcast", "while", "opt-barrier", "add-dependency", "copy-done", "async-update")
_NO_BUFFERS = ("constant", "iota", "after-all", "partition-id", "replica-id")

Leaf = tuple[str, int]
"""The instruction that makes an array, and which of its arrays it is."""


@dataclass(frozen=True)
class Buffer:
    """Equal arrays that are alive at the peak. `source` is file:line, `scope` JAX's name for what makes them; of what
    a loop carries and nothing else names, those of the loop."""

    array: Array
    count: int
    source: str
    scope: str

    @property
    def bytes(self) -> int:
        return self.count * self.array.bytes


@dataclass(frozen=True)
class Peak:
    """The most that is alive at once: its bytes, and each buffer with the instruction that makes it, or the loop that
    carries it where only that says where it comes from."""

    bytes: int
    alive: tuple[tuple[Instruction, Array], ...]


def peak(program: Program) -> Peak:
    """The step's peak: arguments, which live throughout, and temporaries."""
    return _Liveness(program).peak(program.module.entry, outermost=True)


def largest(program: Program, count: int) -> list[Buffer]:
    """The buffers that take most at the step's peak, equal ones of one origin together."""
    groups: dict[tuple[Array, str, str], int] = {}
    for instruction, array in peak(program).alive:
        name = instruction.op_name.replace("\\'", "'")
        key = (array, program.module.source(instruction), name if "[" in name else name.rsplit("/", 1)[-1])
        groups[key] = groups.get(key, 0) + 1
    found = [Buffer(array, number, source, scope) for (array, source, scope), number in groups.items()]
    return sorted(found, key=lambda buffer: -buffer.bytes)[:count]


class _Liveness:
    """Peaks of computations, each once."""

    def __init__(self, program: Program):
        self.program = program
        self.known: dict[str, Peak] = {}

    def peak(self, computation: Computation, outermost: bool = False) -> Peak:
        """The most that a computation holds beside what its caller holds for it: its parameters and results."""
        if computation.name in self.known:
            return self.known[computation.name]
        leaves = self._leaves(computation)
        callers = set() if outermost else set(leaves[computation.root.name])
        loops = {leaf: one for one in computation.instructions if one.opcode == "while" for leaf in leaves[one.name]}
        ends = {leaf: index for index, one in enumerate(computation.instructions) for leaf in self._used(one, leaves)}
        arguments = {
            leaf: (one, array)
            for one in computation.instructions
            if one.opcode == "parameter" and outermost
            for leaf, array in zip(leaves[one.name], one.arrays, strict=True)
        }
        alive, now = dict(arguments), sum(array.bytes for _, array in arguments.values())
        best = Peak(0, ())
        for index, one in enumerate(computation.instructions):
            for leaf, array in self._made(one, computation, leaves):
                if leaf not in callers:
                    named = "stack_frame_id" in one.attributes or "source_file" in one.attributes
                    alive[leaf] = (one if named else loops.get(leaf, one), array)
                    now += array.bytes
            inner = max(self._inner(one), key=lambda one: one.bytes, default=Peak(0, ()))
            if now + inner.bytes > best.bytes:
                best = Peak(now + inner.bytes, (*alive.values(), *inner.alive))
            for leaf in {leaf for leaf in (*self._used(one, leaves), *leaves[one.name]) if leaf in alive}:
                if ends.get(leaf, index) <= index and leaf not in arguments:
                    now -= alive.pop(leaf)[1].bytes
        self.known[computation.name] = best
        return best

    def _inner(self, instruction: Instruction) -> Iterator[Peak]:
        if instruction.opcode in ("while", "conditional", "call"):
            called = [instruction.called[key] for key in ("body", "calls", "to_apply") if key in instruction.called]
            for name in (*called, *instruction.branches):
                yield self.peak(self.program.module.computations[name])

    def _used(self, instruction: Instruction, leaves: dict[str, list[Leaf]]) -> list[Leaf]:
        return [leaf for name in instruction.operands for leaf in leaves.get(name, [])]

    def _made(
        self, one: Instruction, computation: Computation, leaves: dict[str, list[Leaf]]
    ) -> Iterator[tuple[Leaf, Array]]:
        """The buffers that come to life with an instruction. Arrays outside the device's memory take none of it."""
        if one.opcode == "parameter" or one.opcode in _NO_BUFFERS:
            return
        for leaf, array in zip(leaves[one.name], _results(one, computation), strict=False):
            if leaf[0] == one.name and array.space != self._fast_memory:
                yield leaf, array

    @property
    def _fast_memory(self) -> int | None:
        """The memory space of a TPU's vector memory; GPU spaces all lie in the device's memory."""
        return 1 if self.program.platform == "tpu" else None

    def _leaves(self, computation: Computation) -> dict[str, list[Leaf]]:
        """For each instruction the arrays that it stands for, by who made them."""
        leaves: dict[str, list[Leaf]] = {}
        for one in computation.instructions:
            given = [leaves.get(name, []) for name in one.operands]
            if one.opcode == "tuple":
                leaves[one.name] = [leaf for each in given for leaf in each]
            elif one.opcode == "get-tuple-element" and given:
                index = int(one.attribute(r"index=(\d+)") or 0)
                leaves[one.name] = given[0][index : index + 1]
            elif (one.opcode in _SAME_BUFFERS or one.opcode.endswith("-done")) and given:
                leaves[one.name] = given[0]
            elif one.opcode == "dynamic-update-slice" or self._updated(one) is not None:
                leaves[one.name] = given[self._updated(one) or 0]
            else:
                leaves[one.name] = [(one.name, index) for index in range(len(_results(one, computation)))]
        return leaves

    def _updated(self, fusion: Instruction) -> int | None:
        """The operand that a fusion updates in place, if that is all it gives back."""
        if fusion.opcode not in ("fusion", "fusion-start") or len(fusion.arrays) != 1:
            return None
        inside = self.program.module.computations[fusion.called["calls"]]
        result = inside.root
        while result.opcode == "bitcast":
            result = inside.by_name[result.operands[0]]
        if result.opcode != "dynamic-update-slice":
            return None
        target = inside.by_name[result.operands[0]]
        while target.opcode == "bitcast":
            target = inside.by_name[target.operands[0]]
        return int(target.constant) if target.opcode == "parameter" else None


def _results(one: Instruction, computation: Computation) -> tuple[Array, ...]:
    """The arrays that an instruction gives: of a start, those of its end."""
    if one.opcode.endswith("-start"):
        end = next((user for user in computation.users[one.name] if user.opcode.endswith("-done")), None)
        return end.arrays if end else one.arrays
    return one.arrays
