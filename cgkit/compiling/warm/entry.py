"""One stored start of a model: what stages 1 to 3 found out, as bytes, and made into their artefacts again.

``marshal`` carries it: plain values and code objects, nothing that runs while it is read.
"""

from __future__ import annotations

import builtins
import importlib
import marshal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.compiling.compiled_graph import CompiledGraph
from cgkit.compiling.content_key import ContentKey
from cgkit.compiling.plan import Plan, PlanError, PlannedCall
from cgkit.compiling.warm.assumed import Call
from cgkit.compiling.warm.describe import UndescribableError
from cgkit.errors import CgkitError
from cgkit.splitting import Piece, SplitGraph
from cgkit.splitting.loaded import LoadedPiece, LoadedSplit
from cgkit.splitting.piece_code import PieceCode, piece_code
from cgkit.splitting.register import direct_call, registered_op_of, registered_ops
from cgkit.splitting.stitch import StitchingCode
from cgkit.tracing import Arguments, GraphInput, TorchCompileWrapperWithCustomDispatcher, TracedGraph
from cgkit.tracing.assumptions import assumptions, goes_through_keywords, mode_check
from cgkit.tracing.buffer_writes import written_arguments
from cgkit.tracing.loaded import LoadedTrace

#: Changes with what an entry holds.
FORMAT = 2


# --- writing ---------------------------------------------------------------------------------


def encode(compiled: CompiledGraph, guards: Sequence[Any]) -> bytes:
    """The stored form of a model that was just traced, cut and compiled.

    Raises:
        UndescribableError: something in it means nothing to another process; says what.
    """
    split, traced = compiled.split, compiled.split.traced
    assert traced is not None
    keys, calls, shapes = _calls(compiled)
    content = {
        "format": FORMAT,
        **_trace(traced, bool(compiled.config.mode)),
        "guards": [tuple(guard) for guard in guards],
        "pieces": [(p.index, p.is_splitting, p.input_names, p.output_names, p.ops) for p in split.pieces],
        "splitting_ops": tuple(split.splitting_ops),
        "split_inputs": tuple(split.inputs),
        "stitching": _stitching(split),
        "keys": [key.lines for key in keys],
        "codes": _codes(compiled, keys),
        "calls": calls,
        "shapes": shapes,
        "siblings": sorted(_lifted_operators(split)),
    }
    try:
        return marshal.dumps(content)
    except ValueError as error:
        raise UndescribableError(
            f"Dynamo's bytecode holds an object that cannot be written ({error})"
        ) from None


def _trace(traced: TracedGraph, recorded: bool) -> dict[str, Any]:
    wrapper = traced.wrapper
    assert wrapper is not None
    return {
        "model_name": traced.model_name,
        "code": _without_place(traced.code),
        "globals": _globals(traced),
        "inputs": [
            (i.index, i.name, i.kind, i.source, i.dynamic_dims, i.shape, _text(i.dtype), _text(i.device))
            for i in traced.inputs
        ],
        "dropped_guards": traced.dropped_guards,
        "enlarged": traced.enlarged,
        "side_effects": [
            (e.target, e.attribute, _plain(e.key), e.how, e.holds_tensor, e.stacks)
            for e in traced.side_effects
        ],
        "num_outputs": traced.num_outputs,
        "num_nodes": len(traced.graph_module.graph.nodes),
        "written": _written(traced) if recorded else None,
        "trace_seconds": traced.seconds,
    }


def _without_place(code: Any) -> Any:
    return code.replace(co_filename="")


def _written(traced: TracedGraph) -> tuple[int, ...] | None:
    try:
        return tuple(sorted(written_arguments(traced)))
    except CgkitError:  # it is asked again, and says why, where graphs are recorded
        return None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UndescribableError(f"forward writes under a key of type {type(value).__name__}")


def _globals(traced: TracedGraph) -> dict[str, str | None]:
    """What the bytecode finds in globals that Dynamo put there: the module's name, None for the builtins' dict."""
    assert traced.wrapper is not None
    used = {name for code in traced.codes for name in code.co_names}
    found: dict[str, str | None] = {}
    for name, value in traced.wrapper.globals_of(0).items():
        if name.startswith(torch_hooks.COMPILED_FN_PREFIX):
            continue
        if isinstance(value, type(sys)) and sys.modules.get(value.__name__) is value:
            found[name] = value.__name__
        elif value is vars(builtins):
            found[name] = None
        elif name not in used and name != "_wrapped_forward":
            raise UndescribableError(
                f"Dynamo's bytecode reads {name}, a {type(value).__name__} that Dynamo made"
            )
    return found


