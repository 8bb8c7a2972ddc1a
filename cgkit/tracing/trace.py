"""Stage 1: a model -> one graph. One Dynamo trace, dynamic dimensions, no guards.

Implements the article's "support_torch_compile: 类装饰器背后发生了什么" (marking the dynamic dimensions
before the only trace) and "自定义 dispatcher：绕过 Dynamo guard 的全部原理" (taking the bytecode before a
guard stands in front of it). The trace computes nothing: it is cut off where the graph would be
called for the first time.
"""

from __future__ import annotations

import dis
import linecache
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from cgkit import events, torch_hooks
from cgkit.errors import CgkitError, TraceError
from cgkit.tracing.annotations import DynamicDims, infer_dynamic_arg_dims, normalise_dims
from cgkit.tracing.arguments import Arguments, is_constant, signature_of, stand_ins
from cgkit.tracing.assumptions import assumptions, goes_through_keywords, mode_check
from cgkit.tracing.buffer_writes import raise_on_buffer_writes
from cgkit.tracing.failures import explain
from cgkit.tracing.traced_graph import (
    GraphInput,
    GuardFilterExecutor,
    TracedGraph,
    TraceFinishedError,
    plain_source,
)
from cgkit.tracing.wrapper import TorchCompileWrapperWithCustomDispatcher


def trace(
    model: nn.Module,
    *args: Any,
    dynamic_arg_dims: Mapping[str, int | Iterable[int] | Mapping[int, Any]] | None = None,
    dispatch: str = "bytecode",
    check_buffer_writes: bool = False,
    **kwargs: Any,
) -> TracedGraph:
    """Traces ``model.forward(*args, **kwargs)`` once, as one graph.

    Args:
        model: any module. Neither it nor its class is changed.
        args, kwargs: an example call. Values do not matter, only shapes, dtypes and devices; numbers,
            flags, strings and None are baked into the graph. Sizes 0 and 1 of dynamic dimensions
            are traced as 2, so the first call may well be a batch of one.
        dynamic_arg_dims: which dimensions of which arguments change, ``{"x": 0, "y": [0, -1]}``.
            None: dimension 0 of every argument annotated as (carrying) a tensor. ``{}``: nothing
            changes, the graph is for these shapes only.
        dispatch: how later calls reach the bytecode: "bytecode" takes it from Dynamo's hook (the
            article), "guard_filter" leaves it with Dynamo, which checks no guard (vLLM today).
        check_buffer_writes: refuse a model that writes buffers or attributes holding tensors.

    Returns:
        The graph. Calls of what :meth:`TracedGraph.bind` makes never trace again.

    Raises:
        TraceError: Dynamo cannot make one graph of it; the message has the line, the reason and
            what to do. Nothing stays registered.
        BufferWriteError: with ``check_buffer_writes``, where the model writes its own tensors.
        TypeError: the example call does not fit ``forward``.
    """
    if not callable(getattr(model, "forward", None)):
        raise TraceError(f"trace needs a module with a forward, got {type(model).__name__}")
    if dispatch not in ("bytecode", "guard_filter"):
        raise TraceError(f"dispatch={dispatch!r} is unknown; use 'bytecode' or 'guard_filter'")
    name = type(model).__name__
    signature = signature_of(model.forward, args, kwargs)
    arguments = Arguments(name, signature, args, kwargs)
    dims = dims_of_call(model, arguments, dynamic_arg_dims)
    traced_args, traced_kwargs, enlarged = stand_ins(signature, args, kwargs, dims, torch_hooks.mark_dynamic)

    take = _GraphTaker(model, name)
    wrapper = TorchCompileWrapperWithCustomDispatcher(
        model,
        take,
        skip_guards=dispatch == "guard_filter",
        signature=signature,
        passed=tuple(signature.bind(*args, **kwargs).arguments),
    )
    take.self_name = wrapper.self_name
    started = time.perf_counter()
    try:
        with torch.no_grad(), torch_hooks.quiet_loggers(), wrapper.hooked():
            wrapper.compiled_callable(*traced_args, **traced_kwargs)
    except TraceFinishedError:
        pass
    except Exception as error:
        wrapper.forget()
        if isinstance(error.__cause__, CgkitError):  # raised in the backend, wrapped by Dynamo
            raise error.__cause__ from None
        raise explain(error, name, model.forward) from error
    if take.graph_module is None or not wrapper.compiled_codes:
        wrapper.forget()
        raise TraceError(_nothing_came(name))

    traced = take.traced_graph(wrapper, arguments, tuple(enlarged), dispatch, time.perf_counter() - started)
    arguments.expect(
        assumptions(signature, arguments.values, traced.inputs, take.guards),
        in_order=goes_through_keywords(signature, take.guards),
    )
    traced.other_mode = mode_check(model, traced.inputs, take.guards)
    take.let_go()
    if dispatch == "bytecode":
        wrapper.forget()  # Dynamo's entry and its guards are needed no more
    if check_buffer_writes:
        raise_on_buffer_writes(traced)
    events.emit(
        events.GraphTraced(name, len(traced.graph_module.graph.nodes), len(traced.inputs), traced.seconds)
    )
    return traced


