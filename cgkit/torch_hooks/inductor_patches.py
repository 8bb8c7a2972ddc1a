"""Inductor tamed by patches, as the article's InductorAdaptor does it: each patch one function, undone on exit.

Implements the article's "InductorAdaptor 的「驯化」工作" (taming Inductor). The patches change names inside
torch for the whole process, so they are only to be held under :func:`cgkit.torch_hooks.compile_lock`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cgkit.torch_hooks.versions import gone


@dataclass(frozen=True)
class PatchedCompilation:
    """What :func:`compile_fx_patched` made.

    Attributes:
        call: takes the graph's inputs, returns a sequence.
        graph_hash: under which Inductor's graph cache keeps it; None where it does not.
        path: of the Python file that Inductor generated; None where it made none.
        bare: whether what the graph cache holds is all there is to it: no input changes its shape, no output
            shares memory with an input, so that nothing has to be done around it.
    """

    call: Callable[..., Any]
    graph_hash: str | None
    path: str | None
    bare: bool


class AlwaysHitShapeEnv:
    """Stands in for a shape environment where Inductor's graph cache asks for one: everything holds, nothing
    is remembered. Only sound where the caller alone decides which shapes a callable is given.
    Run on torch 2.13 (CPU).
    """

    #: Guards so far: the cache writes them into its log.
    guards: tuple[Any, ...] = ()
    #: Sizes to assume in place of the examples'; the graph's hash reads it (torch 2.13).
    var_to_hint_override: Mapping[Any, int] = {}

    def evaluate_guards_expression(self, code: str, args: Sequence[Any]) -> bool:
        """Whether an entry's guards hold: always."""
        return True

    def get_pruned_guards(self, symints: Sequence[Any]) -> list[Any]:
        """The guards to store with an entry: none."""
        return []

    def produce_guards_expression(self, placeholders: Sequence[Any], **more: Any) -> str:
        """The stored guards as code: empty, which every later look-up takes for a hit."""
        return ""


@contextlib.contextmanager
def always_hit_shape_env() -> Iterator[None]:
    """In the block Inductor's graph cache sees an :class:`AlwaysHitShapeEnv` (``FxGraphCache._get_shape_env``).

    What it is for: a look-up outside of any trace, which has no shape environment and fails without one.
    ``compile_fx`` on fakes brings one of its own on torch 2.13; there the patch only drops the guards.
    Holds on torch 2.11 and 2.13. Run on torch 2.13 (CPU).
    """
    with _swapped(_graph_cache(), "_get_shape_env", staticmethod(lambda: AlwaysHitShapeEnv())):
        yield


