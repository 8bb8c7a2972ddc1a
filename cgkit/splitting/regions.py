"""Regions of a mode (``with torch.autocast(...)``) that a cut would take apart.

In the graph such a region is a node that enters it and one that leaves it. A piece runs by itself: recorded and
replayed, or compiled, one that only enters would leave the mode on, or lose it, for whatever comes after.
"""

from __future__ import annotations

from torch import fx

from cgkit.errors import CutRegionError
from cgkit.splitting.assign import Assignment
from cgkit.tracing.frames import user_line


def refuse_cut_regions(graph: fx.Graph, assignment: Assignment, splitting_ops: tuple[str, ...]) -> None:
    """Raises CutRegionError if a region is entered in one piece and left in another."""
    for node in graph.nodes:
        if not _called(node).startswith("_enter_"):
            continue
        leaving = [user for user in node.users if _called(user).startswith("_exit_")]
        if any(assignment.piece_of[user] != assignment.piece_of[node] for user in leaving):
            raise CutRegionError(_told(node, splitting_ops))


def _called(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _told(node: fx.Node, splitting_ops: tuple[str, ...]) -> str:
    mode = _called(node).removeprefix("_enter_")
    inside = node  # the node that enters has no line of its own; the first in the region has
    while user_line(inside) is None and inside.op != "output":
        inside = inside.next
    frame = user_line(inside)
    where = f" that holds\n  at {frame[0]}:{frame[1]}\n      {frame[2]}\n" if frame else " "
    return (
        f"the region of {mode}{where}goes on beyond a cut ({', '.join(splitting_ops)}), and each piece runs by itself: "
        "the mode would stay on after one piece and be missing in the next. Leave the region before the splitting "
        "operator and enter it again behind it; or put the whole call of the model into it, trace and capture "
        "included; or use level=2, which does not cut"
    )
