"""How long the transfers of a compiled step are waited for: a model of time laid over XLA's own schedule.

A device has one queue of compute and one of transfers, and takes the program's instructions in the order in which XLA
scheduled them. Compute takes the longer of its FLOPs over the rate of matrix products and its bytes over the memory's
bandwidth; attention kernels take what the estimate says of them. A transfer begins at its start, when the transfer
before it has ended, and takes its bytes over the link's bandwidth; where the program comes to its end before that, the
rest is exposed. A synchronous transfer is exposed whole. What XLA decided is in the order; the rates are assumptions
(`assumptions.yaml`); nothing here was measured.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from longtrain.plan.hlo import NO_WORK, Array, Computation, Instruction
from longtrain.plan.program import Collective, Place, Program

# Their work is done elsewhere: by what they call, by other units than compute, or at their start.
_NO_COMPUTE = NO_WORK | {"while", "conditional", "call", "copy-start", "copy-done", "fusion-done", "async-update"}

_SLICES = ("dynamic-slice", "slice", "gather")
_HANDS_ON = ("bitcast", "reshape", "get-tuple-element", "convert", "copy")


@dataclass(frozen=True)
class Rates:
    """What things take.

    Attributes:
      flops: FLOP/s of matrix products. memory: bytes/s.
      attention: seconds of one call of the attention kernel, by scope.
      transfer: seconds of a collective, once.
    """

    flops: float
    memory: float
    attention: Mapping[str, float]
    transfer: Callable[[Collective], float]


@dataclass
class Transfer:
    """A collective in its schedule. Seconds are those of one time; `beside` is the compute between start and end, and
    `longest` the instruction that takes most of it."""

    collective: Collective
    seconds: float
    exposed: float = 0.0
    beside: float = 0.0
    longest: Instruction | None = None

    @property
    def exposed_seconds(self) -> float:
        """Of a step."""
        return self.exposed * self.collective.times


@dataclass(frozen=True, eq=False)
class Event:
    """Something that takes time, in seconds from its computation's beginning.

    Attributes:
      lane: compute, transfer, wait (for a transfer) or loop (what runs the computation `inner`, `count` times).
    """

    lane: str
    start: float
    end: float
    instruction: Instruction
    collective: Collective | None = None
    inner: str = ""
    count: float = 1


@dataclass(frozen=True)
class Schedule:
    """A step's time by the model.

    Attributes:
      transfers: in the program's order. seconds: of the whole step.
      compute: seconds of each instruction's compute, once, with all that it calls.
      events: of each computation, once. entry: the computation that is the step.
    """

    transfers: list[Transfer]
    seconds: float
    compute: Mapping[str, float]
    events: Mapping[str, list[Event]]
    entry: str

    @property
    def exposed_seconds(self) -> float:
        return sum(transfer.exposed_seconds for transfer in self.transfers)


@dataclass
class _Flight:
    transfer: Transfer
    ends: float
    longest_seconds: float = 0.0


@dataclass
class _Simulation:
    program: Program
    rates: Rates
    times: Mapping[str, float]
    seconds: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)

    def run(self, computation: Computation) -> float:
        """Seconds of a computation, once; the transfers in it are noted."""
        if computation.name in self.seconds:
            return self.seconds[computation.name]
        now = link_free = 0.0
        flights: dict[str, _Flight] = {}
        events: list[Event] = []
        for instruction in computation.instructions:
            if instruction.opcode.endswith("-done") and (flight := flights.pop(instruction.operands[0], None)):
                flight.transfer.exposed = max(0.0, flight.ends - now)
                events.append(
                    Event("wait", now, now + flight.transfer.exposed, instruction, flight.transfer.collective)
                )
                now += flight.transfer.exposed
                continue
            started = now
            collective = self.program.collective(Place(computation, instruction, self.times[computation.name]))
            if collective is not None and collective.devices > 1:
                transfer = Transfer(collective, self.rates.transfer(collective))
                self.transfers.append(transfer)
                link_free = max(now, link_free) + transfer.seconds
                events.append(Event("transfer", link_free - transfer.seconds, link_free, instruction, collective))
                if collective.asynchronous:
                    flights[instruction.name] = _Flight(transfer, link_free)
                else:
                    transfer.exposed = link_free - now
                    events.append(Event("wait", now, link_free, instruction, collective))
                    now = link_free
                continue
            now += self.compute(instruction, computation)
            events.append(Event("compute", started, now, instruction))
            for inner, count in self.program.callees(instruction, computation):
                begun = now
                now += count * self.run(inner)
                events.append(Event("loop", begun, now, instruction, inner=inner.name, count=count))
            self.spent[instruction.name] = now - started
            for flight in flights.values():
                flight.transfer.beside += now - started
                if now - started > flight.longest_seconds:
                    flight.longest_seconds, flight.transfer.longest = now - started, instruction
        self.seconds[computation.name] = now
        self.events[computation.name] = [event for event in events if event.end > event.start]
        return now

    def compute(self, instruction: Instruction, computation: Computation) -> float:
        """Seconds of what an instruction itself computes, once."""
        if (scope := self.program.attention(instruction)) is not None:
            return self.rates.attention[scope]
        if instruction.opcode in _NO_COMPUTE or instruction.opcode.endswith("-done"):
            return 0.0
        flops = self.program.matmul_flops(instruction, computation)
        return max(flops / self.rates.flops, touched(instruction, computation, self.program) / self.rates.memory)


def simulate(program: Program, rates: Rates) -> Schedule:
    """The step's schedule in time. The program must be scheduled."""
    times: dict[str, float] = defaultdict(float)
    for place in program.places:
        if place.instruction.is_root:
            times[place.computation.name] += place.times
    simulation = _Simulation(program, rates, times)
    seconds = simulation.run(program.module.entry)
    entry = program.module.entry.name
    return Schedule(simulation.transfers, seconds, simulation.spent, simulation.events, entry)


