"""What a config asks to be prepared: the sources as they are now, the tokenizer, and what it adds to a document."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from longtrain.config import Config
from longtrain.data import sources, tokenizers
from longtrain.data.prepared import FORMAT
from longtrain.data.tokenizers import BytesTokenizer, Tokenizer
from longtrain.errors import ConfigError, DataError, Problem


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


class Request:
    """What a config asks to be prepared.

    Made from names and sizes alone; `content` and `folder_name` read the sources. `tokenizer` is None where it is to
    be trained, as `training` says. Raises DataError for sources or a tokenizer that are not there, ConfigError for a
    tokenizer that does not suit the config.
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
        self.sources = [
            _Source(source.path, source.text_field, sources.list_files(source.path)) for source in data.sources
        ]

    def look(self) -> str:
        """A name for what a cheap look shows: 16 hex digits, equal where nothing seems to have changed."""
        files = [
            [source.text_field, *((os.path.abspath(file.path), file.size, file.modified_ns) for file in source.files)]
            for source in self.sources
        ]
        paths = [source.path for source in self.sources]
        return _digest([FORMAT, paths, files, self._settings()])[:16]

    @cached_property
    def content(self) -> dict[str, Any]:
        """What is asked, with the sources by content: reads every file, once. Stands in the manifest."""
        found = [
            {
                "path": source.path,
                "text_field": source.text_field,
                "files": len(source.files),
                "bytes": source.bytes,
                "sha256": _digest([[file.name, _sha256(file.path)] for file in source.files]),
            }
            for source in self.sources
        ]
        return {"sources": found, **self._settings()}

    @property
    def folder_name(self) -> str:
        """A name for what is asked: 16 hex digits."""
        return _digest([FORMAT, self.content])[:16]

    def documents(self, skipped: sources.Skipped) -> Iterator[tuple[int, sources.Document]]:
        """All documents, each with the number of its source."""
        for number, source in enumerate(self.sources):
            for document in source.documents(skipped):
                yield number, document

    def _settings(self) -> dict[str, Any]:
        tokenizer = self.tokenizer.fingerprint if self.tokenizer is not None else self.training
        return {"tokenizer": tokenizer, "add_bos": self.add_bos, "add_eos": self.add_eos}


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


def _sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
