"""The article's ``InductorAdaptor``: Inductor without ``standalone_compile``, tamed by patches.

Implements "InductorAdaptor 的「驯化」工作" (taming Inductor). It exists to be studied and compared; the
default is :class:`~cgkit.compiling.adaptors.InductorStandaloneAdaptor`, which needs none of it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from cgkit import torch_hooks
from cgkit.compiling.adaptors import CompilerInterface, Runnable, prepare
from cgkit.compiling.inductor_config import check_inductor_options, inductor_options_for
from cgkit.config import Shape
from cgkit.errors import CompileError


class InductorHandle(NamedTuple):
    """What is kept in place of a callable (the article's ``(hash_str, file_path)``).

    ``file_path`` is where the code was written when it was compiled: for people to look at. A second
    process finds the code by the hash and writes its own file.
    """

    hash_str: str
    file_path: str | None


class PatchedGraph:
    """A compiled piece with its handle; call it with the piece's inputs.

    ``handle`` is None where the piece cannot be loaded by handle: Inductor generated no code for it, or
    AOTAutograd has to do something around the code (outputs that share memory with inputs), which is not in
    Inductor's graph cache. Such a piece goes through AOTAutograd again in the next process, and Inductor's
    graph cache still answers then.
    """

    def __init__(self, call: Runnable, handle: InductorHandle | None) -> None:
        self._call = call
        self.handle = handle

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Runs the piece."""
        if not torch.is_grad_enabled():
            return self._call(*args)
        with torch.no_grad():
            return self._call(*args)

    def __repr__(self) -> str:
        return f"PatchedGraph({self.handle})"


class InductorAdaptor(CompilerInterface):
    """Compiles with ``compile_fx`` under four patches (:data:`cgkit.torch_hooks.INDUCTOR_PATCHES`).

    1. The shape environment always hits: the compile stage knows which shapes a piece gets, so what
       Inductor's graph cache would check is dropped. A general piece that was compiled under an assumption
       about its symbol is found again without it, which is why the standalone adaptor is the default.
    2. The hash of the graph is caught: half of the handle.
    3. The path of the generated file is caught: the other half.
    4. The check whether a graph may be cached is silenced.

    A handle is loaded from Inductor's graph cache without AOTAutograd and without Inductor's passes.
    """

    name = "inductor_patched"
    saves = True
    generates = True

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """``options``: Inductor's options by name, for every piece and shape."""
        self._options = dict(options or {})
        check_inductor_options(self._options)

    def compile(
        self, graph_module: fx.GraphModule, inputs: Sequence[Any], fake_mode: Any, runtime_shape: Shape
    ) -> PatchedGraph:
        """A :class:`PatchedGraph`; see :meth:`CompilerInterface.compile`."""
        own, options = prepare(self._options, graph_module, inputs, fake_mode, runtime_shape)
        made = torch_hooks.compile_fx_patched(own, inputs, fake_mode, options)
        kept = made.graph_hash is not None and made.bare
        handle = InductorHandle(str(made.graph_hash), made.path) if kept else None
        return PatchedGraph(made.call, handle)

    def load_handle(self, handle: InductorHandle, inputs: Sequence[Any]) -> PatchedGraph:
        """The callable behind ``handle``, from Inductor's graph cache; ``inputs`` as for :meth:`compile`.

        Raises:
            CompileError: nothing lies there.
        """
        with torch_hooks.compile_lock():
            found = torch_hooks.load_from_graph_cache(handle.hash_str, inputs)
        if found is None:
            raise CompileError(
                f"Inductor's graph cache holds nothing under {handle.hash_str}: it lies in the folder that "
                "TORCHINDUCTOR_CACHE_DIR names; compile the piece again"
            )
        call, path = found
        return PatchedGraph(call, InductorHandle(handle.hash_str, path))

    def save(self, runnable: Any) -> bytes | None:
        """The handle and what Inductor's graph cache holds under it, so that both travel and are checked
        together; None where there is no handle."""
        handle: InductorHandle | None = getattr(runnable, "handle", None)
        if handle is None or not (files := torch_hooks.graph_cache_files(handle.hash_str)):
            return None
        entries = {name: base64.b64encode(content).decode() for name, content in files.items()}
        return json.dumps({"hash": handle.hash_str, "files": entries}).encode()

    def load(self, content: bytes, inputs: Sequence[Any]) -> PatchedGraph:
        """What :meth:`save` wrote: puts it back into Inductor's graph cache and loads it by its handle."""
        known = json.loads(content)
        files = {name: base64.b64decode(text) for name, text in known["files"].items()}
        torch_hooks.put_graph_cache_files(known["hash"], files)
        return self.load_handle(InductorHandle(known["hash"], None), inputs)

    def settings(self, runtime_shape: Shape) -> Mapping[str, Any]:
        """See :meth:`CompilerInterface.settings`."""
        options = inductor_options_for(self._options, runtime_shape)
        return {"adaptor": self.name, **{f"inductor {name}": value for name, value in options.items()}}
