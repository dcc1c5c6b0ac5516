"""The files that sources list: local paths and, through fsspec, object stores.

What a source lists is sorted by name, so the same files give the same documents in the same order on every machine.
What is in the files, readers.py says.
"""

import dataclasses
import glob
import io
import os
import sysconfig
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from longtrain.data.optional import need
from longtrain.errors import DataError

PYTHON_STDLIB = "python-stdlib"
_INSTALLED_LATER = {"site-packages", "dist-packages"}


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of a source. `name` is relative to the source: the same wherever the source lies."""

    name: str
    path: str
    size: int
    version: str
    """Changes when the file does: its time of modification, or what an object store keeps instead."""
    remote: bool = False

    def open(self) -> BinaryIO:
        """The file's bytes. Raises OSError."""
        if not self.remote:
            return open(self.path, "rb")
        system, path = _file_system(self.path)
        return system.open(path, "rb")

    def changed(self) -> bool:
        """Whether it is no longer the file that was listed. Raises OSError."""
        if self.remote:
            system, path = _file_system(self.path)
            return _versions(system.info(path)) != (self.size, self.version)
        status = os.stat(self.path)
        return (status.st_size, str(status.st_mtime_ns)) != (self.size, self.version)


def list_files(path: str) -> list[SourceFile]:
    """The files of a source, sorted by name. `path`: a file, folder or glob, a URL of them, or `python-stdlib`.

    Files and folders in a folder whose names begin with a dot are left out. Raises DataError where there are
    none, or a folder cannot be read.
    """
    try:
        files = _remote_files(path) if "://" in path else _local_files(path)
    except OSError as error:
        raise DataError(f"data source {path}: {error.filename or path}: {error.strerror or error}") from error
    if not files:
        raise DataError(f"data source {path}: no file is there")
    return sorted(files, key=lambda file: file.name)


def _local_files(path: str) -> list[SourceFile]:
    if path == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        found = [
            file
            for file in _walk(root)
            if file.suffix == ".py" and not _INSTALLED_LATER.intersection(file.relative_to(root).parts)
        ]
    elif glob.has_magic(path) and not os.path.exists(path):
        root = Path(_root_of(path))
        found = [Path(file) for file in set(glob.glob(path, recursive=True)) if os.path.isfile(file)]
    elif os.path.isdir(path):
        root = Path(path)
        found = list(_walk(root))
    else:
        root = Path(path).parent
        found = [Path(path)]

    def describe(file: Path) -> SourceFile:
        status = os.stat(file)
        name = file.relative_to(root).as_posix()
        return SourceFile(name, str(file), status.st_size, str(status.st_mtime_ns))

    return [describe(file) for file in found]


def _walk(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield Path(folder, name)


def _remote_files(url: str) -> list[SourceFile]:
    system, path = _file_system(url)
    found: dict[str, dict[str, Any]]
    if glob.has_magic(path) and not system.exists(path):
        root, found = _root_of(path), system.glob(path, detail=True)
    elif system.isdir(path):
        root, found = path, system.find(path, detail=True)
    else:
        root, found = str(PurePosixPath(path).parent), {path: system.info(path)}
    files = []
    for file, about in found.items():
        name = str(PurePosixPath(file).relative_to(root))
        if about["type"] == "file" and not any(part.startswith(".") for part in name.split("/")):
            files.append(SourceFile(name, system.unstrip_protocol(file), *_versions(about), remote=True))
    return files


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it."""
    try:
        return need("fsspec", "data.sources path", url).url_to_fs(url)
    except (ValueError, ImportError) as error:  # a protocol it does not know, or whose library is not here
        raise DataError(f"data source {url}: {error}") from error


def _versions(about: dict[str, Any]) -> tuple[int, str]:
    """Size and version of what fsspec tells of a file; each store has its own word for the latter."""
    for word in ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created"):
        if value := about.get(word):
            # The same file's time comes as a number from one call and as a date from another.
            return about["size"], str(value.timestamp() if isinstance(value, datetime) else value)
    return about["size"], ""


def _root_of(pattern: str) -> str:
    """The folder in front of a glob's first wildcard."""
    plain: list[str] = []
    for part in PurePosixPath(pattern).parts:
        if glob.has_magic(part):
            break
        plain.append(part)
    return str(PurePosixPath(*plain))


class Counted(io.RawIOBase):
    """A binary stream that tells how many bytes were read of it, as they are read."""

    def __init__(self, stream: BinaryIO, tell: Callable[[int], None]):
        self._stream, self._tell = stream, tell

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self._tell(len(data))
        return len(data)

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(place, whence)

    def close(self) -> None:
        self._stream.close()
        super().close()
