"""One compilation of one instance's ``forward``, and its bytecode without the guards.

Implements the article's "自定义 dispatcher：绕过 Dynamo guard 的全部原理" (the custom dispatcher: how the
guards are bypassed). Where it differs from the article (vLLM 0.10.1, ``compilation/wrapper.py``):

- The article hooks and swaps ``__code__`` of the *class's* forward. That code object is shared by all
  instances, by subclasses, and in ``transformers`` by whole families behind one decorator; while it is
  swapped, another thread that runs another instance runs the wrong graph. Here each instance
  gets its own copy of the function, so that the hook knows whose code it sees, Dynamo's recompile
  limit counts one instance, and nothing that others see is ever changed.
- The compiled code runs as a function of its own, with its own globals, in which the graph's name
  means what the caller wants. So it survives ``torch._dynamo.reset()``, and one trace can carry
  several executors.
- The hook is there only while this instance compiles, under a lock.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.errors import TraceError
from cgkit.tracing.frames import TORCH_FOLDER
from cgkit.tracing.own_code import with_own_code


class TorchCompileWrapperWithCustomDispatcher:
    """Compiles ``model.forward`` once and then dispatches to the bytecode, past the guards.

    Args:
        model: the module (or any object with ``forward``).
        backend: as for ``torch.compile``: a name, or ``backend(graph_module, inputs) -> callable``.
        skip_guards: also let Dynamo itself drop every guard (today's vLLM), so that
            ``compiled_callable`` may be called again and again.
        signature: what ``forward`` takes, without ``self``; found if not given.
        passed: the arguments that calls pass, for a ``forward`` behind wrappers; all if not given.

    Attributes:
        original_code_object: the code of this instance's own copy of ``forward``.
        compiled_codes: what Dynamo made of it, one entry a compilation.
        compiled_callable: the plain ``torch.compile`` result, guards and all (unless skipped); made when it is
            first asked for.
        foreign_globals: what the bytecode finds in the globals beside those of ``forward``, where another process
            made it.
    """

    def __init__(
        self,
        model: Any,
        backend: str | Callable[..., Any] = "eager",
        *,
        skip_guards: bool = False,
        signature: inspect.Signature | None = None,
        passed: tuple[str, ...] | None = None,
    ) -> None:
        function, self._owner = function_of(model)
        signature = signature or inspect.signature(model.forward)
        self._function = _own_copy(function, self._owner is not None, signature, passed)
        self._local = threading.local()
        self.original_code_object: CodeType = self._function.__code__
        self.compiled_codes: list[CodeType] = []
        self.foreign_globals: dict[str, Any] = {}
        self._backend = backend
        self._options: dict[str, Any] | None = (
            {"guard_filter_fn": torch_hooks.drop_all_guards} if skip_guards else None
        )

    @functools.cached_property
    def compiled_callable(self) -> Callable[..., Any]:
        """What ``torch.compile`` makes of this instance's copy of ``forward``."""
        target = self._function if self._owner is None else types.MethodType(self._function, self._owner)
        return torch.compile(
            target, backend=self._backend, fullgraph=True, dynamic=False, options=self._options
        )

    def globals_of(self, index: int) -> dict[str, Any]:
        """The globals that compilation ``index`` names and that exist, by name."""
        known = self._function.__globals__
        return {name: known[name] for name in _global_names(self.compiled_codes[index]) if name in known}

    @property
    def self_name(self) -> str:
        """What ``forward`` calls its first parameter ("" if it is not bound)."""
        return "" if self._owner is None else self.original_code_object.co_varnames[0]

    @property
    def owner(self) -> Any:
        """The model, or None where ``forward`` is bound to nothing."""
        return self._owner

    def bytecode_hook(self, old_code: CodeType, new_code: CodeType) -> None:
        """Dynamo's callback after each compilation in the process: keeps what was made of our code."""
        if old_code is self.original_code_object:
            self.compiled_codes.append(new_code)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While inside, compilations of this instance are kept.

        One thread at a time, under the lock that every compilation of the process takes: Dynamo walks
        its dict of hooks while it compiles, which must not change meanwhile.
        """
        with torch_hooks.compile_lock():
            handle = torch_hooks.register_bytecode_hook(self.bytecode_hook)
            try:
                yield
            finally:
                handle.remove()

    @contextmanager
    def dispatch_to_code(self, index: int) -> Iterator[Callable[..., Any]]:
        """While inside, :attr:`forward` is compilation ``index``, in this thread only.

        The article swaps the class's ``__code__`` for the same effect, in every thread.
        """
        before = getattr(self._local, "forward", None)
        self._local.forward = self.function(index)
        try:
            yield self._local.forward
        finally:
            self._local.forward = before

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own forward, or the compiled one inside :meth:`dispatch_to_code`."""
        active = getattr(self._local, "forward", None)
        if active is not None:
            return active
        return self._function if self._owner is None else types.MethodType(self._function, self._owner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The first call compiles; every later one runs the bytecode, whatever the guards would say."""
        if not self.compiled_codes:
            with self.hooked():
                return self.compiled_callable(*args, **kwargs)
        with self.dispatch_to_code(0):
            return self.forward(*args, **kwargs)

    def function(self, index: int, execute: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Compilation ``index`` as a callable like ``model.forward``.

        Args:
            execute: called as ``execute(*graph inputs) -> sequence of graph outputs`` in place of
                what the backend returned.

        Raises:
            TraceError: there is no such compilation, or its bytecode calls no graph.
        """
        if not 0 <= index < len(self.compiled_codes):
            raise TraceError(
                f"no compilation {index}: {len(self.compiled_codes)} were made; call the model first"
            )
        bound = unguarded(self.compiled_codes[index], self._function, execute, self.foreign_globals)
        return bound if self._owner is None else types.MethodType(bound, self._owner)

    def forget(self) -> None:
        """Drops Dynamo's cache of this instance's code (kept bytecode goes on working)."""
        torch_hooks.forget_code(self.original_code_object)


def unguarded(
    code: CodeType,
    original: FunctionType,
    execute: Callable[..., Any] | None,
    foreign: Mapping[str, Any] | None = None,
) -> FunctionType:
    """Dynamo's bytecode as a plain function, which no guard stands before.

    Dynamo keeps arguments, cells and free variables of a code object as they were, so the closure of
    the original fits. The globals that the bytecode names are copied: Dynamo removes its own from the
    module when it is reset. ``foreign`` are globals that Dynamo put there in another process.
    """
    names = _global_names(code)
    known = {**original.__globals__, **foreign} if foreign else original.__globals__
    scope = {name: torch_hooks.lean_global(known[name]) for name in names if name in known}
    scope["__builtins__"] = original.__globals__.get("__builtins__", __builtins__)
    scope["__name__"] = original.__globals__.get("__name__", __name__)
    if execute is not None:
        scope[compiled_name(code)] = execute
    function = FunctionType(code, scope, original.__name__, original.__defaults__, original.__closure__)
    function.__kwdefaults__ = original.__kwdefaults__
    return function


def compiled_name(code: CodeType) -> str:
    """The global through which Dynamo's bytecode calls the graph.

    Raises:
        TraceError: it calls none, or several.
    """
    names = [name for name in code.co_names if name.startswith(torch_hooks.COMPILED_FN_PREFIX)]
    if len(names) != 1:
        raise TraceError(
            f"Dynamo's bytecode calls {len(names)} graphs ({', '.join(names) or 'none'}); expected one"
        )
    return names[0]


def _global_names(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names(constant)
    return names


def function_of(model: Any) -> tuple[Callable[..., Any], Any]:
    """``forward`` as a function and the object that it is bound to (None if it is bound to none)."""
    forward = torch_hooks.original_of_compiled(model.forward)
    if isinstance(forward, types.MethodType):
        return torch_hooks.original_of_compiled(forward.__func__), forward.__self__
    return forward, None


def _own_copy(
    function: Callable[..., Any],
    bound: bool,
    signature: inspect.Signature,
    passed: tuple[str, ...] | None,
) -> FunctionType:
    """A function with a code object of its own that does what ``function`` does."""
    if isinstance(function, FunctionType) and not _behind_a_wrapper(function, bound, signature):
        return with_own_code(function)
    return _shim(function, bound, signature, passed)


def _behind_a_wrapper(function: FunctionType, bound: bool, signature: inspect.Signature) -> bool:
    """Whether ``function`` takes ``*args, **kwargs`` for what it wraps, or is torch's own.

    Bytecode of ``*args, **kwargs`` fits only calls in the very style of the first one; and frames
    from torch's files (``@torch.no_grad()``) are not compiled as such.
    """
    if function.__code__.co_filename.startswith(TORCH_FOLDER):
        return True
    own = list(inspect.signature(function, follow_wrapped=False).parameters)[1 if bound else 0 :]
    return own != list(signature.parameters)


def _shim(
    function: Callable[..., Any],
    bound: bool,
    signature: inspect.Signature,
    passed: tuple[str, ...] | None,
) -> FunctionType:
    """``def forward(self, x, *, flag=...): return function(self, x, flag=flag)``, made on the spot.

    Only the arguments in ``passed`` are handed on: a wrapper may treat an argument that is absent
    otherwise than one that is None.
    """
    owner = ["self"] if bound else []
    head, call = _parameters_and_call(signature, passed)
    source = (
        f"def forward({', '.join(owner + head)}):\n    return _wrapped_forward({', '.join(owner + call)})\n"
    )
    scope: dict[str, Any] = {"_wrapped_forward": function, "__name__": __name__}
    exec(compile(source, __file__, "exec"), scope)
    shim = scope.pop("forward")
    given = [p for p in signature.parameters.values() if p.default is not p.empty]
    shim.__defaults__ = tuple(p.default for p in given if p.kind is not p.KEYWORD_ONLY) or None
    shim.__kwdefaults__ = {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY} or None
    return shim


def _parameters_and_call(
    signature: inspect.Signature, passed: tuple[str, ...] | None
) -> tuple[list[str], list[str]]:
    """The text of a parameter list and of the call that hands it on, for :func:`_shim`."""
    head: list[str] = []
    call: list[str] = []
    starred = skipped = False
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else "**"
            starred = True
            head.append(stars + name)
            call.append(stars + name)
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            head.append("*")
        # The default's value is set on the function afterwards: here only that there is one.
        head.append(name if parameter.default is parameter.empty else f"{name}=None")
        if passed is not None and name not in passed:
            skipped = True  # what follows can no longer go by position
        elif parameter.kind is parameter.KEYWORD_ONLY or skipped:
            call.append(f"{name}={name}")
        else:
            call.append(name)
    return head, call
