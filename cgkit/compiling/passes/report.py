"""What a pass did to one graph, kept so that it can be looked at."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from cgkit.display import Shown


@dataclass(frozen=True, repr=False)
class PassReport(Shown):
    """One pass over one graph."""

    name: str
    uuid: str
    matched: int
    nodes_before: int
    nodes_after: int
    before: str  # the graph as text
    after: str
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def diff(self) -> str:
        """A unified diff of the two texts; "" if nothing changed."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm="", n=2
        )
        return "\n".join(lines)

    def to_frame(self) -> Any:
        """A DataFrame with a row a line that is new, gone or kept in the diff: ``change`` and ``line``."""
        import pandas as pd

        kinds = {"+": "added", "-": "removed"}
        lines = [line for line in self.diff.splitlines() if not line.startswith(("+++", "---", "@@"))]
        rows = [(kinds.get(line[:1], "kept"), line[1:].strip()) for line in lines]
        return pd.DataFrame(rows, columns=["change", "line"])

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        head = (
            f"{self.name}: matched {self.matched}, {self.nodes_before} nodes -> {self.nodes_after}, "
            f"{self.seconds * 1e3:.1f} ms"
        )
        return "\n".join([head, *(f"  {note}" for note in self.notes), *self.diff.splitlines()])


class PassReports(Shown, Sequence[PassReport]):
    """The reports of one graph's passes, in the order in which they ran; one by name with ``reports["noop"]``."""

    def __init__(self, reports: Sequence[PassReport] = ()) -> None:
        self._reports = tuple(reports)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            for report in self._reports:
                if report.name == index:
                    return report
            raise KeyError(f"no pass {index!r} ran; these did: {[r.name for r in self._reports] or 'none'}")
        return self._reports[index]

    def __len__(self) -> int:
        return len(self._reports)

    @property
    def matched(self) -> dict[str, int]:
        """How often each pass matched."""
        counts: Counter[str] = Counter()
        for report in self._reports:
            counts[report.name] += report.matched
        return dict(counts)

    def to_frame(self) -> Any:
        """A DataFrame with a row a pass."""
        import pandas as pd

        columns = ["name", "matched", "nodes_before", "nodes_after", "seconds", "notes"]
        rows = [[getattr(r, c) if c != "notes" else "; ".join(r.notes) for c in columns] for r in self]
        return pd.DataFrame(rows, columns=columns)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Everything, for JSON."""
        return [report.as_dict() for report in self]

    @classmethod
    def from_dicts(cls, rows: Sequence[dict[str, Any]]) -> PassReports:
        """What :meth:`as_dicts` gave."""
        return cls([PassReport(**{**row, "notes": tuple(row["notes"])}) for row in rows])

    def __repr__(self) -> str:
        if not self._reports:
            return "PassReports: no pass ran"
        first, last = self._reports[0], self._reports[-1]
        lines = [f"PassReports: {len(self)} passes, {first.nodes_before} nodes -> {last.nodes_after}"]
        lines += [
            f"  {r.name:<24} matched {r.matched:<3} {r.nodes_before:>4} -> {r.nodes_after:<4}" for r in self
        ]
        return "\n".join(lines)


def graph_text(graph: fx.Graph) -> str:
    """A graph as one line a node: ``name: type = operator(arguments)``."""
    return "\n".join(f"{node.name}{_type(node)} = {_call(node)}" for node in graph.nodes)


def _call(node: fx.Node) -> str:
    if node.op in ("placeholder", "output"):
        return f"{node.op}({', '.join(map(str, node.args))})"
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    if callable(node.target) and "OpOverload" in type(node.target).__name__:
        target = str(node.target)
    arguments = [str(a) for a in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
    return f"{target}({', '.join(arguments)})"


def _type(node: fx.Node) -> str:
    value = node.meta.get("val")
    if value is None or not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return ""
    return f": {str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
