"""Every private hook of torch (and Triton) that cgkit needs, one function each.

Nothing else in cgkit touches a private name of torch. Each function says on which versions it was
run; on a version where the hook is gone it raises UnsupportedTorchError with what was tried.
"""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from cgkit.errors import UnsupportedTorchError

RUN_ON = "torch 2.11 (CUDA) and 2.13 (CPU)"


def _gone(hook: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} has no {hook} as cgkit knows it (run on {RUN_ON}); "
        "install one of these versions, or adapt cgkit/torch_hooks.py"
    )


def weak_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor at the same address as ``tensor`` that does not own the memory.

    Two private constructors, those that torch's own CUDA graph trees use. torch 2.11 and 2.13.
    """
    storage = tensor.untyped_storage()
    metadata = {
        "nbytes": storage.nbytes(),
        "data_ptr": storage.data_ptr(),
        "size": tensor.shape,
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    try:
        make_storage = torch._C._construct_storage_from_data_pointer
        make_tensor: Any = torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata
    except AttributeError:
        raise _gone("constructor of non-owning tensors") from None
    return make_tensor(metadata, make_storage(storage.data_ptr(), tensor.device, storage.nbytes()))


def pool_segments(pool: tuple[int, int]) -> list[tuple[int, int, int]]:
    """The segments of one CUDA memory pool: (address, total bytes, allocated bytes) each.

    ``torch.cuda.memory_snapshot`` filters by pool where it can (torch 2.11 and 2.13); the key
    ``segment_pool_id``, which is not documented, makes sure.
    """
    try:
        segments = torch.cuda.memory_snapshot(pool)
    except TypeError:  # older: no such parameter
        segments = torch.cuda.memory_snapshot()
    found = []
    for segment in segments:
        if "segment_pool_id" not in segment:
            raise _gone("segment_pool_id in torch.cuda.memory_snapshot()")
        if tuple(segment["segment_pool_id"]) == tuple(pool):
            found.append((segment["address"], segment["total_size"], segment["allocated_size"]))
    return found


def end_failed_capture(device: int, pool: tuple[int, int]) -> bool:
    """Stops the allocator from feeding ``pool`` after a stream capture that CUDA refused to begin or end.

    ``CUDAGraph`` raises before it does so itself; the allocator would then believe for ever that a capture
    is under way. True if it did: the pool then counts one user more than it has, see :func:`release_pool`.
    torch 2.11 and 2.13.
    """
    stop: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if stop is None:
        raise _gone("torch._C._cuda_endAllocateToPool")
    try:
        stop(device, pool)
    except RuntimeError:  # the pool was not being fed: torch came so far itself
        return False
    return True


def release_pool(device: int, pool: tuple[int, int]) -> None:
    """Takes one user from a pool of the allocator, as ``CUDAGraph.reset`` does. A pool without users is
    never used again, so this comes last. torch 2.11 and 2.13."""
    torch._C._cuda_releasePool(device, pool)


# --- splitting -------------------------------------------------------------------------------


def destroy_library(library: torch.library.Library) -> None:
    """Takes back everything that ``library`` defined and implemented, at once and not when it is
    collected (``Library._destroy``; torch 2.11, 2.13)."""
    if not hasattr(library, "_destroy"):
        raise _gone("torch.library.Library._destroy")
    library._destroy()


def register_fake_in(library: torch.library.Library, op_name: str, fake_impl: Callable[..., Any]) -> None:
    """Registers a fake implementation whose life is that of ``library``, unlike the public
    ``torch.library.register_fake`` on a name (``Library._register_fake``; torch 2.11, 2.13)."""
    if not hasattr(library, "_register_fake"):
        raise _gone("torch.library.Library._register_fake")
    library._register_fake(op_name, fake_impl)


def resolve_overload(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The overload that ``packet(*args, **kwargs)`` would call, or None where ``packet`` is no packet of
    overloads or torch cannot tell without calling it (``torch._C._jit_resolve_packet``; torch 2.11, 2.13)."""
    from torch._ops import OpOverloadPacket

    if not isinstance(packet, OpOverloadPacket):
        return None
    overloads = packet.overloads()
    if len(overloads) == 1:
        return getattr(packet, overloads[0])
    resolve = getattr(torch._C, "_jit_resolve_packet", None)
    if resolve is None:
        return None
    try:
        return getattr(packet, resolve(packet._qualified_op_name, *args, **kwargs))
    except (RuntimeError, TypeError, AttributeError):
        return None


