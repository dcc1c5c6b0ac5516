"""The weights of a checkpoint as they lie on disk, a block of an array at a time and without a device.

Orbax keeps each array as a zarr array in one OCDBT store, under its path joined by dots. Orbax itself reads and writes
arrays whole (or a device's shard of them); a converter of 8B weights shall hold less.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from longtrain import digests
from longtrain.checkpoint import RunRecord, silence_orbax

Path_ = tuple[str, ...]
Index = tuple[slice, ...]
BLOCK_BYTES = 1 << 27
"""About what a block that is written has at most: less than a layer's matrix of an 8B model."""


def _open(parameters: Path, path: Path_, **more: object) -> ts.TensorStore:
    # What Orbax wrote may be either; what is written here is what Orbax's template has.
    driver = "zarr3" if json.loads((parameters / "_METADATA").read_text()).get("use_zarr3") else "zarr"
    store = {"driver": "ocdbt", "base": parameters.resolve().as_uri() + "/", "path": f"{'.'.join(path)}/"}
    return ts.open({"driver": driver, "kvstore": store} | more).result()


def blocks(parameters: Path, path: Path_) -> Iterator[tuple[Index, np.ndarray]]:
    """The array at this path of a checkpoint's weights, in the blocks that it was written in.

    Raises:
      OSError, ValueError: when it cannot be read.
    """
    array = _open(parameters, path)
    block: Any = array.chunk_layout.read_chunk.shape
    for index in _grid(array.shape, block):
        yield index, array[index].read().result()


def _grid(shape: tuple[int, ...], block: tuple[int, ...]) -> Iterable[Index]:
    starts = (range(0, size, step) for size, step in zip(shape, block, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(slice(at, min(at + step, size)) for at, step, size in zip(corner, block, shape, strict=True))


def write(
    checkpoints: Path,
    shapes: dict[Path_, tuple[int, ...]],
    dtype: np.dtype,
    read: Callable[[Path_, Index], np.ndarray],
    run: RunRecord,
) -> None:
    """Step 0 of a run that has trained nothing: its weights and its run object, with their digests.

    Args:
      read: gives a block of the parameter at a path.

    Raises:
      OSError, ValueError: when it cannot be written.
    """
    silence_orbax()
    # Orbax makes the folder, with what it wants to know of a tree, around arrays of one number; then they are replaced.
    template: dict = {}
    for path, shape in shapes.items():
        inner = template
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = jnp.zeros((1,) * len(shape), dtype)
    with ocp.CheckpointManager(checkpoints) as manager:
        items = ocp.args.Composite(parameters=ocp.args.StandardSave(template), run=ocp.args.JsonSave(run))
        manager.save(0, args=items)
        manager.wait_until_finished()
    parameters = checkpoints / "0" / "parameters"
    (parameters / "_sharding").unlink(missing_ok=True)  # the template's
    for path, shape in shapes.items():
        block = _block(path, shape, dtype)
        metadata = {"shape": shape, "chunks": block, "dtype": dtype.name if dtype.kind == "V" else dtype.str,
                    "compressor": {"id": "zstd", "level": 1}}  # fmt: skip
        array = _open(parameters, path, metadata=metadata, create=True, delete_existing=True)
        for index in _grid(shape, block):
            array[index].write(read(path, index)).result()
    digests.write(checkpoints / "0", 0, 1)


def _block(path: Path_, shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """A layer at a time, and of that as much of the first dim as BLOCK_BYTES has room for."""
    layers = 1 if path[0] == "layers" else 0
    rest = math.prod(shape[layers + 1 :]) * dtype.itemsize
    rows = min(shape[layers], max(BLOCK_BYTES // rest, 1))
    return (*(1,) * layers, rows, *shape[layers + 1 :])
