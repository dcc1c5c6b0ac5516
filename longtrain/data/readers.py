"""Documents out of files: by the file's name, text, JSON lines, Parquet, ArrayRecord or arrays of ids.

    *.jsonl *.ndjson            a document a line, in a field of a JSON object
    *.parquet                   a document a row, in a column
    *.arrayrecord *.array_record   a document a record: text, or a field of a tf.train.Example
    *.npy                       ids: one document [T], or a document a line [D, T]
    anything else               text: the file is one document

Text and JSON lines may be compressed (`.gz`, `.zst`). Text is kept as it is, to the byte: line ends, tabs, a byte order
mark, NUL. Text files are read in blocks and very long lines of JSON as they come, so a document may be of any length; a
record of another kind is held whole.

What is wrong with one document is a `Bad`, and the reader goes on after it; what is wrong with a file (it cannot be
opened, its compression is damaged, it has no such column) is a DataError. Both name the file and, where there is one,
the line or record.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import numpy as np

from longtrain.data import examples, longlines
from longtrain.data.optional import need
from longtrain.data.sources import Counted, SourceFile
from longtrain.errors import DataError

_BLOCK_BYTES = 1 << 20
_LONG_LINE_BYTES = 1 << 24
"""A longer line of JSON is not held, but read as it comes."""
_IDS_AT_ONCE = 1 << 20
_RECORDS_AT_ONCE = 64


class Text(NamedTuple):
    """A stretch of a document's text; `last`: the document ends with it. A document of no text gives one, empty."""

    name: str
    text: str
    last: bool


class Ids(NamedTuple):
    """A stretch of a document that is tokenized already: integers, [T]."""

    name: str
    ids: np.ndarray
    last: bool


class Bad(NamedTuple):
    """A document that cannot be read, from where it begins or from where it was given so far; and why."""

    name: str
    reason: str


Event = Text | Ids | Bad


@dataclass(frozen=True)
class Fields:
    """The fields of a record that hold a document: its ids where `ids` is not None, else its text."""

    text: str
    ids: str | None = None

    @property
    def wanted(self) -> str:
        return self.text if self.ids is None else self.ids

    @property
    def key(self) -> str:
        """The config's own words for it."""
        key = "text_field" if self.ids is None else "tokens_field"
        return f"data.sources {key} = {self.wanted!r}"


@dataclass(frozen=True)
class Part:
    """A part of a file: the lines that begin in bytes start..stop-1, or all of it where `stop` is None."""

    start: int = 0
    stop: int | None = None
    first_line: int = 1


WHOLE = Part()


class Reader(Protocol):
    def __call__(
        self, file: SourceFile, fields: Fields, part: Part, tell: Callable[[int], None]
    ) -> Iterator[Event]: ...


def read(
    file: SourceFile, fields: Fields, part: Part = WHOLE, tell: Callable[[int], None] = lambda size: None
) -> Iterator[Event]:
    """The documents of a file's part, in order. `tell` gets the bytes read, as they lie, as they are read.

    Raises DataError for what is wrong with the file, and where it is no longer the one that was listed.
    """
    try:
        yield from _reader(file)(file, fields, part, tell)
        changed = file.changed()
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror or error}") from error
    if changed:
        raise DataError(f"{file.path}: changed while it was read; prepare again when its writer is done")


def check(file: SourceFile) -> None:
    """Raise DataError for a kind of file that is not read, ConfigError where its library is not installed."""
    _reader(file)
    suffix = _suffix(file)
    for end, module in ((".parquet", "pyarrow.parquet"), (".zst", "zstandard")):
        if suffix.endswith(end):
            need(module, "data.sources path", file.path)
    if file.remote and suffix in _ARRAY_RECORD:
        raise DataError(f"{file.path}: ArrayRecord is read from local disks alone: copy the file to one")


def holds_ids(file: SourceFile, fields: Fields) -> bool:
    """Whether its documents are tokenized already."""
    return _suffix(file) == ".npy" or fields.ids is not None and _reader(file) is not _text


def is_cut_by_lines(file: SourceFile) -> bool:
    """Whether a part of it can be read without what stands before."""
    return not file.remote and _suffix(file) in _JSON_LINES


_JSON_LINES = (".jsonl", ".ndjson")
_ARRAY_RECORD = (".arrayrecord", ".array_record")
_COMPRESSED = (".gz", ".zst")
_NOT_READ = (".json", ".zip", ".tar", ".tgz", ".bz2", ".xz")


def _suffix(file: SourceFile) -> str:
    """What its name ends with, compression and all: `.jsonl.gz`."""
    name = file.name.lower().rpartition("/")[2]
    packed = next((end for end in _COMPRESSED if name.endswith(end)), "")
    stem = name.removesuffix(packed)
    return (stem[stem.rindex(".") :] if "." in stem else "") + packed


