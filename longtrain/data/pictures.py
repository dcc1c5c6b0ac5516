"""A picture of what is trained on: the documents of a step's rows, and how long documents are (needs matplotlib)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from longtrain.data.optional import need
from longtrain.errors import ConfigError, Problem

_ROWS_SHOWN = 32
_FORMATS = (".png", ".svg", ".pdf")


def draw(path: Path, rows: list[dict[str, Any]], length_histogram: Mapping[str, int], *, title: str) -> None:
    """Write a picture of `data inspect`'s rows and of a manifest's histogram of lengths, in the format of its name.

    Of many rows the first are shown. Raises ConfigError where matplotlib is not installed, the format is none of
    its own, or the file cannot be written.
    """
    if path.suffix.lower() not in _FORMATS:
        message = f"the name must end with one of {', '.join(_FORMATS)}"
        raise ConfigError([Problem("--picture", str(path), message)], "the command line")
    figure = need("matplotlib.figure", "--picture", str(path)).Figure(figsize=(12, 8), layout="constrained")
    upper, lower = figure.subplots(2, 1)
    _draw_rows(upper, rows[:_ROWS_SHOWN])
    upper.set_title(title)
    _draw_lengths(lower, length_histogram)
    try:
        figure.savefig(path)
    except OSError as error:
        message = f"cannot be written: {error.strerror or error}"
        raise ConfigError([Problem("--picture", str(path), message)], "the command line") from error


def _draw_rows(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A bar a row, of its documents in turning colours; what is left white is padding."""
    for number, row in enumerate(rows):
        lengths = [document["end"] - document["start"] for document in row["documents"]]
        begins = np.cumsum([0, *lengths[:-1]])
        colours = [f"C{place % 10}" for place in range(len(lengths))]
        axes.broken_barh(list(zip(begins, lengths, strict=True)), (number - 0.4, 0.8), facecolors=colours)
    axes.set_xlim(0, len(rows[0]["tokens"]))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)))
    axes.set_xlabel("place in the row, in document order; white is padding")
    axes.set_ylabel("row of the batch")


def _draw_lengths(axes: Any, histogram: Mapping[str, int]) -> None:
    powers = sorted(int(bound).bit_length() - 1 for bound in histogram)
    bounds = [1 << power for power in range(powers[0], powers[-1] + 1)]
    axes.bar([f"{bound:,}" for bound in bounds], [histogram.get(str(bound), 0) for bound in bounds])
    axes.set_yscale("log")
    axes.set_ylim(bottom=0.5)  # of one document a bar is seen too
    axes.tick_params(axis="x", rotation=45)
    axes.set_xlabel("tokens of a document, at most")
    axes.set_ylabel("documents of the whole corpus")
