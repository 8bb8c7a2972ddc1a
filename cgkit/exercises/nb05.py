"""Exercises of notebook 05: how often fusions match, what a no-op is, and a pass of one's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from cgkit.exercises.core import Verdict, exercise, nearly, package, right, wrong

FUSIONS = ("fuse_norm_quant", "fuse_act_quant", "fuse_attn_quant")
aten = torch.ops.aten


@exercise(
    "05-1",
    question="""
    Write `matches(layers)` for a statically quantised FP8 Llama that is **not cut**: a dictionary that says how often
    `fuse_norm_quant`, `fuse_act_quant` and `fuse_attn_quant` match. It is checked on real graphs.
    """,
    hints=(
        "Go through one layer: before which products is something quantised, and what wrote that?",
        "A layer quantises four times. The last norm of the model is followed by no product that is quantised.",
    ),
)
def predict_matches(answer: Callable[[int], dict[str, int]]) -> Verdict:
    off: dict[tuple[int, str], Any] = {}
    for layers in (1, 2):
        said, found = answer(layers), _matched(layers)
        off |= {
            (layers, name): (said.get(name), found[name]) for name in FUSIONS if said.get(name) != found[name]
        }
    if not off:
        return right("In every layer two norms, one activation and one attention, each before a product.")
    (layers, name), (given, seen) = next(iter(off.items()))
    saw = f"{name} in {layers} layers: you say {given}, it matched {seen}."
    if {each for _, each in off} == {"fuse_attn_quant"}:
        return nearly(f"Only attention is off. The graph is not cut here. {saw}")
    if len({each for _, each in off}) == 1:
        return nearly(f"Only one fusion is off. {saw}")
    return wrong(saw)


@cache
def _matched(layers: int) -> dict[str, int]:
    cgkit = package()
    from cgkit.compiling.passes import preview_passes
    from cgkit.kernels.custom_op import apply_custom_ops
    from cgkit.serving.llama import PRESETS
    from cgkit.serving.llama_fp8 import quantize
    from cgkit.serving.weights import build_model, random_weights

    shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=layers)
    model = quantize(
        build_model(shape, random_weights(shape, torch.bfloat16), dtype=torch.bfloat16), "static"
    )
    apply_custom_ops(model, cgkit.CompilationConfig(custom_ops=("none",)))
    ids = torch.arange(8)
    with cgkit.set_forward_context(None):
        traced = cgkit.trace(model, ids, ids, dynamic_arg_dims={"input_ids": 0, "positions": 0})
    (reports,) = preview_passes(cgkit.split_graph(traced, []), ["noop", *FUSIONS]).values()
    return {name: reports.matched[name] for name in FUSIONS}


@exercise(
    "05-2",
    question="""
    Write `is_noop(old, new)`: does a reshape from the sizes `old` to the sizes `new` change nothing, whatever the
    symbols stand for? Sizes are numbers, or names of symbols like `"s"`; `new` may hold one `-1`. The reshape is always
    a valid one. It is compared with `torch.reshape` at many values of the symbols.
    """,
    hints=(
        "Another number of dimensions is never a no-op.",
        "Where all other sizes agree, `-1` is what is left over: the old size in its place.",
        "Two symbols of different names may have equal values. May, not must.",
    ),
)
def reshape_is_noop(answer: Callable[[list[Any], list[Any]], bool]) -> Verdict:
    off = [case for case in RESHAPES if bool(answer(list(case[0]), list(case[1]))) != _is_noop(*case)]
    if not off:
        return right(f"The same as torch in all {len(RESHAPES)} cases.")
    old, new = off[0]
    truth = "changes nothing" if _is_noop(old, new) else "changes the shape (for some values of the symbols)"
    saw = f"{old} -> {new} {truth}."
    kinds = {
        "symbols" if any(isinstance(size, str) for size in case[0]) else "-1" if -1 in case[1] else ""
        for case in off
    }
    if kinds in ({"symbols"}, {"-1"}):
        return nearly(f"Only cases with {kinds.pop()} are off. {saw}")
    return wrong(f"{len(off)} of {len(RESHAPES)} cases are off. {saw}")


RESHAPES: tuple[tuple[list[Any], list[Any]], ...] = (
    ([4, 6], [4, 6]),
    ([4, 6], [6, 4]),
    ([4, 6], [24]),
    ([4, 6], [-1, 6]),
    ([4, 6], [4, -1]),
    ([4, 6], [-1]),
    ([4, 6], [-1, 4]),
    ([24], [-1]),
    ([4, 1], [4, -1]),
    ([4, 1], [-1, 4]),
    (["s", 6], ["s", 6]),
    (["s", 6], [-1, 6]),
    (["s", 6], ["s", -1]),
    (["s", 6], [-1, "s"]),
    (["s", 6], [-1]),
    (["s", 6], [6, "s"]),
    (["s", "t"], ["s", "t"]),
    (["s", "t"], ["t", "s"]),
    (["s", "t"], [-1, "t"]),
    (["s", "t"], [-1, "s"]),
    (["s", "t", 2], ["s", -1, 2]),
    (["s", "t", 2], ["t", -1, 2]),
)


def _is_noop(old: list[Any], new: list[Any]) -> bool:
    for s, t in itertools.product((1, 2, 3, 5), repeat=2):
        value = {"s": s, "t": t}
        shape = [value.get(size, size) for size in old]
        if torch.empty(shape).reshape([value.get(size, size) for size in new]).shape != torch.Size(shape):
            return False
    return True


@exercise(
    "05-3",
    question="""
    Write a pass `remove_identities(graph)`: it takes `x * 1` and `x + 0` (`aten.mul.Tensor`, `aten.add.Tensor` with a
    number) out of a functional graph and returns how many it took out. What the graph computes must stay the same: its
    values, their types, and whose memory an output is. `node.meta["val"]` is a fake tensor of what a node returns.
    """,
    hints=(
        "`replace_all_uses_with` and `erase_node`, over a list made of the graph's nodes before you change it.",
        "An integer times 1.0 is a float: compare `meta['val'].dtype` of the node and of its input.",
        "If the node is an output and its input is a placeholder, the caller would get its own tensor back.",
    ),
)
def own_pass(answer: Callable[[fx.Graph], int]) -> Verdict:
    off: list[tuple[str, str]] = []
    for name, function, inputs in _graphs():
        if trouble := _try_pass(answer, function, inputs):
            off.append((name, trouble))
    if not off:
        return right("Everything that is an identity is gone, and nothing else.")
    name, trouble = off[0]
    if len(off) == 1:
        return nearly(f"All graphs but one. {name}: {trouble}")
    return wrong(f"{len(off)} graphs are off. {name}: {trouble}")


def _graphs() -> Iterator[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]]:
    numbers, whole = torch.tensor([0.5, -2.0, 3.0]), torch.tensor([1, 2, 3])
    yield "x * 1", lambda x: torch.tanh(x * 1), (numbers,)
    yield "x + 0", lambda x: torch.tanh(x + 0), (numbers,)
    yield "several in a row", lambda x: torch.tanh((x * 1 + 0) * 1.0) + 0 * x, (numbers,)
    yield "x * 2 and x + 1", lambda x: torch.tanh(x * 2) + 1, (numbers,)
    yield "x + 1 and x * 0", lambda x: (torch.tanh(x) + 1) * 0, (numbers,)
    yield "two tensors", lambda x, y: torch.tanh(x * y) + y, (numbers, torch.ones(3))
    yield "whole numbers times 1.0", lambda x: (x * 1.0) / 2, (whole,)
    yield "an input that would be returned itself", lambda x: (x * 1, torch.tanh(x)), (numbers,)


def _try_pass(answer: Callable[[fx.Graph], int], function: Any, inputs: tuple[torch.Tensor, ...]) -> str:
    """What is wrong after the pass ran on the function's graph; "" if nothing."""
    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(function, tracing_mode="fake")(*inputs)
    expected = sum(_removable(node) for node in module.graph.nodes)
    nodes = len(module.graph.nodes)
    said = answer(module.graph)
    module.graph.lint()
    module.recompile()
    wanted, got = _flat(function(*inputs)), _flat(module(*inputs))
    for one, other in zip(wanted, got):
        if one.dtype != other.dtype:
            return f"a result was {one.dtype} and is {other.dtype} now."
        if not torch.equal(one, other):
            return "it computes something else now."
    if any(result is given for result in got for given in inputs):
        return "an output is the caller's own tensor now; a copy was asked for."
    gone = nodes - len(module.graph.nodes)
    if gone != expected:
        return f"{gone} nodes were taken out, {expected} do nothing."
    return "" if said == gone else f"{gone} nodes were taken out, and the pass returned {said}."


def _removable(node: fx.Node) -> bool:
    identity = {aten.mul.Tensor: 1, aten.add.Tensor: 0}.get(node.target)  # type: ignore[call-overload]
    if identity is None or isinstance(node.args[1], fx.Node) or node.args[1] != identity:
        return False
    source: Any = node.args[0]
    leaves = any(user.op == "output" for user in node.users)
    same_type = node.meta["val"].dtype == source.meta["val"].dtype
    return bool(same_type and not (leaves and source.op == "placeholder"))


def _flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
