"""Documents from where they lie: text files, JSON lines, folders, globs, and Python's own standard library.

A text file is one document; a `.jsonl` file has one a line, in a field; either may be gzipped (`.gz`). What a
source lists is sorted by name, so the same files give the same documents in the same order on every machine.
Text is kept as it is, to the byte: line ends, tabs, a byte order mark, NUL.

Whatever cannot be read is a DataError that names the file and, where there is one, the line.
"""

import dataclasses
import glob
import gzip
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from longtrain.errors import DataError

PYTHON_STDLIB = "python-stdlib"
_INSTALLED_LATER = {"site-packages", "dist-packages"}
_NOT_READ = (".json", ".json.gz", ".parquet", ".arrayrecord", ".array_record", ".zst", ".zip", ".tar", ".bz2", ".xz")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of a source. `name` is relative to the source: the same wherever the source lies."""

    name: str
    path: Path
    size: int
    modified_ns: int

    @property
    def is_json_lines(self) -> bool:
        return self.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


@dataclasses.dataclass(frozen=True)
class Document:
    """A text and its name: its file's, with `:line` in JSON lines."""

    name: str
    text: str


@dataclasses.dataclass
class Skipped:
    """Documents that were left out, counted while reading."""

    empty: int = 0
    not_utf8: int = 0


def list_files(path: str) -> list[SourceFile]:
    """The files of a source, sorted by name. `path`: a file, folder, glob or `python-stdlib`.

    Files and folders in a folder whose names begin with a dot are left out. Raises DataError where there are
    none, or a folder cannot be read.
    """
    try:
        if path == PYTHON_STDLIB:
            root = Path(sysconfig.get_path("stdlib"))
            found = [
                file
                for file in _walk(root)
                if file.suffix == ".py" and not _INSTALLED_LATER.intersection(file.relative_to(root).parts)
            ]
        elif glob.has_magic(path) and not os.path.exists(path):
            root = _root_of(path)
            found = [Path(file) for file in set(glob.glob(path, recursive=True)) if os.path.isfile(file)]
        elif os.path.isdir(path):
            root = Path(path)
            found = list(_walk(root))
        else:
            root = Path(path).parent
            found = [Path(path)]
        files = [_describe(file, root) for file in found]
    except OSError as error:
        raise DataError(f"data source {path}: {error.filename or path}: {error.strerror}") from error
    if not files:
        raise DataError(f"data source {path}: no file is there")
    return sorted(files, key=lambda file: file.name)


def read(file: SourceFile, text_field: str, skipped: Skipped, *, keep_going: bool = False) -> Iterator[Document]:
    """The documents of a file, in order, empty ones left out and counted.

    `keep_going` leaves out and counts files that are not UTF-8 as well, instead of raising. Raises DataError
    for what cannot be read, and where the file is no longer the one that was listed.
    """
    try:
        with gzip.open(file.path) if file.name.lower().endswith(".gz") else open(file.path, "rb") as stream:
            if file.is_json_lines:
                yield from _read_json_lines(file, stream, text_field, skipped)
            else:
                text = _decode(stream.read(), file, keep_going)
                if text is None:
                    skipped.not_utf8 += 1
                elif not text:
                    skipped.empty += 1
                else:
                    yield Document(file.name, text)
        now = os.stat(file.path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file.path}: damaged gzip: {error}") from error
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror or error}") from error
    if (now.st_size, now.st_mtime_ns) != (file.size, file.modified_ns):
        raise DataError(f"{file.path}: changed while it was read; prepare again when its writer is done")


def _read_json_lines(
    file: SourceFile, stream: Iterable[bytes], text_field: str, skipped: Skipped
) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        where = f"{file.path}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not valid UTF-8: {error.reason} at byte {error.start} of the line") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON: {error}") from error
        text = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            has = f"the fields {', '.join(map(repr, record))}" if isinstance(record, dict) else "no object"
            found = f"{type(text).__name__} in it" if text is not None else f"{has} instead"
            raise DataError(f"{where}: text expected in data.sources text_field = {text_field!r}, found {found}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: half a surrogate pair at character {error.start} of the text") from error
        if text:
            yield Document(f"{file.name}:{number}", text)
        else:
            skipped.empty += 1


def _decode(data: bytes, file: SourceFile, keep_going: bool) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if keep_going:
            return None
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file.path}, line {line}: not valid UTF-8: {error.reason} at byte {error.start}") from error


def _walk(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(folder, name)


def _root_of(pattern: str) -> Path:
    """The folder in front of a glob's first wildcard."""
    plain: list[str] = []
    for part in Path(pattern).parts:
        if glob.has_magic(part):
            break
        plain.append(part)
    return Path(*plain)


def _describe(path: Path, root: Path) -> SourceFile:
    name = path.relative_to(root).as_posix()
    if name.lower().endswith(_NOT_READ):
        raise DataError(f"{path}: this kind of file is not read; text, .jsonl, and either with .gz, are")
    status = os.stat(path)
    return SourceFile(name, path, status.st_size, status.st_mtime_ns)