def _reader(file: SourceFile) -> Reader:
    suffix = _suffix(file)
    plain = suffix.removesuffix(".gz").removesuffix(".zst")
    if plain in _JSON_LINES:
        return _json_lines
    if suffix == ".parquet":
        return _parquet
    if suffix in _ARRAY_RECORD:
        return _array_record
    if suffix == ".npy":
        return _array
    if plain in (*_NOT_READ, ".parquet", *_ARRAY_RECORD, ".npy"):
        raise DataError(
            f"{file.path}: this kind of file is not read; text and .jsonl are, either with .gz or .zst, and "
            ".parquet, .arrayrecord and .npy as they are"
        )
    return _text


def _text(file: SourceFile, fields: Fields, part: Part, tell: Callable[[int], None]) -> Iterator[Event]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = 1
    with _opened(file, tell) as stream:
        block = _read_block(stream, file, "at its begin")
        while True:
            following = _read_block(stream, file, f"line {lines}") if block else b""
            try:
                text = decoder.decode(block, final=not following)
            except UnicodeDecodeError as error:
                line = lines + error.object.count(b"\n", 0, error.start)
                byte = f"{error.reason}, byte 0x{error.object[error.start]:02x}"
                yield Bad(file.name, f"{file.path}, line {line}: not valid UTF-8: {byte}")
                return
            yield Text(file.name, text, last=not following)
            if not following:
                return
            lines += text.count("\n")
            block = following


def _read_block(stream: BinaryIO, file: SourceFile, where: str) -> bytes:
    try:
        return stream.read(_BLOCK_BYTES)
    except _DAMAGED as error:
        raise DataError(f"{file.path}, {where} or after it: damaged compression: {error}") from error


def _json_lines(file: SourceFile, fields: Fields, part: Part, tell: Callable[[int], None]) -> Iterator[Event]:
    number = part.first_line - 1
    with _opened(file, tell) as stream:
        place = part.start
        if place:  # a line that began before is another part's
            stream.seek(place - 1)
            place += len(read := stream.readline(_BLOCK_BYTES)) - 1
            while read and not read.endswith(b"\n") and (part.stop is None or place < part.stop):
                place += len(read := stream.readline(_BLOCK_BYTES))
        while part.stop is None or place < part.stop:
            number += 1
            name, where = f"{file.name}:{number}", f"{file.path}, line {number}"
            line = read = _read_line(stream, _LONG_LINE_BYTES, where)
            if not line:
                return
            place += len(line)
            if len(line) < _LONG_LINE_BYTES or line.endswith(b"\n"):
                if line.strip():
                    yield _record(line, name, where, fields)
                continue

            def more(where: str = where) -> bytes:
                nonlocal place, read
                read = _read_line(stream, _BLOCK_BYTES, where)
                place += len(read)
                return read

            if fields.ids is None:
                yield from _long_record(line, more, name, where, fields)
                while read and not read.endswith(b"\n"):
                    more()
            else:  # a list of numbers is held whole
                parts = [line]
                while not parts[-1].endswith(b"\n") and (part_read := more()):
                    parts.append(part_read)
                yield _record(b"".join(parts), name, where, fields)


def _read_line(stream: BinaryIO, most: int, where: str) -> bytes:
    try:
        return stream.readline(most)
    except _DAMAGED as error:
        raise DataError(f"{where}: damaged compression: {error}") from error


def _long_record(begin: bytes, more: Callable[[], bytes], name: str, where: str, fields: Fields) -> Iterator[Event]:
    """The text of a line that is too long to be held."""
    try:
        for text in longlines.text_of(begin, more, fields.text):
            yield Text(name, text, last=False)
    except longlines.NotJson as error:
        yield Bad(name, f"{where}, a long one: in data.sources text_field = {fields.text!r}: {error}")
        return
    yield Text(name, "", last=True)


