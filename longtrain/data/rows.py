"""The row index: row number -> row, a pure function of the prepared data, the packing and the seed.

Row r of a run is the same whoever asks, in whatever order, on any number of hosts; nothing is kept between
rows. So a checkpoint holds nothing of the data but how many rows were taken, and the fingerprint of the plan
they came from.

Accounting: a document of n tokens (BOS and EOS counted) is an input n times an epoch. Each input's target is
the document's next token, even where that is the first input of a later row; its last token has no target and
weight 0. So each token is a target once an epoch, bar each document's first.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from longtrain.config import Config
from longtrain.data.hashing import fold, key
from longtrain.data.mixing import Mixture
from longtrain.data.packing import PACKINGS, Packing, Span, pack
from longtrain.errors import DataError

Split = Literal["train", "eval"]

ORDER_VERSION = 1
"""Raised whenever the same prepared data and seed would give other rows than before."""


class Corpus(Protocol):
    """What the index needs of tokenized documents, which are numbered 0..D-1. `Prepared` is the real one."""

    fingerprint: str
    sources: Sequence[str]
    source_of: np.ndarray
    """Number of each document's source, [D]."""
    keys: np.ndarray
    """A hash of each document's identity, uint64 [D]: what decides its split."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [D]."""
        ...

    def tokens(self, document: int, start: int, end: int) -> np.ndarray: ...

    def name(self, document: int) -> str: ...


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens start..end-1 of a document, as they stand in a row."""

    source: str
    document: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One row in document order, before any layout. Arrays are [S], int32 but for the float32 weights.

    `segments` numbers the pieces from 1, 0 is padding; `positions` counts from 0 in each piece; `weights` is
    1 where there is a target to predict and 0 elsewhere, where `targets` is 0.
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    weights: np.ndarray
    pieces: list[Piece]


class RowIndex:
    """All rows of one split. It pickles as its arguments, and is built again where it arrives."""

    def __init__(
        self,
        corpus: Corpus,
        *,
        packing: str,
        sequence_length: int,
        seed: int,
        split: Split = "train",
        eval_fraction: float = 0.0,
        weights: Sequence[float] | None = None,
        length_shares: Sequence[tuple[int | None, float]] = (),
        documents_per_row: int | None = None,
        repeat: bool = True,
    ):
        """Index the rows of `split`.

        `weights`: share of the tokens that each source gives, in any unit; each source then has epochs of its
        own. None: all sources are one, each document once an epoch. `eval_fraction`: part of each source's
        documents that belongs to the eval split, in every epoch. `length_shares`: (longest, share) in rising order, the
        last with None for any length: shares of each source's tokens (or of all, without weights) by length of
        document, each length having epochs of its own. `documents_per_row`: the most, for `best_fit`. `repeat`: False
        ends the rows with the first epoch (with weights or shares: as soon as one of them is used up).

        Raises DataError where the split holds no document, or none for a weight or share.
        """
        if packing not in PACKINGS:
            raise ValueError(f"packing {packing!r} is not one of {', '.join(PACKINGS)}")
        if weights is not None and len(weights) != len(corpus.sources):
            raise ValueError(f"{len(weights)} weights for {len(corpus.sources)} sources")
        self._corpus = corpus
        self._arguments: dict[str, Any] = {
            "packing": packing,
            "sequence_length": sequence_length,
            "seed": seed,
            "split": split,
            "eval_fraction": eval_fraction,
            "weights": list(map(float, weights)) if weights is not None and len(weights) > 1 else None,
            "length_shares": list(map(list, length_shares)),
            "documents_per_row": documents_per_row,
            "repeat": repeat,
        }
        self.sequence_length = sequence_length
        self.split = split

        groups = _split_documents(corpus, split, eval_fraction)
        # The eval split is one and the same for every seed: runs can be compared, and a later stage with another seed
        # is not judged on what an earlier one was trained on.
        order_seed = 0 if split == "eval" else seed
        shares = self._arguments["weights"]
        if shares is None:
            groups, shares = [np.sort(np.concatenate(groups))], [1.0]
        names = [f"data.sources {path}" for path in corpus.sources] if len(groups) > 1 else ["data.sources"]
        lengths = np.asarray(corpus.lengths)
        if length_shares:
            groups, shares, names = _by_length(groups, shares, names, lengths, length_shares)
        kept = [place for place, documents in enumerate(groups) if len(documents)]
        if not kept:
            raise DataError(
                f"the {split} split holds no document: {len(corpus.lengths)} documents are prepared and "
                f"data.eval_fraction = {eval_fraction} (a source of one document gives it to train)"
            )
        if split == "train" and len(kept) < len(groups):
            empty = [names[place] for place in range(len(groups)) if place not in kept]
            raise DataError(f"a share of the tokens but no document to give it: {'; '.join(empty)}")

        self._documents = [groups[place] for place in kept]
        keep = getattr(corpus, "keep", None)
        self._packings: list[Packing] = [
            pack(
                packing,
                lengths[documents],
                sequence_length,
                key(order_seed, split == "eval", place),
                most=documents_per_row,
                keep=keep,
            )
            for place, documents in zip(kept, self._documents, strict=True)
        ]
        # Weights are shares of tokens, but rows are dealt: a source whose rows hold more padding is due more
        # of them.
        self._mixture = Mixture(
            [
                shares[place] * packed.rows_per_epoch / packed.tokens_per_epoch
                for place, packed in zip(kept, self._packings, strict=True)
            ]
        )
        limits = [packed.rows_per_epoch for packed in self._packings]
        self.rows_per_epoch = self._mixture.rows_within(limits)
        """Rows until the first source has been read once; with one source, those of an epoch."""
        self.rows: int | None = None if repeat else self.rows_per_epoch
        """How many rows there are: None for no end."""
        self.documents = sum(len(documents) for documents in self._documents)
        self.tokens_per_epoch = sum(packed.tokens_per_epoch for packed in self._packings)

    @classmethod
    def of(cls, config: Config, prepared: Corpus, split: Split) -> "RowIndex":
        """The rows of `split` as a config packs, mixes and orders them. The eval split is read once, never again."""
        weights = [source.weight for source in config.data.sources]
        return cls(
            prepared,
            packing=config.data.packing,
            sequence_length=config.sequence_length,
            seed=config.run.seed,
            split=split,
            eval_fraction=config.data.eval_fraction,
            weights=None if None in weights else [weight for weight in weights if weight is not None],
            # What is held out is read as it is.
            length_shares=[(it.up_to, it.share) for it in config.data.length_shares] if split == "train" else (),
            documents_per_row=config.data.documents_per_row,
            repeat=config.data.repeat and split == "train",
        )

    def __reduce__(self) -> tuple[Callable[..., "RowIndex"], tuple[Corpus, dict[str, Any]]]:
        return _rebuild, (self._corpus, self._arguments)

    @property
    def fingerprint(self) -> str:
        """The data plan's: equal where, and only where, row r is the same for every r."""
        plan = self._arguments | {"corpus": self._corpus.fingerprint, "order": ORDER_VERSION}
        if plan["packing"] != "concat":
            del plan["repeat"]  # whole rows end an epoch anyway; a stream's last row is filled up or not
        for name in ("length_shares", "documents_per_row"):
            if not plan[name]:
                del plan[name]
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()

    @property
    def padding_fraction(self) -> float:
        """Part of an epoch's places that hold no token."""
        if self._arguments["packing"] == "concat" and self._arguments["repeat"]:
            return 0.0
        places = sum(packed.rows_per_epoch for packed in self._packings) * self.sequence_length
        return 1 - self.tokens_per_epoch / places

    def check(self, first: int, count: int) -> None:
        """Raise DataError unless rows first..first+count-1 exist; all hosts ask for whole batches."""
        if self.rows is not None and first + count > self.rows:
            left = max(0, self.rows - first)
            raise DataError(
                f"the data is exhausted: the {self.split} split has {self.rows} rows, {first} are taken, "
                f"{left} left are too few for a batch of {count}; data.repeat=true would start over"
            )

    def spans(self, row: int) -> list[Span]:
        """The row's (document number, start, end), in their order. Raises DataError beyond the last row."""
        self.check(row, 1)
        group, number = self._mixture.locate(row)
        packed, documents = self._packings[group], self._documents[group]
        ends = self.rows is not None and number == packed.rows_per_epoch - 1
        spans = packed.last_row() if ends else packed.row(number)
        return [(int(documents[document]), start, end) for document, start, end in spans]

    def row(self, row: int, place_T: np.ndarray | None = None) -> Row:
        """Row `row` of the run, from 0 on; or what of it stands at some places, ascending: all [S] are [T] then, and
        no more tokens are read than that. Raises DataError beyond the last row."""
        corpus = self._corpus
        place_T = np.arange(self.sequence_length) if place_T is None else place_T
        tokens, targets, positions, segments = np.zeros((4, len(place_T)), np.int32)
        weights = np.zeros(len(place_T), np.float32)
        pieces = []
        first = 0
        for segment, (document, start, end) in enumerate(self.spans(row), start=1):
            low, high = np.searchsorted(place_T, (first, first + end - start))
            offset = place_T[low:high] - first
            text = corpus.tokens(document, start, min(end + 1, int(corpus.lengths[document])))
            tokens[low:high] = text[offset]
            following = low + int(np.searchsorted(offset, len(text) - 1))  # the document's last token has no target
            targets[low:following] = text[offset[: following - low] + 1]
            weights[low:following] = 1
            positions[low:high] = offset
            segments[low:high] = segment
            source = corpus.sources[int(corpus.source_of[document])]
            pieces.append(Piece(source, corpus.name(document), start, end))
            first += end - start
        return Row(tokens, targets, positions, segments, weights, pieces)

    def segments(self, row: int) -> np.ndarray:
        """The segments of a whole row, int32 [S], of which no token is read. Raises DataError beyond the last row."""
        ends = np.cumsum([end - start for _, start, end in self.spans(row)])
        place_S = np.arange(self.sequence_length)
        segments_S = (np.searchsorted(ends, place_S, side="right") + 1).astype(np.int32)
        segments_S[ends[-1] :] = 0
        return segments_S


