"""One process at a time in a run's folder: two that write checkpoints and metrics into one would ruin both."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longtrain.errors import CheckpointError, ConfigError, Problem

NAME = ".lock"
"""The file's name in the run's folder. It stays there; what counts is who holds it."""

_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def held(run_dir: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the run's folder (made if need be) for the block's time; the kernel lets go of it however the process ends.

    Raises:
      ConfigError: another process holds it; the message says which.
      CheckpointError: the folder cannot be written.
    """
    path = run_dir / NAME
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # A POSIX record lock: a child does not inherit it, and network file systems know it between hosts.
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                say(f"{run_dir}: this file system knows no locks, so nothing keeps a second run out of the folder")
            else:
                raise _taken(run_dir, path) from error
        file.truncate(0)
        file.write(json.dumps({"process": os.getpid(), "host": socket.gethostname()}) + "\n")
        file.flush()
        yield


def _taken(run_dir: Path, path: Path) -> ConfigError:
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        who = f"process {holder['process']} on {holder['host']}"
    except (OSError, ValueError, KeyError):  # it is just being written
        who = "another process"
    message = f"{who} is training in {run_dir}; legal: wait for its end or stop it, or another name"
    return ConfigError([Problem("run.name", run_dir.name, message)])
