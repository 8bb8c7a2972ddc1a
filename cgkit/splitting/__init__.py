"""Stage 2: one graph -> pieces, cut at the splitting operators.

Implements the article's "切分算子：splitting_ops 与「铰链」" (splitting operators, the hinges) and
"split_graph 的切图算法" (the splitting algorithm of split_graph). See the README beside this file.
"""

from cgkit.splitting.pieces import Piece
from cgkit.splitting.register import RegisteredOp, register_op, registered_ops, unregister_op
from cgkit.splitting.split_graph import SplitGraph, split_graph

__all__ = [
    "Piece",
    "RegisteredOp",
    "SplitGraph",
    "register_op",
    "registered_ops",
    "split_graph",
    "unregister_op",
]
