"""Files that appear under their name when they are whole and on the disk, and not before."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def unfinished(path: Path) -> Path:
    """A name that no other process, here or on another machine, writes."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is whole and on the disk."""
    hidden = unfinished(path)
    try:
        with open(hidden, "wb") as file:
            yield file
            sync(file)
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears under its name when it is whole."""
    with whole(path) as file:
        file.write(content)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
