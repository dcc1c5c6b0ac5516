"""Tokenized documents on disk: the format, its writer and its reader.

    manifest.json       what is here and where it came from; written last, so that it stands for the whole
    tokens-00000.bin …  ids end to end, little-endian uint16 (uint32 for more than 65,536 pieces)
    offsets.npy         int64 [D + 1]: document d is tokens offsets[d]..offsets[d + 1]-1, over all shards
    source_of.npy       uint16 [D]: the number of each document's source
    keys.npy            uint64 [D]: a hash of each document's source and name, which decides its split
    names.bin           the documents' names in UTF-8, end to end
    name_offsets.npy    int64 [D + 1]: as offsets, in bytes of names.bin
    tokenizer.model     the tokenizer; not there for `bytes`

A document lies whole in one shard. A folder is made under another name and renamed when complete, so a folder
with a manifest is complete.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from longtrain.data.hashing import key
from longtrain.data.tokenizers import BytesTokenizer, SentencePieceTokenizer, Tokenizer, shortest_unsigned
from longtrain.errors import DataError

FORMAT = 1
"""Raised whenever the same sources and settings would be kept, or turned into tokens, in another way."""
MANIFEST = "manifest.json"
_TOKENIZER = "tokenizer.model"
_TABLES = ("offsets", "source_of", "keys", "name_offsets")
_SHARD_TOKENS = 1 << 28
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
            tables = {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in _TABLES}
            names = np.memmap(self.folder / "names.bin", np.uint8, "r")
            dtype = np.dtype(self.manifest["dtype"])
            self._shards = [np.memmap(self.folder / shard["file"], dtype, "r") for shard in self.manifest["shards"]]
        except OSError as error:
            raise DataError(f"prepared data: {error.filename or self.folder}: {error.strerror or error}") from error
        except (ValueError, KeyError) as error:
            raise DataError(f"prepared data {self.folder} is damaged ({error}): remove it to prepare again") from error
        self._offsets, self._names, self._name_offsets = tables["offsets"], names, tables["name_offsets"]
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
        return self._shards[shard][base + start : base + (stop - first if end is None else end)]

    def name(self, document: int) -> str:
        """A document's name in its source."""
        first, stop = self._name_offsets[document : document + 2]
        return self._names[first:stop].tobytes().decode(errors="replace")

    def tokenizer(self) -> Tokenizer:
        """The tokenizer the tokens were made with."""
        if self.manifest["tokenizer"]["kind"] == "bytes":
            return BytesTokenizer()
        return SentencePieceTokenizer((self.folder / _TOKENIZER).read_bytes())

    def verify(self) -> None:
        """Raise DataError unless the shards are as written: by checksum, or by size where they are large."""
        by_checksum = sum(shard["bytes"] for shard in self.manifest["shards"]) <= _CHECKSUMMED_BYTES
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


class Writer:
    """Writes a folder, which must exist, document by document. Memory holds only the tables."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self._folder, self._tokenizer = folder, tokenizer
        self._dtype = shortest_unsigned(tokenizer.vocab_size)
        self._lengths, self._name_lengths = array("q"), array("q")
        self._source_of, self._keys = array("H"), array("Q")
        self._names = open(folder / "names.bin", "wb")  # noqa: SIM115  open as long as the writer
        self._shards: list[dict[str, Any]] = []
        self._shard: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def add(self, tokens: np.ndarray, source: int, name: str) -> None:
        """Append a document of at least one token."""
        if self._shard is None or self._shards[-1]["tokens"] + len(tokens) > _SHARD_TOKENS:
            self._next_shard()
        assert self._shard is not None
        data = np.ascontiguousarray(tokens, self._dtype).tobytes()
        self._shard.write(data)
        self._digest.update(data)
        self._shards[-1]["tokens"] += len(tokens)
        self._shards[-1]["bytes"] += len(data)
        encoded = name.encode(errors="surrogateescape")
        self._names.write(encoded)
        self._name_lengths.append(len(encoded))
        self._lengths.append(len(tokens))
        self._source_of.append(source)
        self._keys.append(key(source, int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")))

    def finish(self, description: dict[str, Any]) -> None:
        """Write the tables and the manifest: what was written, and `description`."""
        self.close()
        lengths = np.array(self._lengths, np.int64)
        tables: dict[str, np.ndarray] = {
            "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            "source_of": np.array(self._source_of, np.uint16),
            "keys": np.array(self._keys, np.uint64),
            "name_offsets": np.concatenate([[0], np.cumsum(self._name_lengths)]).astype(np.int64),
        }
        for name, table in tables.items():
            np.save(self._folder / f"{name}.npy", table)
        is_bytes = isinstance(self._tokenizer, BytesTokenizer)
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            (self._folder / _TOKENIZER).write_bytes(self._tokenizer.model)

        made = hashlib.sha256(self._tokenizer.fingerprint.encode())
        for shard in self._shards:
            made.update(shard["sha256"].encode())
        for name in ("offsets", "source_of", "keys"):
            made.update(tables[name].astype(tables[name].dtype.newbyteorder("<")).tobytes())
        manifest = {
            "format": FORMAT,
            "fingerprint": made.hexdigest(),
            "documents": len(lengths),
            "tokens": int(lengths.sum()),
            "dtype": self._dtype.str,
            "tokenizer": {
                "kind": "bytes" if is_bytes else "sentencepiece",
                "vocab_size": self._tokenizer.vocab_size,
                "fingerprint": self._tokenizer.fingerprint,
            },
            "length_histogram": length_histogram(lengths),
            "shards": self._shards,
            **description,
        }
        (self._folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in self._folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files. A writer that is not finished leaves a folder without a manifest."""
        self._end_shard()
        self._names.close()

    def _next_shard(self) -> None:
        self._end_shard()
        name = f"tokens-{len(self._shards):05d}.bin"
        self._shard = open(self._folder / name, "wb")  # noqa: SIM115
        self._shards.append({"file": name, "tokens": 0, "bytes": 0})
        self._digest = hashlib.sha256()

    def _end_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shards[-1]["sha256"] = self._digest.hexdigest()
            self._shard = None


def length_histogram(lengths: np.ndarray) -> dict[str, int]:
    """Documents by length: an upper bound in tokens, a power of two -> how many it is the lowest for."""
    bounds, counts = np.unique(np.ceil(np.log2(lengths)).astype(int), return_counts=True)
    return {str(1 << int(bound)): int(count) for bound, count in zip(bounds, counts, strict=True)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
