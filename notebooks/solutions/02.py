"""Solutions of notebook 02, "One trace, no guards"."""

import types

import torch
from torch import nn

import cgkit
from cgkit import torch_hooks

# 6 is the first. With dynamic=False each of 6, 1, 3, 8, 2 is a graph. Plain torch.compile makes one for 6, then meets
# 1, which is always a graph of its own; 3 shows that the size changes, and gets a symbol; 8 and 2 fit it.
solution_02_1 = {"dynamic=False": 5, "torch.compile": 3, "cgkit.trace": 1}

solution_02_2 = {
    "model.norm.weight = another parameter": "followed",
    "model.norm.eps = 0.5": "unnoticed",
    "the two layers change places": "followed",
    "a third layer is appended": "unnoticed",
    "model.tables['bias'] = another tensor": "followed",
    "SCALE = 3.0 (the global)": "unnoticed",
    "9 ids instead of 4": "followed",
    "ids as int32 instead of int64": "refused",
    "positions=None": "refused",
}


class solution_02_3(nn.Module):  # noqa: N801 - named after its exercise
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x / (1 + torch.arange(x.shape[0], device=x.device))[:, None]
        return scaled.view(-1, 2, 4).softmax(-1).view(-1, 8)


def solution_02_4(model):
    traces = []

    def fits(traced, x):
        symbol = next(entry.shape[0] for entry in traced.inputs if entry.kind == "argument")
        return all(eval(guard, {symbol: x.shape[0]}) for guard in traced.dropped_guards)

    def run(x):
        traced = next((one for one in traces if fits(one, x)), None)
        if traced is None:
            traced = cgkit.trace(model, x)
            traces.append(traced)
        return traced(x)

    return run


def solution_02_5(model, x):
    forward, codes = type(model).forward, []

    def hook(old_code, new_code):
        if old_code is forward.__code__:
            codes.append(new_code)

    handle = torch_hooks.register_bytecode_hook(hook)
    try:
        torch.compile(model.forward, fullgraph=True, backend="eager")(x)
    finally:
        handle.remove()
    run = types.FunctionType(codes[0], forward.__globals__)
    return lambda x: run(model, x)
