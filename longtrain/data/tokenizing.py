"""A shard of prepared documents out of a job's files: what a process of `data prepare` does."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from longtrain.data import readers
from longtrain.data.blocks import Blocks
from longtrain.data.jobs import Job
from longtrain.data.readers import Bad, Fields, Ids, Text
from longtrain.data.shards import Counts, ShardWriter
from longtrain.data.sources import SourceFile
from longtrain.data.tokenizers import Tokenizer
from longtrain.errors import DataError

_SECONDS_BETWEEN_TELLS = 0.2


class Stopped(Exception):
    """The parent asked a job to end before it is done."""


class Meter(Protocol):
    """Where jobs tell how far they are, and learn whether to stop."""

    def add(self, read: int, documents: int, tokens: int) -> None:
        """Count what was done since. Raises Stopped."""
        ...


@dataclass(frozen=True)
class Work:
    """What all jobs of a folder share."""

    folder: Path
    tokenizer: Tokenizer
    dtype: np.dtype
    files_of: Sequence[Sequence[SourceFile]]
    fields_of: Sequence[Fields]
    skip_bad_of: Sequence[bool]
    """Of each source: whether bad records are left out and counted, or end it all."""
    add_bos: bool
    add_eos: bool
    vocab_size: int
    """The model's: ids of documents that are tokenized already must be below it."""


def tokenize(work: Work, number: int, job: Job, meter: Meter) -> None:
    """Make shard `number` of the work's folder. Raises DataError, OSError, Stopped."""
    with contextlib.closing(ShardWriter(work.folder, number, work.dtype)) as writer:
        shard = _Shard(work, writer, meter)
        for piece in job:
            file, fields = work.files_of[piece.source][piece.file], work.fields_of[piece.source]
            for event in readers.read(file, fields, piece.part, shard.tell_read):
                shard.take(piece.source, file, event)
        shard.tell()
        writer.finish(shard.counts)


class _Shard:
    """Events to tokens, with BOS and EOS once a document."""

    def __init__(self, work: Work, writer: ShardWriter, meter: Meter):
        self._work, self._writer, self._meter = work, writer, meter
        tokenizer = work.tokenizer
        self._bos = np.array([tokenizer.bos_id] if work.add_bos else [], np.int64)
        self._eos = np.array([tokenizer.eos_id] if work.add_eos else [], np.int64)
        self._blocks = Blocks(tokenizer.encode)
        self.counts = Counts()
        self._text_bytes = 0  # of the document
        self._exact = True
        self._last_id = -1
        self._left_out = False
        self._untold = [0, 0, 0]
        self._told = time.monotonic()

    def tell_read(self, size: int) -> None:
        self._untold[0] += size

    def tell(self) -> None:
        self._meter.add(*self._untold)
        self._untold, self._told = [0, 0, 0], time.monotonic()

    def take(self, source: int, file: SourceFile, event: readers.Event) -> None:
        if self._left_out and not isinstance(event, Bad):  # what follows of a document of ids
            self._left_out = not event.last
            return
        match event:
            case Bad(_, reason):
                self._leave_out(source, reason)
                return
            case Text(_, text, last):
                for block in self._blocks.take(text, last):
                    self._write(block)
            case Ids(_, ids, last):
                if reason := self._out_of_range(file, event):
                    self._leave_out(source, reason)
                    self._left_out = not last
                    return
                if len(ids):
                    given = self._bos[: int(ids[0] != self._bos[0])] if len(self._bos) else self._bos
                    self._extend(ids if self._writer.length else np.concatenate([given, ids]))
                    self._last_id = int(ids[-1])
                    self.counts.largest_id = max(self.counts.largest_id, int(ids.max()))
        if last:
            self._end(source, event)

    def _write(self, block: str) -> None:
        ids = self._work.tokenizer.encode(block)
        if self._exact and self._work.tokenizer.decode(ids) != block:
            self._exact = False
        if not self._writer.length:
            self._extend(self._bos)
        self._extend(np.array(ids, np.int64))
        self._text_bytes += len(block) if block.isascii() else len(block.encode())

    def _extend(self, ids: np.ndarray) -> None:
        self._writer.extend(ids)
        self._untold[2] += len(ids)
        if time.monotonic() - self._told > _SECONDS_BETWEEN_TELLS:
            self.tell()

    def _end(self, source: int, event: Text | Ids) -> None:
        if not self._writer.length:
            self.counts.empty += 1
        else:
            if not (isinstance(event, Ids) and len(self._eos) and self._last_id == self._eos[0]):
                self._extend(self._eos)
            self._writer.end(source, event.name)
            self._untold[1] += 1
            self.counts.text_bytes += self._text_bytes
            if not self._exact:
                self.counts.inexact += 1
                self.counts.first_inexact = self.counts.first_inexact or event.name
        self.counts.forced_cuts, self._text_bytes, self._exact = self._blocks.forced, 0, True

    def _leave_out(self, source: int, reason: str) -> None:
        if not self._work.skip_bad_of[source]:
            raise DataError(f"{reason}; data.on_bad_record = skip would leave it out and count it")
        self._blocks.drop()
        self._writer.abandon()
        self.counts.bad += 1
        self.counts.first_bad = self.counts.first_bad or reason
        self._text_bytes, self._exact = 0, True

    def _out_of_range(self, file: SourceFile, event: Ids) -> str:
        """Why an array of ids cannot be the tokenizer's, or nothing."""
        if not len(event.ids):
            return ""
        low, high = int(event.ids.min()), int(event.ids.max())
        if low >= 0 and high < self._work.vocab_size:
            return ""
        _, colon, record = event.name.rpartition(":")
        where = f"{file.path}, record {record}" if colon else file.path
        wrong = low if low < 0 else high
        return f"{where}: id {wrong} is outside of 0 to model.vocab_size - 1 = {self._work.vocab_size - 1}"
