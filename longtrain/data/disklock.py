"""One process at a time at a task on a disk, and the others waiting for it: over processes, and over machines where
the disk is theirs together. No collective takes part."""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.5
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def held(path: Path, waiting: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file for the block's time, and removes it after; the kernel lets go of it however the process
    ends. `waiting` is told who holds it, again and again while one waits. Raises OSError.

    On a file system without locks the block runs unlocked.
    """
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  closed below
        try:
            while not _locked(file.fileno()):
                waiting(_holder(path))
                time.sleep(_POLL_SECONDS)
            # Whoever held it may have removed the file that was opened above.
            if _is_at(path, file.fileno()):
                file.truncate(0)
                file.write(json.dumps({"process": os.getpid(), "host": socket.gethostname()}) + "\n")
                file.flush()
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            file.close()


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock file now."""
    try:
        with open(path, "r+", encoding="utf-8") as file:  # to write: network file systems lock no other
            return not _locked(file.fileno())
    except FileNotFoundError:
        return False


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['host']}"
    except (OSError, ValueError, KeyError):  # it is just being written, or was just removed
        return "another process"
