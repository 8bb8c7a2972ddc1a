"""The recorder: sees each operator before it runs, and writes it down instead.

A dispatch mode gets the calls of operators; a function mode beside it gets the few ways in which
Python reads a CPU tensor's bytes without any operator (``numpy()``, ``tolist()``, ``print``).
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cgkit import torch_hooks
from cgkit.capturing.emulated_layouts import (
    FromArgument,
    Layouts,
    NotRecordableError,
    OnNewStorage,
    ReadInsideError,
    TensorLayout,
    leaves,
    reads_inside,
)
from cgkit.capturing.emulated_pool import EmulatedPool, fill_with_sentinel, on_storage
from cgkit.capturing.emulated_tape import TapedCall
from cgkit.errors import CaptureError, HostReadError
from cgkit.tensor_trees import map_tensors
from cgkit.torch_hooks import OpOverload, TorchDispatchMode
from cgkit.tracing.frames import TORCH_FOLDER

_aten = torch.ops.aten
# Memory without contents: there is nothing to repeat at replay.
_ONLY_ALLOCATE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.empty_permuted,
    _aten.new_empty, _aten.new_empty_strided,
}  # fmt: skip
_CHANGE_STORAGE = {_aten.resize_, _aten.resize_as_, _aten.set_}
_READS = {
    torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.__array__,
    torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.__dlpack__,
}  # fmt: skip
_SPLITS = {torch.tensor_split, torch.Tensor.tensor_split}

_OURS = (os.path.join(os.path.dirname(__file__), "emulated"), os.path.dirname(torch_hooks.__file__) + os.sep)


def user_line() -> str:
    """``file:line: source`` of the innermost frame that is neither torch's nor the recorder's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH_FOLDER, *_OURS, "<eval_with_key>", "<frozen")):
            source = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            return f"{file}:{frame.f_lineno}: {source or '(no source)'}"
        frame = frame.f_back  # type: ignore[assignment]
    return "(no Python frame of yours)"


def _host_read(what: str, place: str = "") -> HostReadError:
    return HostReadError(
        f"{what} reads a tensor on the host while a graph is recorded, at\n    {place or user_line()}\n"
        "Recording runs nothing, so there is no value to read, and replay would not read it again. Keep it a "
        "tensor operation, pass the number in as a Python int before recording, or move the line to an eager "
        "piece (a splitting operator)."
    )


class _HostReads(TorchFunctionMode):
    """Raises HostReadError where Python reads a tensor past the dispatcher."""

    asleep = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.asleep:
            return func(*args, **(kwargs or {}))
        if func in _READS:
            raise _host_read(f"Tensor.{func.__name__}()")
        given = (*args[1:], *(kwargs or {}).values())
        if func in _SPLITS and any(isinstance(arg, torch.Tensor) for arg in given):
            raise _host_read("tensor_split() with a tensor of indices")
        return func(*args, **(kwargs or {}))