def _calls(compiled: CompiledGraph) -> tuple[list[ContentKey], list[Any], list[Any]]:
    """The different contents; (piece, content, symbol positions, lifted names) a call; further shapes."""
    keys = list(dict.fromkeys(one.key for backend in compiled.backends for one in backend.compiled))
    number = {key: index for index, key in enumerate(keys)}
    cache = compiled.manager.cache
    assert cache is not None
    for backend in compiled.backends:
        if backend.general.adaptor != compiled.manager.adaptor.name or backend.call.written_together:
            raise UndescribableError(f"piece {backend.name} runs operator by operator")
    for key in keys:
        if not key.portable or not cache.path(key).exists():
            raise UndescribableError(f"the piece with the content {key.digest} could not be kept")
    calls = [
        (b.piece.index, number[b.general.key], b.sym_shape_indices, b.lifted.names) for b in compiled.backends
    ]
    shapes = [(b.name, str(one.shape), number[one.key]) for b in compiled.backends for one in b.compiled[1:]]
    return keys, calls, shapes


def _codes(compiled: CompiledGraph, keys: Sequence[ContentKey]) -> list[tuple[Any, ...] | None]:
    """The code of each content, for the emulated platform: it records what lies on the CPU. None: the graph is
    needed after all."""
    traced = compiled.split.traced
    assert traced is not None
    if not compiled.config.mode or any(
        i.device is not None and i.device.type != "cpu" for i in traced.inputs
    ):
        return [None] * len(keys)
    first = {backend.general.key: backend.piece for backend in reversed(compiled.backends)}
    return [_code(first[key]) if key in first else None for key in keys]


def _code(piece: Piece) -> tuple[str, dict[str, tuple[Any, ...]]] | None:
    written = piece_code(piece)
    try:
        return written.source, _constants(written.constants)
    except UndescribableError:
        return None


def _lifted_operators(split: SplitGraph) -> set[str]:
    found = set()
    for node in split.graph_module.graph.nodes:
        op = registered_op_of(node.target) if node.op == "call_function" else None
        if op is not None and op.lookup_args:
            found.add(op.name)
    return found


def _stitching(split: SplitGraph) -> dict[str, Any]:
    stitching = split.stitching()
    marked, by_name = stitching.marked_source()
    return {
        "source": stitching.source,
        "constants": _constants(stitching.constants),
        "callables": tuple(stitching.callable_names),
        "marked": (marked, dict(by_name)),
    }


def _constants(constants: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: _constant(name, value) for name, value in constants.items()}


def _constant(name: str, value: Any) -> tuple[Any, ...]:
    direct = {id(direct_call(op.overload)): key for key, op in registered_ops().items()}
    if id(value) in direct:
        return ("direct", direct[id(value)])
    if (known := torch_hooks.operator_of(value)) is not None:
        return ("operator", *known)
    if isinstance(value, torch.dtype):
        return ("dtype", _text(value))
    if isinstance(value, torch.device):
        return ("device", str(value))
    if isinstance(value, float | complex):
        return ("number", value)
    for module, path in _places(value):
        if module and path and _resolve(module, path) is value:
            return ("attribute", module, path)
    raise UndescribableError(f"the code between the pieces uses {name}, a {type(value).__name__}")


def _places(value: Any) -> Iterator[tuple[str | None, str]]:
    """Where a constant may be found by name: functions, and torch's own values (a memory format)."""
    if callable(value):
        yield getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        yield "torch", getattr(value, "__name__", "")  # torch's functions in C++ do not say where they stand
    elif isinstance(value, torch.memory_format | torch.layout):
        yield "torch", str(value).removeprefix("torch.")


# --- reading ---------------------------------------------------------------------------------


