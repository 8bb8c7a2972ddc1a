"""A list of capture sizes as the option that an engine takes.

Names as of vLLM 0.10 to 0.33 (``CompilationConfig.cudagraph_capture_sizes`` and ``cudagraph_mode``; ``-cc`` is its
newer short form), SGLang (today a list a phase, ``--cuda-graph-bs-decode``; before that ``--cuda-graph-bs``) and
TensorRT-LLM (``cuda_graph_config`` of the LLM arguments: ``batch_sizes``, ``enable_padding``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence


def vllm(sizes: Sequence[int], mode: str = "", *, short: bool = False) -> str:
    """``--compilation-config '{"cudagraph_capture_sizes": [1, 2]}'``, or ``-cc '...'`` with ``short``.

    ``mode``: named too if it is not empty. No sizes: graphs are turned off.
    """
    config: dict[str, object] = {"cudagraph_mode": mode} if mode else {}
    if sizes:
        config["cudagraph_capture_sizes"] = [int(size) for size in sizes]
    else:
        config = {"cudagraph_mode": "NONE"}
    return f"{'-cc' if short else '--compilation-config'} '{json.dumps(config)}'"


def sglang(sizes: Sequence[int], *, older: bool = False) -> str:
    """``--cuda-graph-bs-decode 1 2 4``; ``older``: ``--cuda-graph-bs 1 2 4``; no sizes: ``--disable-cuda-graph``."""
    option = "--cuda-graph-bs" if older else "--cuda-graph-bs-decode"
    return " ".join([option, *map(str, sizes)]) if sizes else "--disable-cuda-graph"


def tensorrt_llm(sizes: Sequence[int]) -> str:
    """The YAML of ``cuda_graph_config`` with ``batch_sizes``, padding on; no sizes: null."""
    if not sizes:
        return "cuda_graph_config: null"
    return f"cuda_graph_config:\n  enable_padding: true\n  batch_sizes: [{', '.join(map(str, sizes))}]"
