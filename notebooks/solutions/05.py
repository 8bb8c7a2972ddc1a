"""Solutions of the exercises of notebook 05."""

import torch

aten = torch.ops.aten


def solution_05_1(layers):
    """A layer quantises what its two norms, its activation and its attention wrote. (The last norm of the model is followed by
    no quantisation, but it is not one of those two.)"""
    return {"fuse_norm_quant": 2 * layers, "fuse_act_quant": layers, "fuse_attn_quant": layers}


def solution_05_2(old, new):
    """Equal numbers, equal symbols, or the one -1: what is left over is then the old size in its place."""
    return len(old) == len(new) and all(size in (-1, was) for was, size in zip(old, new))


def solution_05_3(graph):
    identity, taken = {aten.mul.Tensor: 1, aten.add.Tensor: 0}, 0
    for node in list(graph.nodes):
        if node.target not in identity or node.args[1] != identity[node.target]:
            continue
        source = node.args[0]
        leaves = any(user.op == "output" for user in node.users)
        if node.meta["val"].dtype != source.meta["val"].dtype or (leaves and source.op == "placeholder"):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        taken += 1
    return taken
