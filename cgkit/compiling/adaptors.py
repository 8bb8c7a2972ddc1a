"""Who turns a piece's graph into a callable: Inductor, or nobody (eager).

Implements the article's "InductorAdaptor 的「驯化」工作" (taming Inductor) with what replaced it:
``standalone_compile``, which needs none of the article's patches (the shape environment that always
hits, the hijacked hash and file, the cache check switched off), because the piece is compiled inside
a tracing context that carries the fake mode of the trace. The patched one lies beside it
(:mod:`cgkit.compiling.inductor_adaptor`).
"""

from __future__ import annotations

import copy
import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.cache.folder import disabled
from cgkit.compiling.fakes import renew_examples
from cgkit.compiling.inductor_config import check_inductor_options, inductor_options_for
from cgkit.compiling.passes import PassReports, PostGradPassManager
from cgkit.config import CompilationConfig, Shape
from cgkit.errors import CompileError, ConfigError

Runnable = Callable[..., Sequence[Any]]


class CompilerInterface(ABC):
    """One compiler. ``name`` is what events, counters and tables call it."""

    name: str
    #: Whether what it makes can be kept for another process.
    saves = False
    #: Whether :meth:`load` needs no inputs, so that a piece can be loaded before anything was traced.
    loads_alone = False
    #: Whether Inductor generates the code, so that its kernels can be counted.
    generates = False

    @abstractmethod
    def compile(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any, runtime_shape: Shape
    ) -> Runnable:
        """A callable that takes real arguments in the order of ``inputs`` and returns a sequence.

        Args:
            graph_module: a piece; it returns a tuple, and is left as it is.
            inputs: one a placeholder: fakes of ``fake_mode``, SymInts (the callable takes the
                number) or numbers. Where two share a storage the real ones will as well.
            fake_mode: with symbols for the general shape or a range, without for a static one.
            runtime_shape: the token count, a range of them, or None for the general shape.
        """

    def save(self, runnable: Any) -> bytes | None:
        """What :meth:`load` needs to make ``runnable`` in another process; None if it cannot be kept."""
        return None

    def load(self, content: bytes, inputs: Sequence[Any]) -> Runnable:
        """The callable that :meth:`save` wrote; ``inputs`` as for :meth:`compile`.

        Raises whatever torch raises on bytes that it cannot use.
        """
        raise CompileError(f"the adaptor {self.name} keeps nothing (saves is False)")

    def settings(self, runtime_shape: Shape) -> Mapping[str, Any]:
        """How this compiler is set for ``runtime_shape``: part of the content key."""
        return {"adaptor": self.name}

    def take_reports(self) -> PassReports:
        """What graph passes did since this was last asked."""
        return PassReports()


class EagerAdaptor(CompilerInterface):
    """Runs the graph as it is, operator by operator. No compiler needed, no speed gained."""

    name = "eager"

    def compile(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any, runtime_shape: Shape
    ) -> Runnable:
        forward = graph_module.forward
        grad_enabled = torch.is_grad_enabled

        def run(*args: Any) -> Sequence[Any]:
            if grad_enabled():  # out-parameter operators refuse parameters that want a gradient
                with torch.no_grad():
                    return forward(*args)
            return forward(*args)

        return run


class InductorStandaloneAdaptor(CompilerInterface):
    """Compiles with ``torch._inductor.standalone_compile``; vLLM's adaptor of the same name.

    The callable is a ``CompiledArtifact``: it can be called and saved.
    """

    name = "inductor"
    saves = True
    loads_alone = True
    generates = True

    def __init__(self, options: Mapping[str, Any] | None = None, passes: Sequence[Any] = ()) -> None:
        """``options``: Inductor's options by name, for every piece and shape; ``passes``: graph passes, as in
        :class:`~cgkit.config.CompilationConfig`."""
        self._options = dict(options or {})
        check_inductor_options(self._options)
        self.passes = PostGradPassManager(passes) if passes else None

    def compile(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any, runtime_shape: Shape
    ) -> Runnable:
        own, options = prepare(self._options, graph_module, inputs, fake_mode, runtime_shape)
        if self.passes is not None:
            options.update(self.passes.inductor_options())
        return torch_hooks.standalone_compile(own, inputs, fake_mode, options)

    def save(self, runnable: Any) -> bytes | None:
        """The artefact in torch's binary format."""
        return torch_hooks.artifact_bytes(runnable)

    def load(self, content: bytes, inputs: Sequence[Any]) -> Runnable:
        """The artefact again; it needs no inputs."""
        return torch_hooks.load_artifact(content)

    def settings(self, runtime_shape: Shape) -> Mapping[str, Any]:
        options = inductor_options_for(self._options, runtime_shape)
        passes = {"passes": self.passes} if self.passes is not None else {}
        return {
            "adaptor": self.name,
            **{f"inductor {name}": value for name, value in options.items()},
            **passes,
        }

    def take_reports(self) -> PassReports:
        return self.passes.take_reports() if self.passes is not None else PassReports()


def make_adaptor(config: CompilationConfig, devices: Iterable[torch.device]) -> CompilerInterface:
    """The adaptor that ``config`` asks for, or ``eager`` where it cannot work; the first time with a warning.

    On the CPU Inductor writes C++, and many machines have no compiler for it.

    Raises:
        ConfigError: an Inductor option that does not exist.
    """
    if config.compiler == "eager":
        return EagerAdaptor()
    adaptor: CompilerInterface
    if config.compiler == "inductor_patched":
        from cgkit.compiling.inductor_adaptor import InductorAdaptor

        if config.passes:
            raise ConfigError(
                f"passes={list(config.passes)} with compiler='inductor_patched': the article's adaptor runs no graph "
                "passes; use compiler='inductor'"
            )

        adaptor = InductorAdaptor(config.inductor_compile_config)
    else:
        adaptor = InductorStandaloneAdaptor(config.inductor_compile_config, config.passes)
    if any(device.type == "cpu" for device in devices) and torch_hooks.find_cpp_compiler() is None:
        _say_no_compiler()
        return EagerAdaptor()
    return adaptor


@functools.cache
def _say_no_compiler() -> None:
    """Once a process: the objects say of themselves that they are ``compiled with eager``."""
    warnings.warn(
        "no C++ compiler was found (looked for the environment variable CXX and for g++, clang++ or cl), "
        "and Inductor needs one on the CPU: compiler='eager' is used instead, so the pieces run operator "
        "by operator and num_inductor_compiles stays 0. Install a compiler, or write compiler='eager' to "
        "silence this",
        stacklevel=4,
    )


def prepare(
    user: Mapping[str, Any],
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: Any,
    runtime_shape: Shape,
) -> tuple[fx.GraphModule, dict[str, Any]]:
    """A copy of a piece that Inductor may rewrite, and all options, for one compilation."""
    own = copy.deepcopy(graph_module)
    if isinstance(runtime_shape, int):
        fix_sizes(own, inputs)
    if runtime_shape is not None:
        renew_examples(own, inputs, fake_mode)
    options = inductor_options_for(user, runtime_shape)
    if disabled():
        options["force_disable_caches"] = True
    return own, options


def fix_sizes(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Writes the numbers among ``inputs`` into the graph."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    numbers = {node: value for node, value in zip(placeholders, inputs) if isinstance(value, int)}

    def number(node: fx.Node) -> Any:
        return numbers.get(node, node)

    for node in graph_module.graph.nodes:
        node.args = fx.map_arg(node.args, number)
        node.kwargs = fx.map_arg(node.kwargs, number)
    graph_module.recompile()
