"""``cgkit.bisect``: which stage of the road changes what a model computes, and where in it.

The road has five stages, each of which can be run by itself on one call: the trace as it is, its pieces uncompiled, the
pieces compiled, recorded, replayed. The first that does not give what the eager model gives is looked into: which
piece, which operator. "The same" is measured against a float64 run of the model (:mod:`cgkit.numerics`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cgkit import torch_hooks
from cgkit.capturing import CapturedGraphs, CaptureSizes, capture
from cgkit.capturing.debugging.copies import Kept, attributes_put_back, copied
from cgkit.capturing.debugging.eager import undisturbed
from cgkit.capturing.debugging.guards import DroppedGuards
from cgkit.compiling import CompiledGraph, compile_pieces
from cgkit.compiling.adaptors import CompilerInterface
from cgkit.config import CompilationConfig, CompilationLevel
from cgkit.errors import CgkitError, ConfigError, TraceError
from cgkit.forward_context import current_forward_context, set_forward_context
from cgkit.measuring.bisecting.early import first_piece_apart, operator_of_trace
from cgkit.measuring.bisecting.late import compiled_stage, replay_stages
from cgkit.measuring.bisecting.report import Bisection, StageResult
from cgkit.numerics import Apart, first_apart
from cgkit.splitting import split_graph
from cgkit.tensor_trees import map_tensors, tensor_leaves
from cgkit.tracing import TracedGraph, trace
from cgkit.tracing.own_code import own_forward

logger = logging.getLogger(__name__)

__all__ = ["Bisection", "StageResult", "bisect"]


def bisect(
    model: nn.Module | CapturedGraphs | CompiledGraph,
    *args: Any,
    config: CompilationConfig | None = None,
    dynamic_arg_dims: Any = None,
    adaptor: CompilerInterface | None = None,
    **kwargs: Any,
) -> Bisection:
    """Finds the first stage, piece and operator at which ``model(*args, **kwargs)`` is not what it is eagerly.

    ::

        cgkit.bisect(model, *inputs)                      # goes the road anew
        cgkit.bisect(cgkit.compiled_model(model).captured, *inputs)   # looks into these very recordings

    Nothing of the model is changed; the attention metadata is that of the forward context around the call, and its
    tensors are put back. Random models cannot be compared.

    Args:
        model: a module, decorated or not: its stages are made anew, but for what a decorated one has already. Or an
            artefact: its own trace, pieces and recordings are looked into.
        args, kwargs: the call that comes out wrong.
        config: how it is compiled and recorded. None: a decorated model's, else level 3 with the call's own size.
            ``cudagraph_mode="NONE"`` ends the search at the compiled pieces.
        dynamic_arg_dims: as :func:`cgkit.trace`.
        adaptor: a compiler in place of the one that ``config`` names, as :func:`cgkit.compile_pieces`.

    Raises:
        CgkitError: the model itself cannot run this call, or draws random numbers in it; nothing can be compared.
        ConfigError: ``config`` or ``adaptor`` is given beside an artefact, which has its own; or level 0 or 1.
    """
    return _Search(model, args, kwargs, config, dynamic_arg_dims, adaptor).run()


class _Search:
    def __init__(
        self,
        given: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: CompilationConfig | None,
        dims: Any,
        adaptor: CompilerInterface | None,
    ) -> None:
        self.args, self.kwargs, self.dims, self.adaptor = args, kwargs, dims, adaptor
        self.captured: CapturedGraphs | None = None
        self.compiled: CompiledGraph | None = None
        self.traced: TracedGraph | None = None
        self.results: list[StageResult] = []
        if isinstance(given, (CapturedGraphs, CompiledGraph)):
            if config is not None or adaptor is not None:
                raise ConfigError("config and adaptor belong to a model: an artefact was made with its own")
            self._take(given)
        elif isinstance(given, nn.Module):
            self._of_model(given, config)
        else:
            raise ConfigError(
                f"bisect takes a module, a CompiledGraph or CapturedGraphs, not {type(given).__name__}"
            )
        context = current_forward_context()
        self.metadata = context.attn_metadata if context is not None else None

    def _take(self, artefact: CapturedGraphs | CompiledGraph) -> None:
        self.captured = (
            artefact if isinstance(artefact, CapturedGraphs) and artefact.inputs is not None else None
        )
        compiled = artefact.compiled if isinstance(artefact, CapturedGraphs) else artefact
        self.compiled, self.config, self.traced = compiled, compiled.config, compiled.split.traced
        wrapper = self.traced.wrapper if self.traced is not None else None
        if wrapper is None or wrapper.owner is None:
            raise ConfigError("this graph came without a model, so there is no eager run to compare it with")
        self.model, self.forward, self.name = wrapper.owner, wrapper.forward, compiled.model_name

    def _of_model(self, model: nn.Module, config: CompilationConfig | None) -> None:
        state = model.__dict__.get("_cgkit_state")
        if state is not None and state.compiled is not None and config is None and self.adaptor is None:
            self._take(state.captured if state.captured is not None else state.compiled)
            return
        options = getattr(type(model), "_cgkit_options", None)
        if options is not None and self.dims is None:
            self.dims = options["dims"]
        self.model, self.name = model, type(model).__name__
        self.forward = own_forward(model)
        self.config = config or model.__dict__.get("_cgkit_config") or CompilationConfig()
        if self.config.level.value < CompilationLevel.DYNAMO_ONCE.value:
            raise ConfigError(
                f"level={self.config.level.value} ({self.config.level.name}) has no stages to search; use level 2 or 3"
            )

    # --- the search ------------------------------------------------------------------------------

    def run(self) -> Bisection:
        with self._in_context(), torch.no_grad():
            self.expected = self._eager()
            for stage in (self._traced, self._split, self._compiled, self._replayed):
                stage()
                if self.results and any(each.is_wrong for each in self.results):
                    break
        emulated = self.captured.platform.emulated if self.captured is not None else None
        yardstick = "a float64 run of the model" if self.reference() is not None else "the eager model alone"
        return Bisection(self.name, self.results, emulated, yardstick)

    def _in_context(self) -> Any:
        if current_forward_context() is None:
            return set_forward_context(None)
        return set_forward_context(self.metadata, batch_descriptor=current_forward_context().batch_descriptor)  # type: ignore[union-attr]

    def _run(self, run: Callable[..., Any]) -> tuple[Any, Any]:
        """(result, arguments after) of one run on copies; metadata, the model's buffers and attributes are put back."""
        kept = Kept([*(t for _, t in tensor_leaves(self.metadata)), *self.model.buffers()])
        args, kwargs = copied((self.args, self.kwargs))
        with undisturbed((self.args, self.kwargs)) as drew, torch_hooks.modes_put_back():
            try:
                with attributes_put_back(self.model):
                    made = copied(run(*args, **kwargs))
                self.random = drew()
                return made, (args, kwargs)
            finally:
                kept.restore()

    def _eager(self) -> tuple[Any, Any]:
        try:
            found = self._run(self.forward)
        except Exception as error:
            raise CgkitError(
                f"{self.name} itself cannot run this call ({type(error).__name__}: {error}); give the arguments of a "
                "call that works eagerly, inside set_forward_context if its operators want metadata"
            ) from error
        if self.random:
            raise CgkitError(
                f"{self.name} draws random numbers in this call, so no two runs agree: call .eval(), or take the "
                "random part out"
            )
        again = first_apart(found, self._run(self.forward))
        if again is not None:
            raise CgkitError(
                f"two eager runs of {self.name} on these arguments differ ({again}), so nothing can be compared: "
                "something in it counts, reads what is kept outside of the model, or was never written"
            )
        return found

    def reference(self) -> Any:
        """(result, arguments after) in float64; None where the model cannot be run so."""
        if not hasattr(self, "_reference"):
            self._reference = None
            try:
                self._reference = self._run_in_float64()
            except Exception:
                logger.debug("a float64 run of %s", self.name, exc_info=True)
        return self._reference

    def _run_in_float64(self) -> Any:
        clean = {k: v for k, v in self.model.__dict__.items() if k.startswith("_cgkit")}
        for name in clean:
            del self.model.__dict__[name]
        try:
            wide = copy.deepcopy(self.model).double()
        finally:
            self.model.__dict__.update(clean)

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = map_tensors(
                lambda _, t: t.double() if t.is_floating_point() else t, (args, kwargs)
            )
            return own_forward(wide)(*args, **kwargs), (args, kwargs)

        return self._run(run)[0]

    def compare(self, got: Any) -> Apart | None:
        """How ``got`` (result, arguments after) differs from the eager run."""
        return first_apart(
            {"output": self.expected[0], "argument": self.expected[1]},
            {"output": got[0], "argument": got[1]},
            lambda: {"output": self.reference()[0], "argument": self.reference()[1]},
            "",
        )

    # --- the stages ------------------------------------------------------------------------------

    def _traced(self) -> None:
        if self.traced is None:
            self.traced = trace(
                self.model,
                *self.args,
                dynamic_arg_dims=self.dims,
                dispatch=self.config.dispatch,
                check_buffer_writes=bool(self.config.mode),
                **self.kwargs,
            )
        try:
            got = self._run(self.traced)
        except TraceError as error:
            self.results.append(StageResult("traced", "refused", difference="TraceError", why=str(error)))
            return
        apart = self.compare(got)
        if apart is None:
            self.results.append(StageResult("traced", "same"))
            return
        try:
            which = operator_of_trace(_Forward(self.forward), self.traced, self.args, self.kwargs)
        except Exception:
            logger.debug("comparing operators of %s", self.name, exc_info=True)
            which = None
        operator, line = (which.operator, which.line) if which else ("", "")
        self.results.append(
            StageResult("traced", "differs", "", operator, line, str(apart), self._broken_assumptions())
        )

    def _broken_assumptions(self) -> str:
        assert self.traced is not None
        broken = DroppedGuards(self.traced).broken_sizes(self.args, self.kwargs)
        if broken:
            return f"the trace assumed something that does not hold for this call: {'; '.join(broken)}"
        return "the trace holds what the model did when it was traced, and it does something else now"

    def _split(self) -> None:
        assert self.traced is not None
        whole = self.config.level is CompilationLevel.DYNAMO_ONCE
        split = self.compiled.split if self.compiled else None
        self.split = split or split_graph(self.traced, () if whole else self.config.splitting_ops)
        try:
            apart = self.compare(self._run(self.split))
        except Exception as error:  # a graph that was put together wrongly may raise anything
            apart = Apart("output", f"{type(error).__name__}: {error}")
        if apart is None:
            self.results.append(StageResult("split", "same"))
            return
        piece, which, how = first_piece_apart(self.split, self._graph_inputs())
        why = (
            "the piece does not hold the graph's own nodes"
            if piece
            else "the pieces are put together wrongly"
        )
        operator, line = (which.operator, which.line) if which else ("", "")
        self.results.append(StageResult("split", "differs", piece, operator, line, how or str(apart), why))

    def _graph_inputs(self) -> list[Any]:
        assert self.traced is not None
        taken: list[Any] = []

        def take(*inputs: Any) -> Any:
            taken.extend(inputs)
            raise _Taken

        with suppress(_Taken):
            self.traced.bind(take)(*self.args, **self.kwargs)
        return taken

    def _compiled(self) -> None:
        if self.compiled is None:
            self.compiled = compile_pieces(self.split, self._sized(), adaptor=self.adaptor)
        compiled = self.compiled
        for _ in range(2):  # the very first run takes the general shape always
            apart = self.compare(self._run(compiled))
            if apart is not None:
                self.results.append(compiled_stage(compiled, self._graph_inputs(), apart))
                return
        self.results.append(StageResult("compiled", "same"))

    def _sized(self) -> CompilationConfig:
        """The configuration; without sizes of its own, those of this call."""
        if self.config.cudagraph_capture_sizes is not None or not self.config.mode:
            return self.config
        assert self.traced is not None
        sizes = {
            int(value.shape[dim])
            for entry, value in zip(self.traced.inputs, self._graph_inputs())
            if entry.kind == "argument" and isinstance(value, torch.Tensor)
            for dim in entry.dynamic_dims
        }
        return replace(
            self.config, cudagraph_capture_sizes=tuple(sorted(size for size in sizes if size)) or (1,)
        )

    def _replayed(self) -> None:
        assert self.compiled is not None
        config = self.compiled.config
        made = self.captured is None
        if made and not config.mode:
            return
        if self.captured is None:
            try:
                self.captured = capture(
                    self.compiled,
                    CaptureSizes.resolve(config),
                    context=self.metadata,
                    **self._buffers(config),
                )
            except CgkitError as error:
                why = " ".join(str(error).split())
                self.results.append(
                    StageResult("recorded", "refused", difference=type(error).__name__, why=why)
                )
                return
        kept = Kept([*(t for _, t in tensor_leaves(self.metadata)), *self.model.buffers()])
        try:
            self.results += replay_stages(self.captured, self.args, self.kwargs, self.compare)
        finally:
            kept.restore()

    def _buffers(self, config: CompilationConfig) -> dict[str, Any]:
        if config.cudagraph_copy_inputs:
            return {}
        return {"make_inputs": lambda size: _call(self.args, self.kwargs)}


class _Taken(Exception):  # noqa: N818 - ends a call once the graph's inputs are known
    """The graph's inputs were collected."""


class _Forward:
    """Something with the model's own ``forward``."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from cgkit.capturing.static_inputs import Call

    return Call(args, kwargs)
