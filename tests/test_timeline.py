"""The picture of a step in time, read back from the SVG."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest

from longtrain.plan import schedule, timeline
from longtrain.plan.program import Program
from programs.toys import LAYERS, MESH

PROGRAMS = Path(__file__).parent / "programs"
RATES = schedule.Rates(flops=1e15, memory=4e12, attention={}, transfer=lambda c: c.bytes / 4e11)
SVG = "{http://www.w3.org/2000/svg}"

Rectangle = tuple[str, float, float]


def drawn(name: str) -> tuple[schedule.Schedule, list[Rectangle], list[str]]:
    """The schedule, each box as its kind (by colour), left and right, and all texts."""
    program = Program.read((PROGRAMS / f"{name}.GB200.0.12.0.1.hlo").read_text(encoding="utf-8"), MESH, "cuda")
    simulated = schedule.simulate(program, RATES)
    products = frozenset(
        place.instruction.name for place in program.places if program.matmul_flops(place.instruction, place.computation)
    )
    root = ElementTree.fromstring(timeline.svg(simulated, "a <toy> & more", products, frozenset()))
    kinds = {colour: kind for kind, colour in timeline.COLOURS.items()}
    boxes = []
    for group in root.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        left, width = float(box.get("x")), float(box.get("width"))
        boxes.append((kinds[box.get("fill")], left, left + width))
    return simulated, boxes, [text.text for text in root.iter(f"{SVG}text")]


def test_a_short_loop_is_drawn_step_by_step():
    simulated, boxes, texts = drawn("ring")
    assert Counter(kind for kind, *_ in boxes)["collective-permute"] == 3
    assert Counter(kind for kind, *_ in boxes)["products"] == 4 * 2
    assert "× 3" in texts and "a <toy> & more" in texts
    # All that is computed, with what is waited for, fills the sheet's width: the whole step is drawn.
    compute = sorted((left, right) for kind, left, right in boxes if kind in ("products", "other compute", "wait"))
    assert sum(right - left for left, right in compute) == pytest.approx(timeline.WIDTH - 2 * timeline.MARGIN, rel=0.01)
    for (_, right), (left, _) in zip(compute, compute[1:], strict=False):
        assert left >= right - 0.02


def test_a_long_loop_is_drawn_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timeline, "DRAWN_STEPS", LAYERS - 1)
    _, boxes, texts = drawn("layers")
    counts = Counter(kind for kind, *_ in boxes)
    assert (counts["all-gather"], counts["all-reduce"], counts["reduce-scatter"]) == (1, 1, 1)
    assert f"× {LAYERS}" in texts
    assert all(
        timeline.MARGIN - 0.01 <= left < right <= timeline.WIDTH - timeline.MARGIN + 0.01 for _, left, right in boxes
    )


def test_what_is_waited_for_is_drawn_as_long_as_it_is():
    simulated, boxes, _ = drawn("sabotaged_ring")
    waited = sum(right - left for kind, left, right in boxes if kind == "wait")
    share = simulated.exposed_seconds / simulated.seconds
    assert waited / (timeline.WIDTH - 2 * timeline.MARGIN) == pytest.approx(share, rel=0.01)
    assert share > 0.01