class EmulatedRecorder(TorchDispatchMode):
    """Records one graph into ``pool``. Entered by :meth:`EmulatedPlatform.record` only.

    What becomes of a call:

    - an operator with a Python kernel: its Python runs now, the operators that it calls are recorded;
    - a view, a change of a tensor's own shape: really made, nothing to repeat;
    - an allocation: memory of the pool, nothing to repeat;
    - anything else: written down, outputs in the pool under a sentinel; ``add_`` and ``out=`` return
      the very tensors that they got.
    """

    supports_higher_order_operators = True

    def __init__(self, pool: EmulatedPool, layouts: Layouts) -> None:
        super().__init__()
        self.pool = pool
        self.tape: list[TapedCall] = []
        self._layouts = layouts
        self._reads = _HostReads()

    def __enter__(self) -> EmulatedRecorder:
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and not all(issubclass(each, (torch.nn.Parameter, torch.nn.Buffer)) for each in types):
            return NotImplemented  # a tensor subclass first takes itself apart; its parts come here again
        kwargs = kwargs or {}
        if isinstance(func, torch_hooks.HigherOrderOperator):
            return self._function_operator(func, args, kwargs)
        if torch_hooks.has_python_kernel(func) or torch_hooks.is_composite(func):
            with self:  # what the kernel calls is recorded in its turn
                return torch_hooks.run_cpu_kernel(func, args, kwargs)
        if func is _aten.lift_fresh.default:  # torch.tensor(...): a new constant with each call
            func = _aten.clone.default
        if torch.Tag.inplace_view in func.tags:
            return self._change_own_shape(func, args, kwargs)
        if func.is_view or func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        return self._record(func, args, kwargs)

    def opaque_call(
        self, runnable: Callable[..., Sequence[Any]], on_fakes: Callable[..., Any], args: Sequence[Any]
    ) -> Sequence[Any]:
        """Records a compiled piece as one call (see :class:`cgkit.recording.Recorder`).

        Outputs that share memory with an argument are real views of the argument that was given;
        outputs that share memory with each other lie on one storage of the pool.
        """
        with torch_hooks.without_dispatch_modes():
            layout = self._checked(
                getattr(runnable, "__name__", "a compiled piece"), self._layouts.of_piece, on_fakes, args
            )
            storages = []
            for nbytes, dtype in zip(layout.storage_bytes, layout.storage_dtypes):
                storages.append(self.pool.storage(nbytes))
                fill_with_sentinel(storages[-1], dtype)
            outputs: list[Any] = []
            recorded: list[torch.Tensor | None] = []
            for spec in layout.outputs:
                if isinstance(spec, FromArgument):
                    outputs.append(_from_argument(args[spec.argument], spec.layout))
                    recorded.append(None)
                elif isinstance(spec, OnNewStorage):
                    at = spec.layout
                    _only_cpu(at.device)
                    strong = on_storage(storages[spec.storage], at.offset, at.size, at.stride, at.dtype)
                    outputs.append(torch_hooks.with_lazy_bits(strong, at.conj, at.neg))
                    recorded.append(self.pool.weak(outputs[-1]))
                else:
                    outputs.append(spec)
                    recorded.append(None)
            self._write_down(_with_casts_of_now(runnable), args, {}, recorded)
        return tuple(outputs)

    # -- inside -------------------------------------------------------------------------------

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if reads_inside(func, args):
            raise _host_read(str(func))
        layouts = self._checked(str(func), self._layouts.of_call, func, args, kwargs)
        single = not isinstance(layouts, (tuple, list))
        results: list[Any] = []
        recorded: list[torch.Tensor | None] = []
        written = torch_hooks.written_arguments(func)
        for name, layout in zip(written, [layouts] if single or len(written) == 1 else layouts):
            if name is not None:
                results.append(torch_hooks.bound_argument(func, name, args, kwargs))
                recorded.extend([None] * len(leaves(results[-1])))
            else:
                results.append(map_layouts(self._new, layout))
                recorded.extend(
                    self.pool.weak(leaf) if isinstance(leaf, torch.Tensor) else None
                    for leaf in leaves(results[-1])
                )
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves(results))
        asks_about_shapes = bool(written) and not tensors and not torch_hooks.mutated_arguments(func)
        if func.overloadpacket not in _ONLY_ALLOCATE and not asks_about_shapes:
            self._write_down(func, args, kwargs, recorded)
        if not written:
            return None
        return results[0] if len(written) == 1 else tuple(results)

    def _function_operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that is given functions: what it is made of is recorded."""
        if reads_inside(func, args):
            raise _host_read(str(func))
        with self:
            made = torch_hooks.run_function_operator(func, args, kwargs)
        if made is NotImplemented:
            raise CaptureError(
                f"{func}, an operator over functions, cannot be recorded on the emulated platform, at\n    "
                f"{user_line()}\nLet it be in a compiled piece, or move the line to an eager piece"
            )
        return made

    def _write_down(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], outputs: list[Any]
    ) -> None:
        fixed = [map_tensors(self._address, arg) for arg in args]
        named = {name: map_tensors(self._address, arg) for name, arg in kwargs.items()}
        kept = tuple(outputs) if any(output is not None for output in outputs) else ()
        self.tape.append(TapedCall(function, fixed, named, kept))

    def _address(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's address for the tape: weak in our pool; elsewhere an alias, since the caller
        may give the tensor object other memory later (``parameter.data = ...``)."""
        weak = self.pool.weak(tensor)
        return weak if weak is not tensor else tensor.detach()

    def _new(self, layout: TensorLayout) -> torch.Tensor:
        _only_cpu(layout.device)
        return self.pool.tensor(layout.size, layout.stride, layout.dtype)

    def _change_own_shape(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket in _CHANGE_STORAGE:
            raise CaptureError(
                f"{func} gives a tensor other memory while a graph is recorded, at\n    {user_line()}\n"
                "The graph keeps addresses; allocate the tensor with its final size before recording."
            )
        return func(*args, **kwargs)

    def _checked(self, what: str, find: Callable[..., Any], *args: Any) -> Any:
        """Finds a layout; what cannot be recorded becomes an error with the user's line."""
        self._reads.asleep = True  # fake implementations may look at their own constants
        try:
            return find(*args)
        except ReadInsideError as error:
            raise _host_read(*_named(error, what)) from error
        except torch_hooks.data_dependence_errors() as error:
            raise _host_read(*_named(error, what)) from error
        except torch_hooks.missing_fake_errors() as error:
            what, place = _named(error, what)
            raise CaptureError(
                f"{what} has no fake implementation, so its outputs cannot be foreseen, at\n"
                f"    {place}\nGive it one (torch.library.register_fake, or fake_impl of register_op). "
                f"torch: {error}"
            ) from error
        except NotRecordableError as error:
            _, place = _named(error, what)
            raise CaptureError(f"while a graph is recorded, at\n    {place}\n{error}") from error
        finally:
            self._reads.asleep = False


def _named(error: Exception, what: str) -> tuple[str, str]:
    """What failed and the user's line: of a piece, the node in it."""
    return getattr(error, "node_name", what), getattr(error, "node_line", "") or user_line()


def _with_casts_of_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under autocast as it is now: a piece that runs operator by operator casts inside of its one call."""
    if not torch.is_autocast_enabled("cpu"):
        return function
    dtype = torch.get_autocast_dtype("cpu")

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with torch.autocast("cpu", dtype=dtype):
            return function(*args)

    return run


def _from_argument(argument: torch.Tensor, layout: TensorLayout | None) -> torch.Tensor:
    if layout is None:
        return argument
    storage = argument.untyped_storage()
    view = on_storage(storage, layout.offset, layout.size, layout.stride, layout.dtype)
    return torch_hooks.with_lazy_bits(view, layout.conj, layout.neg)


def _only_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        raise CaptureError(
            f"the emulated platform records CPU tensors, not {device.type!r}, at\n    {user_line()}\n"
            "Use the platform of that device (get_platform('cuda')), or move the model to the CPU."
        )


def map_layouts(function: Callable[[TensorLayout], Any], value: Any) -> Any:
    if isinstance(value, TensorLayout):
        return function(value)
    if isinstance(value, (tuple, list)):
        return [map_layouts(function, item) for item in value]
    return value
