"""How far two checkpoints' weights are apart, parameter by parameter, one array of each in memory at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from longtrain.checkpoint import folder_of, silence_orbax
from longtrain.errors import CheckpointError


@dataclass(frozen=True)
class Difference:
    """Of one parameter. `largest`: of |a - b|; `relative`: |a - b| over |a|, both by the l2 norm.

    Both None where only one has it or their shapes differ, which `note` tells.
    """

    name: str
    largest: float | None
    relative: float | None
    note: str = ""

    def __str__(self) -> str:
        numbers = self.note or f"largest {self.largest:.3e}  relative {self.relative:.3e}"
        return f"{self.name:32} {numbers}"

    def to_json(self) -> dict[str, Any]:
        return {"parameter": self.name, "largest": self.largest, "relative": self.relative, "note": self.note or None}


def named(text: str, run_dir: Path) -> Path:
    """The weights that `STEP` or `RUN:STEP` names; a step alone is one of `run_dir`.

    Raises:
      CheckpointError: when there are none.
    """
    run, _, step = text.rpartition(":")
    folder = folder_of(Path(run) if run else run_dir) / step / "parameters"
    if not step.isdigit() or not folder.is_dir():
        raise CheckpointError(f"--diff {text}: no complete checkpoint {folder.parent}; name one as STEP or RUN:STEP")
    return folder


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """Of every parameter of either, in the first's order.

    Raises:
      CheckpointError: when one cannot be read.
    """
    silence_orbax()
    try:
        with ocp.PyTreeCheckpointer() as reader:
            one, other = _leaves(reader, first), _leaves(reader, second)
            for path in [*one, *(path for path in other if path not in one)]:
                yield _difference(reader, path, (first, one), (second, other))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{first} and {second} cannot be compared: {error}") from error


Leaves = dict[tuple[str, ...], Any]


def _leaves(reader: ocp.PyTreeCheckpointer, folder: Path) -> Leaves:
    """The metadata of every array, by the names on the way to it."""
    tree = reader.metadata(folder).item_metadata.tree
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _difference(reader: ocp.PyTreeCheckpointer, path: tuple[str, ...], *sides: tuple[Path, Leaves]) -> Difference:
    name = ".".join(path)
    if lacking := [folder for folder, leaves in sides if path not in leaves]:
        return Difference(name, None, None, f"not in {lacking[0].parent}")
    shapes = [tuple(leaves[path].shape) for _, leaves in sides]
    if shapes[0] != shapes[1]:
        return Difference(name, None, None, f"shapes {shapes[0]} and {shapes[1]}")
    a, b = (_read(reader, folder, path, leaves[path]) for folder, leaves in sides)
    apart, norm = a - b, float(np.linalg.norm(a))
    difference = float(np.linalg.norm(apart))
    return Difference(name, float(np.abs(apart).max()), difference / norm if norm else float(difference > 0))


def _read(reader: ocp.PyTreeCheckpointer, folder: Path, path: tuple[str, ...], leaf: Any) -> np.ndarray:
    """One array, in float64."""
    item: Any = leaf
    how: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    for name in reversed(path):
        item, how = {name: item}, {name: how}
    tree = reader.restore(folder, args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True))
    return np.asarray(jax.tree.leaves(tree)[0]).astype(np.float64)
