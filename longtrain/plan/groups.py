"""Which devices a collective joins, and along which axes of the mesh they lie.

XLA writes the groups of a collective in one of four ways: `{{0,1},{2,3}}`, `{}` for all, `[2,2]<=[4]` (an iota,
reshaped, transposed by a `T(1,0)` and cut into rows), or by the axes of a mesh, `mesh['x'=2,'y'=4] {'y'}`, which need
not be ours; a permute lists pairs of source and target. Devices are numbered in the mesh's own order.
"""

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

from longtrain.plan.hlo import Instruction

UNKNOWN = "unknown"
"""In place of axes, for groups that no axes of the mesh give."""

_IOTA = re.compile(r"\[(\d+(?:,\d+)*)\]<=\[(\d+(?:,\d+)*)\](?:T\((\d+(?:,\d+)*)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*)\))? \{([^}]*)\}")
_SUB_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")

Sizes = tuple[tuple[str, int], ...]


def axes(instruction: Instruction, mesh: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes that a collective runs over, and the devices that it joins (1: it does nothing)."""
    sizes = tuple(mesh.items())
    pairs = instruction.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
    if pairs is not None:
        return _axes_of_pairs(re.findall(r"(\d+),(\d+)", pairs), sizes)
    groups = _groups(instruction, math.prod(mesh.values()))
    size = max((len(group) for group in groups), default=1)
    if size == 1:
        return (), 1
    return _by_groups(sizes).get(frozenset(frozenset(group) for group in groups), (UNKNOWN,)), size


def _groups(instruction: Instruction, devices: int) -> list[list[int]]:
    text = instruction.attribute(r"replica_groups=(.*)") or "{}"
    if listed := re.match(r"\{((?:\{[\d,]*\},?)*)\}", text):
        groups = [[int(id) for id in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed.group(1))]
        return groups or [list(range(devices))]
    if iota := _IOTA.match(text):
        shape, reshaped, order = ([int(size) for size in part.split(",")] if part else None for part in iota.groups())
        assert shape is not None and reshaped is not None
        ids = np.arange(math.prod(reshaped)).reshape(reshaped)
        return (ids if order is None else ids.transpose(order)).reshape(shape).tolist()
    if named := _MESH.match(text):
        return _mesh_groups(*named.groups())
    raise ValueError(f"groups of {instruction.name} cannot be read: {text[:100]}")


def _mesh_groups(mesh: str, device_ids: str | None, chosen: str) -> list[list[int]]:
    """Groups along the chosen axes of XLA's own mesh; `'x':(2)4` is the part of size 4 of x after the first 2."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    dims: list[int] = []
    inside: list[bool] = []
    wanted = {name: (before, size) for name, before, size in _SUB_AXIS.findall(chosen)}
    for name, size in sizes.items():
        before, part = wanted.get(name, ("", ""))
        if part:
            dims += [int(before), int(part), size // (int(before) * int(part))]
            inside += [False, True, False]
        else:
            dims.append(size)
            inside.append(name in wanted)
    ids = np.arange(math.prod(dims))
    if device_ids:
        ids = np.array([int(id) for id in re.findall(r"\d+", device_ids)])
    order = [i for i, within in enumerate(inside) if not within] + [i for i, within in enumerate(inside) if within]
    width = math.prod(size for size, within in zip(dims, inside, strict=True) if within)
    return ids.reshape(dims).transpose(order).reshape(-1, width).tolist()


@functools.cache
def _by_groups(sizes: Sizes) -> dict[frozenset[frozenset[int]], tuple[str, ...]]:
    """The groups of every choice of axes. Axes of size 1 join nothing and are in none."""
    names = [name for name, size in sizes if size > 1]
    ids = np.arange(math.prod(size for _, size in sizes)).reshape([size for _, size in sizes if size > 1])
    found = {}
    for choice in range(1, 1 << len(names)):
        chosen = [axis for axis in range(len(names)) if choice >> axis & 1]
        rest = [axis for axis in range(len(names)) if axis not in chosen]
        width = math.prod(ids.shape[axis] for axis in chosen)
        rows = ids.transpose(rest + chosen).reshape(-1, width).tolist()
        found[frozenset(frozenset(row) for row in rows)] = tuple(names[axis] for axis in chosen)
    return found


def _axes_of_pairs(pairs: list[tuple[str, str]], sizes: Sizes) -> tuple[tuple[str, ...], int]:
    """Axes along which any source and its target differ."""
    shape = [size for _, size in sizes]
    sources, targets = np.array([[int(id) for id in pair] for pair in pairs]).reshape(-1, 2).T
    places = zip(np.unravel_index(sources, shape), np.unravel_index(targets, shape), strict=True)
    names = tuple(name for (name, _), (at, to) in zip(sizes, places, strict=True) if (at != to).any())
    return names, math.prod(size for name, size in sizes if name in names)
