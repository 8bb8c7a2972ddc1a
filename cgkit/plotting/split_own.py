"""A split graph drawn without any other program: pieces from top to bottom, what crosses beside them.

The same picture on every machine, in any notebook, with no ``dot`` installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cgkit.plotting.layered import Layout, layered
from cgkit.plotting.split_model import INPUTS, OUTPUTS, Box, Model, Node, Wire, summary
from cgkit.plotting.svg_text import cut, text_width, weight_line, xml

LEFT, BOX_W, BOX_H, LINE = 58.0, 430.0, 80.0, 18.0
FONT, SMALL, INNER = 14.0, 12.5, 12.0
LANE, MOST_VALUES = 15.0, 5
_AFTER_FOLD = 16.0


@dataclass
class _Place:
    """Where a box is, and how it looks inside."""

    y: float
    height: float
    width: float
    inside: Layout | None = None


def draw_own(model: Model) -> str:
    """The picture as an SVG element."""
    return _Drawing(model).svg()


class _Drawing:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.out: list[str] = []
        self.right = 720.0
        self.order = [INPUTS, *model.shown, OUTPUTS] if model.inputs or model.outputs else list(model.shown)
        self.next = dict(zip(self.order, self.order[1:]))
        self.far = [wire for wire in model.wires if self.next.get(wire.source) != wire.target]
        self.near = {(w.source, w.target): w for w in model.wires if self.next.get(w.source) == w.target}
        self.fold_ends = {run.start + run.length - 1 for run, _ in model.spans()}
        self.places: dict[int, _Place] = {}
        self.lanes: dict[int, float] = {}

    def svg(self) -> str:
        model = self.model
        for number, line in enumerate(model.heading):
            style = ' font-weight="600" font-size="16"' if number == 0 else ' opacity="0.8"'
            self.text(16, 28 + 21 * number, line, style)
            self.wide(16 + text_width(line, 16.0 if number == 0 else FONT, number == 0))
        bottom = self.stack(28 + 21 * len(model.heading) + 8)
        self.brackets()
        for index in self.order:
            self.box(index)
        for source, target in zip(self.order, self.order[1:]):
            self.arrow_down(source, target)
        self.skipping()
        bottom = self.legend(bottom + 14) if model.letters else bottom + 12
        return self.whole(bottom)

    # --- where things are ------------------------------------------------------------------------

    def stack(self, y: float) -> float:
        """Gives each box its place, from top to bottom; returns where the stack ends."""
        starts = {run.start: run for run, _ in self.model.spans()}
        for index in self.order:
            if index in starts:
                y += 34
            inside = _inside(self.box_of(index))
            incoming = [wire for wire in self.far if wire.target == index]
            lines = sum(min(len(w.values), MOST_VALUES + 1) or 1 for w in incoming)
            height = max(self.own_height(index, inside), lines * (LINE + 1) + 14)
            width = self.own_width(index, inside)
            self.places[index] = _Place(y, height, width, inside)
            self.wide(LEFT + width + 12)
            y += height
            y += _AFTER_FOLD if index in self.fold_ends else 0
            wire = self.near.get((index, self.next.get(index, OUTPUTS)))
            values = len(wire.values) if wire else 0
            y += max(30.0, LINE * min(values, MOST_VALUES + 1) + 16)
        self.give_lanes()
        return y - 16

    def own_height(self, index: int, inside: Layout | None) -> float:
        if index in (INPUTS, OUTPUTS):
            return 34.0
        return 58 + inside.height + 18 if inside else BOX_H

    def own_width(self, index: int, inside: Layout | None) -> float:
        if index in (INPUTS, OUTPUTS):
            return max(BOX_W, text_width(self.said(index), FONT) + 32)
        return max(BOX_W, inside.width + 40) if inside else BOX_W

    def said(self, index: int) -> str:
        """What an end of the graph says: the values that it takes or returns."""
        values = self.model.inputs if index == INPUTS else self.model.outputs
        word = "takes" if index == INPUTS else "returns"
        weights = f", and {self.model.weights:,} weights" if index == INPUTS and self.model.weights else ""
        return f"{word} {_list(values) or 'nothing'}{weights}"

    def give_lanes(self) -> None:
        """A lane at the right for what skips a box: one a source, the longest outermost."""
        base = max(LEFT + place.width for place in self.places.values()) + 16
        sources = sorted({wire.source for wire in self.far}, reverse=True)
        for number, source in enumerate(sources):
            self.lanes[source] = base + LANE * number
        self.lanes_end = base + LANE * max(len(sources) - 1, 0) + 14

    def box_of(self, index: int) -> Box | None:
        return None if index in (INPUTS, OUTPUTS) else self.model.boxes[index]

    def wide(self, x: float) -> None:
        self.right = max(self.right, x)

    # --- drawing ---------------------------------------------------------------------------------

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        self.out.append(f'<text x="{x:g}" y="{y:g}"{style}>{xml(text)}</text>')

    def box(self, index: int) -> None:
        box, place = self.box_of(index), self.places[index]
        if box is None:
            self.end(index, place)
            return
        dash = ' stroke-dasharray="7 4"' if box.splitting else ""
        kind = "splitting" if box.splitting else "capturable"
        corner = min(place.height / 2, 38) if box.splitting else 8
        operators = ", ".join(box.operators)
        self.out.append(
            f'<g class="cg-piece cg-{kind}{" cg-open" if box.opened else ""}" data-piece="{xml(box.name)}" '
            f'data-content="{box.letter}"><title>{xml(f"{box.name}: {operators}")}</title>'
            f'<rect x="{LEFT:g}" y="{place.y:g}" width="{place.width:g}" height="{place.height:g}" '
            f'rx="{corner:g}" fill="{box.colour}" fill-opacity="0.15" stroke="{box.colour}" '
            f'stroke-width="2"{dash}/>'
        )
        x, y = LEFT + (26 if box.splitting else 16), place.y
        room = place.width - (52 if box.splitting else 32)
        self.text(x, y + 24, box.name, ' font-weight="600" font-size="15"')
        after = text_width(box.name, 15, True) + 12
        self.text(
            x + after, y + 24, cut(box.note, room - after - 26, SMALL), ' opacity="0.8" font-size="12.5"'
        )
        if box.letter:
            self.badge(LEFT + place.width - 21, y + 20, box.letter, box.colour)
        self.text(x, y + 44, box.size, ' opacity="0.8" font-size="12.5"')
        if place.inside is None:
            self.text(x, y + 64, cut(summary(box.operators), room, FONT))
        else:
            self.inner(box, place)
        self.out.append("</g>")

    def badge(self, x: float, y: float, letter: str, colour: str) -> None:
        self.out.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="12" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        size = 13 if len(letter) == 1 else 10
        self.text(x, y + 4.5, letter, f' text-anchor="middle" font-weight="600" font-size="{size}"')

    def end(self, index: int, place: _Place) -> None:
        """The graph's inputs or outputs: a line of their names on a grey strip."""
        values = self.model.inputs if index == INPUTS else self.model.outputs
        self.out.append(
            f'<g class="cg-end"><title>{xml(", ".join(values))}</title><rect x="{LEFT:g}" y="{place.y:g}" '
            f'width="{place.width:g}" height="{place.height:g}" rx="4" fill="currentColor" fill-opacity="0.07" '
            'stroke="currentColor" stroke-opacity="0.45"/>'
        )
        self.text(LEFT + 16, place.y + 22, self.said(index))
        self.out.append("</g>")

    def arrow_down(self, source: int, target: int) -> None:
        x = LEFT + 56
        top, bottom = self.places[source], self.places[target]
        wire = self.near.get((source, target))
        y0, y1 = top.y + top.height, bottom.y
        dash = "" if wire else ' stroke-dasharray="2 4"'
        tip = f"<title>{xml(chr(10).join(wire.values))}</title>" if wire else ""
        self.out.append(
            f'<g class="cg-edge">{tip}<path d="M{x:g} {y0 + 2:g} V{y1 - 3:g}" fill="none" '
            f'stroke="currentColor" stroke-width="1.6"{dash} marker-end="url(#cg-arrow)"/>'
        )
        lines = _some(wire.values) if wire else []
        start = y0 + 20 + (_AFTER_FOLD if source in self.fold_ends else 0)
        for number, line in enumerate(lines):
            self.text(x + 14, start + LINE * number, line, f' font-size="{SMALL:g}"')
            self.wide(x + 14 + text_width(line, SMALL) + 12)
        self.out.append("</g>")

    def skipping(self) -> None:
        """What goes past one box or more: a lane at the right, its values beside where it comes in."""
        for target in self.order:
            y = self.places[target].y + 12
            for wire in sorted((w for w in self.far if w.target == target), key=lambda w: -w.source):
                y = self.skip(wire, y)

    def skip(self, wire: Wire, y: float) -> float:
        source, target, lane = self.places[wire.source], self.places[wire.target], self.lanes[wire.source]
        y0 = source.y + source.height - 12
        x0, x1 = LEFT + source.width, LEFT + target.width
        lines = _some(wire.values) or [""]
        lines[0] += f"  from {wire.origin or 'the inputs'}"
        tip = xml("\n".join(wire.values))
        self.out.append(
            f'<g class="cg-edge cg-skip"><title>{tip}</title><path d="M{x0 + 2:g} {y0:g} H{lane:g} V{y:g} '
            f'H{x1 + 4:g}" fill="none" stroke="currentColor" stroke-width="1.3" stroke-opacity="0.75" '
            'stroke-linejoin="round" marker-end="url(#cg-arrow)"/>'
        )
        if self.lanes_end > lane + 8:
            self.out.append(
                f'<path d="M{lane + 4:g} {y:g} H{self.lanes_end - 4:g}" stroke="currentColor" '
                'stroke-opacity="0.5" stroke-dasharray="1 3"/>'
            )
        for line in lines:
            self.text(self.lanes_end, y + 4.5, line, f' font-size="{SMALL:g}"')
            self.wide(self.lanes_end + text_width(line, SMALL) + 12)
            y += LINE + 1
        self.out.append("</g>")
        return y

    def brackets(self) -> None:
        """A dashed frame around what repeats, with how often, and an arrow from its end to its start."""
        for run, said in self.model.spans():
            first, last = self.places[run.start], self.places[run.start + run.length - 1]
            widest = max(self.places[run.start + i].width for i in range(run.length))
            widest = max(widest, 84 + text_width(said, FONT, True))
            y0, y1 = first.y - 30, last.y + last.height + 10
            self.out.append(
                f'<g class="cg-fold" data-times="{run.times}"><rect x="{LEFT - 40:g}" y="{y0:g}" '
                f'width="{widest + 50:g}" height="{y1 - y0:g}" rx="12" fill="none" stroke="currentColor" '
                'stroke-opacity="0.55" stroke-width="1.4" stroke-dasharray="4 4"/>'
            )
            x, up, down = LEFT - 22, first.y + 22, last.y + last.height - 22
            self.out.append(
                f'<path d="M{LEFT - 2:g} {down:g} H{x:g} V{up:g} H{LEFT - 4:g}" fill="none" '
                'stroke="currentColor" stroke-width="1.4" stroke-linejoin="round" marker-end="url(#cg-arrow)"/>'
            )
            self.text(LEFT + 84, y0 + 20, said, ' font-weight="600"')
            self.wide(LEFT + 84 + text_width(said, FONT, True) + 12)
            self.out.append("</g>")

    def inner(self, box: Box, place: _Place) -> None:
        """The operators of an opened piece."""
        layout = place.inside
        assert layout is not None
        dx, dy = LEFT + (place.width - layout.width) / 2, place.y + 58
        for points in layout.edges.values():
            self.out.append(
                f'<path d="{_curve([(x + dx, y + dy) for x, y in points])}" fill="none" '
                'stroke="currentColor" stroke-opacity="0.6" stroke-width="1.1" marker-end="url(#cg-small)"/>'
            )
        for node in box.opened:
            x, y = layout.centre[node.name]
            width, height = _node_size(node)
            self.node(node, x + dx - width / 2, y + dy - height / 2, width, height, box.colour)

    def node(self, node: Node, x: float, y: float, width: float, height: float, colour: str) -> None:
        end = node.role in ("value", "constant", "output")
        look = (
            'fill="currentColor" fill-opacity="0.08" stroke="currentColor" stroke-opacity="0.5"'
            if end
            else f'fill="{colour}" fill-opacity="0.22" stroke="{colour}"'
        )
        self.out.append(
            f'<g class="cg-node"><title>{xml(node.tip)}</title><rect x="{x:g}" y="{y:g}" width="{width:g}" '
            f'height="{height:g}" rx="{height / 2 if end and not node.shape else 5:g}" {look}/>'
        )
        middle = x + width / 2
        for number, (line, style) in enumerate(_node_lines(node)):
            self.text(
                middle, y + 15 + 14 * number, line, f' text-anchor="middle" font-size="{INNER:g}"{style}'
            )
        self.out.append("</g>")

    def legend(self, y: float) -> float:
        """What the letters and the dashes mean."""
        many = [f"{letter} ({count})" for letter, count in self.model.letters.items()]
        said = _list(many, 8)
        if said:
            lead = "One letter and colour = one content"
            self.text(
                16, y, f"{lead}, compiled once: {said}. Dashed: runs between the recorded pieces.", _FAINT
            )
            self.wide(
                16 + text_width(f"{lead}, compiled once: {said}. Dashed: runs between the …", SMALL) + 70
            )
        return y + 16

    def whole(self, bottom: float) -> str:
        width, height = math.ceil(self.right), math.ceil(bottom)
        names = [] if self.model.heading else [box.name for box in self.model.drawn()]
        label = xml(" ".join([*self.model.heading, *names, *(said for _, said in self.model.spans())]))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" aria-label="{label}" style="max-width:100%;height:auto;'
            "font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif\" fill=\"currentColor\" "
            f'font-size="{FONT:g}">'
        )
        return "\n".join([head, _MARKERS, *self.out, "</svg>"])