def free_symbol_names(value: Any) -> frozenset[str]:
    """The names of the symbols in ``value`` (a tensor's shape, strides and offset; a SymInt; a nest
    of them). ``torch.fx.experimental.symbolic_shapes.free_symbols``; torch 2.11, 2.13."""
    if isinstance(value, (tuple, list)):
        return frozenset().union(*(free_symbol_names(element) for element in value))
    if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return frozenset()
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return frozenset(str(symbol) for symbol in free_symbols(value))


def plain_symbol_name(value: Any) -> str | None:
    """The symbol's name if ``value`` is a SymInt that is one bare symbol, like ``s77``; else None
    (``SymInt.node.expr``; torch 2.11, 2.13)."""
    if not isinstance(value, torch.SymInt):
        return None
    expr = value.node.expr
    return str(expr) if expr.is_Symbol else None


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a fake tensor (``torch._subclasses.FakeTensor``; torch 2.11, 2.13)."""
    from torch._subclasses import FakeTensor

    return isinstance(value, FakeTensor)


def triton_direct_launch(compiled_kernel: Any) -> Callable[[Sequence[int], int, Sequence[Any]], None] | None:
    """``launch(grid, raw_stream, arguments)`` for a compiled Triton kernel, past Triton's own dispatch.

    ``arguments`` are all parameters in the order of the signature, constants included; pointers may be
    plain integers. None where the kernel's private ``run`` is not known to take this call: the caller
    then launches in the public way. Launch hooks of Triton's profiler do not fire.

    Read in, and written for, Triton 3.6; other versions give None, as does Triton's interpreter.
    """
    import triton

    if ".".join(triton.__version__.split(".")[:2]) != "3.6":
        return None
    try:
        run, function = compiled_kernel.run, compiled_kernel.function
        packed = compiled_kernel.packed_metadata
    except AttributeError:
        return None
    if not callable(run) or function is None:
        return None

    def launch(grid: Sequence[int], stream: int, arguments: Sequence[Any]) -> None:
        run(grid[0], grid[1], grid[2], stream, function, packed, None, None, None, *arguments)

    return launch


def current_raw_stream(device_index: int) -> int:
    """The address of the current CUDA stream of a device. torch 2.11; elsewhere by the public way."""
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw(device_index) if raw is not None else torch.cuda.current_stream(device_index).cuda_stream


# --- compiling ---------------------------------------------------------------------------------


def compile_lock() -> Any:
    """The re-entrant lock that Dynamo and Inductor themselves compile under (2.11, 2.13).

    Taking it keeps a trace in another thread out of our compilations, which change global state.
    """
    from torch._dynamo import convert_frame

    try:
        return convert_frame.compile_lock
    except AttributeError:
        raise _gone("torch._dynamo.convert_frame.compile_lock") from None


def standalone_compile(
    graph_module: torch.fx.GraphModule, fake_args: Sequence[Any], fake_mode: Any, options: dict[str, Any]
) -> Callable[..., Sequence[Any]]:
    """Inductor's ``standalone_compile`` on fakes of ``fake_mode``; the artefact (2.11, 2.13).

    A fresh tracing context carries the fake mode in (``dynamic_shapes="from_tracing_context"``), so
    that symbols keep their meaning and a mode without symbols gives a static compilation, without
    a real example tensor. The graph module is given away: hand in a copy.
    """
    from torch._guards import TracingContext, tracing

    try:
        from torch._inductor import standalone_compile as compile_it
    except ImportError:
        raise _gone("torch._inductor.standalone_compile") from None
    more: dict[str, Any] = {}
    if "donate_graph_module" in inspect.signature(compile_it).parameters:  # 2.13
        more["donate_graph_module"] = True
    with torch.inference_mode(False), torch.no_grad(), tracing(TracingContext(fake_mode)):
        return compile_it(
            graph_module,
            list(fake_args),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": options},
            **more,
        )


def inductor_options() -> set[str]:
    """The names of Inductor's options, as ``config_patches`` takes them (2.11, 2.13)."""
    from torch._inductor import list_options

    return set(list_options())


def generated_kernels() -> int:
    """How many kernels Inductor has generated in this process, cache hits included (2.11, 2.13)."""
    from torch._inductor import metrics

    return getattr(metrics, "generated_kernel_count", 0)


