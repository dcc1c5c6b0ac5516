"""A picture of a compiled step in time: compute above, transfers below, and where the one waits for the other.

Time runs by the model of `schedule.py` over XLA's order of instructions. A loop of few steps is drawn step by step; a
longer one (the layers, the micro-batches) once, in a frame that says how often it runs, so that a step of thousands of
instructions fits on one sheet: distances are those of one time through. SVG, of which any browser shows the details of
the box under the pointer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from longtrain.plan.schedule import Event, Schedule

DRAWN_STEPS = 4
"""Loops of at most so many steps are drawn step by step."""

WIDTH, MARGIN, LANE, TOP = 1600, 20, 34, 84
NARROWEST = 0.25
"""Pixels: narrower boxes are left out, they could not be seen."""

COLOURS = {
    "attention": "#4878a8",
    "products": "#74a9cf",
    "other compute": "#c6d4e1",
    "wait": "#d7301f",
    "collective-permute": "#31a354",
    "all-gather": "#e6ab02",
    "reduce-scatter": "#d95f0e",
    "all-reduce": "#a6761d",
    "all-to-all": "#7570b3",
}
OTHER_COLLECTIVE = "#777777"
LETTER = 6.2
"""Pixels a letter takes, about."""


@dataclass(frozen=True)
class Box:
    """Something to draw, in seconds of the drawing's own time. `lane`: compute, transfer, wait or loop."""

    lane: str
    start: float
    end: float
    kind: str
    title: str
    depth: int = 0


def svg(schedule: Schedule, heading: str, products: frozenset[str], attention: frozenset[str]) -> str:
    """The picture. `products` and `attention` name the instructions that are matrix products or attention kernels."""
    boxes, length = _boxes(schedule, schedule.entry, products, attention, 0)
    scale = (WIDTH - 2 * MARGIN) / length if length else 0.0
    depth = max((box.depth for box in boxes if box.lane == "loop"), default=0) + 1
    compute_top = TOP + 16 * depth
    tops = {"compute": compute_top, "wait": compute_top, "transfer": compute_top + LANE + 10}
    height = tops["transfer"] + LANE + 60
    summary = f"{schedule.seconds:.3g} s a step by the model, {schedule.exposed_seconds:.3g} s of it waiting"
    font = 'font-family="sans-serif" font-size="11"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {font}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(MARGIN, 24, heading, 'font-size="15" font-weight="bold"'),
        _text(MARGIN, 44, f"{summary}. Drawn: {length:.3g} s, a loop of more than {DRAWN_STEPS} steps once."),
        *_legend(boxes),
        _text(MARGIN, tops["compute"] - 4, "compute", 'fill="#555555"'),
        _text(MARGIN, tops["transfer"] + LANE + 12, "transfers", 'fill="#555555"'),
    ]
    for box in boxes:
        x, width = MARGIN + box.start * scale, (box.end - box.start) * scale
        if width < NARROWEST:
            continue
        if box.lane == "loop":
            y = TOP + 16 * box.depth
            drawn.append(
                f'<path d="M{x:.2f} {y + 10}v-6h{width:.2f}v6" fill="none" stroke="#888888"/>'
                + (_text(x + 3, y + 2, box.title) if len(box.title) * LETTER < width else "")
            )
            continue
        y = tops[box.lane]
        label = box.kind if len(box.kind) * LETTER < width and box.lane != "wait" else ""
        drawn.append(
            f'<g><title>{escape(box.title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{LANE}" '
            f'fill="{COLOURS.get(box.kind, OTHER_COLLECTIVE)}"/>{_text(x + 3, y + 21, label) if label else ""}</g>'
        )
    return "\n".join([*drawn, "</svg>", ""])


def _boxes(
    schedule: Schedule, computation: str, products: frozenset[str], attention: frozenset[str], depth: int
) -> tuple[list[Box], float]:
    """The boxes of a computation and its length as drawn: shorter than it takes, where it holds long loops."""
    events = schedule.events[computation]
    inside = {
        event: _boxes(schedule, event.inner, products, attention, depth + 1) for event in events if event.lane == "loop"
    }
    steps = {event: max(int(event.count), 1) if event.count <= DRAWN_STEPS else 1 for event in inside}

    def at(time: float) -> float:
        """A time as drawn: of each long loop only its first step is there."""
        drawn_ends = ((event, event.start + steps[event] * length) for event, (_, length) in inside.items())
        return time - sum(max(0.0, min(time, event.end) - drawn_end) for event, drawn_end in drawn_ends)

    boxes: list[Box] = []
    for event in events:
        start = at(event.start)
        if event.lane != "loop":
            boxes.append(_box(event, start, at(event.end), products, attention))
            continue
        inner, length = inside[event]
        if event.count > 1:
            boxes.append(Box("loop", start, start + steps[event] * length, "", f"× {event.count:,.0f}", depth))
        for step in range(steps[event]):
            boxes += [_moved(box, start + step * length) for box in inner]
    return boxes, at(max((event.end for event in events), default=0.0))


def _moved(box: Box, by: float) -> Box:
    return Box(box.lane, box.start + by, box.end + by, box.kind, box.title, box.depth)


def _box(event: Event, start: float, end: float, products: frozenset[str], attention: frozenset[str]) -> Box:
    took = f"{1e3 * (event.end - event.start):.3g} ms"
    if event.collective is not None:
        one = event.collective
        over = " x ".join(one.axes)
        what = f"{one.kind} over {over}, {one.held / 2**20:,.1f} MiB, {one.times:,.0f} a step, {one.backend}"
        if event.lane == "wait":
            return Box("wait", start, end, "wait", f"{took} waiting for {what}")
        return Box("transfer", start, end, one.kind, f"{took}: {what}")
    name = event.instruction.name
    kind = "attention" if name in attention else "products" if name in products else "other compute"
    return Box("compute", start, end, kind, f"{took}: {event.instruction.op_name or name}")


def _legend(boxes: list[Box]) -> Iterator[str]:
    x = MARGIN
    for kind in dict.fromkeys([*COLOURS, *(box.kind for box in boxes)]):
        if kind and any(box.kind == kind for box in boxes):
            yield f'<rect x="{x}" y="54" width="12" height="12" fill="{COLOURS.get(kind, OTHER_COLLECTIVE)}"/>'
            yield _text(x + 16, 64, kind)
            x += int(34 + LETTER * len(kind))


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(text)}</text>'