def decode(payload: bytes) -> dict[str, Any]:
    """What :func:`encode` wrote. ValueError for anything else."""
    try:
        content = marshal.loads(payload)
    except (EOFError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("it is no trace of this version of cgkit")
    return content


def loaded_trace(
    content: Mapping[str, Any],
    call: Call,
    example: tuple[Arguments, TorchCompileWrapperWithCustomDispatcher],
    files: Sequence[str],
    remake: Callable[[], TracedGraph],
) -> LoadedTrace:
    """Stage 1's artefact for ``call``'s model.

    Raises:
        PlanError: a module that the bytecode looks into cannot be had.
    """
    arguments, wrapper = example
    inputs = [
        GraphInput(index, name, kind, source, tuple(dims), tuple(shape), _dtype(dtype), _device(device))
        for index, name, kind, source, dims, shape, dtype, device in content["inputs"]
    ]
    code = content["code"].replace(co_filename=wrapper.original_code_object.co_filename)
    wrapper.compiled_codes.append(code)
    wrapper.foreign_globals = {name: _module(module) for name, module in content["globals"].items()}
    guards = [tuple(guard) for guard in content["guards"]]
    arguments.expect(
        assumptions(arguments.signature, arguments.values, inputs, guards),
        in_order=goes_through_keywords(arguments.signature, guards),
    )
    effects = [
        torch_hooks.SideEffect(target, attribute, key, how, holds, stacks)
        for target, attribute, key, how, holds, stacks in content["side_effects"]
    ]
    return LoadedTrace(
        model_name=content["model_name"],
        inputs=inputs,
        code=code,
        wrapper=wrapper,
        arguments=arguments,
        other_mode=mode_check(call.model, inputs, guards),
        remake=remake,
        stored={**content, "traced_files": files, "side_effects": effects},
    )


def loaded_split(content: Mapping[str, Any], traced: LoadedTrace) -> LoadedSplit:
    """Stage 2's artefact.

    Raises:
        PlanError: an operator between the pieces is not registered here.
    """
    codes = [code and PieceCode(code[0], _values(code[1])) for code in content["codes"]]
    code_of = {index: codes[key] for index, key, *_ in content["calls"]}
    pieces = [
        LoadedPiece(index, splitting, inputs, outputs, ops, code_of.get(index))
        for index, splitting, inputs, outputs, ops in content["pieces"]
    ]
    known = content["stitching"]
    code = StitchingCode(
        pieces,
        inline=True,
        source=known["source"],
        constants=_values(known["constants"]),
        callable_names=known["callables"],
        marked=known["marked"],
    )
    return LoadedSplit(traced, pieces, content["splitting_ops"], content["split_inputs"], code)


def plan_of(content: Mapping[str, Any], split: LoadedSplit) -> Plan:
    """What stage 3 follows."""
    keys = [ContentKey(tuple(lines)) for lines in content["keys"]]
    calls = [
        PlannedCall(split.pieces[index], keys[key], symbols, names)
        for index, key, symbols, names in content["calls"]
    ]
    shapes = {(piece, shape): keys[key] for piece, shape, key in content["shapes"]}
    return Plan(calls, shapes, content["siblings"])


def _module(name: str | None) -> Any:
    if name is None:
        return vars(builtins)
    if name in sys.modules:
        return sys.modules[name]
    if name.partition(".")[0] == "torch":
        return importlib.import_module(name)
    raise PlanError(f"the module {name} is not imported")


def _values(specs: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {name: _value(spec) for name, spec in specs.items()}


def _value(spec: Sequence[Any]) -> Any:
    kind, *rest = spec
    if kind == "number":
        return rest[0]
    if kind == "dtype":
        return _dtype(rest[0])
    if kind == "device":
        return torch.device(rest[0])
    if kind == "direct":
        op = registered_ops().get(rest[0])
        found: Any = direct_call(op.overload) if op is not None else None
    elif kind == "operator":
        found = _operator(*rest)
    else:
        found = _resolve(*rest)
    if found is None:
        raise PlanError(f"{rest[0]}, which stands between the pieces, is not there")
    return found


def _operator(name: str, overload: str | None) -> Any:
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return packet if overload is None or packet is None else getattr(packet, overload, None)


def _resolve(module: str, path: str) -> Any:
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _dtype(text: str) -> torch.dtype | None:
    return getattr(torch, text.removeprefix("torch.")) if text else None


def _device(text: str) -> torch.device | None:
    return torch.device(text) if text else None
