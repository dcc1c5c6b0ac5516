"""`data prepare`: every document through the tokenizer, once.

    {data.prepared_dir}/0123456789abcdef/   one folder for each thing asked for, by its content (request.py);
                                            what is in it, prepared.py says
                        requests/           which folder a cheap look at the sources led to

A folder is found again by the cheap look, or else by reading the sources and comparing content; a source that
changed leads to another folder. A folder is made under a name that begins with a dot and renamed when complete,
so a killed run leaves nothing that could be taken for data; the next one removes its remains.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from longtrain.config import Config
from longtrain.data import sources, tokenizers
from longtrain.data.prepared import MANIFEST, Prepared, Writer
from longtrain.data.progress import TextProgress
from longtrain.data.request import Request, check_vocabulary
from longtrain.data.tokenizers import Tokenizer
from longtrain.errors import DataError

__all__ = ["Prepared", "ensure"]

Log = Callable[[str], None]

_BATCH_BYTES = 4 << 20
_POLL_SECONDS = 0.5


def ensure(config: Config, log: Log, *, process_index: int = 0, wait_seconds: float = 3600) -> Prepared:
    """The config's documents as tokens: prepared before, where they still stand for the sources, or now.

    With several processes, process 0 prepares; the others wait at most `wait_seconds` for its folder to appear,
    with no collective, so `data.prepared_dir` must be one they share.

    Raises DataError for what is wrong with the data, ConfigError where the tokenizer does not suit the config.
    """
    request = Request(config)
    root = Path(config.data.prepared_dir)
    with _disk_errors(root):
        pointer = root / "requests" / request.look()
        folder = root / pointer.read_text() if pointer.exists() else root / request.folder_name
        if not (folder / MANIFEST).exists():
            folder = root / request.folder_name  # what the pointer led to was removed since
        if (folder / MANIFEST).exists():
            prepared = Prepared(folder)
            prepared.verify()
            log(f"data: reusing {folder}: {_sizes(prepared.manifest)}")
        elif process_index == 0:
            log(f"data: preparing {folder}: {_why(root, request)}")
            _prepare(config, request, folder, log)
            prepared = Prepared(folder)
        else:
            log(f"data: waiting for process 0 to prepare {folder}")
            _wait_for(folder, wait_seconds)
            prepared = Prepared(folder)
        check_vocabulary(prepared.vocab_size, config)
        if not pointer.exists() or pointer.read_text() != folder.name:
            pointer.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(pointer, folder.name)
    return prepared


def _prepare(config: Config, request: Request, folder: Path, log: Log) -> None:
    """Make `folder`, whole or not at all."""
    root = folder.parent
    root.mkdir(parents=True, exist_ok=True)
    owner = f"{socket.gethostname()}.{os.getpid()}"
    _remove_remains(root)
    partial = root / f".{folder.name}.{owner}.partial"
    partial.mkdir()
    try:
        tokenizer = request.tokenizer
        if tokenizer is None:
            size, sample = request.training["vocab_size"], request.training["sample_bytes"]
            log(f"data: training a tokenizer of {size:,} pieces on up to {sample / 1e6:.0f} MB of text")
            started = time.monotonic()
            documents = (document for _, document in request.documents(sources.Skipped()))
            tokenizer = tokenizers.train(documents, vocab_size=size, sample_bytes=sample)
            log(f"data: trained it in {time.monotonic() - started:.1f} s")
            check_vocabulary(tokenizer.vocab_size, config)
        _tokenize(request, tokenizer, partial, log)
        try:
            os.rename(partial, folder)
        except OSError:
            if not (folder / MANIFEST).exists():  # else another run was faster, and its data is as good
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tokenize(request: Request, tokenizer: Tokenizer, folder: Path, log: Log) -> None:
    skipped = sources.Skipped()
    inexact: list[str] = []
    text_bytes = sum(source.bytes for source in request.sources)
    before = [tokenizer.bos_id] if request.add_bos else []
    after = [tokenizer.eos_id] if request.add_eos else []
    with (
        contextlib.closing(Writer(folder, tokenizer)) as writer,
        TextProgress("data: tokenizing", text_bytes, log) as progress,
    ):
        for batch in _batches(request.documents(skipped)):
            texts = [document.text for _, document in batch]
            ids = tokenizer.encode_all(texts)
            made = 0
            for (number, document), tokens, back in zip(batch, ids, tokenizer.decode_all(ids), strict=True):
                if back != document.text:
                    inexact.append(document.name)
                whole = np.array([*before, *tokens, *after], np.int64)
                if len(whole):
                    writer.add(whole, number, document.name)
                else:
                    skipped.empty += 1
                made += len(whole)
            progress.advance(sum(len(text.encode()) for text in texts), len(batch), made)
        if not progress.tokens:
            raise DataError(f"no document with text in {', '.join(source.path for source in request.sources)}")
        counts = {
            "text_bytes": progress.bytes,
            "skipped": dataclasses.asdict(skipped),
            "inexact_documents": len(inexact),
        }
        writer.finish({"asked": request.content, **counts})
    log(f"data: tokenized {progress.detail}")
    if skipped.empty or skipped.not_utf8:
        log(f"data: left out {skipped.empty} empty documents and {skipped.not_utf8} files that are not UTF-8")
    if inexact:
        log(f"data: {len(inexact)} documents do not survive the tokenizer exactly; the first is {inexact[0]}")


def _batches(
    documents: Iterable[tuple[int, sources.Document]],
) -> Iterator[list[tuple[int, sources.Document]]]:
    """Runs of documents with some megabytes of text, for the tokenizer to spread over the cores."""
    batch: list[tuple[int, sources.Document]] = []
    size = 0
    for item in documents:
        batch.append(item)
        size += len(item[1].text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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


def _wait_for(folder: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not (folder / MANIFEST).exists():
        if time.monotonic() > deadline:
            raise DataError(
                f"process 0 did not prepare {folder} in {seconds:.0f} s: data.prepared_dir and the sources "
                "must be the same for all processes; or run `data prepare` once beforehand"
            )
        time.sleep(_POLL_SECONDS)


def _remove_remains(root: Path) -> None:
    """Remove what killed runs of this machine left behind."""
    for partial in root.glob(f".*.{socket.gethostname()}.*.partial"):
        process = int(partial.name.split(".")[-2])
        if process == os.getpid() or not _is_alive(process):
            shutil.rmtree(partial, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    partial.write_text(text)
    os.replace(partial, path)


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"data.prepared_dir = {root}: {error.filename or root}: {error.strerror or error}") from error


def _sizes(manifest: dict[str, Any]) -> str:
    return f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens"
