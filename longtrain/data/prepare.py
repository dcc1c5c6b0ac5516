"""`data prepare`: every document through the tokenizer, once.

    {data.prepared_dir}/0123456789abcdef/   one folder for each thing asked for, by its content (request.py);
                                            what is in it, prepared.py says
                        requests/           which folder a cheap look at the sources led to

A folder is found again by the cheap look, or else by reading the sources and comparing content; a source that
changed leads to another folder. A folder is made under a name that begins with a dot and renamed when complete,
so a killed run leaves nothing that could be taken for data; the next one goes on after its finished shards.

Of several processes one prepares: whoever gets a lock on the disk. So on a disk that all share it is done once, on
disks of their own once on each.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from longtrain.config import Config
from longtrain.data import disklock, pool, shards, tokenizer_training, tokenizers
from longtrain.data.files import write_whole
from longtrain.data.jobs import Job, Piece
from longtrain.data.prepared import MANIFEST, Prepared
from longtrain.data.progress import TextProgress
from longtrain.data.readers import Part
from longtrain.data.request import Request, check_vocabulary
from longtrain.data.tokenizers import Tokenizer, shortest_unsigned
from longtrain.data.tokenizing import Work
from longtrain.errors import ConfigError, DataError, Problem

__all__ = ["Prepared", "ensure"]

Log = Callable[[str], None]

_PLAN = Path(shards.PARTS, "plan.json")
"""Of a folder in the making: what was asked, and the jobs; a run that goes on need not read the sources again."""
_HEAD_START_SECONDS = 5.0
"""Process 0, whose messages are shown, is to be the one that prepares where it sees this disk."""
_SECONDS_BETWEEN_MESSAGES = 60.0


def ensure(config: Config, log: Log, *, process_index: int = 0) -> Prepared:
    """The config's documents as tokens: prepared before, where they still stand for the sources, or now.

    Of several processes one on each disk prepares, and the others wait for it, with no collective.

    Raises DataError for what is wrong with the data, ConfigError where the tokenizer does not suit the config.
    """
    request = Request(config)
    root = Path(config.data.prepared_dir)
    with _disk_errors(root):
        pointer = root / "requests" / request.look()
        folder = _found(root, pointer)
        if folder is None and process_index:
            folder = _found_soon(root, pointer)
        if folder is None and root.exists() and not os.access(root, os.W_OK):
            same = root / request.folder_name  # others' data, that one may only read
            folder = same if (same / MANIFEST).exists() else None
        prepared = _reused(folder, log) if folder is not None else _prepared_now(config, request, root, pointer, log)
    check_vocabulary(prepared.vocab_size, config)
    _check_ids(prepared, config)
    return prepared


def _found(root: Path, pointer: Path) -> Path | None:
    """The folder that the cheap look led to before, where it is complete."""
    if not pointer.exists():
        return None
    folder = root / pointer.read_text()
    return folder if (folder / MANIFEST).exists() else None


def _found_soon(root: Path, pointer: Path) -> Path | None:
    """As `_found`, with time for process 0 to take the lock or to be done."""
    deadline = time.monotonic() + _HEAD_START_SECONDS
    while time.monotonic() < deadline and not any(root.glob(".*.lock")) and _found(root, pointer) is None:
        time.sleep(0.1)
    return _found(root, pointer)


def _reused(folder: Path, log: Log) -> Prepared:
    prepared = Prepared(folder)
    prepared.verify()
    log(f"data: reusing {folder}: {prepared.manifest['documents']:,} documents, {prepared.manifest['tokens']:,} tokens")
    return prepared


def _prepared_now(config: Config, request: Request, root: Path, pointer: Path, log: Log) -> Prepared:
    """Under the disk's lock: a folder of the same content, or a new one."""
    root.mkdir(parents=True, exist_ok=True)
    told = [-_SECONDS_BETWEEN_MESSAGES]

    def waiting(holder: str) -> None:
        if time.monotonic() - told[0] > _SECONDS_BETWEEN_MESSAGES:
            told[0] = time.monotonic()
            log(f"data: waiting for {holder} to prepare in {root}")

    lock = root / f".{pointer.name}.lock"
    with disklock.held(lock, waiting):
        # A killed run wrote where it was going; what it had read need not be read again.
        folder = root / (pointer.read_text() if pointer.exists() else request.folder_name)
        if not (folder / MANIFEST).exists() and not _partial(folder).exists():
            folder = root / request.folder_name
        if not pointer.exists() or pointer.read_text() != folder.name:
            pointer.parent.mkdir(exist_ok=True)
            write_whole(pointer, folder.name.encode())
        if (folder / MANIFEST).exists():
            return _reused(folder, log)
        _remove_remains(root, folder, lock)
        try:
            _prepare(config, request, folder, log)
        except (ConfigError, DataError):
            if not _partial(folder).exists():
                pointer.unlink()  # there is nothing that it could lead to
            raise
    return Prepared(folder)


