"""Digests of a checkpoint's files. Orbax and tensorstore restore a flipped bit without a word; this notices.

Once a checkpoint is complete, each process writes `digests.process_K.json` into its folder, over the files that it
wrote itself, in the background. Before a restore the processes share the work of reading all files again.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterable
from pathlib import Path

POLL_SECONDS = 0.2
READERS = 4
"""Threads of a process that read files at a time: hashing leaves Python's lock alone."""

Digests = dict[str, str]
"""File, relative to the checkpoint's folder -> hex digest of its bytes."""


class Digester:
    """Writes the digests of checkpoints as they become complete.

    Args:
      folder: where Orbax makes a folder for each step, under its final name once it is complete.
      process, processes: this process's place among those that write.
    """

    def __init__(self, folder: Path, process: int, processes: int):
        self._folder, self._process, self._processes = folder, process, processes
        self._closed = threading.Event()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "digests")
        self._pending: list[concurrent.futures.Future[None]] = []

    def after(self, step: int) -> None:
        """Digests this step's files once it is complete.

        Raises:
          OSError: the digests of a step before it could not be written.
        """
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        self._pending.append(self._worker.submit(self._digest, self._folder / str(step)))
        _raise_first(done)

    def wait(self) -> None:
        """Returns when the digests of all steps are written; all must be complete, or on their way there.

        Raises:
          OSError: those of one could not be.
        """
        pending, self._pending = self._pending, []
        _raise_first(pending)

    def close(self) -> None:
        """Gives up on steps that are not complete."""
        self._closed.set()
        self._worker.shutdown()

    def _digest(self, checkpoint: Path) -> None:
        while not checkpoint.is_dir():
            if self._closed.wait(POLL_SECONDS):
                return
        try:
            write(checkpoint, self._process, self._processes)
        except FileNotFoundError:
            if checkpoint.is_dir():  # else it was one too many to keep
                raise


def write(checkpoint: Path, process: int, processes: int) -> None:
    """Writes the digests of the files in a complete checkpoint that `process` wrote, as their names tell.

    Raises:
      OSError: a file cannot be read, or the digests not be written.
    """
    files = [file for file in _files(checkpoint) if _writer(file) == process]
    digests = dict(zip(map(str, files), _hashed(checkpoint / file for file in files), strict=True))
    path = checkpoint / _name(process)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"processes": processes, "files": digests}), encoding="utf-8")
    os.replace(unfinished, path)


def verify(checkpoint: Path, items: Iterable[str], share: int, shares: int) -> str:
    """Compares this share of the files of a checkpoint's items with their digests; what was done, in words.

    Digests that were never written (the run was killed just after the save) are told of, and are no error.

    Raises:
      ValueError: some file is not what was written; the message names the first such.
      OSError: a file cannot be read.
    """
    started = time.perf_counter()
    digests, missing = _read(checkpoint)
    wanted = tuple(f"{item}/" for item in items)
    ours = sorted(file for file in digests if file.startswith(wanted))[share::shares]
    for file, digest in zip(ours, _hashed(checkpoint / file for file in ours), strict=True):
        if digest != digests[file]:
            raise ValueError(f"{file} is not what was written: its digest is {digest}, and was {digests[file]}")
    size = sum((checkpoint / file).stat().st_size for file in ours)
    said = f"{len(ours)} files, {size:,} bytes, are what was written ({time.perf_counter() - started:.1f} s)"
    return f"{said}; NOT VERIFIED: {missing}" if missing else said


def _read(checkpoint: Path) -> tuple[Digests, str]:
    """All digests of the checkpoint, and in words which are missing ("" for none)."""
    records = {}
    for path in checkpoint.glob(_name("*")):
        try:
            records[path.name] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path.name} is not what was written: {error}") from error
    processes = max((record["processes"] for record in records.values()), default=1)
    missing = [_name(process) for process in range(processes) if _name(process) not in records]
    digests = {file: digest for record in records.values() for file, digest in record["files"].items()}
    return digests, f"{', '.join(missing)} not there" if missing else ""


def _files(checkpoint: Path) -> list[Path]:
    """The checkpoint's files, relative to it, without the digests."""
    files = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_file())
    return sorted(file for file in files if not file.name.startswith("digests."))


def _writer(file: Path) -> int:
    """The process that wrote a file: Orbax puts its number into the name of the file or a folder, but for the first."""
    match = re.search(r"process_(\d+)(/|$)", str(file))
    return int(match[1]) if match else 0


def _name(process: int | str) -> str:
    return f"digests.process_{process}.json"


def _hashed(paths: Iterable[Path]) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(READERS) as readers:
        return list(readers.map(_hash, paths))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _raise_first(futures: Iterable[concurrent.futures.Future[None]]) -> None:
    for future in futures:
        future.result()
