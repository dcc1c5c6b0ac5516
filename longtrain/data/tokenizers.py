"""Tokenizers: plain bytes, SentencePiece models, and Hugging Face's tokenizer.json.

A tokenizer turns a text into ids and back. It adds no BOS or EOS of itself: `data prepare` does, once a
document. Padding needs no id: a row's padding is what has segment 0.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece

from longtrain.config import BYTES_VOCABULARY
from longtrain.errors import DataError


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer. It pickles."""

    kind: str
    files: Mapping[str, bytes]
    """What it is made of, by file name: `restore(kind, files)` makes it again."""
    vocab_size: int
    bos_id: int | None
    """Begin of a document; None where the tokenizer has no such piece."""
    eos_id: int | None
    """End of a document; None where the tokenizer has no such piece."""
    fingerprint: str
    """Equal for tokenizers that give every text the same ids."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, BOS and EOS left out."""
        ...


class BytesTokenizer:
    """A token a byte of UTF-8: ids 0..255 are the bytes, then begin and end of a document."""

    kind = "bytes"
    files: Mapping[str, bytes] = {}
    vocab_size = BYTES_VOCABULARY
    bos_id: int | None = 256
    eos_id: int | None = 257
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        # A model may well generate what is not UTF-8; that shows as replacement characters.
        return bytes(token for token in ids if token < 256).decode(errors="replace")


class SentencePieceTokenizer:
    """A SentencePiece model."""

    kind = "sentencepiece"

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
        self.files: Mapping[str, bytes] = {SENTENCEPIECE_FILE: model}
        self.vocab_size: int = self._processor.vocab_size()
        bos, eos = self._processor.bos_id(), self._processor.eos_id()
        self.bos_id: int | None = bos if bos >= 0 else None
        self.eos_id: int | None = eos if eos >= 0 else None
        self.fingerprint = f"sentencepiece:{hashlib.sha256(model).hexdigest()}"

    def __reduce__(self) -> tuple[type["SentencePieceTokenizer"], tuple[bytes]]:
        return SentencePieceTokenizer, (self.model,)

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(ids)


SENTENCEPIECE_FILE = "tokenizer.model"


def load(path: str | Path) -> Tokenizer:
    """The tokenizer of a file: a SentencePiece model, a tokenizer.json, or a folder that holds one of them.

    Raises DataError where it cannot be read or is neither, ConfigError where its library is not installed.
    """
    given, path = path, Path(path)
    if path.is_dir():
        from_folder = [path / name for name in (HUGGING_FACE_FILE, SENTENCEPIECE_FILE) if (path / name).is_file()]
        if not from_folder:
            message = f"a folder without a {HUGGING_FACE_FILE} or {SENTENCEPIECE_FILE}"
            raise DataError(f"data.tokenizer = {given}: {message}")
        path = from_folder[0]
    try:
        if path.suffix == ".json":
            from longtrain.data import huggingface

            return huggingface.load(path)
        return SentencePieceTokenizer(path.read_bytes())
    except OSError as error:
        raise DataError(f"data.tokenizer = {given}: {error.strerror}") from error
    except ValueError as error:
        what = "Hugging Face tokenizer" if path.suffix == ".json" else "SentencePiece model"
        raise DataError(f"data.tokenizer = {given}: not a {what}: {error}") from error


HUGGING_FACE_FILE = "tokenizer.json"


def restore(kind: str, files: Mapping[str, bytes]) -> Tokenizer:
    """A tokenizer from what was kept of it. Raises ValueError for a kind this version does not know."""

    def hugging_face() -> Tokenizer:
        from longtrain.data.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(files)

    kinds: dict[str, Callable[[], Tokenizer]] = {
        BytesTokenizer.kind: BytesTokenizer,
        SentencePieceTokenizer.kind: lambda: SentencePieceTokenizer(files[SENTENCEPIECE_FILE]),
        "huggingface": hugging_face,
    }
    if kind not in kinds:
        raise ValueError(f"a tokenizer of kind {kind!r}")
    return kinds[kind]()


def shortest_unsigned(vocab_size: int) -> np.dtype:
    """The dtype tokens are kept in."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
