"""fx graphs: how their arguments and outputs are nested."""

from __future__ import annotations

from typing import Any

from cgkit.torch_hooks.versions import gone


def codegen_of(graph: Any) -> Any:
    """The fx code generator of ``graph``, which holds how its arguments and outputs are nested
    (``fx.Graph._codegen``). Run on torch 2.11 (CUDA) and 2.13 (CPU)."""
    if not hasattr(graph, "_codegen"):
        raise gone("torch.fx.Graph._codegen")
    return graph._codegen