def touched(instruction: Instruction, computation: Computation, program: Program) -> int:
    """Bytes of memory that an instruction reads and writes: of what it slices or updates, only that part."""
    operands = computation.operands(instruction)
    if instruction.opcode in ("fusion", "fusion-start") and "calls" in instruction.called:
        inside = program.module.computations[instruction.called["calls"]]
        parameters = {int(one.constant): one for one in inside.instructions if one.opcode == "parameter"}
        read = sum(
            _read(parameters[number], inside) if number in parameters else operand.bytes
            for number, operand in enumerate(operands)
        )
        return read + _written(inside.root, inside)
    if instruction.opcode in _SLICES:
        return 2 * instruction.bytes
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1].bytes
    return sum(operand.bytes for operand in operands) + instruction.bytes


def _read(parameter: Instruction, inside: Computation) -> int:
    """Bytes that a fusion reads of one of its parameters."""
    total = 0
    for user in inside.users[parameter.name]:
        if user.opcode in _SLICES:
            total += user.bytes
        elif user.opcode in ("bitcast", "reshape"):
            total += _read(user, inside)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue
        else:
            return parameter.bytes
    return min(total, parameter.bytes)


def _written(result: Instruction, inside: Computation) -> int:
    """Bytes that a fusion writes of one of its results."""
    operands = inside.operands(result)
    if result.opcode == "tuple":
        return sum(_written(operand, inside) for operand in operands)
    if result.opcode in _HANDS_ON and operands and math.prod(_dims(operands[0])) == math.prod(_dims(result)):
        return min(_written(operands[0], inside), result.bytes)
    return operands[1].bytes if result.opcode == "dynamic-update-slice" else result.bytes


def _dims(instruction: Instruction) -> tuple[int, ...]:
    arrays: tuple[Array, ...] = instruction.arrays
    return arrays[0].dims if arrays else ()