def find_cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use for CPU code, or None (2.11, 2.13)."""
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler
    except ImportError:
        raise _gone("torch._inductor.cpp_builder.get_cpp_compiler") from None
    try:
        return get_cpp_compiler()
    except (RuntimeError, OSError, subprocess.SubprocessError):
        return None


def new_fake_mode() -> Any:
    """A fake mode with a shape environment of its own (2.11, 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv())


def fake_mode_of(values: Iterable[Any]) -> Any | None:
    """The fake mode of the first fake tensor among ``values``, or None (2.11, 2.13)."""
    return next((value.fake_mode for value in values if is_fake(value)), None)


def running_fake(fake_mode: Any) -> AbstractContextManager[Any]:
    """A context in which operators on ``fake_mode``'s tensors compute shapes only (2.11, 2.13).

    The Python dispatcher is switched on as well, without which composite operators would turn
    symbolic sizes into numbers.
    """
    from torch._dispatch.python import enable_python_dispatcher

    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))  # inference tensors do not count their writes
    stack.enter_context(torch.no_grad())
    stack.enter_context(fake_mode)
    stack.enter_context(enable_python_dispatcher())
    return stack


def symbolic_expression(value: Any) -> Any:
    """The sympy expression of a SymInt, SymFloat or SymBool (2.11, 2.13)."""
    return value.node.expr


def symbol_facts(fake_mode: Any, symbol: Any) -> tuple[str, str]:
    """What the shape environment knows of a symbol: its range and its example (2.11, 2.13)."""
    environment = getattr(fake_mode, "shape_env", None)
    known_range = getattr(environment, "var_to_range", {}).get(symbol, "?")
    for name in ("backed_var_to_val", "var_to_val"):  # the name differs between versions
        values = getattr(environment, name, None)
        if values is not None and symbol in values:
            return str(known_range), str(values[symbol])
    return str(known_range), "?"


def specialised_symbols(fake_mode: Any) -> dict[Any, int]:
    """Symbols that the shape environment has fixed to a number meanwhile (2.11, 2.13)."""
    replacements = getattr(getattr(fake_mode, "shape_env", None), "replacements", {})
    return {
        symbol: int(value) for symbol, value in replacements.items() if getattr(value, "is_Integer", False)
    }


def substitute_symbols(value: Any, numbers: dict[Any, int]) -> Any:
    """``value`` with ``numbers`` for symbols; an int if none is left, else as it was (2.11, 2.13)."""
    if not isinstance(value, torch.SymInt):
        return value
    import sympy

    expression = value.node.expr.xreplace({symbol: sympy.Integer(n) for symbol, n in numbers.items()})
    return int(expression) if expression.is_number else value


def shape_guards(holder: Any) -> list[str]:
    """What has been assumed of the symbols of a fake mode (or of a tracing context's), in order, as
    text (2.11, 2.13)."""
    fake_mode = getattr(holder, "fake_mode", holder)
    return [str(guard.expr) for guard in getattr(getattr(fake_mode, "shape_env", None), "guards", ())]