def _prepare(config: Config, request: Request, folder: Path, log: Log) -> None:
    """Make `folder`, whole or not at all. What ends early keeps its finished shards, unless the input is at fault."""
    partial = _partial(folder)
    try:
        if not (partial / MANIFEST).exists():
            asked, jobs = _plan(request, partial, log)
            tokenizer = _tokenizer(config, request, partial, log)
            _tokenize(config, request, tokenizer, asked, jobs, partial, log)
        shutil.rmtree(partial / shards.PARTS, ignore_errors=True)
        try:
            os.rename(partial, folder)
        except OSError:
            if not (folder / MANIFEST).exists():  # else another run was faster, and its data is as good
                raise
            shutil.rmtree(partial, ignore_errors=True)
    except (pool.Unfinished, OSError) as error:
        where = f"{error.filename or folder}: " if isinstance(error, OSError) else ""
        reason = where + (getattr(error, "strerror", None) or str(error))
        raise DataError(f"{reason}; the shards that are finished are kept, and the same command goes on") from error
    except (ConfigError, DataError):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _plan(request: Request, partial: Path, log: Log) -> tuple[dict[str, Any], list[Job]]:
    """What is asked and the jobs: those of a run that was killed, or new ones."""
    with contextlib.suppress(FileNotFoundError):
        plan = json.loads((partial / _PLAN).read_text())
        jobs = [[Piece(source, file, Part(*part)) for source, file, part in job] for job in plan["jobs"]]
        left = len(shards.missing(partial, len(jobs)))
        log(f"data: going on in {partial}: {len(jobs) - left} of {len(jobs)} shards are finished")
        return plan["asked"], jobs
    log(f"data: preparing {partial.parent / request.folder_name}: {_why(partial.parent, request)}")
    (partial / shards.PARTS).mkdir(parents=True, exist_ok=True)
    asked, jobs = request.content, request.jobs
    cut = [[(piece.source, piece.file, _numbers(piece.part)) for piece in job] for job in jobs]
    write_whole(partial / _PLAN, json.dumps({"asked": asked, "jobs": cut}).encode())
    return asked, jobs


def _numbers(part: Part) -> tuple[int, int | None, int]:
    return part.start, part.stop, part.first_line


def _tokenizer(config: Config, request: Request, partial: Path, log: Log) -> Tokenizer:
    """The one given, or one trained: by the run that was killed, or now."""
    if request.tokenizer is not None:
        return request.tokenizer
    kept = partial / tokenizers.SENTENCEPIECE_FILE
    if not kept.exists():
        size, sample = request.training["vocab_size"], request.training["sample_bytes"]
        log(f"data: training a tokenizer of {size:,} pieces on up to {sample / 1e6:.0f} MB of text")
        started = time.monotonic()
        trained = tokenizer_training.train(request.texts(), vocab_size=size, sample_bytes=sample)
        log(f"data: trained it in {time.monotonic() - started:.1f} s")
        check_vocabulary(trained.vocab_size, config)
        write_whole(kept, trained.model)
    return tokenizers.load(kept)