_FAINT = ' opacity="0.8" font-size="12.5"'
_MARKERS = (
    '<defs><marker id="cg-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0.8 L7 4 L0 7.2 z" fill="currentColor"/></marker>'
    '<marker id="cg-small" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" '
    'orient="auto"><path d="M0 0.8 L7 4 L0 7.2 z" fill="currentColor"/></marker></defs>'
)


def _some(values: Sequence[str], most: int = MOST_VALUES) -> list[str]:
    """At most ``most`` values, one a line, and how many more there are (all are in the tooltip)."""
    if len(values) <= most + 1:
        return list(values)
    return [*values[:most], f"and {len(values) - most} more"]


def _list(values: Sequence[str], most: int = 3) -> str:
    more = f", and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(values[:most]) + more


def _node_lines(node: Node) -> list[tuple[str, str]]:
    """The lines of a node, each with its style."""
    lines = [(cut(node.title, 230, INNER, True), ' font-weight="600"')]
    if node.shape:
        lines.append((cut(node.shape, 230, INNER), ' opacity="0.85"'))
    lines += [(weight_line(name, 230, INNER), ' opacity="0.85" font-style="italic"') for name in node.weights]
    return lines


def _node_size(node: Node) -> tuple[float, float]:
    lines = _node_lines(node)
    widths = [text_width(line, INNER, "weight" in style) for line, style in lines]
    return max([44.0, *(width + 16 for width in widths)]), 8 + 14.0 * len(lines)


def _inside(box: Box | None) -> Layout | None:
    if box is None or not box.opened:
        return None
    edges = [(name, node.name) for node in box.opened for name in node.inputs]
    return layered({node.name: _node_size(node) for node in box.opened}, edges)


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """A smooth line from top to bottom through ``points``."""
    (x, y), *rest = points
    parts = [f"M{x:.1f} {y:.1f}"]
    for x1, y1 in rest:
        half = (y1 - y) / 2
        parts.append(f"C{x:.1f} {y + half:.1f} {x1:.1f} {y1 - half:.1f} {x1:.1f} {y1:.1f}")
        x, y = x1, y1
    return " ".join(parts)
