"""A list of capture sizes as the option that an engine takes.

Names as of vLLM 0.10 to 0.33 (``CompilationConfig.cudagraph_capture_sizes`` and ``cudagraph_mode``), SGLang
(the server argument ``--cuda-graph-bs``; newer releases also know ``--cuda-graph-bs-decode``) and TensorRT-LLM
(``cuda_graph_config`` of the LLM arguments: ``batch_sizes``, ``enable_padding``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence


def vllm(sizes: Sequence[int], mode: str = "", *, short: bool = False) -> str:
    """``--compilation-config '{"cudagraph_capture_sizes": [1, 2]}'``; ``short``: ``-cc``, which 0.33 has.

    ``mode``: named too if it is not empty. No sizes: graphs are turned off.
    """
    config: dict[str, object] = {"cudagraph_mode": mode} if mode else {}
    if sizes:
        config["cudagraph_capture_sizes"] = [int(size) for size in sizes]
    else:
        config = {"cudagraph_mode": "NONE"}
    return f"{'-cc' if short else '--compilation-config'} '{json.dumps(config)}'"


def sglang(sizes: Sequence[int]) -> str:
    """``--cuda-graph-bs 1 2 4``; no sizes: ``--disable-cuda-graph``."""
    return " ".join(["--cuda-graph-bs", *map(str, sizes)]) if sizes else "--disable-cuda-graph"


def tensorrt_llm(sizes: Sequence[int]) -> str:
    """The YAML of ``cuda_graph_config`` with ``batch_sizes``, padding on; no sizes: null."""
    if not sizes:
        return "cuda_graph_config: null"
    return f"cuda_graph_config:\n  enable_padding: true\n  batch_sizes: [{', '.join(map(str, sizes))}]"
