"""What a drawing of a split graph shows, whoever draws it: boxes, wires between them, folded runs.

Made of the frames of the split stage; :mod:`cgkit.plotting.split_own` and
:mod:`cgkit.plotting.split_dot` turn it into pictures.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from cgkit.plotting.folding import Run, fold
from cgkit.plotting.style import SERIES, SPLITTING

if TYPE_CHECKING:
    import pandas as pd

#: The ends of the graph, beside the pieces' numbers.
INPUTS, OUTPUTS = -1, -2
_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "bool",
}


@dataclass(frozen=True)
class Node:
    """One operator inside an opened piece (or a value that comes in)."""

    name: str
    title: str
    shape: str
    weights: tuple[str, ...]
    inputs: tuple[str, ...]
    role: str
    tip: str


@dataclass(frozen=True)
class Box:
    """One piece as it is drawn. Equal pieces share ``letter`` and ``colour``; ``letter`` is "" where
    the piece splits."""

    index: int
    name: str
    splitting: bool
    nodes: int
    operators: tuple[str, ...]
    letter: str
    colour: str
    weights: int
    opened: tuple[Node, ...] = ()
    traced: bool = False

    @property
    def note(self) -> str:
        """What becomes of it."""
        if self.traced:
            return "as Dynamo traced it"
        return "runs at each step, not recorded" if self.splitting else "compiled and recorded"

    @property
    def size(self) -> str:
        """How much is in it."""
        held = f", {self.weights} weight{'s' * (self.weights != 1)}" if self.weights else ""
        return f"{self.nodes} node{'s' * (self.nodes != 1)}{held}"


@dataclass(frozen=True)
class Wire:
    """What goes from one box (or :data:`INPUTS`) to another (or :data:`OUTPUTS`): one text a value.

    ``origin`` is the piece that it really comes from, where ``source`` stands for a folded run ("" for
    the graph's inputs).
    """

    source: int
    target: int
    values: tuple[str, ...]
    origin: str = ""


@dataclass
class Model:
    """The drawing: ``shown`` are the numbers of the boxes that are drawn, in order, of all ``boxes``."""

    heading: list[str]
    boxes: list[Box]
    runs: list[Run]
    shown: list[int]
    wires: list[Wire]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    weights: int = 0
    letters: dict[str, int] = field(default_factory=dict)

    def drawn(self) -> list[Box]:
        """The boxes that are drawn, in order."""
        return [self.boxes[index] for index in self.shown]

    def spans(self) -> list[tuple[Run, str]]:
        """The folded runs, with what to write beside them."""
        return [(run, self._said(run)) for run in self.runs if run.times > 1]

    def _said(self, run: Run) -> str:
        first, last = self.boxes[run.start], self.boxes[run.end - 1]
        return f"{run.times} × the same: {first.name} … {last.name}"


def make_model(
    frame: pd.DataFrame,
    heading: str,
    *,
    edges: pd.DataFrame | None = None,
    nodes: Mapping[str, pd.DataFrame] | None = None,
) -> Model:
    """The model of a drawing.

    Args:
        frame: one row a piece in order; see :func:`cgkit.plotting.split_graph.split_graph`.
        edges: what crosses; without it each piece is joined to the next.
        nodes: the nodes of the pieces that are to be opened, by name.
    """
    opened = {name: opened_nodes(of) for name, of in (nodes or {}).items()}
    boxes, letters = _boxes(frame, opened, edges)
    keys = [
        (box.splitting, box.operators if box.splitting else box.letter, box.index if box.opened else -1)
        for box in boxes
    ]
    runs = fold(keys)
    shown = [index for run in runs for index in range(run.start, run.start + run.length)]
    model = Model(heading.split("\n"), boxes, runs, shown, [], letters=letters)
    if edges is None:
        model.wires = [Wire(a, b, ()) for a, b in itertools.pairwise(shown)]
    else:
        model.wires = _wires(model, edges)
        crossing = edges[(edges["from_piece"] == "") & (edges["role"] == "value")]
        model.inputs = tuple(dict.fromkeys(_value(row) for row in crossing.to_dict("records")))
        left = edges[edges["to_piece"] == ""].to_dict("records")
        model.outputs = tuple(dict.fromkeys(_value(row) for row in left))
        model.weights = int(edges[edges["role"] == "weight"]["value"].nunique())
    return model


def _boxes(
    frame: pd.DataFrame, opened: Mapping[str, tuple[Node, ...]], edges: pd.DataFrame | None
) -> tuple[list[Box], dict[str, int]]:
    letters: dict[Any, str] = {}
    counts: dict[str, int] = {}
    weights: dict[str, int] = {}
    if edges is not None:
        weights = edges[edges["role"] == "weight"].groupby("to_piece")["value"].nunique().to_dict()
    boxes = []
    for index, row in enumerate(frame.to_dict("records")):
        splitting = str(row["kind"]) == "splitting"
        operators = tuple(_names(row.get("operators")))
        key = row.get("key") or row.get("content") or (operators, row.get("nodes"))
        letter = (
            ""
            if splitting or str(row["kind"]) == "traced"
            else letters.setdefault(key, _letter(len(letters)))
        )
        if letter:
            counts[letter] = counts.get(letter, 0) + 1
        number = list(letters.values()).index(letter) if letter else 0
        name = str(row["piece"])
        boxes.append(
            Box(
                index,
                name,
                splitting,
                int(row["nodes"]),
                operators,
                letter,
                SPLITTING if splitting else SERIES[number % len(SERIES)],
                int(weights.get(name, 0)),
                opened.get(name, ()),
                str(row["kind"]) == "traced",
            )
        )
    return boxes, counts


def _letter(number: int) -> str:
    """A, B, ... Z, AA, AB: which pieces are equal, for who does not see colours."""
    head, tail = divmod(number, 26)
    return (_letter(head - 1) if head else "") + ascii_uppercase[tail]


def _names(operators: Any) -> list[str]:
    """Operator names, from a list or comma-separated text."""
    if operators is None or (isinstance(operators, float) and operators != operators):
        return []
    names = operators.replace(";", ",").split(",") if isinstance(operators, str) else list(operators)
    return [str(name).strip() for name in names if str(name).strip()]


def _wires(model: Model, edges: pd.DataFrame) -> list[Wire]:
    """What crosses between the boxes that are drawn. Of a folded run the first block stands for all:
    what its repetitions pass on to each other goes from block to block and is no wire of its own."""
    number = {box.name: box.index for box in model.boxes}
    stands_for = {
        index: run.start + (index - run.start) % run.length
        for run in model.runs
        for index in range(run.start, run.end)
    }
    found: dict[tuple[int, int], dict[tuple[int, int], list[str]]] = {}
    for row in edges[edges["role"] == "value"].to_dict("records"):
        a = number.get(row["written_by"] or row["from_piece"], INPUTS)
        b = number.get(row["to_piece"], OUTPUTS)
        ends = stands_for.get(a, a), stands_for.get(b, b)
        if ends[1] != OUTPUTS and ends[0] >= ends[1]:
            continue
        text = _value(row) + (" (written)" if row["written_by"] else "")
        found.setdefault(ends, {}).setdefault((a, b), []).append(text)
    wires = []
    for (a, b), exact in found.items():
        nearest = min(exact, key=lambda pair: (abs(pair[1] - pair[0]), pair[0]))
        origin = model.boxes[nearest[0]].name if nearest[0] >= 0 else ""
        wires.append(Wire(a, b, tuple(dict.fromkeys(exact[nearest])), origin))
    return wires


def _value(row: Mapping[str, Any]) -> str:
    """``q [s77, 9·64] bf16``: what a value is, short enough for an edge."""
    return " ".join(filter(None, [plain_name(row), tensor_text(row["shape"], row["dtype"])]))


def plain_name(row: Mapping[str, Any]) -> str:
    """What a value is called: an argument by its own name, everything else by its node's."""
    source = str(row.get("source") or "")
    return (
        source[3:-2]
        if source.startswith("L['") and source.endswith("']")
        else str(row.get("value", row.get("node")))
    )


def tensor_text(shape: str, dtype: str) -> str:
    """``(s77, 9, 64)``, ``bfloat16`` -> ``[s77, 9·64] bf16``."""
    if not shape.startswith("("):
        return shape
    sizes = [size.strip() for size in shape.strip("()").split(",") if size.strip()]
    tail = "·".join(sizes[1:])
    inside = ", ".join(filter(None, [sizes[0] if sizes else "", tail]))
    return f"[{inside}] {_DTYPES.get(dtype, dtype)}"


def opened_nodes(frame: pd.DataFrame) -> tuple[Node, ...]:
    """The nodes of an opened piece: values that come in, calls, what is returned. Weights and sizes
    stand in the nodes that take them."""
    records = frame.to_dict("records")
    weights = {row["node"]: str(row["source"] or row["node"]) for row in records if row["role"] == "weight"}
    hidden = {row["node"] for row in records if row["role"] == "number"} | set(weights)
    nodes = []
    for row in records:
        if row["node"] in hidden:
            continue
        title, role = _title(row), str(row["role"])
        takes = tuple(name for name in row["reads_from"] if name not in hidden)
        held = tuple(weights[name] for name in row["reads_from"] if name in weights)
        shape = "" if role == "output" else tensor_text(str(row["shape"]), str(row["dtype"]))
        if role == "output" and not takes:
            continue
        nodes.append(Node(str(row["node"]), title, shape, held, takes, role, str(row["text"])))
    return tuple(nodes)


def _title(row: Mapping[str, Any]) -> str:
    if row["role"] in ("value", "constant"):
        return plain_name(row)
    if row["role"] == "output":
        return "return"
    constants = str(row.get("constants") or "")
    if short(row["operator"]) == "getitem":
        return f"[{constants.removeprefix('(').removesuffix(')')}]"
    return f"{short(row['operator'])} {constants}".strip()


def short(name: str) -> str:
    """An operator's name without namespace and overload: ``aten::add.Tensor``, ``operator.getitem``."""
    rest = (
        str(name).split("::")[-1]
        if "::" in str(name)
        else str(name).lstrip(".").partition(".")[2] or str(name)
    )
    return rest.lstrip(".").partition(".")[0].split(" ")[0]


def summary(operators: Sequence[str], most: int = 6) -> str:
    """The operators of a piece in a line, the most frequent first."""
    counts: dict[str, int] = {}
    for name in operators:
        counts[short(name)] = counts.get(short(name), 0) + 1
    words = [f"{n} ×{c}" if c > 1 else n for n, c in sorted(counts.items(), key=lambda item: -item[1])]
    return ", ".join(words[:most]) + (", …" if len(words) > most else "")
