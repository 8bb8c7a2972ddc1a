"""Every way in which users of the engines were hurt, as far as we know them, and where it can be seen here.

Sources: the issues and pull requests that each row names. A row without an exhibit says why, and what would show it.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """``instead``: for a row without an exhibit, why there is none and what shows it."""

    number: int
    what: str
    reported: str
    instead: str = ""


ROWS = (
    Row(1, "memory for graphs in no budget", "vllm#19186, #11251"),
    Row(2, "a memory estimate of zero", "vllm#49224"),
    Row(3, "a memory estimate from two samples", "vllm#57475"),
    Row(4, "padding by a ladder with gaps", "vllm PR#12920"),
    Row(5, "the largest batch is no recorded size", "vllm PR#40734, vllm#54933"),
    Row(6, "batches above the ladder", "sglang PR#33900, vllm PR#51509"),
    Row(7, "a key that misses", "vllm PR#53407, #36165"),
    Row(
        8,
        "graphs recorded with LoRA although none is active",
        "vllm PR#25914, #32005, #5193",
        "cgkit has no LoRA adapters, so its keys have no has_lora field. What would show it: a model with adapters, "
        "each key recorded with and without them, and the nodes of both graphs in an idle step",
    ),
    Row(9, "a splitting operator that returns a new tensor", "vllm PR#53915, PR#37395"),
    Row(10, "a tensor outside of the pool that is replaced", "vllm#40038"),
    Row(11, "attention inside of a recorded piece", "vllm#53030, torchtitan PR#3685"),
    Row(12, "a call that capture forbids", "vllm#9094, pytorch#87794, vllm PR#53818"),
    Row(13, "a factor that the cache's key lacks", "vllm#53366"),
    Row(14, "a cache that does not survive a move", "vllm#52154, dynamo#10695"),
    Row(15, "equal layers compiled one by one", "vllm#20451, #20264, #20342, #33267, sglang#6830"),
    Row(16, "a dimension that became a constant", "vllm#23970, vllm-ascend#1368, pytorch#141251, #136002"),
    Row(17, "a dropped guard", "vllm PR#26199, PR#27432"),
    Row(18, "guards evaluated at each step", "vllm PR#11217"),
    Row(19, "no graphs after a warm start", "vllm#31439"),
    Row(
        20,
        "Inductor's own partition: faster, and slower to compile",
        "vllm#27080, #27828, pytorch PR#167132",
        "a trade and no fault, and both sides of it are a GPU's and a compiler's: fewer and faster kernels, against "
        "seconds of Inductor on one large graph. cgkit cuts the FX graph and does not drive Inductor's partition. What "
        "would show it: one model compiled both ways in fresh processes, torch.compile with "
        "torch._inductor.config.graph_partition beside compile_pieces, seconds and step times in turn on a GPU. What "
        "sharing equal pieces saves the cut graph is measured: `cgkit bench dedup`",
    ),
    Row(21, "a result that the next replay overwrites", "pytorch#148439, #144386, #170604, #122192"),
    Row(22, "recompilations while serving", "sglang#15654, PR#38354, #32655"),
    Row(23, "sizes that are advertised and not recorded", "TensorRT-LLM PR#13574, PR#12895"),
    Row(24, "a decompiler that fails on new bytecode", "depyf#86, depyf#8, vllm#20713"),
    Row(25, "a ladder that stops short of max_num_seqs", "vllm-ascend#16049"),
    Row(26, "CUDAGraph Trees beside graphs of one's own", "measured with torch 2.11"),
)
