"""CUDAGraph Trees beside graphs of one's own: a GPU is needed, and the process may not live on.

cuBLAS keeps a workspace for each stream, outside of every graph's pool; a graph that was recorded by hand holds its
address. CUDAGraph Trees clear all workspaces before they record. Then that memory is somebody else's, and the next
replay writes its partial sums there: the replay's own result is right, and a tensor that has nothing to do with it is
spoiled. Where the allocator has given the memory back to the driver, the replay is an illegal memory access instead.

``python -m cgkit.hazards.trees ORDER`` records a graph of a matrix product, lets something happen as :data:`ORDERS`
says, fills half a GiB with tensors of sevens, replays, and prints one JSON line. A crash shows as the exit
status, so start it in a process of its own (:func:`replay_beside_trees` does). Seen on an H200, torch 2.11.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from cgkit import torch_hooks
from cgkit.errors import CgkitError

#: What happens when.
ORDERS = {
    "before": "Trees run before the recording: they clear nothing that it holds",
    "between": "Trees run between recording and replay",
    "cleared": "in place of Trees only their clearing, and what is free goes back to the driver",
}
#: How many tensors of sevens, and how many numbers of 8 bytes in each. The memory that was cleared has gone back to the
#: driver meanwhile (who records empties the allocator's cache), and comes back with some later request.
_SEVENS, _NUMBERS = 256, 1 << 18


def replay_beside_trees(order: str, timeout: float = 240.0) -> dict[str, Any]:
    """What becomes of a graph that was recorded by hand, in a process of its own.

    Args:
        order: one of :data:`ORDERS`.
        timeout: seconds until it is given up.

    Returns:
        ``order``, ``replayed`` (the process came to its end), ``equal`` (the replay gives what it gave before) and
        ``kept`` (no other tensor was written; both None if it did not come so far), ``status`` (of the process; None
        after ``timeout``), ``error`` (the line that names the error, or "").

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
        return {"order": order, "replayed": False, "equal": None, "kept": None, "status": None, "error": late}
    lines = done.stdout.strip().splitlines()
    seen = json.loads(lines[-1]) if done.returncode == 0 and lines else {"equal": None, "kept": None}
    errors = [line for line in done.stderr.strip().splitlines() if "rror" in line]
    return {
        "order": order,
        "replayed": done.returncode == 0,
        "equal": seen["equal"],
        "kept": seen["kept"],
        "status": done.returncode,
        "error": errors[0] if done.returncode and errors else "",
    }


def _trees(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Four calls: warm-up, recording, two replays of ``torch.compile``'s own graphs."""
    step = torch.compile(lambda a: torch.relu(a @ weight), mode="reduce-overhead")
    for _ in range(4):
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
        graph.replay()
        right = result.clone()
        if order == "between":
            _trees(x, weight)
        elif order == "cleared":
            torch_hooks.clear_cublas_workspaces()
            torch.cuda.empty_cache()
        sevens = [] if order == "cleared" else [_seven() for _ in range(_SEVENS)]
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        kept = all(bool((each == 7).all()) for each in sevens)
        print(json.dumps({"equal": torch.equal(result, right), "kept": kept}))


def _seven() -> torch.Tensor:
    return torch.full((_NUMBERS,), 7, device="cuda", dtype=torch.int64)


if __name__ == "__main__":
    _main(sys.argv[1])
