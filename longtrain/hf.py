"""The weights of Hugging Face's Llama folders, into our parameters and back, a part of a tensor at a time.

Theirs and ours differ in two ways: a matrix there is [out, in], here [in, out] with the heads apart; and a layer's
tensors have names of their own there, while here all layers are stacked. So each of their tensors, mapped from its
file, is one of our parameters (or a layer of one) as another view of the same memory, and nothing is read or written
but what is used.

A safetensors file is eight bytes of length, a JSON header of that length with each tensor's dtype, shape and place, and
the tensors end to end (https://github.com/huggingface/safetensors, "Format"). q and k need no reordering: `ops/rope.py`
pairs a head's dims as transformers does.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from longtrain.errors import CheckpointError
from longtrain.model import Params

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 5 * 10**9
"""The usual most of a file of weights."""

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}
_NAMES = {kind: name for name, kind in DTYPES.items()}

Path_ = tuple[str, ...]
"""A parameter's place in our tree: ("layers", "q_DNH")."""
Shapes = Mapping[Path_, tuple[int, ...]]
"""Of every parameter, the layers' with a leading L."""
Index = tuple[slice, ...]

# Their name, and how many of our dims, the first ones, are a matrix's input; None: the same shape in both.
_OUTER: dict[str, tuple[str, int | None]] = {
    "embed_VD": ("model.embed_tokens.weight", None),
    "final_norm_D": ("model.norm.weight", None),
    "head_DV": ("lm_head.weight", 1),
}
_LAYER: dict[str, tuple[str, int | None]] = {
    "attention_norm_D": ("input_layernorm.weight", None),
    "q_DNH": ("self_attn.q_proj.weight", 1),
    "k_DKH": ("self_attn.k_proj.weight", 1),
    "v_DKH": ("self_attn.v_proj.weight", 1),
    "out_NHD": ("self_attn.o_proj.weight", 2),
    "mlp_norm_D": ("post_attention_layernorm.weight", None),
    "gate_DF": ("mlp.gate_proj.weight", 1),
    "up_DF": ("mlp.up_proj.weight", 1),
    "down_FD": ("mlp.down_proj.weight", 1),
}


@dataclass(frozen=True)
class Tensor:
    """One of their tensors, `name` and `shape`, and what of ours it is: the parameter at `path`, or its `layer`."""

    name: str
    shape: tuple[int, ...]
    path: Path_
    layer: int | None
    ours: tuple[int, ...]
    """The shape of the parameter, or of one layer of it."""

    def view(self, theirs: np.ndarray) -> np.ndarray:
        """Their array as ours: the same memory, which an assignment to the view changes."""
        _, inputs = _named(self.path)
        return theirs if inputs is None else theirs.T.reshape(self.ours)  # an axis split in two: never a copy