def _by_length(
    groups: list[np.ndarray],
    shares: list[float],
    names: list[str],
    lengths: np.ndarray,
    length_shares: Sequence[tuple[int | None, float]],
) -> tuple[list[np.ndarray], list[float], list[str]]:
    """Each group's documents apart by length, with what each part's share is and what to call it."""
    longest = np.array([np.iinfo(np.int64).max if most is None else most for most, _ in length_shares])
    total = sum(share for _, share in length_shares)
    apart: list[np.ndarray] = []
    for documents in groups:
        bucket = np.searchsorted(longest, lengths[documents], side="left")
        apart += [documents[bucket == number] for number in range(len(longest))]
    called, least = [], 1
    for most, _ in length_shares:
        called.append(f"of {least:,} or more tokens" if most is None else f"of {least:,} to {most:,} tokens")
        least = (most or 0) + 1
    return (
        apart,
        [whole * share / total for whole in shares for _, share in length_shares],
        [f"{name}, documents {lengths_called}" for name in names for lengths_called in called],
    )


def _rebuild(corpus: Corpus, arguments: dict[str, Any]) -> RowIndex:
    return RowIndex(corpus, **arguments)


def _split_documents(corpus: Corpus, split: Split, eval_fraction: float) -> list[np.ndarray]:
    """The split's documents of each source, ascending.

    A document is held out by its own identity: those of a source with the smallest hashes are. So the splits
    stay disjoint over every epoch and for every seed, and a corpus that grows moves few documents from one split to
    the other.
    """
    source_of = np.asarray(corpus.source_of)
    rank = fold(0, np.asarray(corpus.keys, np.uint64))
    groups = []
    for source in range(len(corpus.sources)):
        documents = np.flatnonzero(source_of == source)
        held_out = round(eval_fraction * len(documents))
        if eval_fraction > 0:
            held_out = max(1, min(held_out, len(documents) - 1)) if len(documents) > 1 else 0
        by_rank = documents[np.argsort(rank[documents], kind="stable")]
        groups.append(np.sort(by_rank[:held_out] if split == "eval" else by_rank[held_out:]))
    return groups
