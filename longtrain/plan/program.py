"""What a compiled step does, read from its scheduled HLO text: how often each instruction runs, every collective, and
the FLOPs of the matrix products. All figures are of one device and one step.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from longtrain.ops.kernels import BACKWARD_SCOPE, FORWARD_SCOPE
from longtrain.plan import groups
from longtrain.plan.hlo import Array, Computation, Instruction, Module, parse

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

# Custom calls that are an attention kernel when they stand in its scope; others there sort or allocate.
_KERNEL_CALLS = re.compile(r"fmha|triton|mosaic|tpu_custom_call|flash")


@dataclass(frozen=True)
class Place:
    """An instruction, the computation it stands in, and how often a step comes there."""

    computation: Computation
    instruction: Instruction
    times: float


@dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
      kind: XLA's name. axes: of the mesh; devices: that it joins.
      arrays: what a device gives, as it lies in memory. bytes: that a device sends each time, when the devices pass
        parts round a ring: of n devices' whole result (n - 1) / n in an all-gather or reduce-scatter, twice that in an
        all-reduce, (n - 1) / n of what it holds in an all-to-all, all it holds in a permute.
      times: a step. backend: who carries it. asynchronous: other work may run between its start and its end.
      source: file:line. scope: JAX's name for the operation.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    devices: int
    arrays: tuple[Array, ...]
    bytes: int
    times: float
    backend: str
    asynchronous: bool
    source: str
    scope: str

    @property
    def held(self) -> int:
        """Bytes that a device gives."""
        return sum(array.bytes for array in self.arrays)


@dataclass(frozen=True)
class Program:
    """A compiled step. `platform` is jax's: cuda, tpu or cpu."""

    module: Module
    mesh: Mapping[str, int]
    platform: str

    @classmethod
    def read(cls, text: str, mesh: Mapping[str, int], platform: str) -> "Program":
        return cls(parse(text), mesh, platform)

    @cached_property
    def places(self) -> list[Place]:
        """Every instruction that runs by itself (not those inside a fusion), in the schedule's order.

        A loop's body counts as often as it runs, each branch of a conditional as often as all are alike. What an
        attention kernel does inside is its own: how often its loops run depends on the documents.
        """
        return list(self._walk(self.module.entry, 1.0))

    def _walk(self, computation: Computation, times: float) -> Iterator[Place]:
        for instruction in computation.instructions:
            yield Place(computation, instruction, times)
            for inner, share in self.callees(instruction, computation):
                yield from self._walk(inner, times * share)

    def callees(self, instruction: Instruction, caller: Computation) -> list[tuple[Computation, float]]:
        """What an instruction runs, and how often each time: nothing for fusions and attention kernels.

        A loop whose length the data say counts once; there is none outside attention kernels.
        """
        if self.attention(instruction) is not None:
            return []
        find = self.module.computations
        if instruction.opcode == "while":
            trips = self.module.trips(instruction, caller)
            return [(find[instruction.called["body"]], 1 if trips is None else trips)]
        if instruction.opcode == "conditional":
            return [(find[name], 1 / len(instruction.branches)) for name in instruction.branches]
        if instruction.opcode == "call":
            name = instruction.called.get("to_apply") or instruction.called["calls"]
            return [(find[name], 1)]
        return []

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective that joins more than one device."""
        found = (self.collective(place) for place in self.places)
        return [collective for collective in found if collective is not None and collective.devices > 1]

    def collective(self, place: Place) -> Collective | None:
        """The collective that starts here, if one does."""
        computation, instruction = place.computation, place.instruction
        kind = instruction.opcode.removesuffix("-start")
        carrier = instruction
        if instruction.opcode in ("async-start", "fusion"):
            inside = self.module.computations[instruction.called["calls"]]
            carrier = next((one for one in inside.instructions if one.opcode in KINDS), instruction)
            kind = carrier.opcode
            computation = inside if carrier is not instruction else computation
        if kind not in KINDS:
            return None
        if instruction.opcode == "fusion" and kind == "all-reduce" and "scatter" in instruction.called["calls"]:
            kind = "reduce-scatter"  # as TPU writes one: an all-reduce of which each device keeps its part
        joined, devices = groups.axes(carrier, self.mesh)
        arrays = tuple(array for operand in computation.operands(carrier) for array in operand.arrays)
        return Collective(
            name=instruction.name,
            kind=kind,
            axes=joined,
            devices=devices,
            arrays=arrays,
            bytes=_sent(kind, sum(array.bytes for array in arrays), devices),
            times=place.times,
            backend=self._backend(carrier),
            asynchronous=self._asynchronous(instruction),
            source=self.module.source(carrier),
            scope=carrier.op_name or instruction.op_name,
        )

    def _backend(self, collective: Instruction) -> str:
        if self.platform != "cuda":
            return {"tpu": "ici"}.get(self.platform, self.platform)
        config = collective.backend_config.get("collective_backend_config", {})
        if config.get("backend", "DEFAULT") != "DEFAULT":
            return str(config["backend"]).lower()
        return "nccl_symmetric" if config.get("collectives_mode") == "COLLECTIVES_SYMMETRIC_MEMORY" else "nccl"

    def _asynchronous(self, instruction: Instruction) -> bool:
        if not instruction.opcode.endswith("-start"):
            return False
        return not instruction.backend_config.get("collective_backend_config", {}).get("is_sync", False)

    @cached_property
    def flops(self) -> float:
        """FLOPs of the matrix products, those inside attention kernels not counted."""
        return sum(place.times * self.matmul_flops(place.instruction, place.computation) for place in self.places)

    @cached_property
    def attention_calls(self) -> dict[str, float]:
        """How often a step runs an attention kernel, by scope; those that it runs."""
        calls: dict[str, float] = {}
        for place in self.places:
            if (scope := self.attention(place.instruction)) is not None:
                calls[scope] = calls.get(scope, 0.0) + place.times
        return calls

    def attention(self, instruction: Instruction) -> str | None:
        """The scope whose attention kernel an instruction is: a loop over tiles, or a kernel of its own."""
        scope = next((scope for scope in (FORWARD_SCOPE, BACKWARD_SCOPE) if f"/{scope}/" in instruction.op_name), None)
        if scope is None:
            return None
        if instruction.opcode == "custom-call" and _KERNEL_CALLS.search(instruction.attributes):
            return scope
        return scope if instruction.opcode == "while" and self._multiplies(instruction.called["body"]) else None

    def _multiplies(self, name: str) -> bool:
        """Whether a computation, or one that it calls, holds a matrix product."""
        if name not in self._with_products:
            inside = self.module.computations[name].instructions
            self._with_products[name] = any(
                one.opcode in ("dot", "convolution")
                or any(self._multiplies(called) for called in (*one.called.values(), *one.branches))
                for one in inside
            )
        return self._with_products[name]

    @cached_property
    def _with_products(self) -> dict[str, bool]:
        return {}

    def matmul_flops(self, instruction: Instruction, computation: Computation) -> float:
        """FLOPs of an instruction's matrix products, of all that a fusion holds."""
        if instruction.opcode in ("fusion", "fusion-start") and "calls" in instruction.called:
            inside = self.module.computations[instruction.called["calls"]]
            return sum(self.matmul_flops(one, inside) for one in inside.instructions)
        if instruction.opcode == "dot":
            contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
            return _product_flops(instruction, computation, contracted)
        if instruction.opcode == "convolution":
            return _convolution_flops(instruction, computation)
        if instruction.opcode == "custom-call" and "__cublas$" in instruction.attributes:
            dims = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
            return _product_flops(instruction, computation, dims.group(1).replace('"', "") if dims else "")
        return 0.0