# --- Dynamo: one trace -----------------------------------------------------------------------


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Tells Dynamo that ``dim`` may have any size from 2 up. Same on 2.11 to 2.13."""
    torch._dynamo.mark_dynamic(tensor, dim)


def register_bytecode_hook(hook: Callable[[CodeType, CodeType], CodeType | None]) -> Any:
    """Calls ``hook(old code, new code)`` after each compilation; the result has ``remove()``.

    Same on 2.11 to 2.13. The hooks are one dict a process, which Dynamo walks while it compiles:
    add and remove under a lock.
    """
    try:
        return torch._dynamo.convert_frame.register_bytecode_hook(hook)  # type: ignore[arg-type]
    except AttributeError:
        raise _gone("torch._dynamo.convert_frame.register_bytecode_hook") from None


def count_bytecode_hooks() -> int:
    """How many bytecode hooks are registered in the process (for tests). 2.11 to 2.13."""
    return len(torch._dynamo.convert_frame._bytecode_hooks)


def forget_code(code: CodeType) -> None:
    """Drops what Dynamo has cached for this one code object. Same on 2.11 to 2.13."""
    try:
        from torch._C._dynamo.eval_frame import reset_code
    except ImportError:
        raise _gone("torch._C._dynamo.eval_frame.reset_code") from None
    reset_code(code)


#: Dynamo calls the compiled graph through a global whose name starts so (2.11 to 2.13).
COMPILED_FN_PREFIX = "__compiled_fn_"


def drop_all_guards(entries: Any) -> list[bool]:
    """A ``guard_filter_fn`` that keeps nothing (torch.compiler.skip_all_guards_unsafe, 2.10 up)."""
    return [False] * len(entries)


def tracing_context() -> Any:
    """The tracing context of the compilation that runs in this thread. Same on 2.11 to 2.13."""
    try:
        context = torch._guards.TracingContext.try_get()
    except AttributeError:
        raise _gone("torch._guards.TracingContext") from None
    if context is None or context.fake_mode is None:
        raise _gone("tracing context with a fake mode inside a backend")
    return context


def in_tracing_context(context: Any) -> AbstractContextManager[Any]:
    """Re-enters a tracing context after Dynamo has returned. Same on 2.11 to 2.13.

    ``standalone_compile(dynamic_shapes="from_tracing_context")`` finds its symbols through it.
    """
    return torch._guards.tracing(context)


def traced_code(context: Any) -> list[CodeType]:
    """The code of the traced function and of all that were inlined. Same on 2.11 to 2.13."""
    return list(getattr(context, "traced_code", None) or ())


def placeholder_source(node: torch.fx.Node) -> str:
    """Where a placeholder's value comes from, as Dynamo says it (``L['self']...``); "" if unknown.

    Only inside the backend: afterwards Dynamo drops the record. Same on 2.11 to 2.13.
    """
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return name() if callable(name) else name


def fake_example(example: Any, context: Any) -> Any:
    """The fake form of a placeholder's example, in the context's fake mode, with the trace's symbols.

    The fakes in ``meta["example_value"]`` belong to a fake mode that Dynamo has already left; the
    context remembers which symbols each real tensor got (``tensor_to_context``). 2.11 to 2.13.
    """
    if not isinstance(example, torch.Tensor) or isinstance(example, torch._subclasses.FakeTensor):
        return example
    symbolic = context.tensor_to_context.get(example)
    if symbolic is None:
        return context.fake_mode.from_tensor(example, static_shapes=True)
    return context.fake_mode.from_tensor(
        example, symbolic_context=symbolic, source=getattr(symbolic, "tensor_source", None)
    )


@dataclass(frozen=True)
class SideEffect:
    """One write to a Python object that Dynamo replays after the graph.

    ``target`` is Dynamo's name of the object, ``key`` the attribute (or the dict's key) written,
    None for a list. ``holds_tensor``: the new or the old value holds a tensor. ``frames``: for each
    write of the object (file, line, source line) from the outermost to the innermost.
    """

    target: str
    attribute: str | None
    key: Any
    how: str
    holds_tensor: bool
    stacks: tuple[tuple[tuple[str, int, str], ...], ...]


def dynamo_side_effects() -> list[SideEffect]:
    """The writes to objects from outside that the running compilation will replay. Inside a backend.

    Reads ``SideEffects.store_attr_mutations`` and ``mutation_user_stacks`` of the current
    instruction translator (2.11 to 2.13).
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        effects = InstructionTranslator.current_tx().output.side_effects
        modified, stores = effects._get_modified_vars(), effects.store_attr_mutations
    except (ImportError, AttributeError):
        raise _gone("InstructionTranslator.current_tx().output.side_effects") from None
    stacks_of = getattr(effects, "mutation_user_stacks", {})
    found: list[SideEffect] = []
    for variable in modified:
        target = _variable_source(variable)
        if not target:  # made inside forward: nobody outside sees it
            continue
        stacks = tuple(
            tuple((frame.filename, frame.lineno or 0, frame.line or "") for frame in stack)
            for stack in stacks_of.get(variable, ())
        )
        if variable in stores:
            owner = vars(variable).get("value")
            for name, value in stores[variable].items():
                holds = _holds_tensor(value) or isinstance(getattr(owner, name, None), torch.Tensor)
                found.append(SideEffect(target, name, None, "assigned", holds, stacks))
        else:
            found += [SideEffect(target, None, *change, stacks) for change in _changes(variable)]
    return found


def _changes(container: Any) -> list[tuple[Any, str, bool]]:
    """(key, how, holds a tensor) of each change of a list, dict or other container."""
    items, before = vars(container).get("items"), vars(container).get("original_items")
    if not isinstance(items, dict) or not isinstance(before, dict):
        return [(None, "contents changed", _holds_tensor(container))]
    new = {_plain_key(key): value for key, value in items.items()}
    old = {_plain_key(key): value for key, value in before.items()}
    changes: list[tuple[Any, str, bool]] = [
        (key, "assigned", _holds_tensor(value)) for key, value in new.items() if old.get(key) is not value
    ]
    return changes + [(key, "deleted", _holds_tensor(old[key])) for key in old if key not in new]


