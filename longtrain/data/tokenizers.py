"""Tokenizers: plain bytes, and SentencePiece models, given or trained on the run's own text.

A tokenizer turns a text into ids and back. It adds no BOS or EOS of itself: `data prepare` does, once a
document. Padding needs no id: a row's padding is what has segment 0.
"""

import hashlib
import heapq
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from longtrain.config import BYTES_VOCABULARY
from longtrain.data.hashing import key
from longtrain.data.sources import Document
from longtrain.errors import ConfigError, DataError, Problem


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

    vocab_size: int
    bos_id: int | None
    """Begin of a document; None where the tokenizer has no such piece."""
    eos_id: int | None
    """End of a document; None where the tokenizer has no such piece."""
    fingerprint: str
    """Equal for tokenizers that give every text the same ids."""

    def encode(self, text: str) -> list[int]: ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode` for each, over all cores where the tokenizer can."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, BOS and EOS left out."""
        ...

    def decode_all(self, ids: Sequence[list[int]]) -> list[str]: ...


class BytesTokenizer:
    """A token a byte of UTF-8: ids 0..255 are the bytes, then begin and end of a document."""

    vocab_size = BYTES_VOCABULARY
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        # A model may well generate what is not UTF-8; that shows as replacement characters.
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def decode_all(self, ids: Sequence[list[int]]) -> list[str]:
        return [self.decode(tokens) for tokens in ids]


class SentencePieceTokenizer:
    """A SentencePiece model."""

    def __init__(self, model: bytes):
        """`model`: what a .model file holds. Raises ValueError where it is not one."""
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        if not loaded or not self._processor.vocab_size():
            raise ValueError("not a SentencePiece model")
        self.model = model
        self.vocab_size: int = self._processor.vocab_size()
        bos, eos = self._processor.bos_id(), self._processor.eos_id()
        self.bos_id: int | None = bos if bos >= 0 else None
        self.eos_id: int | None = eos if eos >= 0 else None
        self.fingerprint = f"sentencepiece:{hashlib.sha256(model).hexdigest()}"

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return self._processor.encode(list(texts), num_threads=-1)

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(token) for token in ids])

    def decode_all(self, ids: Sequence[list[int]]) -> list[str]:
        return self._processor.decode(list(ids), num_threads=-1)


def load(path: str | Path) -> SentencePieceTokenizer:
    """The SentencePiece model of a file. Raises DataError where it cannot be read or is not one."""
    try:
        return SentencePieceTokenizer(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"data.tokenizer = {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"data.tokenizer = {path}: not a SentencePiece model") from error


# A line's end and the next one's indentation are one piece, as are blank lines: most of what tells code from
# prose.
_LINE_BREAKS = ["\n", "\n\n", "\n\n\n", *("\n" + "\u2581" * spaces for spaces in range(4, 25, 4))]
_SAMPLE_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 12


def train(documents: Iterable[Document], *, vocab_size: int, sample_bytes: int) -> SentencePieceTokenizer:
    """A SentencePiece BPE model of `vocab_size` pieces: the same for the same documents, and exact.

    Exact: every text survives encode and decode, but for U+2581, which SentencePiece keeps for the space.
    Text is not normalised, no space is put in front, runs of spaces are pieces, and what the pieces do not
    cover falls back to bytes. Raises ConfigError where the text does not give that many pieces, or the
    alphabet needs more.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(_sample(documents, sample_bytes)),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=_LINE_BREAKS,
            max_sentence_length=4 * _LONGEST_LINE,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split("] ")[-1].split()) or "the text holds too little to learn from"
        raise ConfigError(
            [Problem("data.tokenizer.vocab_size", vocab_size, f"SentencePiece cannot train it: {reason}")]
        ) from error
    return SentencePieceTokenizer(model.getvalue())


def _sample(documents: Iterable[Document], sample_bytes: int) -> list[str]:
    """Blocks of text of at most `sample_bytes` together, drawn evenly from all documents."""
    # Those of smallest hash, in a heap of (minus hash, minus place, block): the next to go is on top.
    kept: list[tuple[int, int, str]] = []
    size = place = 0
    for document in documents:
        for start in range(0, len(document.text), _SAMPLE_BLOCK):
            block = document.text[start : start + _SAMPLE_BLOCK]
            heapq.heappush(kept, (-key(place), -place, block))
            place += 1
            size += len(block.encode())
            while size > sample_bytes and len(kept) > 1:
                size -= len(heapq.heappop(kept)[2].encode())
    return [block for _, _, block in sorted(kept, key=lambda item: -item[1])]


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    for block in blocks:
        for line in block.split("\n"):
            for start in range(0, len(line), _LONGEST_LINE):
                yield line[start : start + _LONGEST_LINE]


def shortest_unsigned(vocab_size: int) -> np.dtype:
    """The dtype tokens are kept in."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
