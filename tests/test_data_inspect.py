"""`data inspect`: the contract's JSON, and a text that shows what each shard gets."""

import json
import re
import sys

import matplotlib.figure
import numpy as np
import pytest

import tiny
from documents import Documents
from longtrain.data import pictures
from longtrain.data.inspect import inspect, inspect_step, render
from longtrain.data.rows import RowIndex
from longtrain.errors import ConfigError, DataError
from longtrain.layout import Deal


def index_of(**options) -> RowIndex:
    documents = Documents([121, 5, 30])
    return RowIndex(documents, packing="best_fit", sequence_length=60, seed=0, **options)


def test_the_json_is_the_rows_in_document_order():
    index = index_of()
    found = json.loads(json.dumps(inspect(index, step=3, sequences=2)))
    assert found["step"] == 3
    assert [row["tokens"] for row in found["rows"]] == [index.row(row).tokens.tolist() for row in (4, 5)]
    for row in found["rows"]:
        place = 0
        for segment, piece in enumerate(row["documents"], start=1):
            assert piece["source"] == "source 0"
            for token in range(piece["start"], piece["end"]):
                assert row["tokens"][place] == 1000 * int(piece["document"]) + token + 1
                assert row["segments"][place] == segment
                assert row["positions"][place] == token - piece["start"]
                place += 1
        assert not any(row["segments"][place:])


def test_a_step_may_begin_at_any_row():
    assert (
        inspect(index_of(), step=9, sequences=2, first_row=4)["rows"]
        == inspect(index_of(), step=3, sequences=2)["rows"]
    )


def test_a_step_beyond_the_data_is_refused():
    with pytest.raises(DataError, match="exhausted"):
        inspect(index_of(repeat=False), step=2, sequences=2)


def test_the_text_shows_documents_padding_and_shards():
    found = inspect(index_of(), step=1, sequences=3)
    text = render(found, deal=Deal("zigzag", 2))
    assert text.count("context shard") == 3
    [split_row] = [row for row in found["rows"] if len(row["documents"]) == 1 and row["documents"][0]["start"] == 60]
    assert split_row["documents"][0]["end"] == 120
    assert re.search(r"source 0 +0 +60 +120 +60\b", text)
    assert "40.0% padding" in text
    groups = render(found, deal=Deal("dealt", 4, ulysses_degree=2))
    assert groups.count("context shards") == 3 and "0 to 1" in groups and "2 to 3" in groups
    shown = render(found, deal=Deal("contiguous", 1), decode=lambda ids: f"[b]{len(ids)} ids[/b]")
    assert "[b]16 ids[/b]" in shown


def test_a_step_of_a_config(tmp_path):
    (tmp_path / "a.txt").write_text("a text\n" * 100)
    overrides = [
        f"data.sources.0.path={tmp_path / 'a.txt'}",
        f"data.prepared_dir={tmp_path / 'prepared'}",
        "mesh.context=4",
    ]
    found, text = inspect_step(tiny.config(*overrides), 2, print)
    assert [len(row["tokens"]) for row in found["rows"]] == [64] * 4
    assert "a.txt" in text
    assert "layout dealt" in text
    with pytest.raises(ConfigError, match="mesh.context = -1"):
        inspect_step(tiny.config(*overrides[:2], "mesh.context=-1"), 1, print)


def test_a_picture_of_rows_and_lengths(tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    for number, size in enumerate((10, 150, 30)):
        (tmp_path / "corpus" / f"{number}.txt").write_text("x" * size)
    config = tiny.config(f"data.sources.0.path={tmp_path}/corpus", f"data.prepared_dir={tmp_path}/prepared")
    inspect_step(config, 1, print, picture=tmp_path / "rows.png")
    data = (tmp_path / "rows.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    for wrong, message in (("rows.bmp", "must end with one of .png"), ("nowhere/rows.png", "cannot be written")):
        with pytest.raises(ConfigError, match=rf"--picture.*{message}"):
            inspect_step(config, 1, print, picture=tmp_path / wrong)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"matplotlib.*longtrain\[plot\]"):
        inspect_step(config, 1, print, picture=tmp_path / "rows.png")


def test_the_bars_of_a_picture_are_the_documents():
    axes = matplotlib.figure.Figure().subplots()
    found = inspect(index_of(), step=1, sequences=3)
    pictures._draw_rows(axes, found["rows"])
    for row, bars in zip(found["rows"], axes.collections, strict=True):
        edges = [path.vertices[:, 0] for path in bars.get_paths()]
        widths = [int(edge.max() - edge.min()) for edge in edges]
        assert widths == [piece["end"] - piece["start"] for piece in row["documents"]]
        assert [int(edge.min()) for edge in edges] == np.cumsum([0, *widths[:-1]]).tolist()