def dims_of_call(
    model: nn.Module,
    arguments: Arguments,
    given: Mapping[str, int | Iterable[int] | Mapping[int, Any]] | None,
) -> DynamicDims:
    """The dims to mark; TraceError where nothing was said and nothing can be inferred."""
    if given is not None:
        dims = normalise_dims(arguments.signature, given)
        for name, value in given.items():
            if isinstance(value, Mapping):
                _check_labels(name, value, arguments)
        return dims
    dims = infer_dynamic_arg_dims(model.forward)
    if not dims:
        raise TraceError(
            f"no argument of {arguments.model}.forward is annotated as a tensor, so that it is unknown which "
            "sizes change from call to call. Annotate it (`x: torch.Tensor`), pass dynamic_arg_dims="
            "{'x': 0}, or pass dynamic_arg_dims={} for a graph of exactly these shapes"
        )
    rest = [n for n, p in arguments.signature.parameters.items() if p.kind is p.VAR_POSITIONAL]
    return {
        name: value
        for name, value in dims.items()
        if name in rest or not is_constant(arguments.values.get(name))
    }


def _check_labels(name: str, labels: Mapping[int, Any], arguments: Arguments) -> None:
    """Dimensions that carry one label must have one size in the example."""
    tensor = arguments.values.get(name)
    if not isinstance(tensor, torch.Tensor):
        return
    sizes: dict[Any, int] = {}
    for dim, label in labels.items():
        size = tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else None
        if label is not None and size is not None and sizes.setdefault(label, size) != size:
            raise TraceError(
                f"dynamic_arg_dims[{name!r}] calls two dimensions {label!r}, but they have the sizes "
                f"{sizes[label]} and {size}"
            )


def _nothing_came(name: str) -> str:
    return (
        f"Dynamo made no graph of {name}.forward. Either it computes nothing on tensors, or Dynamo is off: "
        "TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE, torch.compiler.set_stance('force_eager'), or "
        "@torch.compiler.disable on forward"
    )


