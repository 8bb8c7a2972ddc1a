"""Why do these two pieces differ? Their nodes side by side, and the first thing that is not the same.

A piece whose graph differs in one constant from its neighbours' is compiled for itself, and a deep model
whose layers all differ compiles for minutes. Two lists of nodes are aligned by what they call, and then
compared argument by argument, so that one node too many does not make all that follow "different". Names
of nodes and of weights mean nothing to a compiler: they are shown, and are no difference.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cgkit.display import Shown
from cgkit.splitting.node_lines import NodeLine

if TYPE_CHECKING:
    import pandas as pd

Pair = tuple[NodeLine | None, NodeLine | None]
#: How each status is marked, so that a diff reads without colours.
SIGNS = {
    "same": "  ",
    "renamed": "· ",
    "looked up": "· ",
    "changed": "≠ ",
    "only left": "- ",
    "only right": "+ ",
}


@dataclass(frozen=True)
class Row:
    """Two nodes that stand for each other, or one without a partner. ``what`` says how they differ."""

    status: str
    left: NodeLine | None
    right: NodeLine | None
    what: tuple[str, ...] = ()


class PieceDiff(Shown):
    """Two pieces, node by node.

    Attributes:
        names: what the two are called.
        rows: every node of both, aligned, in order.
        key_lines: where the nodes are equal and the compile stage's keys are not: the lines in which the
            keys differ (strides, shared memory, the compiler's settings).
    """

    def __init__(self, names: tuple[str, str], rows: Sequence[Row], key_lines: Sequence[str] = ()) -> None:
        self.names = names
        self.rows = list(rows)
        self.key_lines = tuple(key_lines)

    @property
    def differences(self) -> list[Row]:
        """The rows that are not the same, names aside."""
        return [row for row in self.rows if row.status not in ("same", "renamed", "looked up")]

    @property
    def equal(self) -> bool:
        """Whether one compilation serves both."""
        return not self.differences and not self.key_lines

    @property
    def renamed(self) -> list[tuple[str, str]]:
        """The weights that stand for each other under different names."""
        return [
            (r.left.source, r.right.source) for r in self.rows if r.status == "renamed" and r.left and r.right
        ]

    def verdict(self) -> str:
        """The answer in a sentence."""
        left, right = self.names
        if self.equal:
            notes = [f"the names of {len(self.renamed)} weights"] if self.renamed else []
            looked_up = sum(row.status == "looked up" for row in self.rows)
            notes += [f"{looked_up} names that operators look something up by"] if looked_up else []
            names = f" (only {' and '.join(notes)} differ)" if notes else ""
            return f"{left} and {right} do the same: one compilation serves both{names}"
        if not self.differences:
            return f"{left} and {right} have equal nodes, but are not compiled alike: {self.key_lines[0]}"
        first = self.differences[0]
        count = len(self.differences)
        more = f", the first of {count} differences" if count > 1 else ""
        return f"{left} and {right} differ: {_said(first, self.names)}{more}"

    def to_frame(self) -> pd.DataFrame:
        """One row a pair: ``status`` (same, renamed, looked up, changed, only left, only right), ``left``, ``right``
        (the calls as text), ``what`` (how they differ)."""
        import pandas as pd

        texts = [
            (
                row.status,
                _text(row.left, self._weights(0)),
                _text(row.right, self._weights(1)),
                "; ".join(row.what),
            )
            for row in self.rows
        ]
        return pd.DataFrame(texts, columns=["status", "left", "right", "what"])

    def _weights(self, side: int) -> dict[str, str]:
        lines = [row.right if side else row.left for row in self.rows]
        return _sources([line for line in lines if line])

    def __repr__(self) -> str:
        lines = [self.verdict()]
        weights = self._weights(0), self._weights(1)
        for row in self.differences[:20]:
            if row.status == "changed":
                lines.append(f"{SIGNS['only left']}{_text(row.left, weights[0])}")
                lines.append(f"{SIGNS['only right']}{_text(row.right, weights[1])}")
                lines += [f"    {what}" for what in row.what]
            else:
                line, side = (row.left, 0) if row.left else (row.right, 1)
                lines.append(f"{SIGNS[row.status]}{_text(line, weights[side])}")
        if len(self.differences) > 20:
            lines.append(f"  ... {len(self.differences) - 20} more: .to_frame()")
        lines += [f"  {line}" for line in self.key_lines]
        return "\n".join(lines)


def diff_nodes(
    left: Sequence[NodeLine],
    right: Sequence[NodeLine],
    names: tuple[str, str] = ("left", "right"),
    key_lines: Sequence[str] = (),
    *,
    shared: bool = False,
    looked_up: Collection[str] = (),
) -> PieceDiff:
    """Aligns two lists of nodes and compares them; ``key_lines`` count where the nodes are equal.

    ``shared``: one compilation serves both. Constants that differ all the same are then names that an operator
    looks something up by, and that were taken out of the piece before it was compiled. ``looked_up``: such names of
    both pieces, as text; where they do not share one for another reason, the names are no reason all the same.
    """
    pairs = _align(left, right)
    partner = {a.name: b.name for a, b in pairs if a and b}
    held = _sources(left), _sources(right)
    rows = [_row(a, b, partner, held, looked_up) for a, b in pairs]
    if shared:
        rows = [replace(row, status="looked up") if row.status == "changed" else row for row in rows]
    diff = PieceDiff(names, rows)
    return diff if diff.differences else PieceDiff(names, rows, key_lines)


def _align(left: Sequence[NodeLine], right: Sequence[NodeLine]) -> list[Pair]:
    """Pairs in order: first what is the same but for names, then what calls the same, then the rest."""
    matcher = difflib.SequenceMatcher(None, [_exact(n) for n in left], [_exact(n) for n in right], False)
    pairs: list[Pair] = []
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        if tag == "equal":
            pairs += list(zip(left[a0:a1], right[b0:b1]))
        else:
            pairs += _align_calls(left[a0:a1], right[b0:b1])
    return pairs


def _align_calls(left: Sequence[NodeLine], right: Sequence[NodeLine]) -> list[Pair]:
    matcher = difflib.SequenceMatcher(None, [_call(n) for n in left], [_call(n) for n in right], False)
    pairs: list[Pair] = []
    for tag, a0, a1, b0, b1 in matcher.get_opcodes():
        if tag == "equal":
            pairs += list(zip(left[a0:a1], right[b0:b1]))
        else:
            pairs += [(node, None) for node in left[a0:a1]] + [(None, node) for node in right[b0:b1]]
    return pairs


def _role(node: NodeLine) -> str:
    return "value" if node.role == "weight" else node.role


def _exact(node: NodeLine) -> Any:
    """What a node is apart from all names: a number stands in the graph under one name for all pieces."""
    constants = tuple((where, "" if at else text) for where, text, at in node.arguments)
    held = node.source if node.role == "constant" else ""
    return _role(node), node.operator, constants, node.shape, node.dtype, held


def _call(node: NodeLine) -> Any:
    return _role(node), node.operator


def _sources(lines: Sequence[NodeLine]) -> dict[str, str]:
    """What to call the weights among ``lines``: by where the model keeps them."""
    return {line.name: line.source for line in lines if line.role == "weight" and line.source}


def _row(
    left: NodeLine | None,
    right: NodeLine | None,
    partner: Mapping[str, str],
    held: tuple[Mapping[str, str], Mapping[str, str]],
    looked_up: Collection[str] = (),
) -> Row:
    if left is None or right is None:
        return Row("only left" if left else "only right", left, right)
    what = tuple(_how(left, right, partner, held))
    if what and looked_up:
        others = tuple(_how(left, right, partner, held, looked_up))
        if not others:
            return Row("looked up", left, right, what)
        what = others
    if what:
        return Row("changed", left, right, what)
    renamed = left.source != right.source and "weight" in (left.role, right.role)
    return Row("renamed" if renamed else "same", left, right)


def _how(
    left: NodeLine,
    right: NodeLine,
    partner: Mapping[str, str],
    held: tuple[Mapping[str, str], Mapping[str, str]],
    looked_up: Collection[str] = (),
) -> list[str]:
    """How two aligned nodes differ (but for names ``looked_up``), each thing a sentence."""
    found = []
    before, after = dict(_by_place(left)), dict(_by_place(right))
    for where in dict.fromkeys([*before, *after]):
        a, b = before.get(where), after.get(where)
        if a is None or b is None:
            found.append(f"argument {where}: {_value(a)} → {_value(b)}")
        elif a[1] and b[1]:
            if partner.get(a[1]) != b[1]:
                takes = f"{held[0].get(a[1], a[0])} → {held[1].get(b[1], b[0])}"
                found.append(f"argument {where}: takes {takes}")
        elif a != b and not (a[0] in looked_up and b[0] in looked_up):
            found.append(f"constant (argument {where}): {a[0]} → {b[0]}")
    if left.shape != right.shape:
        found.append(f"shape: {left.shape or 'none'} → {right.shape or 'none'}")
    if left.dtype != right.dtype:
        found.append(f"dtype: {left.dtype or 'none'} → {right.dtype or 'none'}")
    if left.role == "constant" and left.source != right.source:
        found.append(f"constant: {left.source} → {right.source}")
    return found


def _by_place(node: NodeLine) -> list[tuple[str, tuple[str, str]]]:
    return [(where, (text, name)) for where, text, name in node.arguments]


def _value(argument: tuple[str, str] | None) -> str:
    return "none" if argument is None else argument[0]


def _text(node: NodeLine | None, weights: Mapping[str, str]) -> str:
    if node is None:
        return ""
    text = node.text(weights)
    return (
        f"{node.name} = {text}"
        if node.role == "call"
        else text
        if node.role == "weight"
        else (f"{node.name}: {text}" if node.role != "output" else text)
    )


def _said(row: Row, names: tuple[str, str]) -> str:
    if row.left and row.right:
        at = row.left.operator or row.left.role
        return f"{at} ({row.left.name}), {row.what[0]}"
    node, name = (row.left, names[0]) if row.left else (row.right, names[1])
    assert node is not None
    return f"only {name} has {node.operator or node.role} ({node.name})"