def _sent(kind: str, held: int, devices: int) -> int:
    if kind in ("collective-permute", "collective-broadcast"):
        return held
    if kind == "all-gather":
        return held * (devices - 1)
    return (2 if kind == "all-reduce" else 1) * held * (devices - 1) // devices


def _product_flops(instruction: Instruction, computation: Computation, contracted: str) -> float:
    lhs = computation.operands(instruction)[0].arrays[0]
    summed = math.prod(lhs.dims[int(dim)] for dim in contracted.split(",") if dim.strip())
    return 2.0 * math.prod(instruction.arrays[0].dims) * summed


def _convolution_flops(instruction: Instruction, computation: Computation) -> float:
    """TPU writes matrix products as convolutions; taps that meet the padding are no work."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels is not None, instruction.name
    operands = computation.operands(instruction)
    (lhs, rhs), out = (operand.arrays[0].dims for operand in operands[:2]), instruction.arrays[0].dims
    lhs_labels, rhs_labels, out_labels = labels.groups()
    work = 2.0 * out[out_labels.index("b")] * out[out_labels.index("f")] * rhs[rhs_labels.index("i")]
    window = _window(instruction)
    for dim in sorted(label for label in out_labels if label.isdigit()):
        taps = rhs[rhs_labels.index(dim)]
        stride, low, apart, spread = (
            window[name][int(dim)] if name in window else default
            for name, default in (("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        )
        size, count = lhs[lhs_labels.index(dim)], out[out_labels.index(dim)]
        work *= sum(_met(size, count, stride, low - tap * spread, apart) for tap in range(taps))
    return work / int(instruction.attribute(r"batch_group_count=(\d+)") or 1)


def _window(instruction: Instruction) -> dict[str, list[int]]:
    """size, stride, lhs_dilate and rhs_dilate of each spatial dim; of `pad` the part before the first element."""
    text = instruction.attribute(r"window=\{([^}]*)\}") or ""
    fields = dict(part.split("=") for part in text.split())
    return {name: [int(part.split("_")[0]) for part in value.split("x")] for name, value in fields.items()}


def _met(size: int, count: int, stride: int, before: int, dilation: int) -> int:
    """Outputs o of `count` whose input o * stride - before is one of the `size` elements, `dilation` apart."""
    last = (size - 1) * dilation
    first, end = max(0, -(-before // stride)), min(count - 1, (last + before) // stride)
    if end < first:
        return 0
    if dilation == 1:
        return end - first + 1
    return sum((output * stride - before) % dilation == 0 for output in range(first, end + 1))