def _record(line: bytes, name: str, where: str, fields: Fields) -> Event:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return Bad(name, f"{where}: not valid UTF-8: {error.reason} at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Bad(name, f"{where}: not valid JSON: {error}")
    if not isinstance(record, dict):
        return Bad(name, f"{where}: an object with {fields.key} expected, found {type(record).__name__}")
    if fields.wanted not in record:
        found = ", ".join(map(repr, record)) or "none"
        return Bad(name, f"{where}: no field as in {fields.key}; the fields are {found}")
    return _document(record[fields.wanted], name, where, fields)


def _document(value: object, name: str, where: str, fields: Fields) -> Event:
    """A field's value as a document."""
    if fields.ids is not None:
        ids = np.asarray(value if isinstance(value, list | np.ndarray) else None)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            return Bad(name, f"{where}: a list of whole numbers expected in {fields.key}, found {type(value).__name__}")
        return Ids(name, ids, last=True)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            return Bad(name, f"{where}: not valid UTF-8: {error.reason} at byte {error.start} of the text")
    if not isinstance(value, str):
        return Bad(name, f"{where}: text expected in {fields.key}, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Bad(name, f"{where}: half a surrogate pair at character {error.start} of the text")
    return Text(name, value, last=True)


def _parquet(file: SourceFile, fields: Fields, part: Part, tell: Callable[[int], None]) -> Iterator[Event]:
    pyarrow = need("pyarrow.parquet", "data.sources path", file.path)
    number = 0
    try:
        with file.open() as stream, pyarrow.ParquetFile(stream) as table:
            if fields.wanted not in table.schema_arrow.names:
                columns = ", ".join(map(repr, table.schema_arrow.names))
                raise DataError(f"{file.path}: no column as in {fields.key}; the columns are {columns}")
            rows = table.metadata.num_rows
            for batch in table.iter_batches(_RECORDS_AT_ONCE, columns=[fields.wanted]):
                for value in batch.column(0):
                    number += 1
                    yield _document(_value(value), f"{file.name}:{number}", f"{file.path}, row {number}", fields)
                tell(file.size * len(batch) // rows)
    except (ValueError, OSError) as error:  # what pyarrow raises derives from these
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{file.path}, row {number + 1} or after it: {error}") from error


def _value(scalar: Any) -> object:
    """A value of Arrow's; of a list of numbers, an array, with no object a number."""
    numbers = getattr(scalar, "values", None)
    return scalar.as_py() if numbers is None or numbers.null_count else numbers.to_numpy(zero_copy_only=False)


def _array_record(file: SourceFile, fields: Fields, part: Part, tell: Callable[[int], None]) -> Iterator[Event]:
    from array_record.python import array_record_module  # Grain's own format: it comes with Grain

    number = 0
    try:
        with closing(array_record_module.ArrayRecordReader(file.path)) as reader:
            count = reader.num_records()
            as_examples = False
            for first in range(0, count, _RECORDS_AT_ONCE):
                records = reader.read(list(range(first, min(count, first + _RECORDS_AT_ONCE))))
                for record in records:
                    number += 1
                    example = examples.parse(record)
                    if number == 1:
                        as_examples = example is not None
                    yield _example(record, example, as_examples, file, number, fields)
                tell(file.size * len(records) // count)
    except (RuntimeError, ValueError, IndexError) as error:
        raise DataError(f"{file.path}, record {number + 1} or after it: {error}") from error


def _example(
    record: bytes, example: examples.Example | None, as_examples: bool, file: SourceFile, number: int, fields: Fields
) -> Event:
    """A record of a file whose first one is, or is not, a tf.train.Example: what it is, all others must be."""
    name, where = f"{file.name}:{number}", f"{file.path}, record {number}"
    if not as_examples:
        if fields.ids is not None:
            return Bad(name, f"{where}: a tf.train.Example with {fields.key} expected")
        return _document(record, name, where, fields)
    if example is None:
        return Bad(name, f"{where}: not a tf.train.Example, as the file's first record is")
    if fields.wanted not in example:
        found = ", ".join(map(repr, sorted(example)))
        return Bad(name, f"{where}: no feature as in {fields.key}; the features are {found}")
    value: object = example[fields.wanted]
    if fields.ids is None and isinstance(value, list):
        value = value[0] if len(value) == 1 else value
    return _document(value, name, where, fields)


def _array(file: SourceFile, fields: Fields, part: Part, tell: Callable[[int], None]) -> Iterator[Event]:
    try:
        if file.remote:
            with file.open() as stream:
                ids = np.load(io.BytesIO(stream.read()), allow_pickle=False)
        else:
            ids = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{file.path}: not an array of numpy: {error}") from error
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        raise DataError(f"{file.path}: ids [T] or [D, T] of an integer type expected, found {ids.dtype} {ids.shape}")
    for number, document in enumerate(ids if ids.ndim == 2 else ids[None], start=1):
        name = f"{file.name}:{number}" if ids.ndim == 2 else file.name
        for start in range(0, max(1, len(document)), _IDS_AT_ONCE):
            stretch = document[start : start + _IDS_AT_ONCE]
            yield Ids(name, stretch, last=start + _IDS_AT_ONCE >= len(document))
            tell(stretch.nbytes)


_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)


def _opened(file: SourceFile, tell: Callable[[int], None]) -> BinaryIO:
    """The file's bytes, decompressed. Reading raises one of _DAMAGED where they are not what was compressed."""
    raw = io.BufferedReader(Counted(file.open(), tell), _BLOCK_BYTES)
    suffix = _suffix(file)
    if suffix.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if suffix.endswith(".zst"):
        return io.BufferedReader(_Zstandard(raw, file.path), _BLOCK_BYTES)
    return raw


class _Zstandard(io.RawIOBase):
    """The frames of a zstandard file, end to end. The library's own stream takes a file that is cut for one that
    ends."""

    def __init__(self, raw: BinaryIO, path: str):
        self._library = need("zstandard", "data.sources path", path)
        self._raw = raw
        self._frame = self._library.ZstdDecompressor().decompressobj()
        self._begun = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            data = data or self._raw.read(_BLOCK_BYTES)
            if not data:
                if self._begun and not self._frame.eof:
                    raise EOFError("the file ends before the end of its frame")
                return 0
            if self._frame.eof:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._begun = True
            try:
                self._ready = self._frame.decompress(data)
            except self._library.ZstdError as error:
                raise zlib.error(str(error)) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()
