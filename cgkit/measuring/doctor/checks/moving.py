"""Inputs of recorded pieces that are made anew in each step: a replay reads where the first one lay."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from cgkit import torch_hooks
from cgkit.config import CUDAGraphMode
from cgkit.measuring.doctor.findings import Finding, at
from cgkit.measuring.doctor.patient import Patient
from cgkit.measuring.doctor.registry import check
from cgkit.splitting import SplitGraph
from cgkit.splitting.matching import operator_name
from cgkit.tracing.frames import user_line


@check("moved-input")
def moving(patient: Patient) -> Iterator[Finding]:
    """Splitting operators that return a new tensor which a recorded piece takes."""
    split = patient.split
    if split is None or not patient.config.mode.has_mode(CUDAGraphMode.PIECEWISE):
        return
    told = set()
    for node in split.graph_module.graph.nodes:
        if not _returns_new(node) or not _in_splitting_piece(split, node):
            continue
        taker = next((name for user in node.users if (name := _recorded_piece(split, user))), "")
        name = operator_name(node)
        if taker and name not in told:
            told.add(name)
            yield Finding(
                "moved-input",
                "error",
                f"{name} is a splitting operator and returns a new tensor, which {taker} takes: it lies elsewhere in "
                "each step, and a replay reads the address of the recording (cgkit refuses the replay)",
                "let it write into a tensor that it is given (mutates_args=['output']) and that a recorded piece "
                "allocates",
                again="cgkit.split_graph(cgkit.trace(model, *example_inputs), splitting_ops).edges_frame()",
                **at(user_line(node)),
            )


def _returns_new(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch_hooks.OpOverloadPacket):
        target = getattr(target, "default", target)
    return isinstance(target, torch_hooks.OpOverload) and None in torch_hooks.written_arguments(target)


def _in_splitting_piece(split: SplitGraph, node: fx.Node) -> bool:
    piece = split.assignment.piece_of.get(node)
    return piece is not None and split.assignment.is_splitting[piece] and len(split.splitting_ops) > 0


def _recorded_piece(split: SplitGraph, node: fx.Node) -> str:
    piece = split.assignment.piece_of.get(node)
    return f"submod_{piece}" if piece is not None and not split.assignment.is_splitting[piece] else ""
