"""What a config asks to be prepared: the sources as they are now, the tokenizer, and what it adds to a document."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longtrain.config import Config
from longtrain.data import jobs, readers, sources, tokenizers
from longtrain.data.jobs import Job
from longtrain.data.prepared import FORMAT
from longtrain.data.processes import cores
from longtrain.data.readers import Fields
from longtrain.data.sources import SourceFile
from longtrain.data.tokenizers import BytesTokenizer, Tokenizer
from longtrain.errors import ConfigError, Problem


@dataclass(frozen=True)
class Source:
    """A source of the config, with the files that it lists now."""

    path: str
    fields: Fields
    skip_bad: bool
    files: list[SourceFile]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def holds_ids(self) -> bool:
        return any(readers.holds_ids(file, self.fields) for file in self.files)


class Request:
    """What a config asks to be prepared.

    Made from names and sizes alone; `content`, `jobs` and `folder_name` read the sources. `tokenizer` is None where it
    is to be trained, as `training` says. Raises DataError for sources or a tokenizer that are not there, ConfigError
    for a tokenizer that does not suit the config, or a library that is not installed.
    """

    def __init__(self, config: Config):
        data = config.data
        self.training: dict[str, Any] = {}
        self.tokenizer: Tokenizer | None = None
        if not isinstance(data.tokenizer, str):
            self.training = data.tokenizer.model_dump()
        else:
            self.tokenizer = BytesTokenizer() if data.tokenizer == "bytes" else tokenizers.load(data.tokenizer)
            check_vocabulary(self.tokenizer.vocab_size, config)
            _check_pieces(self.tokenizer, config)
        self.add_bos, self.add_eos = data.add_bos, data.add_eos
        self.on_bad_record = data.on_bad_record
        self.sources = [
            Source(
                source.path,
                Fields(source.text_field, source.tokens_field),
                # Nobody chose the files of the standard library, so one that is not text is no reason to stop.
                data.on_bad_record == "skip" or source.path == sources.PYTHON_STDLIB,
                sources.list_files(source.path),
            )
            for source in data.sources
        ]
        for source in self.sources:
            for file in source.files:
                readers.check(file)
        if self.training and any(source.holds_ids for source in self.sources):
            message = "documents that are tokenized already need the tokenizer they were made with: legal is its path"
            raise ConfigError([Problem("data.tokenizer", self.training, message)])

    def look(self) -> str:
        """A name for what a cheap look shows: 16 hex digits, equal where nothing seems to have changed."""

        def seen(file: SourceFile) -> tuple[str, int, str]:
            return file.path if file.remote else os.path.abspath(file.path), file.size, file.version

        files = [[seen(file) for file in source.files] for source in self.sources]
        paths = [(source.path, source.fields.text, source.fields.ids) for source in self.sources]
        return _digest([FORMAT, paths, files, self._settings()])[:16]

    @cached_property
    def _scans(self) -> list[list[jobs.Scan]]:
        """Every file, read once, over the cores."""
        every = jobs.job_bytes(file for source in self.sources for file in source.files)
        with ThreadPoolExecutor(cores()) as pool:
            waiting = [[pool.submit(jobs.scan, file, every) for file in source.files] for source in self.sources]
            return [[future.result() for future in futures] for futures in waiting]

    @cached_property
    def content(self) -> dict[str, Any]:
        """What is asked, with the sources by content. Stands in the manifest. Raises DataError."""
        found = [
            {
                "path": source.path,
                "text_field": source.fields.text,
                "tokens_field": source.fields.ids,
                "files": len(source.files),
                "bytes": source.bytes,
                "sha256": _digest([[file.name, it.digest] for file, it in zip(source.files, scans, strict=True)]),
            }
            for source, scans in zip(self.sources, self._scans, strict=True)
        ]
        return {"sources": found, **self._settings()}

    @cached_property
    def jobs(self) -> list[Job]:
        """The jobs that make the shards, a shard each."""
        return jobs.plan([source.files for source in self.sources], self._scans)

    @property
    def folder_name(self) -> str:
        """A name for what is asked: 16 hex digits."""
        return _digest([FORMAT, self.content])[:16]

    def texts(self) -> Iterator[str]:
        """The text of all documents, in stretches, for a tokenizer to be trained on. Bad records are left out: what is
        to be said of them, tokenizing says. Raises DataError."""
        for source in self.sources:
            for file in source.files:
                for event in readers.read(file, source.fields):
                    if isinstance(event, readers.Text):
                        yield event.text

    def _settings(self) -> dict[str, Any]:
        tokenizer = self.tokenizer.fingerprint if self.tokenizer is not None else self.training
        return {
            "tokenizer": tokenizer,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "on_bad_record": self.on_bad_record,
        }


def check_vocabulary(vocab_size: int, config: Config) -> None:
    """Raise ConfigError where a tokenizer of that size has ids the model has no place for."""
    if vocab_size > config.model.vocab_size:
        message = f"must be at least {vocab_size}: the tokenizer has ids up to {vocab_size - 1}"
        raise ConfigError([Problem("model.vocab_size", config.model.vocab_size, message)])


def _check_pieces(tokenizer: Tokenizer, config: Config) -> None:
    problems = [
        Problem(key, True, f"must be false: the tokenizer {config.data.tokenizer} has no {piece} piece")
        for key, asked, piece, id in (
            ("data.add_bos", config.data.add_bos, "BOS", tokenizer.bos_id),
            ("data.add_eos", config.data.add_eos, "EOS", tokenizer.eos_id),
        )
        if asked and id is None
    ]
    if problems:
        raise ConfigError(problems)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
