"""What one piece allocates and gives back, in order, found without running it: its tape.

A piece's own memory is decided by what the compiler generated. Inductor writes a Python function that allocates
each buffer, launches kernels, and deletes or reuses buffers; that function is taken from the artefact and
run on fake tensors, with kernels that do nothing. Its lifetimes are therefore those of the very code that will
be recorded. A piece without generated code (``compiler='eager'``) is run operator by operator on fakes.

What no tape can hold: workspaces that a library takes inside an operator (cuBLAS takes its own while the
warm-ups run, outside of the pool).
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgkit import torch_hooks
from cgkit.compiling import PiecewiseBackend
from cgkit.compiling.fakes import static_version
from cgkit.errors import CompileError


class OutputSpec(NamedTuple):
    """One output: on new storage number ``block`` of the tape, or (``block`` < 0) on that of argument
    ``-1 - block``."""

    block: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class PieceTape:
    """The memory side of one piece at one size.

    Attributes:
        events: ``(block, nbytes)`` for an allocation, ``(block, -1)`` for its end, in order; blocks
            count from 0. Blocks without an end are the outputs'.
        outputs: an :class:`OutputSpec` for each tensor, other values as they are.
        source: ``"generated code"``, ``"operators"``, or ``"outputs only"``.
        note: why the generated code was not used, if it should have been.
    """

    events: list[tuple[int, int]]
    outputs: list[Any]
    source: str
    note: str = ""
    sizes: dict[int, int] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that live at once, without any allocator's rounding; outputs included."""
        now = most = 0
        for block, nbytes in self.events:
            now += nbytes if nbytes >= 0 else -self.sizes[block]
            most = max(most, now)
        return most


