"""Hugging Face's tokenizer.json, as Llama 3 has it, read with their own `tokenizers` library."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longtrain.data.optional import need
from longtrain.data.tokenizers import HUGGING_FACE_FILE

_CONFIG = "tokenizer_config.json"
"""Beside the tokenizer, it names the BOS and EOS pieces, and holds the chat template."""


class HuggingFaceTokenizer:
    """A tokenizer.json. What it says of truncation, padding and added pieces is left out: a document is encoded whole,
    and what looks like a special piece in a text is text."""

    kind = "huggingface"

    def __init__(self, files: Mapping[str, bytes]):
        """`files`: tokenizer.json and, where there is one, tokenizer_config.json.

        Raises ValueError where they are not what they should be, ConfigError where the library is not installed.
        """
        library = need("tokenizers", "data.tokenizer", HUGGING_FACE_FILE)
        try:
            self._tokenizer = library.Tokenizer.from_buffer(files[HUGGING_FACE_FILE])
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(str(error)) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.files = files
        config = json.loads(files.get(_CONFIG, b"{}"))
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id, self.eos_id = (self._id_of(config.get(name)) for name in ("bos_token", "eos_token"))
        digest = hashlib.sha256(files[HUGGING_FACE_FILE])
        digest.update(json.dumps([self.bos_id, self.eos_id]).encode())
        self.fingerprint = f"huggingface:{digest.hexdigest()}"

    def __reduce__(self) -> tuple[type["HuggingFaceTokenizer"], tuple[dict[str, bytes]]]:
        return HuggingFaceTokenizer, (dict(self.files),)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _id_of(self, piece: Any) -> int | None:
        """The id of a piece as the config names it: a string, or an object that holds one."""
        if isinstance(piece, dict):
            piece = piece.get("content")
        return self._tokenizer.token_to_id(piece) if isinstance(piece, str) else None


def load(path: Path) -> HuggingFaceTokenizer:
    """The tokenizer of a tokenizer.json, with what the tokenizer_config.json beside it says.

    Raises OSError, ValueError, and ConfigError where the library is not installed.
    """
    files = {HUGGING_FACE_FILE: path.read_bytes()}
    config = path.with_name(_CONFIG)
    if config.exists():
        files[_CONFIG] = config.read_bytes()
    return HuggingFaceTokenizer(files)
