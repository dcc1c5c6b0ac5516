"""`data prepare`: every document through the tokenizer, once.

    {data.prepared_dir}/{16 hex digits}/     one folder for what was asked: the sources' content, the
    tokenizer, BOS
                                             and EOS (prepared.py has the format)
                        requests/            what cheap looks at the sources (names, sizes, times) led to
                        which folder

A folder is found again by the cheap look, or else by reading the sources and comparing content; a source that
changed leads to another folder. A folder is made under a name that begins with a dot and renamed when
complete, so a killed run leaves nothing that could be taken for data; its remains are removed by the next
one.
"""

import contextlib
import dataclasses
import hashlib
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
from longtrain.data.prepared import FORMAT, MANIFEST, Prepared, Writer
from longtrain.data.progress import TextProgress
from longtrain.data.tokenizers import BytesTokenizer, Tokenizer
from longtrain.errors import ConfigError, DataError, Problem

__all__ = ["Prepared", "ensure"]

Log = Callable[[str], None]

_BATCH_BYTES = 4 << 20
_POLL_SECONDS = 0.5


def ensure(config: Config, log: Log, *, process_index: int = 0, wait_seconds: float = 3600) -> Prepared:
    """The config's documents as tokens: prepared before, where they still stand for the sources, or now.

    With several processes, process 0 prepares; the others wait at most `wait_seconds` for its folder to
    appear, with no collective, so `data.prepared_dir` must be one they share.

    Raises DataError for what is wrong with the data, ConfigError where the tokenizer does not suit the
    config.
    """
    request = _Request.of(config)
    root = Path(config.data.prepared_dir)
    with _disk_errors(root):
        pointer = root / "requests" / request.look()
        folder = root / pointer.read_text() if pointer.exists() else root / request.name()
        if not (folder / MANIFEST).exists():
            folder = root / request.name()  # what the pointer led to was removed since
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
        _check_tokenizer(prepared.vocab_size, config)
        if not pointer.exists() or pointer.read_text() != folder.name:
            pointer.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(pointer, folder.name)
    return prepared


@dataclasses.dataclass
class _Source:
    """A source of the config, with the files that it lists now."""

    path: str
    text_field: str
    files: list[sources.SourceFile]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def documents(self, skipped: sources.Skipped) -> Iterator[sources.Document]:
        for file in self.files:
            # Nobody chose the files of the standard library, so one that is not text is no reason to stop.
            yield from sources.read(file, self.text_field, skipped, keep_going=self.path == sources.PYTHON_STDLIB)


class _Request:
    """What a config asks to be prepared: the sources as they are now, the tokenizer, and what it adds."""

    def __init__(self, found: list[_Source], tokenizer: Tokenizer | None, training: dict[str, Any], added: dict):
        """`tokenizer`: None where it is to be trained, as `training` says."""
        self.sources, self.tokenizer, self.training, self.added = found, tokenizer, training, added
        self._asked: dict[str, Any] | None = None

    @staticmethod
    def of(config: Config) -> "_Request":
        data = config.data
        tokenizer: Tokenizer | None = None
        training = {}
        if data.tokenizer == "bytes":
            tokenizer = BytesTokenizer()
        elif isinstance(data.tokenizer, str):
            tokenizer = tokenizers.load(data.tokenizer)
        else:
            training = data.tokenizer.model_dump()
        if tokenizer is not None:
            _check_tokenizer(tokenizer.vocab_size, config)
            for key, piece, id in (("bos", "BOS", tokenizer.bos_id), ("eos", "EOS", tokenizer.eos_id)):
                if getattr(data, f"add_{key}") and id is None:
                    message = f"must be false: the tokenizer {data.tokenizer} has no {piece} piece"
                    raise ConfigError([Problem(f"data.add_{key}", True, message)])
        found = [_Source(source.path, source.text_field, sources.list_files(source.path)) for source in data.sources]
        return _Request(found, tokenizer, training, {"add_bos": data.add_bos, "add_eos": data.add_eos})

    def look(self) -> str:
        """A name for what a cheap look shows: equal where nothing seems to have changed."""
        files = [
            [
                source.path,
                source.text_field,
                *((os.path.abspath(file.path), file.size, file.modified_ns) for file in source.files),
            ]
            for source in self.sources
        ]
        return _digest([FORMAT, files, self._tokenizer(), self.added])[:16]

    def asked(self) -> dict[str, Any]:
        """What is asked, by content: reads every file, once."""
        if self._asked is None:
            self._asked = {
                "sources": [
                    {
                        "path": source.path,
                        "text_field": source.text_field,
                        "files": len(source.files),
                        "bytes": source.bytes,
                        "sha256": _digest([[file.name, _content(file.path)] for file in source.files]),
                    }
                    for source in self.sources
                ],
                "tokenizer": self._tokenizer(),
                **self.added,
            }
        return self._asked

    def name(self) -> str:
        """The folder's name."""
        return _digest([FORMAT, self.asked()])[:16]

    def documents(self, skipped: sources.Skipped) -> Iterator[tuple[int, sources.Document]]:
        """All documents, each with the number of its source."""
        for number, source in enumerate(self.sources):
            for document in source.documents(skipped):
                yield number, document

    def _tokenizer(self) -> str | dict[str, Any]:
        return self.tokenizer.fingerprint if self.tokenizer is not None else self.training


def _prepare(config: Config, request: _Request, folder: Path, log: Log) -> None:
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
            _check_tokenizer(tokenizer.vocab_size, config)
        _tokenize(request, tokenizer, partial, log)
        try:
            os.rename(partial, folder)
        except OSError:
            if not (folder / MANIFEST).exists():  # else another run was faster, and its data is as good
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tokenize(request: _Request, tokenizer: Tokenizer, folder: Path, log: Log) -> None:
    skipped = sources.Skipped()
    inexact: list[str] = []
    text_bytes = sum(source.bytes for source in request.sources)
    before = [tokenizer.bos_id] if request.added["add_bos"] else []
    after = [tokenizer.eos_id] if request.added["add_eos"] else []
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
        if not progress.documents:
            raise DataError(f"no document with text in {', '.join(source.path for source in request.sources)}")
        counts = {
            "text_bytes": progress.bytes,
            "skipped": dataclasses.asdict(skipped),
            "inexact_documents": len(inexact),
        }
        writer.finish({"asked": request.asked(), **counts})
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


def _check_tokenizer(vocab_size: int, config: Config) -> None:
    if vocab_size > config.model.vocab_size:
        message = f"must be at least {vocab_size}: the tokenizer has ids up to {vocab_size - 1}"
        raise ConfigError([Problem("model.vocab_size", config.model.vocab_size, message)])


def _why(root: Path, request: _Request) -> str:
    """Why nothing that is prepared serves: against the newest folder with the same sources."""
    asked = request.asked()
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


def _content(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
