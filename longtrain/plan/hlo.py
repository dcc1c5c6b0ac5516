"""Reads the text of a compiled XLA program: its computations, their instructions in the order they are scheduled in.

A line of the text is

    [ROOT] %name = SHAPE opcode(%operand, …), attribute=…, metadata={…}, backend_config={…}

SHAPE is `bf16[2,16]{1,0:T(8,128)S(1)}` (the braces: order of the dims, tiles, memory space) or a tuple of such. What
differs between versions and platforms is met here: operands with their shapes or without, names with % or without,
source lines in the metadata or in tables at the head of the text, trip counts that XLA states or that are read from
the loop's condition.
"""

import json
import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}

_ARRAY = re.compile(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\](?:\{([^}]*)\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_NAME = re.compile(r"%([\w.\-]+)")

# These hand on what they are given, in whole or in part: no bytes move and nothing is computed.
NO_WORK = frozenset(
    ("parameter", "constant", "iota", "partition-id", "replica-id", "tuple", "get-tuple-element", "bitcast")
    + ("after-all", "opt-barrier", "add-dependency")
)


Linear = tuple[int, int]
"""How often a counter stands in a number, and what is added to it."""


@dataclass(frozen=True)
class Array:
    """An array of the program: a device's part of it. `space` is the memory space, 0 the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        return math.prod(self.dims) * _bits(self.dtype) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    """Bits of an element: f8e4m3fn has 8, bf16 16, s4 4."""
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    return int(width.group(1)) if width else 8


@dataclass
class Instruction:
    """One line. `arrays` are the results' (of a tuple all, in order); `attributes` all text after the operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    constant: str
    """What a constant's parentheses hold, e.g. "7"; for a parameter, its number."""

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @cached_property
    def called(self) -> dict[str, str]:
        """What of another computation it calls: calls, body, condition, to_apply, … -> its name."""
        return dict(_CALLED.findall(self.attributes))

    @cached_property
    def branches(self) -> list[str]:
        """Computations of a conditional."""
        if listed := _BRANCHES.search(self.attributes):
            return _NAME.findall(listed.group(1)) or [name.strip() for name in listed.group(1).split(",")]
        return [self.called[key] for key in ("true_computation", "false_computation") if key in self.called]

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern in the attributes."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else None

    @cached_property
    def op_name(self) -> str:
        """The path of names that JAX gave the operation: transformations, scopes, primitive."""
        return self.attribute(r'op_name="([^"]*)"') or ""

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """XLA's own notes on how the instruction is carried out; empty where there are none, or not in JSON."""
        at = self.attributes.find("backend_config=")
        if at < 0:
            return {}
        try:
            config, _ = json.JSONDecoder().raw_decode(self.attributes, at + len("backend_config="))
        except ValueError:
            return {}
        return config if isinstance(config, dict) else {}


@dataclass
class Computation:
    """Instructions in their schedule's order."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in reversed(self.instructions) if instruction.is_root)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]

    def uses(self, instruction: Instruction) -> list[Instruction]:
        return self.users[instruction.name]

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {name: [] for name in self.by_name}
        for instruction in self.instructions:
            for name in instruction.operands:
                if name in found:
                    found[name].append(instruction)
        return found


@dataclass
class Module:
    """A whole program."""

    computations: dict[str, Computation]
    entry: Computation
    frames: dict[int, tuple[str, int, int]]
    """Stack frame -> file, line, the calling frame (0 for none)."""

    def source(self, instruction: Instruction, package: str = "longtrain") -> str:
        """`file:line` that an instruction comes from: the innermost of the package's own, else the innermost."""
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        innermost = ""
        at = int(frame) if frame else 0
        while at in self.frames:
            path, line, at = self.frames[at]
            place = f"{_short(path, package)}:{line}"
            if f"/{package}/" in path:
                return place
            innermost = innermost or place
        if innermost:
            return innermost
        path_, line_ = instruction.attribute(r'source_file="([^"]*)"'), instruction.attribute(r"source_line=(\d+)")
        return f"{_short(path_, package)}:{line_}" if path_ and line_ else ""

    def trips(self, loop: Instruction, caller: Computation) -> int | None:
        """How often a while loop's body runs; None where that depends on the data."""
        stated = loop.backend_config.get("known_trip_count", {}).get("n")
        return int(stated) if stated is not None else self._counted(loop, caller)

    def _counted(self, loop: Instruction, caller: Computation) -> int | None:
        """Of a condition `counter < constant`, for a counter that starts at a constant and grows by one, or by more
        where the compiler has unrolled the loop."""
        condition = self.computations[loop.called["condition"]]
        test = condition.root
        if test.opcode == "fusion":
            condition = self.computations[test.called["calls"]]
            test = condition.root
        sides = [_copied(condition, operand) for operand in condition.operands(test)]
        if test.opcode != "compare" or "direction=LT" not in test.attributes or len(sides) != 2:
            return None
        counter, limit = sides
        if limit.opcode != "constant" or counter.opcode not in ("get-tuple-element", "parameter"):
            return None
        index = int(counter.attribute(r"index=(\d+)") or 0)
        start = _element(caller, loop.operands[0], index)
        growth = self._growth(self.computations[loop.called["body"]], index)
        if start is None or start.opcode != "constant" or not growth:
            return None
        return max(0, -(-(int(limit.constant) - int(start.constant)) // growth))

    def _growth(self, body: Computation, index: int) -> int | None:
        """What a step of a loop adds to the counter, the element `index` of what it carries."""
        after = _element(body, body.root.name, index)
        counters: dict[str, Linear] = {one.name: (1, 0) for one in body.instructions if _is_element(one, body, index)}
        value = self._sum(after, body, counters) if after is not None else None
        return value[1] if value is not None and value[0] == 1 else None

    def _sum(self, one: Instruction, inside: Computation, known: dict[str, Linear]) -> Linear | None:
        """An integer as counters * known + constant, if it is one."""
        one = _copied(inside, one, stop=known)
        if one.name in known:
            return known[one.name]
        if one.opcode == "constant" and re.fullmatch(r"-?\d+", one.constant):
            return 0, int(one.constant)
        values = [self._sum(operand, inside, known) for operand in inside.operands(one)]
        if one.opcode == "add":
            if len(values) == 2 and values[0] and values[1]:
                return values[0][0] + values[1][0], values[0][1] + values[1][1]
        elif one.opcode == "fusion":
            fused = self.computations[one.called["calls"]]
            given = {
                parameter.name: value
                for parameter in fused.instructions
                if parameter.opcode == "parameter" and (value := values[int(parameter.constant)])
            }
            return self._sum(fused.root, fused, given)
        return None


def _is_element(one: Instruction, body: Computation, index: int) -> bool:
    of_parameter = one.opcode == "get-tuple-element" and body.by_name[one.operands[0]].opcode == "parameter"
    return of_parameter and one.attribute(r"index=(\d+)") == str(index)


def _element(computation: Computation, tuple_name: str, index: int) -> Instruction | None:
    made = computation.by_name.get(tuple_name)
    if made is None or made.opcode != "tuple" or index >= len(made.operands):
        return None
    return _copied(computation, computation.by_name[made.operands[index]])


def _copied(computation: Computation, instruction: Instruction, stop: Container[str] = frozenset()) -> Instruction:
    """What an instruction is a copy of."""
    copies = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape")
    while instruction.opcode in copies and instruction.name not in stop:
        instruction = computation.by_name[instruction.operands[0]]
    return instruction


def parse(text: str) -> Module:
    """The program of `compiled.as_text()`.

    Raises:
      ValueError: for a text that is no such program, or not scheduled.
    """
    header = text[: text.find("\n")]
    if "is_scheduled=true" not in header:
        raise ValueError(f"no scheduled HLO text: it begins with {header[:100]!r}")
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    current: Computation | None = None
    for line in text.splitlines():
        if current is None:
            if head := _COMPUTATION.match(line):
                current = computations[head.group(2)] = Computation(head.group(2))
                entry = current if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif start := _INSTRUCTION.match(line):
            current.instructions.append(_instruction(line, start))
    if entry is None:
        raise ValueError("no HLO text: it has no ENTRY computation")
    return Module(computations, entry, _frames(text))


def _instruction(line: str, start: re.Match[str]) -> Instruction:
    at = start.end()
    shape_end = _closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    while line[shape_end] != " ":  # the layout of a tuple's parentheses
        shape_end += 1
    opens = line.index("(", shape_end)
    closes = _closing(line, opens)
    inside = line[opens + 1 : closes]
    return Instruction(
        name=start.group(2),
        opcode=line[shape_end + 1 : opens],
        arrays=tuple(_arrays(line[at:shape_end])),
        operands=tuple(_operands(inside)),
        attributes=line[closes + 1 :],
        is_root=bool(start.group(1)),
        constant=inside,
    )


def _operands(text: str) -> list[str]:
    if "%" in text:
        return _NAME.findall(text)
    # Without % a name is the last word of each part that is not within brackets.
    plain = re.sub(r"[\[{(][^\]})]*[\]})]", "", re.sub(r"/\*.*?\*/", "", text))
    return [part.split()[-1] for part in plain.split(",") if part.strip()]


def _arrays(shape: str) -> Iterator[Array]:
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        sizes = tuple(int(size.lstrip("<=")) for size in dims.split(",") if size)
        yield Array(dtype, sizes, int(space.group(1)) if space else 0)


def _closing(line: str, opens: int) -> int:
    """Index of the parenthesis that closes the one at `opens`; quoted text may hold any."""
    depth, quoted = 0, False
    for index in range(opens, len(line)):
        character = line[index]
        if character == '"' and line[index - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                return index
    raise ValueError(f"unbalanced parentheses: {line[:200]}")


def _frames(text: str) -> dict[int, tuple[str, int, int]]:
    """The tables at the head of the text: FileNames, FileLocations, StackFrames."""
    head = text[: text.find("\n%")] if "\nStackFrames" in text else ""
    files = {int(number): path for number, path in re.findall(r'^(\d+) "(.*)"$', _table(head, "FileNames"), re.M)}
    locations = {
        int(number): (files.get(int(path), ""), int(line))
        for number, path, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)", _table(head, "FileLocations"), re.M
        )
    }
    rows = re.findall(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(head, "StackFrames"), re.M)
    frames = {}
    for number, location, parent in rows:
        caller = int(parent or 0)
        if int(location) in locations:
            frames[int(number)] = (*locations[int(location)], 0 if caller == int(number) else caller)
    return frames


def _table(head: str, name: str) -> str:
    at = head.find(f"\n{name}\n")
    return head[at : head.find("\n\n", at)] if at >= 0 else ""


def _short(path: str, package: str) -> str:
    """The path from the package on, or the file's name."""
    at = path.rfind(f"/{package}/")
    return path[at + 1 :] if at >= 0 else path.rsplit("/", 1)[-1]
