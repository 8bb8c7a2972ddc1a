"""CUDAGraph Trees beside graphs of one's own: a GPU is needed, and the process may not live on.

``python -m cgkit.hazards.trees before|between`` records a graph of a matrix product by hand and replays it.
``between``: ``torch.compile(mode="reduce-overhead")`` runs between recording and replay, in the same process.
``before``: it has run already when the graph is recorded. It prints one JSON line; a crash shows as the exit status,
so start it in a process of its own (:func:`replay_beside_trees` does). Not yet run on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from cgkit.errors import CgkitError

#: What runs in which order.
ORDERS = ("before", "between")


def replay_beside_trees(order: str, timeout: float = 240.0) -> dict[str, Any]:
    """What becomes of a graph that was recorded by hand, in a process of its own.

    Args:
        order: "between": Trees run after the recording and before the replay; "before": before both.
        timeout: seconds until it is given up.

    Returns:
        ``order``, ``replayed`` (the process came to its end), ``equal`` (the replay gave what eager gives; None if it
        did not come so far), ``status`` (of the process; None after ``timeout``), ``error`` (the last line that it
        wrote, or "").

    Raises:
        CgkitError: no GPU, or ``order`` is unknown.
    """
    if order not in ORDERS:
        raise CgkitError(f"order={order!r} is unknown; use one of {', '.join(ORDERS)}")
    if not torch.cuda.is_available():
        raise CgkitError(
            "CUDAGraph Trees need a GPU, and torch sees none: run it where torch.cuda.is_available()"
        )
    command = [sys.executable, "-m", "cgkit.hazards.trees", order]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        late = f"no answer within {timeout:g} s"
        return {"order": order, "replayed": False, "equal": None, "status": None, "error": late}
    lines = done.stdout.strip().splitlines()
    seen = json.loads(lines[-1]) if done.returncode == 0 and lines else {"equal": None}
    errors = done.stderr.strip().splitlines()
    return {
        "order": order,
        "replayed": done.returncode == 0,
        "equal": seen["equal"],
        "status": done.returncode,
        "error": errors[-1] if done.returncode and errors else "",
    }


def _trees(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Three calls: warm-up, recording, replay of ``torch.compile``'s own graphs."""
    step = torch.compile(lambda a: torch.relu(a @ weight), mode="reduce-overhead")
    for _ in range(3):
        step(x).clone()
    torch.cuda.synchronize()


def _main(order: str) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        # Few results of long sums: cuBLAS splits the sums, and keeps the parts in its workspace.
        x = torch.randn(32, 16384, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(16384, 256, device="cuda", dtype=torch.bfloat16) / 128
        if order == "before":
            _trees(x, weight)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            x @ weight  # cuBLAS makes its workspace for this stream, outside of the graph's pool
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = x @ weight
        if order == "between":
            _trees(x, weight)
        filler = [
            torch.full((1 << 22,), 7, device="cuda") for _ in range(16)
        ]  # who was given that memory by now
        graph.replay()
        torch.cuda.synchronize()
        right = x @ weight
        kept = all(bool((each == 7).all()) for each in filler)
        torch.cuda.synchronize()
        print(json.dumps({"equal": kept and torch.allclose(result, right, rtol=2e-2, atol=2e-2)}))


if __name__ == "__main__":
    _main(sys.argv[1])