def shapes_of(parameters: Params) -> dict[Path_, tuple[int, ...]]:
    """The shapes of a tree of arrays, by their paths."""
    return {
        tuple(key.key for key in path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(parameters)
    }


def _named(path: Path_) -> tuple[str, int | None]:
    return _LAYER[path[1]] if path[0] == "layers" else _OUTER[path[0]]


def tensors(shapes: Shapes) -> Iterator[Tensor]:
    """All of their tensors for parameters of these shapes, layer after layer, in the order of the files."""

    def tensor(path: Path_, layer: int | None) -> Tensor:
        name, inputs = _named(path)
        ours = shapes[path] if layer is None else shapes[path][1:]
        theirs = ours if inputs is None else (math.prod(ours[inputs:]), math.prod(ours[:inputs]))
        return Tensor(name if layer is None else f"model.layers.{layer}.{name}", theirs, path, layer, ours)

    yield tensor(("embed_VD",), None)
    stacked = [path for path in shapes if path[0] == "layers"]
    for layer in range(shapes[stacked[0]][0]):
        yield from (tensor(path, layer) for path in stacked)
    yield from (tensor((name,), None) for name in ("final_norm_D", "head_DV") if (name,) in shapes)


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `offset` in bytes from the file's begin."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def map(self, mode: Any = "r") -> np.ndarray:
        """The tensor, mapped into memory for as long as the array lives."""
        return np.memmap(self.file, DTYPES[self.dtype], mode, self.offset, self.shape)


class Weights:
    """The safetensors files of a folder, held to the shapes of our parameters. `vocabulary`: rows of their embedding,
    fewer than ours where ours is padded; the padding is zeros."""

    def __init__(self, folder: Path, shapes: Shapes, vocabulary: int):
        """
        Raises:
          CheckpointError: when a file is missing or damaged, or the folder holds not just the tensors of such a model.
        """
        self._shapes = shapes
        self._vocabulary = vocabulary
        cut = {path: tuple(vocabulary if at == padded_dim(path) else n for at, n in enumerate(shape))
               for path, shape in shapes.items()}  # fmt: skip
        self._tensors = {(tensor.path, tensor.layer): tensor for tensor in tensors(cut)}
        self._stored = _stored(folder)
        self._check(folder)
        self.dtypes = {self._stored[tensor.name].dtype for tensor in self._tensors.values()}

    def _check(self, folder: Path) -> None:
        wanted = {tensor.name: tensor for tensor in self._tensors.values()}
        # Old exports keep what is computed from the config, and some a tied head a second time.
        tied = _OUTER["head_DV"][0] if ("head_DV",) not in self._shapes else None
        extra = sorted(
            name
            for name in self._stored
            if name not in wanted and name != tied and not name.endswith("rotary_emb.inv_freq")
        )
        problems = [f"{name} is missing" for name in wanted if name not in self._stored]
        problems += [f"{name} is none of a Llama's with this config" for name in extra]
        for name in wanted.keys() & self._stored.keys():
            stored, shape = self._stored[name], wanted[name].shape
            if stored.dtype not in DTYPES:
                problems.append(f"{name} has dtype {stored.dtype}: only {', '.join(DTYPES)} are read")
            elif stored.shape != shape:
                problems.append(f"{name} is {list(stored.shape)}, the config makes it {list(shape)}")
        if problems:
            more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
            raise CheckpointError(f"{folder}: " + "; ".join([*problems[:8], *more]))

    def part(self, path: Path_, layer: int | None, index: Index) -> np.ndarray:
        """Part `index` of a parameter, or of a layer of it, in the dtype that it is kept in. No more is read."""
        tensor = self._tensors[path, layer]
        found = tensor.view(self._stored[tensor.name].map())
        shape = self._shapes[path] if layer is None else self._shapes[path][1:]
        asked = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, shape, strict=True))
        inside = np.ascontiguousarray(found[index])
        if inside.shape == asked:
            return inside
        padded = np.zeros(asked, inside.dtype)
        padded[tuple(slice(size) for size in inside.shape)] = inside
        return padded

    def parameters(self, abstract: Params) -> Params:
        """All of it, as `abstract` shards it and in its dtypes: each device's part is read as it is placed."""

        def leaf(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
            ours = tuple(key.key for key in path)

            def read(index: Index | None) -> np.ndarray:
                assert index is not None  # of an array that has dims
                if ours[0] != "layers":
                    return self.part(ours, None, index).astype(shape.dtype)
                layers = range(shape.shape[0])[index[0]]
                first = self.part(ours, layers[0], index[1:])
                made = np.empty((len(layers), *first.shape), shape.dtype)
                for place, layer in enumerate(layers):
                    made[place] = self.part(ours, layer, index[1:]) if place else first
                return made

            return jax.make_array_from_callback(shape.shape, shape.sharding, read)

        return jax.tree_util.tree_map_with_path(leaf, abstract)


def padded_dim(path: Path_) -> int | None:
    """Which dim of a parameter is the vocabulary."""
    return {"embed_VD": 0, "head_DV": 1}.get(path[0])


def _stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's files, by name."""
    found: dict[str, Stored] = {}
    for file in _files(folder):
        for name, stored in _header(file).items():
            if name in found:
                raise CheckpointError(f"{file}: {name} is also in {found[name].file.name}")
            found[name] = stored
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        found = sorted(folder.glob("*.safetensors"))
        if len(found) != 1:
            missing = (
                f"{INDEX} is not there, which says what the {len(found)} files hold" if found else "no safetensors file"
            )
            raise CheckpointError(f"{folder}: {missing}")
        return found
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: is no index of safetensors files: {error}") from error
    if missing_files := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder}: of the files in {INDEX} these are missing: {', '.join(missing_files)}")
    return [folder / name for name in names]


def _header(file: Path) -> dict[str, Stored]:
    """The tensors of a file, whose size must be what its header says."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 + length:
                raise ValueError(f"cut short: {size:,} bytes, and a header of {length:,}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        found, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, stop = entry["data_offsets"]
            stored = Stored(file, entry["dtype"], tuple(entry["shape"]), 8 + length + begin)
            if begin != end:
                raise ValueError(f"{name} begins at byte {begin:,}, and what is before it ends at {end:,}")
            if stored.dtype in DTYPES and math.prod(stored.shape) * DTYPES[stored.dtype].itemsize != stop - begin:
                raise ValueError(f"{name} has {stop - begin:,} bytes, not those of {stored.dtype} {list(stored.shape)}")
            found[name], end = stored, stop
        if size != 8 + length + end:
            raise ValueError(f"cut short or altered: {size:,} bytes, its header says {8 + length + end:,}")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{file}: is no whole safetensors file: {error}") from error
    return found


class Export:
    """Safetensors files of the usual sizes in a folder, with their index where there are several: at first all zeros.

    Raises:
      OSError: when they cannot be written.
    """

    def __init__(self, folder: Path, shapes: Shapes, dtype: str, file_bytes: int = FILE_BYTES):
        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
        files: list[list[Tensor]] = [[]]
        sizes = [0]
        for tensor in tensors(shapes):
            size = math.prod(tensor.shape) * kind.itemsize
            if files[-1] and sizes[-1] + size > file_bytes:
                files.append([])
                sizes.append(0)
            files[-1].append(tensor)
            sizes[-1] += size
        self._tensors = {(tensor.path, tensor.layer): tensor for group in files for tensor in group}
        self._stored: dict[str, Stored] = {}
        for number, group in enumerate(files, start=1):
            name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            self._stored |= _allocate(folder / name, group, kind)
        if len(files) > 1:
            weight_map = {name: stored.file.name for name, stored in self._stored.items()}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def put(self, path: Path_, layer: int | None, index: Index, part: np.ndarray) -> None:
        """Write a part of a parameter, or of a layer of it."""
        tensor = self._tensors[path, layer]
        mapped = self._stored[tensor.name].map("r+")
        tensor.view(mapped)[index] = part


def _allocate(file: Path, group: list[Tensor], kind: np.dtype) -> dict[str, Stored]:
    """A file with the header of these tensors and room for them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in group:
        begin, end = end, end + math.prod(tensor.shape) * kind.itemsize
        header[tensor.name] = {"dtype": _NAMES[kind], "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        os.posix_fallocate(stream.fileno(), 0, 8 + len(text) + end)  # a full disk is found now, not by a signal later
    return _header(file)
