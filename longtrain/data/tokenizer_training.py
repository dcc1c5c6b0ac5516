"""Training a SentencePiece model on the run's own text."""

import heapq
import io
from collections.abc import Iterable, Iterator

import sentencepiece

from longtrain.data.hashing import key
from longtrain.data.tokenizers import SentencePieceTokenizer
from longtrain.errors import ConfigError, Problem

# A line's end and the next one's indentation are one piece, as are blank lines: most of what tells code from
# prose.
_LINE_BREAKS = ["\n", "\n\n", "\n\n\n", *("\n" + "\u2581" * spaces for spaces in range(4, 25, 4))]
_SAMPLE_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 12


def train(texts: Iterable[str], *, vocab_size: int, sample_bytes: int) -> SentencePieceTokenizer:
    """A SentencePiece BPE model of `vocab_size` pieces: the same for the same texts, and exact.

    Exact: every text survives encode and decode, but for U+2581, which SentencePiece keeps for the space.
    Text is not normalised, no space is put in front, runs of spaces are pieces, and what the pieces do not
    cover falls back to bytes. Raises ConfigError where the text does not give that many pieces, or the
    alphabet needs more.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(_sample(texts, sample_bytes)),
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


def _sample(texts: Iterable[str], sample_bytes: int) -> list[str]:
    """Blocks of text of at most `sample_bytes` together, drawn evenly from all texts."""
    # Those of smallest hash, in a heap of (minus hash, minus place, block): the next to go is on top.
    kept: list[tuple[int, int, str]] = []
    size = place = 0
    for text in texts:
        for start in range(0, len(text), _SAMPLE_BLOCK):
            block = text[start : start + _SAMPLE_BLOCK]
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
