"""Writing prepared documents: shards, each on its own and in any order, and then the whole folder of them.

A shard is finished when its table is there: tokens are written first, each file under another name and renamed. So
several processes can write shards of one folder, and after a kill only what was being written is written again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import zipfile
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longtrain.data.files import sync, unfinished, whole
from longtrain.data.hashing import key
from longtrain.data.prepared import FORMAT, MANIFEST, TABLES, shard_name
from longtrain.data.tokenizers import Tokenizer

PARTS = "parts"
"""Folder of what only the making of a folder needs: the shards' tables, until they are joined."""
_DIGEST_BYTES = 16


@dataclasses.dataclass
class Counts:
    """What was read, and what of it was left out or came back otherwise. They add up over shards."""

    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    first_bad: str = ""
    inexact: int = 0
    first_inexact: str = ""
    forced_cuts: int = 0
    largest_id: int = -1

    def add(self, other: "Counts") -> None:
        for field in dataclasses.fields(self):
            mine, its = getattr(self, field.name), getattr(other, field.name)
            total = mine or its if isinstance(mine, str) else mine + its
            setattr(self, field.name, max(mine, its) if field.name == "largest_id" else total)


class ShardWriter:
    """Writes a shard, document by document, in stretches. Memory holds only the table."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype):
        """`dtype`: that of the ids. The folder must exist."""
        self._folder, self._number, self._dtype = folder, number, dtype
        self._unfinished = unfinished(folder / shard_name(number))
        self._file: BinaryIO = open(self._unfinished, "wb")  # noqa: SIM115  open as long as the writer
        self._lengths, self._name_lengths = array("q"), array("q")
        self._source_of, self._keys = array("H"), array("Q")
        self._names, self._digests = bytearray(), bytearray()
        self._begun = 0
        self.length = 0
        """Tokens of the document so far."""
        self._digest = self._new_digest()

    def extend(self, ids: np.ndarray) -> None:
        """Append to the document."""
        data = np.ascontiguousarray(ids, self._dtype).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self.length += len(ids)

    def end(self, source: int, name: str) -> None:
        """End the document, which has at least one token."""
        encoded = name.encode(errors="surrogateescape")
        self._names += encoded
        self._name_lengths.append(len(encoded))
        self._lengths.append(self.length)
        self._source_of.append(source)
        self._keys.append(key(source, int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")))
        self._digests += self._digest.digest()
        self._begun += self.length
        self.length, self._digest = 0, self._new_digest()

    def abandon(self) -> None:
        """Take the document back, as far as it was written."""
        self._file.seek(self._begun * self._dtype.itemsize)
        self._file.truncate()
        self.length, self._digest = 0, self._new_digest()

    def finish(self, counts: Counts) -> None:
        """Put the shard in its place, then its table."""
        sync(self._file)
        self._file.close()
        with open(self._unfinished, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.replace(self._unfinished, self._folder / shard_name(self._number))
        about = {"sha256": sha256, "tokens": self._begun, "bytes": self._begun * self._dtype.itemsize}
        table = _table(self._folder, self._number)
        with whole(table) as file:
            np.savez(
                file,
                lengths=np.array(self._lengths, np.int64),
                name_lengths=np.array(self._name_lengths, np.int64),
                source_of=np.array(self._source_of, np.uint16),
                keys=np.array(self._keys, np.uint64),
                names=np.frombuffer(self._names, np.uint8),
                digests=np.frombuffer(self._digests, np.uint8),
                about=np.array(json.dumps(about | {"counts": dataclasses.asdict(counts)})),
            )

    def close(self) -> None:
        """Close the file; of a shard that is not finished nothing stays."""
        self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def _new_digest(self) -> Any:
        return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def missing(folder: Path, count: int) -> list[int]:
    """The shards 0..count-1 that a folder in the making has not yet."""
    return [number for number in range(count) if not _table(folder, number).exists()]


def join(folder: Path, count: int, tokenizer: Tokenizer, dtype: np.dtype, description: Mapping[str, Any]) -> Counts:
    """Make the finished shards 0..count-1 of a folder one: their tables, and last the manifest, if there is a document.

    Returns what was counted. Memory holds one shard's table. The fingerprint is that of the documents' tokens in their
    order, however they are cut into shards.
    """
    digests = {name: hashlib.sha256() for name in ("lengths", "source_of", "keys", "digests")}
    shards: list[dict[str, Any]] = []
    counts, histogram = Counts(), np.zeros(64, np.int64)
    documents = tokens = 0
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(open(_raw(folder, name), "wb")) for name in TABLES}
        names = stack.enter_context(open(folder / "names.bin", "wb"))
        for name in ("offsets", "name_offsets"):
            files[name].write(np.zeros(1, np.int64).tobytes())
        name_bytes = 0
        for number in range(count):
            with _opened(folder, number) as table:
                about = json.loads(str(table["about"]))
                counts.add(Counts(**about.pop("counts")))
                lengths = table["lengths"]
                if not len(lengths):
                    (folder / shard_name(number)).unlink(missing_ok=True)
                    continue
                shards.append({"file": shard_name(number), **about})
                columns = {name: table[name] for name in ("source_of", "keys")}
                columns["offsets"] = tokens + np.cumsum(lengths)
                columns["name_offsets"] = name_bytes + np.cumsum(table["name_lengths"])
                for name, column in columns.items():
                    files[name].write(column.astype(TABLES[name]).tobytes())
                names.write(table["names"].tobytes())
                for name, digest in digests.items():
                    digest.update(table[name].astype(table[name].dtype.newbyteorder("<")).tobytes())
                histogram += np.bincount(_power_above(lengths), minlength=64)
            documents += len(lengths)
            tokens, name_bytes = int(columns["offsets"][-1]), int(columns["name_offsets"][-1])
    if not documents:
        return counts
    for name, kind in TABLES.items():
        _as_npy(_raw(folder, name), folder / f"{name}.npy", kind)
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    made = [tokenizer.fingerprint, *(digest.hexdigest() for digest in digests.values())]
    manifest = {
        "format": FORMAT,
        "fingerprint": hashlib.sha256(json.dumps(made).encode()).hexdigest(),
        "documents": documents,
        "tokens": tokens,
        "dtype": dtype.str,
        "tokenizer": {
            "kind": tokenizer.kind,
            "files": sorted(tokenizer.files),
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
        },
        "length_histogram": {str(1 << power): int(many) for power, many in enumerate(histogram) if many},
        "shards": shards,
        "counts": dataclasses.asdict(counts),
        **description,
    }
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    with whole(folder / MANIFEST) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    return counts


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes were writing in a folder in the making."""
    for path in folder.rglob(".*"):
        path.unlink(missing_ok=True)


def _power_above(lengths: np.ndarray) -> np.ndarray:
    """The lowest power of two that is no less, by its exponent."""
    return np.ceil(np.log2(lengths)).astype(int)


def _table(folder: Path, number: int) -> Path:
    return folder / PARTS / f"{number:05d}.npz"


@contextlib.contextmanager
def _opened(folder: Path, number: int) -> Iterator[Any]:
    try:
        with np.load(_table(folder, number), allow_pickle=False) as table:
            yield table
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise OSError(0, f"damaged ({error}): remove {folder} to begin anew", str(_table(folder, number))) from error


def _raw(folder: Path, name: str) -> Path:
    return folder / PARTS / name


def _as_npy(raw: Path, path: Path, kind: str) -> None:
    """A file of numbers with numpy's header before them."""
    dtype = np.dtype(kind)
    header = {"descr": dtype.str, "fortran_order": False, "shape": (raw.stat().st_size // dtype.itemsize,)}
    with open(path, "wb") as file, open(raw, "rb") as numbers:
        np.lib.format.write_array_header_2_0(file, header)
        while block := numbers.read(1 << 20):
            file.write(block)
    raw.unlink()
