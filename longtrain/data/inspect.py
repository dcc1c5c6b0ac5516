"""`data inspect`: the rows of a step as they are trained on, as JSON and as text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from longtrain import layout as layouts
from longtrain.config import Config
from longtrain.data import pictures, prepare
from longtrain.data.rows import RowIndex
from longtrain.data.rowsource import SEQUENCE_KEYS
from longtrain.errors import ConfigError, Problem
from longtrain.layout import Deal

_DOCUMENTS_SHOWN = 12


def inspect_step(
    config: Config, step: int, log: Callable[[str], None], *, picture: Path | None = None
) -> tuple[dict[str, Any], str]:
    """The rows of a step of a run whose batch size never changed: the contract's JSON, and a text for people.

    `picture`: a file to draw them in, and the lengths of all documents. Prepares the data where needed. Raises
    DataError where the data ends before that step, ConfigError where the mesh has a -1 for context, which only the
    devices would tell.
    """
    if config.mesh.context < 1:
        message = "a number is needed to show what each context shard gets, e.g. mesh.context=4"
        raise ConfigError([Problem("mesh.context", config.mesh.context, message)])
    prepared = prepare.ensure(config, log)
    index = RowIndex.of(config, prepared, "train")
    found = inspect(index, step=step, sequences=config.batch.sequences)
    layout, reason = layouts.resolve(
        config.attention.layout,
        context=config.mesh.context,
        strategy=config.attention.strategy,
        packing=config.data.packing,
        kernel=config.attention.kernel,
    )
    tokenizer = prepared.tokenizer()
    attention = config.attention
    deal = Deal(layout, config.mesh.context, attention.ulysses_degree, attention.two_way, attention.strategy)
    if picture is not None:
        histogram = prepared.manifest["length_histogram"]
        pictures.draw(picture, found["rows"], histogram, title=f"{config.run.name}, step {step}: {config.data.packing}")
    text = render(found, deal=deal, decode=tokenizer.decode)
    return found, f"{text}\nlayout {layout}: {reason}"


def inspect(index: RowIndex, *, step: int, sequences: int, first_row: int | None = None) -> dict[str, Any]:
    """The rows of step `step` (the first is 1) in the contract's form: document order, before the layout.

    `first_row`: where the step's rows begin; None: (step - 1) * sequences, right for a run whose batch size
    never changed. Raises DataError where the rows are used up before.
    """
    first = (step - 1) * sequences if first_row is None else first_row
    index.check(first, sequences)
    rows = []
    for number in range(first, first + sequences):
        row = index.row(number)
        documents = [
            {"source": piece.source, "document": piece.document, "start": piece.start, "end": piece.end}
            for piece in row.pieces
        ]
        rows.append({name: getattr(row, name).tolist() for name in SEQUENCE_KEYS} | {"documents": documents})
    return {"step": step, "rows": rows}


def named(index: RowIndex, *, first_row: int, sequences: int) -> str:
    """A batch's rows by what they are made of, a line a row: `row 7: corpus/a.txt 0:4096, …` (source, document, tokens
    of the document, from and to)."""
    lines = []
    for number in range(first_row, first_row + sequences):
        pieces = [f"{piece.source} {piece.document} {piece.start}:{piece.end}" for piece in index.row(number).pieces]
        more = [f"and {len(pieces) - _DOCUMENTS_SHOWN} more"] if len(pieces) > _DOCUMENTS_SHOWN else []
        lines.append(f"  row {number}: {', '.join([*pieces[:_DOCUMENTS_SHOWN], *more])}")
    return "\n".join(lines)


def render(found: dict[str, Any], *, deal: Deal, decode: Callable[[list[int]], str] | None = None) -> str:
    """What `inspect` found, for people: each row's documents, padding, and each context shard's share of the
    work.

    `decode`: shows how each piece begins as well.
    """
    console = Console(width=110, highlight=False)
    with console.capture() as captured:
        for number, row in enumerate(found["rows"]):
            segments_S = np.array(row["segments"])
            padding = float(np.mean(segments_S == 0))
            console.print(
                f"step {found['step']}, row {number} of its batch: {len(segments_S):,} places, "
                f"{int(np.sum(row['weights'])):,} targets, {len(row['documents'])} documents, "
                f"{padding:.1%} padding",
                markup=False,
            )
            console.print(_documents_table(row, decode))
            console.print(_shards_table(segments_S, deal))
    return captured.get().rstrip()


def _documents_table(row: dict[str, Any], decode: Callable[[list[int]], str] | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("source", "document", "start", "end", "tokens"):
        table.add_column(name, justify="left" if name in ("source", "document") else "right", overflow="fold")
    if decode is not None:
        table.add_column("begins", no_wrap=True, overflow="ellipsis", max_width=40)
    place = 0
    for shown, piece in enumerate(row["documents"]):
        size = piece["end"] - piece["start"]
        if shown < _DOCUMENTS_SHOWN:
            begin = [repr(decode(row["tokens"][place : place + min(size, 16)]))] if decode is not None else []
            cells = [
                piece["source"],
                piece["document"],
                *(f"{n:,}" for n in (piece["start"], piece["end"], size)),
                *begin,
            ]
            table.add_row(*(cell.replace("[", r"\[") for cell in cells))
        place += size
    hidden = len(row["documents"]) - _DOCUMENTS_SHOWN
    if hidden > 0:
        table.add_row(f"and {hidden} more")
    return table


def _shards_table(segments_S: np.ndarray, deal: Deal) -> Table:
    """A line a context shard, or a group of them: its tokens, and its attention tiles in all and by step (of a ring;
    other strategies have one)."""
    work, degree = deal.work(segments_S), deal.ulysses_degree
    local = segments_S[deal.order(len(segments_S))].reshape(deal.members, -1)
    mean = max(1.0, float(work.sum()) / deal.members)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    who = "context shard" if degree == 1 else "context shards"
    for name in (who, "tokens", "pieces", "attention tiles", "of the mean", "tiles by step"):
        table.add_column(name, justify="right")
    for member in range(deal.members):
        held = local[member][local[member] > 0]
        tiles = int(work[:, member].sum())
        steps = " ".join(str(count) for count in work[:, member].tolist())
        table.add_row(
            str(member) if degree == 1 else f"{member * degree} to {member * degree + degree - 1}",
            f"{len(held):,}",
            str(len(np.unique(held))),
            f"{tiles:,}",
            f"{tiles / mean:.2f}",
            steps,
        )
    return table