def _plain_key(key: Any) -> Any:
    """The Python key that a dict key of Dynamo stands for, or its text."""
    try:
        return getattr(key, "vt", key).as_python_constant()
    except Exception:  # a tensor, a module, ...: only shown
        return str(key)


def _variable_source(variable: Any) -> str:
    """Dynamo's name for where a variable comes from; "" if it was made inside the trace."""
    source = getattr(variable, "source", None)
    if source is None or type(source).__name__ == "TempLocalSource":
        return ""
    try:
        name = source.name
        return name() if callable(name) else name
    except NotImplementedError:
        return ""


def _holds_tensor(value: Any) -> bool:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.tensor import TensorVariable

    kinds: list[type] = []
    VariableTracker.visit(lambda variable: kinds.append(type(variable)), value)
    return any(issubclass(kind, TensorVariable) for kind in kinds)


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Silences the tracebacks that Dynamo logs beside the exception it raises. 2.11 to 2.13."""
    loggers = [logging.getLogger(name) for name in ("torch._guards", "torch._subclasses.fake_tensor")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before):
            logger.disabled = disabled


def original_of_compiled(function: Any) -> Any:
    """What a function made by ``torch.compile`` wraps, or the function itself. 2.11 to 2.13."""
    if getattr(function, "_torchdynamo_disable", False):
        return function
    return getattr(function, "_torchdynamo_orig_callable", function)


_LIBRARY_FOLDERS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))


def is_library_file(file: str) -> bool:
    """Whether a source file is torch's or cgkit's own tracing code, not the user's."""
    return file.startswith((_LIBRARY_FOLDERS[0], "<frozen ", _LIBRARY_FOLDERS[1] + "tracing" + os.sep))


def storage_key(tensor: torch.Tensor) -> int:
    """A number that two tensors share if and only if they share their storage (fake ones too).

    ``untyped_storage()._cdata``: the same on 2.11 to 2.13. Valid while one of them is alive.
    """
    return tensor.untyped_storage()._cdata


# -- what the emulated graph platform needs ---------------------------------------------------------


def with_lazy_bits(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """``tensor`` seen through a lazy conjugate and a lazy negative. Run on 2.13; old names."""
    if conj:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if neg else tensor


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that tensors on one storage have in common; also for fake tensors. Run on 2.13."""
    return tensor.untyped_storage()._cdata


def fake_tensor_mode(allow_real_inputs: bool = False) -> Any:
    """A new FakeTensorMode without symbols: concrete shapes, nothing allocated. Run on 2.13."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=allow_real_inputs)


def data_dependence_errors() -> tuple[type[Exception], ...]:
    """What a fake run raises where a value, not a shape, decides. Run on 2.13."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return (DataDependentOutputException, DynamicOutputShapeException)


def missing_fake_errors() -> tuple[type[Exception], ...]:
    """What a fake run raises for an operator without a fake implementation. Run on 2.13."""
    from torch._subclasses.fake_tensor import UnsupportedOperatorException

    return (UnsupportedOperatorException,)


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Takes this thread's dispatch modes off for a block. Run on 2.13; there since 2.1."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


_PYTHON_KERNEL_KEYS = ("CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd")


def has_python_kernel(op: OpOverload) -> bool:
    """Whether a call of ``op`` on CPU tensors would run Python code, registered with torch.library.

    torch.library notes each such registration (custom_op and Library.impl alike) in one set of
    "namespace/name.overload/key". Run on 2.13; the same in 2.11.
    """
    namespace, _, name = op.name().partition("::")
    registered = getattr(torch.library, "_impls", None)
    if registered is None:
        raise _gone("torch.library._impls")
    return any(f"{namespace}/{name}/{key}" in registered for key in _PYTHON_KERNEL_KEYS)


def run_cpu_kernel(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the kernel of ``op`` for CPU tensors past the modes; what the kernel calls meets them.

    Run on 2.13.
    """
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return op.redispatch(keys, *args, **kwargs)


def is_composite(op: OpOverload) -> bool:
    """Whether ``op`` on CPU tensors is only a composition of others. Run on 2.13.

    In inference mode such operators reach a dispatch mode whole; otherwise in their parts.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(op.name(), "CompositeImplicitAutograd") and not has_kernel(op.name(), "CPU")


def written_arguments(op: OpOverload) -> list[str | None]:
    """For each return of ``op``, the argument that it is (``add_``, ``out=``), or None. Run on 2.13."""
    schema = op._schema
    names: list[str | None] = []
    for returned in schema.returns:
        alias = returned.alias_info
        same = (
            [a.name for a in schema.arguments if a.alias_info and a.alias_info.before_set == alias.before_set]
            if alias is not None and alias.is_write
            else []
        )
        names.append(same[0] if same else None)
    return names


def writes(op: OpOverload) -> bool:
    """Whether ``op`` says that it changes one of its arguments. Run on 2.13."""
    return op._schema.is_mutable


def bound_argument(op: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument called ``name`` in a call of ``op``. Run on 2.13."""
    if name in kwargs:
        return kwargs[name]
    position = [argument.name for argument in op._schema.arguments].index(name)
    return args[position]


def assumed_of_symbols(fake_mode: Any) -> list[str]:
    """What has been assumed of the symbols so far, as text in order (2.11, 2.13)."""
    return [str(guard.expr) for guard in getattr(getattr(fake_mode, "shape_env", None), "guards", ())]


def operator_of(target: Any) -> tuple[str, str | None] | None:
    """``("ns::name", overload)`` of an operator; overload None for a packet of them; None for anything
    that is no operator of torch's registry (``torch._ops``; torch 2.11, 2.13)."""
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

    if isinstance(target, OpOverload):
        return str(target._schema.name), str(target._overloadname)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name), None
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}", "default"
    return None


