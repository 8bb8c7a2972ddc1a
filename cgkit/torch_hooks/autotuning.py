"""Inductor's autotuner: what it tried for a matrix product, and how long each took."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from cgkit.torch_hooks.versions import gone


@contextlib.contextmanager
def autotuning_caught(found: list[dict[str, Any]]) -> Iterator[None]:
    """In the block each candidate that Inductor's autotuner timed is appended to ``found``.

    A dict each: ``operator`` ("mm"), ``inputs`` (their sizes, "8x2048, 2048x3072"), ``candidate`` (its name),
    ``backend`` ("ATen", "Triton", ...), ``parameters`` (block sizes and the like), ``ms`` (infinite: it failed),
    ``chosen``. Operators with one candidate alone are not timed and not listed.
    Through ``select_algorithm.add_feedback_saver``, whose callback has gained arguments over time: only the
    first four are read. Written for torch 2.11 too. Run on torch 2.13 (CPU).
    """
    from torch._inductor import select_algorithm

    add = getattr(select_algorithm, "add_feedback_saver", None)
    if add is None:
        raise gone("torch._inductor.select_algorithm.add_feedback_saver")

    def listen(timings: dict[Any, float], name: str, input_nodes: Any, choices: Any, *more: Any) -> None:
        finite = {choice: ms for choice, ms in timings.items() if math.isfinite(ms)}
        best = min(finite, key=finite.__getitem__) if finite else None
        inputs = ", ".join("x".join(map(str, _sizes(node))) for node in input_nodes)
        for choice, ms in timings.items():
            found.append(
                {
                    "operator": name,
                    "inputs": inputs,
                    "candidate": str(getattr(choice, "name", choice)),
                    "backend": _backend(choice),
                    "parameters": str(getattr(choice, "description", "") or ""),
                    "ms": float(ms),
                    "chosen": choice is best,
                }
            )

    add(listen)
    try:
        yield
    finally:
        _remove(select_algorithm, listen)


def _remove(module: Any, listener: Any) -> None:
    """Takes one listener off again, where the list can be found; else all of them."""
    find = getattr(module, "get_algorithm_selector_cache", None)
    cache = find() if find is not None else getattr(module, "_ALGORITHM_SELECTOR_CACHE", None)
    listeners = getattr(cache, "feedback_saver_fns", None)
    if listeners is None:
        module.clear_feedback_savers()
    elif listener in listeners:
        listeners.remove(listener)


def _sizes(node: Any) -> tuple[Any, ...]:
    try:
        return tuple(node.get_size())
    except (AttributeError, NotImplementedError):
        return ()


def _backend(choice: Any) -> str:
    kind = type(getattr(choice, "_wrapped", choice)).__name__  # a C++ template comes in a wrapper
    for word in ("Extern", "Triton", "CUTLASS", "Cpp", "CK", "Subgraph", "Decompose"):
        if word.lower() in kind.lower():
            return "ATen" if word == "Extern" else word
    return kind