def _tokenize(
    config: Config,
    request: Request,
    tokenizer: Tokenizer,
    asked: dict[str, Any],
    jobs: list[Job],
    folder: Path,
    log: Log,
) -> None:
    # Ids that are given may be of pieces that the tokenizer does not have.
    holds_ids = any(source.holds_ids for source in request.sources)
    dtype = shortest_unsigned(config.model.vocab_size if holds_ids else tokenizer.vocab_size)
    work = Work(
        folder,
        tokenizer,
        dtype,
        [source.files for source in request.sources],
        [source.fields for source in request.sources],
        [source.skip_bad for source in request.sources],
        request.add_bos,
        request.add_eos,
        config.model.vocab_size,
    )
    left = shards.missing(folder, len(jobs))
    source_bytes = sum(_size(work, piece) for number in left for piece in jobs[number])
    with TextProgress("data: tokenizing", source_bytes, log) as progress:
        pool.run(work, jobs, left, progress.show)
    log(f"data: tokenized {progress.detail}")
    counts = shards.join(folder, len(jobs), tokenizer, dtype, {"asked": asked})
    if counts.empty:
        log(f"data: left out {counts.empty:,} empty documents")
    if counts.bad:
        log(f"data: left out {counts.bad:,} bad records; the first is {counts.first_bad}")
    if counts.inexact:
        log(
            f"data: {counts.inexact:,} documents do not survive the tokenizer exactly; the first is "
            f"{counts.first_inexact}"
        )
    if counts.forced_cuts:
        log(f"data: {counts.forced_cuts:,} texts had to be cut between ids that might have been one")
    if not (folder / MANIFEST).exists():
        raise DataError(f"no document with text in {', '.join(source.path for source in request.sources)}")


def _size(work: Work, piece: Piece) -> int:
    return (piece.part.stop or work.files_of[piece.source][piece.file].size) - piece.part.start


def _check_ids(prepared: Prepared, config: Config) -> None:
    """Of documents that came as ids: they were checked against the vocabulary of the config that prepared them."""
    largest = prepared.manifest["counts"]["largest_id"]
    if largest >= config.model.vocab_size:
        message = f"must be at least {largest + 1}: {prepared.folder} holds the id {largest}"
        raise ConfigError([Problem("model.vocab_size", config.model.vocab_size, message)])


def _why(root: Path, request: Request) -> str:
    """Why nothing that is prepared serves: against the newest folder with the same sources."""
    asked = request.content
    paths = [source["path"] for source in asked["sources"]]
    earlier: list[tuple[float, dict[str, Any]]] = []
    for manifest in root.glob(f"*/{MANIFEST}"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            then = json.loads(manifest.read_text())["asked"]
            if [source["path"] for source in then["sources"]] == paths:
                earlier.append((manifest.stat().st_mtime, then))
    if not earlier:
        return "nothing is prepared yet from " + ", ".join(paths)
    then = max(earlier, key=lambda item: item[0])[1]
    reasons = [
        f"{new['path']} changed ({old['files']} files, {old['bytes']:,} bytes then; "
        f"{new['files']} files, {new['bytes']:,} bytes now)"
        for old, new in zip(then["sources"], asked["sources"], strict=True)
        if old != new
    ]
    reasons += [
        f"{key} was {then[key]}, is {asked[key]}"
        for key in ("tokenizer", "add_bos", "add_eos")
        if then[key] != asked[key]
    ]
    return "; ".join(reasons) or "the format changed"


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


def _remove_remains(root: Path, folder: Path, own_lock: Path) -> None:
    """Remove what killed runs left behind: what they were writing, and of other content all, as nobody may ask for it
    again."""
    if any(disklock.is_held(lock) for lock in root.glob(".*.lock") if lock != own_lock):
        return  # whose it is cannot be told
    for partial in root.glob(".*.partial"):
        if partial == _partial(folder):
            shards.remove_unfinished(partial)
        else:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"data.prepared_dir = {root}: {error.filename or root}: {error.strerror or error}") from error
