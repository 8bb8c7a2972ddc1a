"""CUDAGraph Trees beside graphs of one's own: a GPU is needed, and the process may not live on.

cuBLAS keeps a workspace for each stream, outside of every graph's pool; a graph that was recorded by hand holds its
address. CUDAGraph Trees clear all workspaces before they record. From then on the graph writes its partial sums into
memory that is not its own: somebody else's, and a tensor that has nothing to do with the replay is spoiled while the
replay's own result is right; or nobody's, and nothing is seen yet; or no memory at all, because the allocator has given
it back to the driver, and the replay is an illegal memory access. Which of them comes is the allocator's chance. So the
allocator is asked what has become of the workspace, and the harm is looked for beside it.

``python -m cgkit.hazards.trees ORDER`` records a graph of a matrix product, lets something happen as :data:`ORDERS`
says, fills half a GiB with tensors of sevens, and replays. It prints a JSON line before the replay and one after it. A
crash shows as the exit status, so start it in a process of its own (:func:`replay_beside_trees` does).
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
_NOTHING = {"workspace": None, "equal": None, "kept": None}
_SMALLEST_WORKSPACE = 1 << 20  # bytes; the product's own result is smaller


def replay_beside_trees(order: str, timeout: float = 240.0) -> dict[str, Any]:
    """What becomes of a graph that was recorded by hand, in a process of its own.

    Args:
        order: one of :data:`ORDERS`.
        timeout: seconds until it is given up.

    Returns:
        ``order``, ``workspace`` (before the replay: "held", "free", "somebody else's", or "given back" to the
        driver), ``replayed`` (the process came to its end), ``equal`` (the replay gives what it gave before),
        ``kept`` (no other tensor was written), each None if it did not come so far, ``status`` (of the process;
        None after ``timeout``), ``error`` (the line that names the error, or "").

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
        return {"order": order, **_NOTHING, "replayed": False, "status": None, "error": late}
    seen: dict[str, Any] = dict(_NOTHING)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            seen |= json.loads(line)
    errors = [line for line in done.stderr.strip().splitlines() if "rror" in line]
    return {
        "order": order,
        **seen,
        "replayed": done.returncode == 0,
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
        had = _used()
        with torch.cuda.stream(stream):
            x @ weight  # cuBLAS makes its workspace for this stream, outside of the graph's pool
        torch.cuda.synchronize()
        workspace = _workspace(had)
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
        print(json.dumps({"workspace": _state(workspace)}), flush=True)
        graph.replay()
        torch.cuda.synchronize()
        kept = all(bool((each == 7).all()) for each in sevens)
        print(json.dumps({"equal": torch.equal(result, right), "kept": kept}))


def _blocks() -> dict[tuple[int, int, int], bool]:
    """What the allocator holds: (address, bytes, stream) of each block, and whether it is in use."""
    blocks = {}
    for segment in torch.cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            blocks[address, block["size"], segment["stream"]] = block["state"] == "active_allocated"
            address += block["size"]
    return blocks


def _used() -> set[tuple[int, int, int]]:
    """The blocks that are in use."""
    return {place for place, used in _blocks().items() if used}


def _workspace(had: set[tuple[int, int, int]]) -> tuple[int, int, int]:
    """The block that is in use now and was not among ``had``. What the product's own result lay in is new as well, free
    again, and no smaller: a whole segment."""
    for place in sorted(_used() - had):
        if place[1] >= _SMALLEST_WORKSPACE:
            return place
    raise CgkitError("no workspace of cuBLAS was found among the allocator's new blocks")


def _state(workspace: tuple[int, int, int]) -> str:
    """What the memory at the workspace's address is now; see :func:`replay_beside_trees`."""
    for block, used in _blocks().items():
        if block[0] <= workspace[0] < block[0] + block[1]:
            return "free" if not used else "held" if block == workspace else "somebody else's"
    return "given back"


def _seven() -> torch.Tensor:
    return torch.full((_NUMBERS,), 7, device="cuda", dtype=torch.int64)


if __name__ == "__main__":
    _main(sys.argv[1])
