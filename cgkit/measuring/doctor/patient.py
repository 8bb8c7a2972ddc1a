"""The model that is looked at, and how far it came on the road: each stage tried once, its failure kept."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cgkit import torch_hooks
from cgkit.capturing import CaptureSizes
from cgkit.capturing.debugging.copies import KeptAttributes, attributes_put_back
from cgkit.compiling import CompiledGraph, compile_pieces
from cgkit.config import CompilationConfig, CompilationLevel
from cgkit.errors import CgkitError, CutRegionError, TraceError
from cgkit.forward_context import current_forward_context, set_forward_context
from cgkit.numerics import python_random_put_back
from cgkit.splitting import SplitGraph, split_graph
from cgkit.tensor_trees import replace_tensors, tensor_leaves
from cgkit.tracing import TracedGraph, infer_dynamic_arg_dims, trace
from cgkit.tracing.arguments import is_constant, signature_of
from cgkit.tracing.buffer_writes import find_buffer_writes
from cgkit.tracing.frames import Frame, frames_in

#: "You marked L['x'].size()[0] as dynamic but your code specialized it to be a constant (8)"
_SPECIALISED = re.compile(r"L\['(\w+)'\]([^\s]*?)\.size\(\)\[(\d+)\][^\n]*?constant \((\d+)\)")

_ARGUMENT = re.compile(r"^L\['(\w+)'\]")


@dataclass(frozen=True)
class Specialised:
    """A dimension that was to be dynamic and became a number."""

    argument: str
    path: str
    dim: int
    size: int
    frames: tuple[Frame, ...]

    @property
    def name(self) -> str:
        return f"{self.argument}{self.path}.shape[{self.dim}]"


class Patient:
    """A model, an example call, and what the stages make of them.

    Attributes:
        model, args, kwargs, config: as given.
        others: further calls that the model will get, each (args, kwargs).
        traced: the trace, or None; with dimensions left out that would not stay dynamic.
        specialised: those dimensions.
        failure: why there is no trace, or None.
        cut_region: why the trace cannot be cut (known once `split` was asked for), or None.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        config: CompilationConfig,
        dims: Mapping[str, Any] | None = None,
        others: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (),
    ) -> None:
        self.model, self.args, self.kwargs, self.config = model, args, kwargs, config
        self.others = others
        self.name = type(model).__name__
        self.signature = signature_of(model.forward, args, kwargs)
        self.given_dims = dims
        self.specialised: list[Specialised] = []
        self.failure: TraceError | None = None
        self.cut_region: CutRegionError | None = None
        self.notes: dict[str, Any] = {}  # what a check found out and another one needs
        self.traced: TracedGraph | None = None
        self.marked: Mapping[str, Any] | None = None  # the dims of the trace that worked; None: inferred
        self._attributes: KeptAttributes | None = KeptAttributes(model)
        self._trace()

    # --- the stages ---

    def _trace(self) -> None:
        """Traces, leaving out one dimension after the other that turns out to be a constant."""
        dims = dict(
            self.given_dims if self.given_dims is not None else infer_dynamic_arg_dims(self.model.forward)
        )
        given: Mapping[str, Any] | None = self.given_dims
        if self.given_dims is None and not dims:
            given = {}
        while True:
            try:
                with self.in_context():
                    self.traced = trace(self.model, *self.args, dynamic_arg_dims=given, **self.kwargs)
                self.marked = given if given is not None else dims
                return
            except TraceError as error:
                found = specialised_in(error)
                left = without(dims, found, self.bound)
                if not found or left == dims:
                    self.failure = error
                    return
                self.specialised += found
                given = dims = left

    @functools.cached_property
    def split(self) -> SplitGraph | None:
        """The trace cut as the configuration says, or uncut where that cannot be; None without a trace."""
        if self.traced is None:
            return None
        piecewise = self.config.level is CompilationLevel.PIECEWISE
        try:
            return split_graph(self.traced, self.config.splitting_ops if piecewise else [])
        except CutRegionError as error:
            self.cut_region = error
            return split_graph(self.traced, [])

    @functools.cached_property
    def compiled(self) -> CompiledGraph | None:
        """The pieces with the eager adaptor: which share a compilation does not depend on the compiler."""
        if self.split is None:
            return None
        return compile_pieces(self.split, self.eager_config)

    @property
    def eager_config(self) -> CompilationConfig:
        """The configuration for a quick recording: no compiler, the example's size only."""
        return replace(
            self.config,
            compiler="eager",
            passes=(),
            inductor_compile_config={},
            compile_sizes=(),
            compile_ranges=(),
            debug_dump_path=None,
            cudagraph_capture_sizes=(max(self.num_tokens, 1),),
        )

    @functools.cached_property
    def sizes(self) -> CaptureSizes:
        """The sizes that would be recorded."""
        return CaptureSizes.resolve(replace(self.config, compile_sizes=()))

    # --- the call ---

    @property
    def bound(self) -> dict[str, Any]:
        """The example call's arguments by name, defaults filled in."""
        bound = self.signature.bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    @property
    def head(self) -> Frame | None:
        """The line at which ``forward`` begins."""
        forward = inspect.unwrap(getattr(self.model.forward, "__func__", self.model.forward))
        code = getattr(forward, "__code__", None)
        return (code.co_filename, code.co_firstlineno, "") if code else None

    @property
    def given(self) -> set[str]:
        """The arguments that the example call gives."""
        return set(self.signature.bind(*self.args, **self.kwargs).arguments)

    @functools.cached_property
    def dynamic_sizes(self) -> dict[str, int]:
        """The size of each dynamic dimension in the example, by name (``x.shape[0]``)."""
        scope = {"__builtins__": {}, "L": self.bound}
        found: dict[str, int] = {}
        for entry in self.traced.inputs if self.traced is not None else ():
            if entry.kind == "argument" and entry.dynamic_dims:
                shape = eval(entry.source, scope).shape  # Dynamo's text
                name = _ARGUMENT.sub(r"\1", entry.source)
                found |= {f"{name}.shape[{dim}]": int(shape[dim]) for dim in entry.dynamic_dims}
        return found

    @property
    def num_tokens(self) -> int:
        """The size of the first dynamic dimension in the example; 1 if there is none."""
        return next(iter(self.dynamic_sizes.values()), 1)

    @property
    def is_dynamic(self) -> bool:
        """Whether any dimension of an argument changes."""
        return bool(self.dynamic_sizes)

    def call_of_size(self, size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call with ``size`` for every dynamic dimension: its own rows, repeated or cut."""
        assert self.traced is not None
        scope = {"__builtins__": {}, "L": self.bound}
        into: dict[int, torch.Tensor] = {}
        for entry in self.traced.inputs:
            if entry.kind == "argument" and entry.dynamic_dims:
                tensor = original = eval(entry.source, scope)  # Dynamo's text
                for dim in entry.dynamic_dims:
                    rows = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
                    tensor = tensor.index_select(dim, rows) if tensor.shape[dim] else tensor
                into[id(original)] = tensor
        return replace_tensors(self.args, into), replace_tensors(self.kwargs, into)

    def copies(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example call with tensors of its own, which a model that writes its inputs may write."""
        leaves = [*tensor_leaves(self.args), *tensor_leaves(self.kwargs)]
        into = {id(tensor): tensor.detach().clone() for _, tensor in leaves}
        return replace_tensors(self.args, into), replace_tensors(self.kwargs, into)

    @contextmanager
    def in_context(self) -> Iterator[None]:
        """A forward context if none is set, and no gradients."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if current_forward_context() is None:
                stack.enter_context(set_forward_context(None))
            yield

    @contextmanager
    def unharmed(self) -> Iterator[None]:
        """Runs of the model inside leave its buffers, the parameters that its trace writes and the random state as they
        were. Other parameters are not copied: a model without a trace that writes some keeps what it wrote."""
        kept = [(tensor, tensor.detach().clone()) for tensor in (*self.model.buffers(), *self._written)]
        kinds = [
            module._buffers for module in self.model.modules()
        ]  # a scripted module's is no dict, and fixed
        own = [(buffers, dict(buffers)) for buffers in kinds if isinstance(buffers, dict)]
        with (
            torch.random.fork_rng(devices=[]),
            python_random_put_back(),
            torch_hooks.modes_put_back(),
            self.in_context(),
        ):
            try:
                yield
            finally:
                for buffers, names in own:  # forward may put another tensor there
                    buffers.update(names)
                for tensor, old in kept:
                    if tensor.shape == old.shape:
                        tensor.copy_(old)

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """:meth:`unharmed`, and the model's attributes are inside what they were before the trace, which holds their
        numbers: a model that counts its calls can be compared with its trace."""
        with attributes_put_back(self.model), self.unharmed():
            if self._attributes is not None:
                self._attributes.restore()
            yield

    def discharge(self) -> None:
        """The checks are through: lets go of what was kept for them, so that no weight lives on by it."""
        self._attributes = None

    @functools.cached_property
    def _written(self) -> list[torch.Tensor]:
        """The parameters that the trace writes: few models have any."""
        try:
            writes = find_buffer_writes(self.traced) if self.traced is not None else []
        except TraceError:
            return []
        known = dict(self.model.named_parameters(remove_duplicate=False))
        return [known[name] for name in dict.fromkeys(write.name for write in writes) if name in known]

    @property
    def device(self) -> torch.device:
        """Of the first tensor among weights and arguments."""
        leaves = [*self.model.parameters(), *self.model.buffers()]
        leaves += [tensor for _, tensor in tensor_leaves(self.args)]
        return leaves[0].device if leaves else torch.device("cpu")


def specialised_in(error: TraceError) -> list[Specialised]:
    """The dimensions that Dynamo's complaint names, each with its stack."""
    text = str(error.__cause__ or error)
    starts = [*_SPECIALISED.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    found = []
    for match, end in zip(starts, ends):
        frames = tuple(frames_in(text[match.end() : end]))
        found.append(Specialised(match[1], match[2], int(match[3]), int(match[4]), frames))
    return found


def without(dims: dict[str, Any], found: list[Specialised], values: Mapping[str, Any]) -> dict[str, Any]:
    """``dims`` less those found; None as "inferred" was made explicit by the caller."""
    left: dict[str, Any] = {}
    for name, entries in dims.items():
        value = values.get(name)
        if is_constant(value):
            continue
        listed = [entries] if hasattr(entries, "__index__") else list(entries)
        rank = value.dim() if isinstance(value, torch.Tensor) else 0
        gone = {each.dim for each in found if each.argument == name}
        kept = [d for d in listed if (d % rank if rank else d) not in gone]
        if kept:
            left[name] = kept
    return left


def cannot_run(error: Exception) -> str:
    """An error that the model itself raised, in one line."""
    return f"the model fails: {type(error).__name__}: {' '.join(str(error).split())}"


def cannot(error: CgkitError | None) -> str:
    """An error in one line."""
    return " ".join(str(error).split())
