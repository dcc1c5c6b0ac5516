"""How the files of all sources are cut into the jobs that make a shard each: by their sizes alone.

Small files go together; a large file of JSON lines is cut; what else is large is a job of its own.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from longtrain.data.readers import Part, is_cut_by_lines
from longtrain.data.sources import SourceFile
from longtrain.errors import DataError

_SMALLEST_JOB_BYTES = 4 << 20
_JOBS = 512
_READ_BYTES = 4 << 20


class Piece(NamedTuple):
    """A part of a file of a source; both by number."""

    source: int
    file: int
    part: Part


Job = list[Piece]


class Scan(NamedTuple):
    """What reading a file tells: a digest of its bytes, and the number of the first line that begins at or after each
    multiple of a job's bytes."""

    digest: str
    first_lines: list[int]


def job_bytes(files: Iterable[SourceFile]) -> int:
    """Bytes of a job: such that there are some hundreds of them, and none is too small to be worth one."""
    return max(_SMALLEST_JOB_BYTES, sum(file.size for file in files) // _JOBS)


def scan(file: SourceFile, every: int) -> Scan:
    """Read a file. `every`: bytes of a job. Of a file in an object store, which keeps its own word for the content, no
    byte is read. Raises DataError where it cannot be read."""
    if file.remote:
        return Scan(hashlib.sha256(f"{file.size} {file.version}".encode()).hexdigest(), [1])
    digest, first_lines = hashlib.sha256(), [1]
    cut = is_cut_by_lines(file)
    try:
        with file.open() as stream:
            place, lines = 0, 0
            while block := stream.read(min(_READ_BYTES, every - place % every)):
                digest.update(block)
                place += len(block)
                if cut:
                    lines += block.count(b"\n")
                    if place % every == 0:
                        first_lines.append(lines + 1 + (not block.endswith(b"\n")))
    except OSError as error:
        raise DataError(f"{file.path}: {error.strerror or error}") from error
    return Scan(digest.hexdigest(), first_lines)


def plan(files_of: Sequence[Sequence[SourceFile]], scans_of: Sequence[Sequence[Scan]]) -> list[Job]:
    """The jobs for the files of each source, in their order."""
    every = job_bytes(file for files in files_of for file in files)
    jobs: list[Job] = [[]]
    room = every
    for source, (files, scans) in enumerate(zip(files_of, scans_of, strict=True)):
        for number, (file, scanned) in enumerate(zip(files, scans, strict=True)):
            for part in _parts(file, scanned, every):
                size = (part.stop or file.size) - part.start
                if size > room and jobs[-1]:
                    jobs.append([])
                    room = every
                jobs[-1].append(Piece(source, number, part))
                room -= size
    return jobs


def _parts(file: SourceFile, scanned: Scan, every: int) -> list[Part]:
    if not is_cut_by_lines(file) or file.size <= every:
        return [Part()]
    starts = range(0, file.size, every)
    return [
        Part(start, min(start + every, file.size), line)
        for start, line in zip(starts, scanned.first_lines, strict=False)
    ]