def returns_several(target: Any) -> bool | None:
    """Whether an overload's schema returns a list or several values; None if ``target`` is no overload
    (``OpOverload._schema``; torch 2.11, 2.13)."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    return len(schema.returns) > 1 or any("List" in str(returned.type) for returned in schema.returns)


class _LeanDynamoUtils:
    """``torch._dynamo.utils`` as Dynamo's bytecode sees it, less what costs time at each call.

    The bytecode opens a profiler range around fetching the graph's inputs, and reads sizes through
    functions that switch Dynamo off and on again: microseconds a step that only a trace in progress needs.
    """

    @staticmethod
    def record_pregraph_bytecode_enter() -> None:
        return None

    @staticmethod
    def record_pregraph_bytecode_exit(_: Any) -> None:
        return None

    @staticmethod
    def call_size(x: torch.Tensor, dim: int) -> int:
        return x.size(dim)

    @staticmethod
    def call_stride(x: torch.Tensor, dim: int) -> int:
        return x.stride(dim)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._dynamo.utils, name)


_lean_dynamo_utils = _LeanDynamoUtils()


def lean_global(value: Any) -> Any:
    """What stands for a global of Dynamo's bytecode when no guard is before it: its helpers, made lean.

    Read in torch 2.13; where the bytecode has no such helpers (2.11 has some), nothing is replaced.
    """
    import torch._dynamo.utils

    return _lean_dynamo_utils if value is torch._dynamo.utils else value


def dispatch_mode_class() -> type[Any]:
    """``TorchDispatchMode``: a mode that sees every operator below autograd. 2.11 to 2.13."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def codegen_of(graph: Any) -> Any:
    """The fx code generator of ``graph``, which holds how its arguments and outputs are nested
    (``fx.Graph._codegen``; torch 2.11, 2.13)."""
    if not hasattr(graph, "_codegen"):
        raise _gone("torch.fx.Graph._codegen")
    return graph._codegen


def dynamo_guards(context: Any) -> list[tuple[str, str, Any]]:
    """(source, kind, key) of every guard of a trace so far, as text (2.11, 2.13).

    ``kind`` is the name of Dynamo's builder ("CONSTANT_MATCH", "SEQUENCE_LENGTH", "DICT_CONTAINS", ...);
    ``key`` what a dictionary was asked for. Empty where Dynamo keeps its guards otherwise.
    """
    found = []
    guards = getattr(getattr(context, "guards_context", None), "dynamo_guards", ())
    for guard in guards:
        name, build = getattr(guard, "name", ""), getattr(guard, "create_fn", None)
        source = name() if callable(name) else name
        kind = getattr(getattr(build, "func", build), "__name__", "")
        bound = getattr(build, "keywords", None) or {}
        positional = getattr(build, "args", ())
        key = bound.get("key", positional[0] if positional else None)
        found.append((str(source), kind, key))
    return found