class _GraphTaker:
    """The backend of the one trace: keeps the graph, the fake examples and the context."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model: nn.Module | None = model
        self.name = name
        self.self_name = "self"  # what forward calls its first parameter
        self.executor = GuardFilterExecutor(name)
        self.graph_module: fx.GraphModule | None = None
        self.taken = False
        self.guards: list[tuple[str, str, Any]] = []

    def __call__(
        self, graph_module: fx.GraphModule, examples: list[Any], **options: Any
    ) -> Callable[..., Any]:
        if self.taken:
            raise self.executor.traced_again()
        self.taken = True
        context = torch_hooks.tracing_context()
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        assert self.model is not None
        owned = _Owned(self.model)
        self.examples = [torch_hooks.fake_example(example, context) for example in examples]
        self.inputs = [
            _graph_input(index, node, example, fake, owned, self.self_name)
            for index, (node, example, fake) in enumerate(zip(placeholders, examples, self.examples))
        ]
        self.side_effects = tuple(
            replace(effect, target=plain_source(effect.target, self.self_name))
            for effect in torch_hooks.dynamo_side_effects()
        )
        self.guards = torch_hooks.dynamo_guards(context)
        self.context = context
        self.graph_module = graph_module
        return self.executor.run

    def traced_graph(
        self,
        wrapper: TorchCompileWrapperWithCustomDispatcher,
        arguments: Arguments,
        enlarged: tuple[str, ...],
        dispatch: str,
        seconds: float,
    ) -> TracedGraph:
        """What was taken, with the bytecode that the hook got after it."""
        assert self.graph_module is not None
        code = wrapper.compiled_codes[0]
        traced_code = torch_hooks.traced_code(self.context)
        _refuse_global_writes(self.name, code, traced_code)
        files = {each.co_filename for each in traced_code}
        return TracedGraph(
            model_name=self.name,
            graph_module=self.graph_module,
            example_inputs=self.examples,
            fake_mode=self.context.fake_mode,
            tracing_context=self.context,
            inputs=self.inputs,
            code=code,
            original_code=wrapper.original_code_object,
            traced_files=tuple(sorted(file for file in files if os.path.isfile(file))),
            dropped_guards=tuple(dict.fromkeys(torch_hooks.shape_guards(self.context))),
            enlarged=enlarged,
            seconds=seconds,
            dispatch=dispatch,
            arguments=arguments,
            side_effects=self.side_effects,
            guards=tuple(self.guards),
            codes=tuple(torch_hooks.traced_code(self.context)),
            wrapper=wrapper,
            executor=self.executor if dispatch == "guard_filter" else None,
        )

    def let_go(self) -> None:
        """Dynamo keeps every backend it has seen for good; what this one took must not stay with it."""
        self.model = self.graph_module = self.context = None
        self.examples, self.inputs, self.side_effects, self.guards = [], [], (), []


class _Owned:
    """Which tensors a model holds, by identity."""

    def __init__(self, model: nn.Module) -> None:
        module = isinstance(model, nn.Module)
        self.parameters = {id(tensor) for tensor in model.parameters()} if module else set()
        self.buffers = {id(tensor) for tensor in model.buffers()} if module else set()


def _graph_input(
    index: int, node: fx.Node, example: Any, fake: Any, owned: _Owned, self_name: str
) -> GraphInput:
    source = plain_source(torch_hooks.placeholder_source(node), self_name)
    tensor = isinstance(fake, torch.Tensor)
    shape = tuple(fake.shape) if tensor else (fake,)
    if not tensor:
        kind = "symint" if isinstance(fake, torch.SymInt) else "argument"
    elif id(example) in owned.parameters:
        kind = "parameter"
    elif id(example) in owned.buffers:
        kind = "buffer"
    elif source.startswith("L['self']"):
        kind = "attribute"
    else:
        kind = "argument" if source.startswith("L[") else "other"
    return GraphInput(
        index=index,
        name=node.name,
        kind=kind,
        source=source,
        dynamic_dims=tuple(
            dim for dim, size in enumerate(shape) if tensor and isinstance(size, torch.SymInt)
        ),
        shape=tuple(str(size) for size in shape),
        dtype=fake.dtype if tensor else None,
        device=fake.device if tensor else None,
    )


def _refuse_global_writes(name: str, code: CodeType, traced_code: Iterable[CodeType]) -> None:
    """The bytecode runs with globals of its own, so that ``global x; x = ...`` would not be seen."""
    written = {name for name, _ in _global_writes(code)}
    if not written:
        return
    sources = (*traced_code, code)
    file, line = next(
        ((each.co_filename, line) for each in sources for _, line in _global_writes(each) if line),
        (code.co_filename, code.co_firstlineno),
    )
    raise TraceError(
        f"{name}.forward assigns the global {', '.join(sorted(written))}\n"
        f"  at {file}:{line}\n"
        f"      {linecache.getline(file, line).strip()}\n"
        f"  reason: it assigns the global {', '.join(sorted(written))}, and compiled code does not run that statement "
        "at a replay\n"
        "  what to do: return the value instead, or keep it in a register_op operator"
    )


def _global_writes(code: CodeType) -> list[tuple[str, int]]:
    """(name, line) of each global that ``code`` assigns or deletes; line 0 where it is not known."""
    return [
        (each.argval, each.positions.lineno or 0 if each.positions else 0)
        for each in dis.get_instructions(code)
        if each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    ]
