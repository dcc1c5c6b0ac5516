"""Tokenized documents on disk: the format and its reader; shards.py writes it.

    manifest.json       what is here and where it came from; written last, so that it stands for the whole
    tokens-00000.bin …  ids end to end, little-endian uint16 (uint32 for more than 65,536 pieces)
    offsets.npy         int64 [D + 1]: document d is tokens offsets[d]..offsets[d + 1]-1, over all shards
    source_of.npy       uint16 [D]: the number of each document's source
    keys.npy            uint64 [D]: a hash of each document's source and name, which decides its split
    names.bin           the documents' names in UTF-8, end to end
    name_offsets.npy    int64 [D + 1]: as offsets, in bytes of names.bin
    rows/               what row indices that were made of them keep for the next time
    tokenizer.model     the tokenizer, or tokenizer.json with what belongs to it; not there for `bytes`

A document lies whole in one shard. A folder is made under another name and renamed when complete, so a folder
with a manifest is complete.
"""

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longtrain.data.files import whole
from longtrain.data.tokenizers import Tokenizer, restore
from longtrain.errors import DataError

FORMAT = 2
"""Raised whenever the same sources and settings would be kept, or turned into tokens, in another way."""
MANIFEST = "manifest.json"
TABLES = {"offsets": "<i8", "source_of": "<u2", "keys": "<u8", "name_offsets": "<i8"}
"""The tables and their dtypes."""
ROWS = "rows"
"""Folder of what row indices keep: it can be removed at any time."""
_SHARDS_OPEN = 256
"""Shards mapped at a time: each map is an open file, of which a process mostly may have 1,024."""
_CHECKSUMMED_BYTES = 1 << 30
"""Up to this many bytes of shards, `verify` reads them all (a second or so); beyond, it compares sizes."""


class Prepared:
    """Tokenized documents of a folder, memory-mapped. Pickles as its path."""

    def __init__(self, folder: str | Path):
        """Open a finished folder. Raises DataError where a part is missing or of another format."""
        self.folder = Path(folder)
        try:
            self.manifest: dict[str, Any] = json.loads((self.folder / MANIFEST).read_text())
            if self.manifest["format"] != FORMAT:
                raise DataError(
                    f"{self.folder} has format {self.manifest['format']}, this version reads {FORMAT}: "
                    "remove the folder to prepare it again"
                )
            tables = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in TABLES}
            names = np.memmap(self.folder / "names.bin", np.uint8, "r")
            self._dtype = np.dtype(self.manifest["dtype"])
            for shard in self.manifest["shards"]:
                (self.folder / shard["file"]).stat()
        except OSError as error:
            raise DataError(f"prepared data: {error.filename or self.folder}: {error.strerror or error}") from error
        except (ValueError, KeyError) as error:
            raise DataError(f"prepared data {self.folder} is damaged ({error}): remove it to prepare again") from error
        self._offsets, self._names, self._name_offsets = tables["offsets"], names, tables["name_offsets"]
        self._shard = functools.lru_cache(_SHARDS_OPEN)(self._open_shard)
        self._shard_starts = np.cumsum([0, *(shard["tokens"] for shard in self.manifest["shards"])])
        self.source_of: np.ndarray = tables["source_of"]
        self.keys: np.ndarray = tables["keys"]
        self.sources: Sequence[str] = [source["path"] for source in self.manifest["asked"]["sources"]]
        self.fingerprint: str = self.manifest["fingerprint"]
        """Of the tokens, their documents and tokenizer: equal where training sees the same."""
        self.vocab_size: int = self.manifest["tokenizer"]["vocab_size"]

    def __reduce__(self) -> tuple[type["Prepared"], tuple[Path]]:
        return Prepared, (self.folder.resolve(),)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, BOS and EOS counted: int64 [D]."""
        return np.diff(self._offsets)

    def tokens(self, document: int, start: int = 0, end: int | None = None) -> np.ndarray:
        """Tokens start..end-1 of a document, a view of the file; `end` None: to its last."""
        first, stop = int(self._offsets[document]), int(self._offsets[document + 1])
        shard = int(np.searchsorted(self._shard_starts, first, side="right")) - 1
        base = first - int(self._shard_starts[shard])
        return self._shard(shard)[base + start : base + (stop - first if end is None else end)]

    def keep(self, name: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """An array that follows from the tables, kept beside the shards where one may write: see packing.Keep."""
        path = self.folder / ROWS / f"{name}.npy"
        try:
            return np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError):  # not there, or not whole
            made = make()
        with contextlib.suppress(OSError):  # a folder that others own, or a full disk: it is only made anew
            path.parent.mkdir(exist_ok=True)
            with whole(path) as file:
                np.save(file, made)
        return made

    def _open_shard(self, number: int) -> np.ndarray:
        path = self.folder / self.manifest["shards"][number]["file"]
        try:
            return np.memmap(path, self._dtype, "r")
        except (OSError, ValueError) as error:  # the latter for a file that is empty now
            raise DataError(f"prepared data: {path}: {error}; remove {self.folder} to prepare again") from error

    def name(self, document: int) -> str:
        """A document's name in its source."""
        first, stop = self._name_offsets[document : document + 2]
        return self._names[first:stop].tobytes().decode(errors="replace")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the tokens were made with."""
        about = self.manifest["tokenizer"]
        return restore(about["kind"], {name: (self.folder / name).read_bytes() for name in about["files"]})

    def verify(self, *, whole: bool = False) -> None:
        """Raise DataError unless the shards are as written: by checksum, or by size where they are large and not
        `whole`."""
        total = sum(shard["bytes"] for shard in self.manifest["shards"])
        by_checksum = whole or total <= _CHECKSUMMED_BYTES
        for shard in self.manifest["shards"]:
            path = self.folder / shard["file"]
            size = path.stat().st_size
            if size != shard["bytes"]:
                found = f"has {size} bytes, {shard['bytes']} were written"
            elif by_checksum and _sha256(path) != shard["sha256"]:
                found = "does not match its checksum"
            else:
                continue
            raise DataError(f"prepared data {path} was altered: it {found}; remove {self.folder} to prepare again")


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"tokens-{number:05d}.bin"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
