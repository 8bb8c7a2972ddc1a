"""Fake tensors between pieces: who shares a storage, copies without a run, static versions.

A fake tensor has a shape, strides and a storage identity, but no memory. Everything here works on
lists of a piece's inputs or outputs: tensors, symbolic sizes (SymInt) and plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.config import TokenRange
from cgkit.errors import CompileError


def storage_groups(values: Sequence[Any]) -> dict[int, list[int]]:
    """Positions of the strided tensors in ``values`` by storage, only storages seen more than once."""
    groups: dict[int, list[int]] = {}
    for index, value in enumerate(values):
        if _strided(value):
            groups.setdefault(torch_hooks.storage_key(value), []).append(index)
    return {storage: indices for storage, indices in groups.items() if len(indices) > 1}


def layout_of(value: Any) -> tuple[Any, ...]:
    """Shape, strides and offset of a tensor (what an operator like ``t_`` may change in place)."""
    if not _strided(value):
        return ()
    return (*value.shape, *value.stride(), value.storage_offset())


class PieceOutputs:
    """The outputs of one fake run, to be made again for an equal piece without running it.

    Eighty equal layers need one run. Fresh tensors are needed all the same: if two layers' outputs
    were one fake, a later piece that reads both would be compiled as if they shared memory.
    """

    def __init__(
        self, args: Sequence[Any], layouts: Sequence[tuple[Any, ...]], outputs: Sequence[Any]
    ) -> None:
        """``layouts``: :func:`layout_of` each argument before the run."""
        self._outputs = tuple(outputs)
        self._symbols = _symbols_in(args)
        given = {torch_hooks.storage_key(a) for a in args if _strided(a)}
        fresh = all(
            not isinstance(o, torch.Tensor) or (_strided(o) and torch_hooks.storage_key(o) not in given)
            for o in self._outputs
        )
        # An output that is a view of an input, or an input whose shape changed, has to be run again.
        self._repeatable = fresh and all(layout_of(a) == before for a, before in zip(args, layouts))

    def repeatable_for(self, args: Sequence[Any]) -> bool:
        """Whether an equal piece called on ``args`` has these outputs (same symbols, nothing aliased)."""
        return self._repeatable and _symbols_in(args) == self._symbols

    def again(self, fake_mode: Any) -> Sequence[Any]:
        """New outputs, laid out as those of the run."""
        with torch_hooks.running_fake(fake_mode):
            return _empty_like_all(self._outputs, lambda size: size)


def renew_examples(graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any) -> None:
    """Puts what each node gives for ``inputs`` (fakes of ``fake_mode``) into its ``meta["example_value"]``.

    Dynamo's examples hold the trace's symbols. Inductor's passes before autograd read them, and AOTAutograd's
    cache refuses a graph with method calls that has none.
    """

    class Renew(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op != "output":
                n.meta["example_value"] = result
            return result

    with torch_hooks.running_fake(fake_mode):
        # detached: an operator that changes a tensor's shape in place must not change the caller's
        Renew(graph_module).run(*(v.detach() if isinstance(v, torch.Tensor) else v for v in inputs))


def unread_offsets(graph_module: fx.GraphModule, values: Sequence[Any]) -> set[Any]:
    """Symbols that only say where an input begins in its storage, and that the graph does not read.

    An input that is a slice of a larger buffer brings such a symbol. Compiled code gets the address with the
    offset in it, so that a static version may take any number for it.
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    offsets, others = set(), set()
    for node, value in zip(placeholders, values):
        if _strided(value):
            offsets |= _free(value.storage_offset())
            others |= _free(*value.shape, *value.stride())
        else:  # a number that no node of this piece takes is as free
            (others if node.users else offsets).update(_free(value))
    return offsets - others


def _free(*sizes: Any) -> set[Any]:
    expressions = [torch_hooks.symbolic_expression(s) for s in sizes if isinstance(s, torch.SymInt)]
    return {symbol for expression in expressions for symbol in expression.free_symbols}


def static_version(values: Sequence[Any], numbers: dict[Any, int], what: str) -> tuple[list[Any], Any]:
    """``values`` with ``numbers`` for symbols, as fakes of a new fake mode, which is returned too.

    Storages that were shared stay shared. Nothing is allocated.

    Raises:
        CompileError: a symbol is left over (``what`` names the piece and size).
    """
    mode = torch_hooks.new_fake_mode()

    def fix(size: Any) -> int:
        fixed = torch_hooks.substitute_symbols(size, numbers)
        if not isinstance(fixed, int):
            raise CompileError(
                f"{what}: size {fixed} does not follow from the token count alone; compile_sizes needs "
                "graphs with one symbolic size. Leave compile_sizes out, or trace with one dynamic dimension"
            )
        return fixed

    with torch_hooks.running_fake(mode):
        return _empty_like_all(values, fix), mode


def ranged_version(
    values: Sequence[Any],
    symbol: Any,
    tokens: TokenRange,
    what: str,
    numbers: Mapping[Any, int] | None = None,
) -> tuple[list[Any], Any]:
    """``values`` with ``symbol`` known to lie in ``tokens``, as fakes of a new fake mode, which is returned too.
    ``numbers`` are put for other symbols.

    The trace takes sizes 0 and 1 for special, so the symbol is 2 at least here as well, and never one number
    alone (it would be fixed to that): a range that says less than it could is still right.

    Raises:
        CompileError: a size depends on another symbol (``what`` names the piece and range).
    """
    low = max(tokens.start, 2)
    high = max(tokens.end, low + 1)
    mode, new = torch_hooks.ranged_fake_mode(low, high)

    def narrow(size: Any) -> Any:
        rewritten = torch_hooks.rewritten_size(size, symbol, new, mode, high, numbers)
        if rewritten is size and isinstance(size, torch.SymInt):
            raise CompileError(
                f"{what}: size {size} does not follow from the token count alone; compile_ranges needs "
                "graphs with one symbolic size. Leave compile_ranges out, or trace with one dynamic dimension"
            )
        return rewritten

    with torch_hooks.running_fake(mode):
        return _empty_like_all(values, narrow), mode


def _empty_like_all(values: Sequence[Any], size: Any) -> list[Any]:
    """New empty tensors laid out as ``values``, storages shared as there; numbers go through ``size``."""
    shared = {index: storage for storage, group in storage_groups(values).items() for index in group}
    storages: dict[int, torch.Tensor] = {}
    result: list[Any] = []
    for index, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            result.append(size(value))
            continue
        shape = [size(s) for s in value.shape]
        if value.layout is not torch.strided:
            result.append(torch.empty(shape, dtype=value.dtype, device=value.device, layout=value.layout))
            continue
        stride = [size(s) for s in value.stride()]
        offset = size(value.storage_offset())
        if index not in shared and isinstance(offset, int) and offset == 0:
            result.append(torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device))
            continue
        key = shared.get(index, -1 - index)
        if key not in storages:
            nbytes = size(value.untyped_storage().nbytes())
            storages[key] = torch.empty(nbytes, dtype=torch.uint8, device=value.device)
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        result.append(empty.set_(storages[key].untyped_storage(), offset, shape, stride))
    return result


def _strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _symbols_in(args: Sequence[Any]) -> list[Any]:
    """The symbolic sizes among ``args``, in order: equal keys may stand for other symbols."""
    found = []
    for value in args:
        sizes = (*value.shape, *value.stride()) if _strided(value) else (value,)
        found += [torch_hooks.symbolic_expression(size) for size in sizes if isinstance(size, torch.SymInt)]
    return found
