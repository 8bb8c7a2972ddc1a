"""``@support_torch_compile``: strings the five stages together behind a model's own call.

Implements the article's "模型侧的接入点：support_torch_compile 装饰器" (the way in on the model's side) and
"编译等级：0/1/2/3 四级" (the four levels). There is no second implementation here: the decorator calls
:func:`cgkit.trace`, :func:`cgkit.split_graph`, :func:`cgkit.compile_pieces` and :func:`cgkit.capture`,
as a notebook does by hand.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn

from cgkit import events, marks
from cgkit.capturing import (
    CapturedGraphs,
    CaptureSizes,
    CUDAGraphOptions,
    Ledgers,
    capture,
    device_of,
    free_all,
    get_platform,
)
from cgkit.capturing.debugging.whole_call import CheckedGraphs, beside_forward
from cgkit.compiling import CompiledGraph, compile_model
from cgkit.config import CompilationConfig, CompilationLevel
from cgkit.counters import compilation_counter
from cgkit.errors import CaptureError, CgkitError, ConfigError
from cgkit.kernels.custom_op import apply_custom_ops
from cgkit.splitting import SplitGraph
from cgkit.tracing import TracedGraph, infer_dynamic_arg_dims
from cgkit.tracing.own_code import own_forward, with_forward, with_own_code

M = TypeVar("M", bound=type[nn.Module])

_OPTIONS = "_cgkit_options"  # on a decorated class
_WRAPPED = "_cgkit_wrapped"  # on a decorated class's __call__: what stands behind it
_CONFIG = "_cgkit_config"  # on an instance that was given one
_STATE = "_cgkit_state"  # on an instance that was called
_states: weakref.WeakSet[CompiledModel] = weakref.WeakSet()
_first_call = threading.Lock()
_serial = itertools.count()


@overload
def support_torch_compile(cls: M) -> M: ...
@overload
def support_torch_compile(
    cls: None = None,
    *,
    dynamic_arg_dims: Mapping[str, int | list[int]] | None = None,
    enable_if: Callable[[CompilationConfig], bool] | None = None,
    config: CompilationConfig | None = None,
) -> Callable[[M], M]: ...
def support_torch_compile(
    cls: Any = None,
    *,
    dynamic_arg_dims: Mapping[str, int | list[int]] | None = None,
    enable_if: Callable[[CompilationConfig], bool] | None = None,
    config: CompilationConfig | None = None,
) -> Any:
    """Class decorator: instances are traced once, split, compiled and replayed.

    ::

        @cgkit.support_torch_compile
        class Model(nn.Module):
            def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...

        model = Model(compilation_config=cgkit.CompilationConfig(level=3))

    The constructor then takes ``compilation_config`` too (passed on if the class asks for it by that
    name). A call at level 2 or 3 runs without gradients: this is an inference toolkit. A decorated
    module inside another that is being traced is traced with it; inside one that is not, it is compiled
    on its own.

    Args:
        dynamic_arg_dims: which dimensions of which arguments change from call to call, as
            ``{"x": 0, "mask": [0, -1]}``. None: dimension 0 of each argument whose annotation is a
            tensor, an optional tensor, or a dataclass of tensors.
        enable_if: asked with the configuration; False leaves the instance as it was (level 0).
        config: for instances that are built without ``compilation_config``.

    Raises:
        ConfigError: at decoration, if no argument of ``forward`` has a dynamic dimension.
        TraceError: at the first call, if the model is not one graph.
    """

    def decorate(target: M) -> M:
        return _decorate(target, dynamic_arg_dims, enable_if, config)

    return decorate if cls is None else decorate(cls)


def _decorate(cls: M, dims: Any, enable_if: Any, default: CompilationConfig | None) -> M:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ConfigError(f"support_torch_compile takes an nn.Module class, not {cls!r}")
    if previous := cls.__dict__.get(_OPTIONS):  # a notebook's cell that is run again
        cls.__init__, cls.__call__ = previous["init"], previous["call"]  # type: ignore[misc, method-assign]
    init, call = cls.__init__, cls.__call__
    call = getattr(call, _WRAPPED, call)  # of a decorated base class: one way in, not two around each other
    if dims is None:
        dims = infer_dynamic_arg_dims(cls.forward)
    if not dims:
        raise ConfigError(
            f"no argument of {cls.__name__}.forward has a dynamic dimension: annotate the tensors "
            "(x: torch.Tensor), or name them with dynamic_arg_dims={'x': 0}"
        )
    takes_config = "compilation_config" in inspect.signature(init).parameters

    @functools.wraps(init)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = kwargs.get("compilation_config") if takes_config else kwargs.pop("compilation_config", None)
        if given is not None:
            if not isinstance(given, CompilationConfig):
                raise ConfigError(f"compilation_config={given!r} is not a CompilationConfig")
            object.__setattr__(self, _CONFIG, given)
        init(self, *args, **kwargs)

    @functools.wraps(call)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # Inside the trace of an outer model: be a part of it. (Not is_compiling: that is true in this thread too
        # while another one compiles.)
        if torch.compiler.is_dynamo_compiling():
            return call(self, *args, **kwargs)
        state = self.__dict__.get(_STATE)
        if state is None:
            state = _state_of(self)
        if self._forward_hooks or self._forward_pre_hooks:
            return state.call_with_hooks(args, kwargs)
        return state.call(*args, **kwargs)

    setattr(__call__, _WRAPPED, call)
    cls.__init__, cls.__call__ = __init__, __call__  # type: ignore[misc,assignment]
    setattr(
        cls,
        _OPTIONS,
        {"init": init, "call": call, "dims": dims, "enable_if": enable_if, "config": default},
    )
    return cls


def _state_of(model: nn.Module) -> CompiledModel:
    options = getattr(type(model), _OPTIONS, None)
    if options is None:
        raise CgkitError(
            f"{type(model).__name__} is not decorated: put @cgkit.support_torch_compile above its class"
        )
    with _first_call:
        state = model.__dict__.get(_STATE)
        if state is None:
            config = model.__dict__.get(_CONFIG) or options["config"] or CompilationConfig()
            state = CompiledModel(model, config, options)
            object.__setattr__(model, _STATE, state)
        return state


def compiled_model(model: nn.Module) -> CompiledModel:
    """The stages' artefacts of a decorated model: ``.traced``, ``.split``, ``.compiled``, ``.captured``."""
    return _state_of(model)


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Inside, the decorated modules of ``model`` run their forward as it is written: nothing is compiled or replayed.

    For whoever runs a model to find out something about it, with tensors that compiled code was not made for.
    """
    with ExitStack() as undo:
        for module in model.modules():
            if hasattr(type(module), _OPTIONS):
                marks.swap_attribute(_state_of(module), "call", own_forward(module), undo)
        yield


class CompiledModel:
    """What the decorator keeps for one instance: the artefact of each stage, made at the first call.

    ``call`` is the way a call takes. Before the first one it compiles; then it is replaced by what
    the level asks for, so that nothing is decided anew at each call.
    """

    def __init__(self, model: nn.Module, config: CompilationConfig, options: dict[str, Any]) -> None:
        self._model = weakref.ref(model)
        self._options = options
        enabled = options["enable_if"] is None or options["enable_if"](config)
        self.config = config if enabled else CompilationConfig(level=CompilationLevel.NO_COMPILATION)
        self._lock = threading.RLock()
        self.close()
        _states.add(self)
        marks.register(self)

    def close(self) -> None:
        """Frees graphs, pools and compiled pieces; the next call starts from the beginning."""
        if captured := getattr(self, "captured", None):
            captured.free()
        self.traced: TracedGraph | None = None
        self.split: SplitGraph | None = None
        self.compiled: CompiledGraph | None = None
        self.captured: CapturedGraphs | None = None
        self.call: Callable[..., Any] = self._compile_and_call

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model is another instance: it gets a trace of its own."""

    def __reduce__(self) -> Any:
        return (_nothing, ())

    def put_marks(self, marker: marks.Marker, undo: ExitStack) -> None:
        """Marks the levels that have no pieces; the others mark their pieces. See :mod:`cgkit.marks`."""
        model = self._model()
        if model is None or self.call == self._compile_and_call:
            return
        facts = {"model": type(model).__name__}
        if self.config.level is CompilationLevel.NO_COMPILATION:
            marks.mark_modules(model, marker, undo, **facts, mode="eager")
        stage = "forward"
        if self.config.level is CompilationLevel.DYNAMO_AS_IS:
            stage, facts["mode"] = "compiled", "torch.compile"
        marks.swap_attribute(self, "call", marker.function(self.call, stage, **facts), undo)

    @property
    def model(self) -> nn.Module:
        """The decorated instance."""
        model = self._model()
        assert model is not None, "the model is gone, and with it what was compiled for it"
        return model

    def compile(self, *args: Any, **kwargs: Any) -> CompiledModel:
        """Goes the road up to the compiled pieces, with these arguments as the example; runs nothing."""
        with self._lock:
            if self.call == self._compile_and_call:
                self.call = self._choose(args, kwargs)
        return self

    def _compile_and_call(self, *args: Any, **kwargs: Any) -> Any:
        return self.compile(*args, **kwargs).call(*args, **kwargs)

    def call_with_hooks(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``nn.Module``'s own way around ``forward``, for a model with forward hooks of its own."""
        model, call = self.model, self.compile(*args, **kwargs).call
        with with_forward(model, call):
            return self._options["call"](model, *args, **kwargs)

    def _choose(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        level, name = self.config.level, type(self.model).__name__
        apply_custom_ops(self.model, self.config)
        if level is CompilationLevel.NO_COMPILATION:
            return self._forward()
        events.emit(events.ModelSeen(name))
        if level is CompilationLevel.DYNAMO_AS_IS:
            events.emit(events.DynamoAsIs(name))
            # A code object of its own: Dynamo counts recompilations, and remembers sizes, by code.
            own = with_own_code(cast(FunctionType, self._forward()), f"forward_of_{name}_{next(_serial)}")
            return torch.compile(own, backend=self.config.dynamo_backend)
        return self._road(args, kwargs)

    def _forward(self) -> Callable[..., Any]:
        """The model's forward, without keeping the model alive (it holds us)."""
        ref, own = self._model, self.model.__dict__.get("forward")
        if own is not None:  # an instance's own: it is asked for anew, and lives in the model
            del own
            return lambda *args, **kwargs: own_forward(ref())(*args, **kwargs)  # type: ignore[arg-type]
        function = type(self.model).forward
        return lambda *args, **kwargs: function(ref(), *args, **kwargs)

    def _road(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """Stages 1 to 3, and the wrappers of stage 4 if graphs are on (still open: nothing is recorded)."""
        config = self.config
        sizes = CaptureSizes.resolve(config)  # before the work: a size that makes no sense is refused here
        self.compiled = compile_model(
            self.model,
            args,
            kwargs,
            config,
            dynamic_arg_dims=self._options["dims"],
            check_buffer_writes=bool(config.mode),
        )
        self.split = self.compiled.split
        self.traced = self.split.traced
        if not config.mode:
            return self._checked(self.compiled.bind())
        self.captured = self._open(self.compiled, sizes)
        return self._checked(self.captured)

    def _checked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``; under ``debug=True`` beside the model's own forward."""
        if not self.config.debug:
            return call
        return beside_forward(self, call.unchecked if isinstance(call, CheckedGraphs) else call)

    def _open(self, compiled: CompiledGraph, sizes: CaptureSizes) -> CapturedGraphs:
        """The wrappers of stage 4 with nothing recorded yet."""
        config = self.config
        platform = get_platform(config.graph_platform, device_of(compiled))
        options = CUDAGraphOptions(debug=config.debug)
        return CapturedGraphs(compiled, sizes, config.mode, platform, None, options)

    def capture(self, sizes: Any = None, **options: Any) -> CapturedGraphs:
        """Records every size (see :func:`cgkit.capture`) and locks; calls are replayed from then on.

        Raises:
            CaptureError: the model was not called yet, or the configuration records nothing.
        """
        with self._lock:
            if self.compiled is None or not self.config.mode:
                raise CaptureError(
                    f"{type(self.model).__name__} has nothing to record: "
                    + (
                        "call it once first (or compiled_model(model).compile(*example))"
                        if self.config.mode
                        else f"its configuration is {self.config!r}; set level=3 and a cudagraph_mode"
                    )
                )
            resolved = CaptureSizes.resolve(self.config, sizes)  # what is wrong with them leaves all as it is
            if self.captured is not None:
                self.captured.free()
            try:
                self.captured = capture(self.compiled, resolved, **options)
                self.call = self._checked(self.captured)
            except (
                BaseException
            ):  # what was recorded is gone: calls run compiled, as before the first capture
                self.compiled.lock.reopen()
                self.captured = self._open(self.compiled, resolved)
                self.call = self._checked(self.captured)
                raise
            return self.captured


def capture_model(model: nn.Module, sizes: Any = None, **options: Any) -> CapturedGraphs:
    """Records the graphs of a decorated model that was called once; takes what :func:`cgkit.capture` takes.

    Implements the article's "capture_model：runner 侧的编排" for a model without a runner.
    """
    return compiled_model(model).capture(sizes, **options)


def ledgers(of: Any) -> Ledgers:
    """The ledgers of a decorated model, a runner, an engine or a :class:`CapturedGraphs`: see :class:`Ledgers`.

    Raises:
        CaptureError: nothing is recorded, or ``of`` is none of these.
    """
    found = compiled_model(of) if isinstance(of, nn.Module) else getattr(of, "runner", of)  # an engine's
    found = getattr(getattr(found, "executor", found), "captured", found)
    if not isinstance(found, CapturedGraphs) or not found.num_graphs:
        raise CaptureError(
            f"{type(of).__name__} has no recorded graphs, and so no ledgers: capture first "
            "(cgkit.capture_model(model), runner.capture_model())"
        )
    return found.ledgers


def reset() -> None:
    """Frees every recorded graph and pool, what decorated models compiled, and sets the counters to zero.

    For notebooks: after it each cell can be run as if for the first time. Graphs and pieces that were
    made by hand are freed too; a decorated model compiles again at its next call.
    """
    for state in list(_states):
        state.close()
    free_all()
    torch.compiler.reset()
    compilation_counter.reset()


def _nothing() -> None:
    """What a pickled model holds in place of its compiled state."""