@contextlib.contextmanager
def graph_hash_caught(found: list[str]) -> Iterator[None]:
    """In the block each hash that Inductor computes for a graph is appended to ``found``
    (``codecache.compiled_fx_graph_hash``). Holds on torch 2.11 and 2.13. Run on torch 2.13 (CPU)."""
    module = _codecache()
    original = getattr(module, "compiled_fx_graph_hash", None)
    if original is None:
        raise gone("torch._inductor.codecache.compiled_fx_graph_hash")

    def listen(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        found.append(result[0])
        return result

    with _swapped(module, "compiled_fx_graph_hash", listen):
        yield


@contextlib.contextmanager
def generated_file_caught(found: list[Any]) -> Iterator[None]:
    """In the block everything that ``compile_fx_inner`` compiles is appended to ``found``:
    (the compiled graph, the path of its Python file or None, its number of inputs and of outputs).

    ``compile_fx`` must be given ``compile_fx.compile_fx_inner`` by name: its default was bound long before.
    Holds on torch 2.11 and 2.13. Run on torch 2.13 (CPU).
    """
    from torch._inductor import compile_fx as module

    original = getattr(module, "compile_fx_inner", None)
    if original is None:
        raise gone("torch._inductor.compile_fx.compile_fx_inner")

    def listen(graph_module: Any, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        outputs = len(next(iter(reversed(graph_module.graph.nodes))).args[0])  # Inductor empties the graph
        compiled = original(graph_module, example_inputs, **kwargs)
        found.append((compiled, _file_of(compiled), len(example_inputs), outputs))
        return compiled

    with _swapped(module, "compile_fx_inner", listen):
        yield


@contextlib.contextmanager
def cacheability_unchecked() -> Iterator[None]:
    """In the block Inductor keeps every graph, also what it would call uncacheable: ``FxGraphCache._check_can_cache``
    does nothing. With a pass without a uuid, or constants folded in, that gives wrong hits.

    Holds on torch 2.11 and 2.13. Run on torch 2.13 (CPU).
    """
    with _swapped(_graph_cache(), "_check_can_cache", staticmethod(lambda *args, **kwargs: None)):
        yield


#: The patches by name, in the order in which they are entered; each takes the list that it fills, if any.
INDUCTOR_PATCHES: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
    "always_hit_shape_env": always_hit_shape_env,
    "graph_hash_caught": graph_hash_caught,
    "generated_file_caught": generated_file_caught,
    "cacheability_unchecked": cacheability_unchecked,
}


def compile_fx_patched(
    graph_module: torch.fx.GraphModule,
    fake_args: Sequence[Any],
    fake_mode: Any,
    options: Mapping[str, Any],
) -> PatchedCompilation:
    """Inductor's ``compile_fx`` under the four patches. The graph module is given away: hand in a copy.

    AOTAutograd's own cache is off in it, so that Inductor's graph cache is the one that is asked.
    Run on torch 2.13 (CPU).
    """
    from torch._functorch import config as functorch_config
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile_fx as module

    hashes: list[str] = []
    compiled: list[Any] = []
    context = TracingContext(fake_mode)
    with contextlib.ExitStack() as stack:
        stack.enter_context(always_hit_shape_env())
        stack.enter_context(graph_hash_caught(hashes))
        stack.enter_context(generated_file_caught(compiled))
        stack.enter_context(cacheability_unchecked())
        stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(tracing(context))
        call: Any = module.compile_fx(
            graph_module,
            list(fake_args),
            inner_compile=module.compile_fx_inner,
            config_patches={"fx_graph_cache": True, "fx_graph_remote_cache": False, **options},
        )
    if len(compiled) != 1 or len(hashes) != 1:
        return PatchedCompilation(call, None, None, False)
    ((_, path, inputs, outputs),) = compiled
    bare = inputs == len(fake_args) and not _needs_wrapper(context, outputs)
    return PatchedCompilation(call, hashes[0], path, bare)


def load_from_graph_cache(
    graph_hash: str, fake_args: Sequence[Any]
) -> tuple[Callable[..., Any], str | None] | None:
    """What Inductor's graph cache holds under ``graph_hash``, and its Python file's path; None if nothing.

    The callable takes the inputs and returns a sequence. Raises whatever torch raises on a broken entry.
    Run on torch 2.13 (CPU).
    """
    from torch._inductor import output_code
    from torch._inductor.utils import BoxedBool

    lookup = getattr(_graph_cache(), "_lookup_graph", None)
    constants = getattr(output_code, "CompiledFxGraphConstants", None)
    if lookup is None or constants is None:
        raise gone("torch._inductor.codecache.FxGraphCache._lookup_graph")
    with always_hit_shape_env(), torch.inference_mode(False), torch.no_grad():
        graph, _ = lookup(graph_hash, list(fake_args), True, None, constants())
        if graph is None:
            return None
        settings: Any = {
            **(getattr(graph, "fx_kwargs", None) or {}),
            "cudagraphs": BoxedBool(False),
            "is_backward": False,
        }
        graph.post_compile(list(fake_args), constants(), settings)

    def call(*args: Any) -> Any:
        return graph(list(args))

    return call, _file_of(graph)


def graph_cache_files(graph_hash: str) -> dict[str, bytes]:
    """The files of Inductor's graph cache under ``graph_hash``: name -> content. Run on torch 2.13 (CPU)."""
    folder = _entry_folder(graph_hash)
    if not folder.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def put_graph_cache_files(graph_hash: str, files: Mapping[str, bytes]) -> None:
    """Makes Inductor's graph cache hold exactly ``files`` under ``graph_hash``. Run on torch 2.13 (CPU)."""
    folder = _entry_folder(graph_hash)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files and path.is_file():
            path.unlink()
    for name, content in files.items():
        path = folder / os.path.basename(name)
        if not path.exists() or path.read_bytes() != content:
            part = path.with_name(f".{path.name}.{os.getpid()}")
            part.write_bytes(content)
            os.replace(part, path)


# --- inside ------------------------------------------------------------------------------------------


def _codecache() -> Any:
    from torch._inductor import codecache

    return codecache


def _graph_cache() -> Any:
    found = getattr(_codecache(), "FxGraphCache", None)
    if found is None:
        raise gone("torch._inductor.codecache.FxGraphCache")
    return found


@contextlib.contextmanager
def _swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` in the block, and afterwards what it was; inherited ones are uncovered again."""
    if not hasattr(owner, name):
        raise gone(
            f"{getattr(owner, '__module__', '')}.{getattr(owner, '__name__', owner)}.{name}".strip(".")
        )
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _entry_folder(graph_hash: str) -> Path:
    find = getattr(_graph_cache(), "_get_tmp_dir_for_key", None)
    if find is None:
        raise gone("torch._inductor.codecache.FxGraphCache._get_tmp_dir_for_key")
    if not graph_hash.isalnum():
        raise ValueError(f"{graph_hash!r} is no hash of a graph")
    return Path(find(graph_hash))


def _file_of(compiled: Any) -> str | None:
    """The Python file that Inductor generated for a compiled graph."""
    key = getattr(compiled, "cache_key", None)
    if not key:
        return None
    path = _codecache().get_path(key, "py")[2]
    return path if os.path.exists(path) else None


def _needs_wrapper(context: Any, outputs: int) -> bool:
    """Whether AOTAutograd does something around the compiled graph: what it says, or to be safe where it
    says nothing. ``outputs``: how many the compiled graph has."""
    facts = getattr(context, "fw_metadata", None)
    if facts is None:
        return True
    infos = getattr(facts, "output_info", None)
    if infos is None or len(infos) != outputs:  # a graph with extra outputs: written inputs, bases of views
        return True
    counts = ("num_outputs_aliased", "num_mutated_inp_runtime_indices")
    return any(getattr(facts, name, 1) for name in counts)