class StorageWatch(torch_hooks.TorchDispatchMode):  # type: ignore[misc,name-defined]
    """Sees each new storage that operators make on fake tensors, and when it dies.

    ``began(nbytes) -> block`` and ``ended(block)`` are called in the order in which an allocator would be:
    what died is noticed before the next storage begins, which is when it matters.
    """

    def __init__(
        self,
        device: str,
        began: Callable[[int], int],
        ended: Callable[[int], None],
        known: Sequence[Any] = (),
    ) -> None:
        super().__init__()
        self.device, self._began, self._ended = device, began, ended
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known = {torch_hooks.storage_key(t) for t in known if isinstance(t, torch.Tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            self.see(leaf)
        return result

    def see(self, value: Any) -> None:
        """Takes note of ``value``'s storage if it is a new one."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return
        if value.device.type != self.device:
            return
        self.sweep()
        key = torch_hooks.storage_key(value)
        if key not in self.live and key not in self._known:
            self.adopt(value, self._began(int(value.untyped_storage().nbytes())))

    def adopt(self, value: torch.Tensor, block: int) -> None:
        """``value``'s storage is ``block``: reported as ended when it dies."""
        self.live[torch_hooks.storage_key(value)] = (StorageWeakRef(value.untyped_storage()), block)

    def sweep(self) -> None:
        """Reports the storages that have died since."""
        for key in [key for key, (ref, _) in self.live.items() if ref.expired()]:
            self._ended(self.live.pop(key)[1])


def arguments_at(values: Sequence[Any], num_tokens: int, what: str) -> tuple[list[Any], Any]:
    """``values`` (fakes and SymInts) with ``num_tokens`` for each of their symbols, and the new fake mode."""
    numbers: dict[Any, int] = {}
    for value in values:
        tensor = isinstance(value, torch.Tensor) and value.layout is torch.strided
        for size in (*value.shape, *value.stride(), value.storage_offset()) if tensor else (value,):
            if isinstance(size, torch.SymInt):
                expression = torch_hooks.symbolic_expression(size)
                numbers.update(dict.fromkeys(expression.free_symbols, num_tokens))
    return static_version(values, numbers, what)


def walk_piece(
    backend: PiecewiseBackend, num_tokens: int, device: str, outputs_only: bool = False
) -> PieceTape:
    """The tape of ``backend`` at ``num_tokens`` tokens: of the callable that would be recorded.

    Args:
        device: the type of the device whose memory counts ("cuda", "cpu").
        outputs_only: the piece is one opaque call that allocates its outputs, as on the emulated platform.

    Raises:
        CompileError: the piece cannot be run on fake tensors at this size.
    """
    what = f"{backend.name} at {num_tokens} tokens"
    note = ""
    source = None if outputs_only else torch_hooks.generated_wrapper(backend.runnable_for(num_tokens))
    if source is not None:
        try:
            return _walk(backend, num_tokens, device, wrapper_function(source), "generated code", what)
        except Exception as error:  # generated code may hold anything: then the graph itself is walked
            note = f"the generated code could not be walked ({type(error).__name__}: {error})"
    label = "outputs only" if outputs_only else "operators"
    try:
        forward = backend.graph.forward
        tape = _walk(backend, num_tokens, device, lambda args: forward(*args), label, what)
    except CompileError:
        raise
    except Exception as error:
        raise CompileError(
            f"{what} cannot be run on fake tensors: {type(error).__name__}: {error}"
        ) from error
    tape.note = note
    return only_outputs(tape) if outputs_only else tape


def _walk(
    backend: PiecewiseBackend,
    num_tokens: int,
    device: str,
    function: Callable[[list[Any]], Any],
    source: str,
    what: str,
) -> PieceTape:
    args, mode = arguments_at(backend.call.args, num_tokens, what)
    events: list[tuple[int, int]] = []
    sizes: dict[int, int] = {}

    def began(nbytes: int) -> int:
        block = len(sizes)
        sizes[block] = nbytes
        events.append((block, nbytes))
        return block

    watch = StorageWatch(device, began, lambda block: events.append((block, -1)), args)
    with torch_hooks.running_fake(mode), watch:
        results = list(function(list(args)))
    watch.sweep()
    blocks = {key: block for key, (_, block) in watch.live.items()}
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            blocks.setdefault(torch_hooks.storage_key(value), -1 - index)
    return PieceTape(events, [_spec(each, blocks) for each in results], source, sizes=sizes)


def _spec(value: Any, blocks: dict[int, int]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    block = blocks.get(torch_hooks.storage_key(value))
    if block is None:  # on another device, or a constant: no memory of the pool
        return None
    size, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return OutputSpec(block, size, stride, int(value.storage_offset()), value.dtype, value.device)


def only_outputs(tape: PieceTape) -> PieceTape:
    """``tape`` as an opaque call: its outputs' storages, in the order of the outputs, and nothing else."""
    kept = list(dict.fromkeys(o.block for o in tape.outputs if isinstance(o, OutputSpec) and o.block >= 0))
    return PieceTape(
        [(block, tape.sizes[block]) for block in kept], tape.outputs, tape.source, tape.note, tape.sizes
    )


# --- the generated code ------------------------------------------------------------------------------


def wrapper_function(source: str) -> Callable[[list[Any]], Any]:
    """Inductor's ``call(args)`` out of its generated module, with kernels that do nothing.

    Raises:
        ValueError: there is no such function in ``source``.
    """
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = [f for f in functions if f.name == "call"]
    if not calls:
        raise ValueError("the generated module has no function call()")
    parts = [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("partition_")]
    names = {node.id for f in (*calls, *parts) for node in ast.walk(f) if isinstance(node, ast.Name)}
    space: dict[str, Any] = {name: _NOTHING for name in names if not hasattr(builtins, name)}
    space |= {name: value for name, value in _NAMES.items() if name in names}
    for name in names:
        if name.startswith("empty_strided_"):
            space[name] = _empty_on(name.removeprefix("empty_strided_").removesuffix("_pinned"))
    module = ast.Module([*parts, calls[0]], type_ignores=[])
    exec(compile(module, "<generated by Inductor>", "exec"), space)  # Inductor's own, from this process
    call, method = space["call"], [arg.arg for arg in calls[0].args.args][:1] == ["self"]
    if not method:
        return call
    runner = type("Runner", (), {"partitions": [space[part.name] for part in parts]})()
    return lambda args: call(runner, args)


class _Nothing:
    """Stands for kernels, streams and guards: takes any call and does nothing."""

    __iter__ = None  # it can be indexed, so without this it would be an endless sequence

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getitem__(self, key: Any) -> _Nothing:
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        return None


_NOTHING = _Nothing()


class _Torch:
    """torch, whose device modules do nothing."""

    cuda = xpu = mtia = _NOTHING

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _ExternKernels:
    """Matrix products and the like: with ``out=`` nothing is allocated, without it the result is."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if "out" in kwargs:
                return kwargs["out"]
            return getattr(torch, name)(*args, **kwargs)

        return run


def _empty_on(device: str) -> Callable[..., torch.Tensor]:
    def empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def _reinterpret(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _from_pool(
    base: torch.Tensor, offset: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A buffer inside another (Inductor's memory planning); ``offset`` in bytes."""
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset // dtype.itemsize, tuple(size), tuple(stride))


_NAMES: dict[str, Any] = {
    "torch": _Torch(),
    "math": math,
    "inf": math.inf,
    "nan": math.nan,
    "device": torch.device,
    "aten": torch.ops.aten,
    "inductor_ops": torch.ops.inductor,
    "empty_strided": torch.empty_strided,
    "extern_kernels": _ExternKernels(),
    "reinterpret_tensor": _reinterpret,
    "alloc_from_pool": _from_pool,
    "align": lambda nbytes: -(-nbytes // 64) * 64,
}
