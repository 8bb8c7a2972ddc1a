"""Which batch sizes are recorded, and what the others are padded to.

Implements the article's "capture 尺寸：为什么默认不是所有 batch size" (capture sizes: why not every
batch size). Sizes are token counts. The article prints the list of vLLM's V0 engine; the ladders of
the engines that are in use are here beside it, by name. Read in: vLLM 0.10.1 ``config/__init__.py``,
vLLM 0.33 ``config/vllm.py``, SGLang 0.5.23 ``cuda_graph_config.py``, and TensorRT-LLM's page
"torch.compile and piecewise CUDA graph".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, count, takewhile
from typing import Any

from cgkit.config import CompilationConfig, whole_sizes
from cgkit.display import Shown
from cgkit.errors import CgkitError, ConfigError

#: What a table with an entry a token count can hold without being the largest thing in memory.
_LARGEST = 2**22


def _article(max_num_seqs: int, max_num_batched_tokens: int | None) -> Sequence[int]:
    """1, 2, 4 and every 8, up to the least that covers ``max_num_seqs``."""
    steps = chain([1, 2, 4], count(8, 8))
    below = list(takewhile(lambda size: size < max_num_seqs, steps))
    top = next(size for size in chain([1, 2, 4], count(8, 8)) if size >= max_num_seqs)
    return [*below, top]


def _vllm_0_10_1(max_num_seqs: int, max_num_batched_tokens: int | None) -> Sequence[int]:
    """The V1 engine of the article's version: up to twice ``max_num_seqs``, at most 512."""
    top = min(2 * max_num_seqs, 512)
    return _within([1, 2, 4, *range(8, top + 1, 8)], max_num_batched_tokens)


def _vllm_0_33(max_num_seqs: int, max_num_batched_tokens: int | None) -> Sequence[int]:
    """Every 8 to 256, every 16 above; the two limits themselves are added, so that neither falls off."""
    top = min(2 * max_num_seqs, 512, max_num_batched_tokens or 512)
    sizes = [size for size in [1, 2, 4, *range(8, 256, 8), *range(256, top + 1, 16)] if size <= top]
    limits = [max_num_seqs, max_num_batched_tokens or max_num_seqs]
    return [*sizes, *(limit for limit in limits if limit <= top)]


def _sglang(max_num_seqs: int, max_num_batched_tokens: int | None) -> Sequence[int]:
    """Decode sizes: coarser as they grow; the largest batch itself is always there."""
    steps = chain([1, 2, 4, 8, 12], range(16, 257, 8), range(272, 512, 16), count(512, 32))
    return [*takewhile(lambda size: size < max_num_seqs, steps), max_num_seqs]


def _tensorrt_llm(max_num_seqs: int, max_num_batched_tokens: int | None) -> Sequence[int]:
    """Token counts for prefill too: powers of two below 256, then every 256 to 3072."""
    return _within([*(2**i for i in range(8)), *range(256, 3073, 256)], max_num_batched_tokens)


def _within(sizes: Sequence[int], limit: int | None) -> Sequence[int]:
    return [size for size in sizes if limit is None or size <= limit]


_LADDERS: dict[str, Callable[[int, int | None], Sequence[int]]] = {
    "article": _article,
    "vllm-0.10.1": _vllm_0_10_1,
    "vllm-0.33": _vllm_0_33,
    "sglang": _sglang,
    "tensorrt-llm": _tensorrt_llm,
}


def ladder(name: str, max_num_seqs: int = 256, max_num_batched_tokens: int | None = None) -> tuple[int, ...]:
    """The sizes of the ladder ``name``, ascending (:data:`cgkit.config.LADDERS` lists the names).

    Only the article's list, SGLang's and vLLM's depend on ``max_num_seqs``; TensorRT-LLM's is fixed.

    Raises:
        ConfigError: the name is unknown, or a limit is not a positive whole number.
    """
    if name not in _LADDERS:
        raise ConfigError(f"ladder {name!r} is unknown; use one of {', '.join(_LADDERS)}")
    (max_num_seqs,) = whole_sizes("max_num_seqs", [max_num_seqs])
    if max_num_batched_tokens is not None:
        (max_num_batched_tokens,) = whole_sizes("max_num_batched_tokens", [max_num_batched_tokens])
    return whole_sizes("cudagraph_capture_sizes", _LADDERS[name](max_num_seqs, max_num_batched_tokens))


class CaptureSizes(Shown):
    """The sizes to record, ascending, with the table that maps every batch to one of them.

    ``bs_to_padded_graph_size[n]`` is the least size that holds ``n`` tokens (O(1), as in the
    article); it ends at the largest size, above which nothing is recorded. ``[0]`` is 0.

    Raises:
        ConfigError: no sizes, or one that is not a positive whole number.
    """

    def __init__(self, sizes: Sequence[int], *, tensor_parallel_size: int = 1, ladder: str = "") -> None:
        self.sizes = whole_sizes("cudagraph_capture_sizes", sizes)
        if not self.sizes:
            raise ConfigError("cudagraph_capture_sizes=[] records nothing: give at least one size")
        if self.sizes[-1] > _LARGEST:
            raise ConfigError(
                f"cudagraph_capture_sizes has {self.sizes[-1]}: no step has more than {_LARGEST} tokens; sizes "
                "are token counts, not bytes"
            )
        self.ladder = ladder
        self.tensor_parallel_size = tensor_parallel_size
        self.bs_to_padded_graph_size = [0]
        for size in self.sizes:
            self.bs_to_padded_graph_size += [size] * (size + 1 - len(self.bs_to_padded_graph_size))

    @classmethod
    def resolve(cls, config: CompilationConfig, sizes: Any = None) -> CaptureSizes:
        """What ``sizes`` (a :class:`CaptureSizes`, a list, a ladder's name or None) means under ``config``.

        None: ``config.cudagraph_capture_sizes``, and without that the article's ladder. Also checks
        ``config.compile_sizes`` (:func:`check_compile_sizes`).
        """
        if sizes is None:
            sizes = config.cudagraph_capture_sizes or "article"
        if isinstance(sizes, str):
            listed = ladder(sizes, config.max_num_seqs, config.max_num_batched_tokens)
            sizes = cls(listed, tensor_parallel_size=config.tensor_parallel_size, ladder=sizes)
        elif not isinstance(sizes, CaptureSizes):
            sizes = cls(sizes, tensor_parallel_size=config.tensor_parallel_size)
        check_compile_sizes(config, sizes)
        return sizes

    @property
    def largest(self) -> int:
        """The largest recorded size; above it a batch runs compiled, without a graph."""
        return self.sizes[-1]

    def is_captured(self, num_tokens: int) -> bool:
        """Whether a batch of ``num_tokens`` fits a recorded size (after padding)."""
        return 0 < num_tokens <= self.sizes[-1]

    def pad_for_cudagraph(self, num_tokens: int) -> int:
        """The least recorded size that holds ``num_tokens``.

        Raises:
            CgkitError: ``num_tokens`` is negative or above the largest size (the article's table
                raises a bare IndexError there, or worse, takes -1 for the last entry).
        """
        if not 0 <= num_tokens <= self.sizes[-1]:
            raise CgkitError(
                f"num_tokens={num_tokens} is outside 0 to {self.sizes[-1]}, the largest recorded size: "
                "ask is_captured(num_tokens) first, or use pad(num_tokens), which leaves it uncaptured"
            )
        return self.bs_to_padded_graph_size[num_tokens]

    def pad(self, num_tokens: int) -> int:
        """What a step of ``num_tokens`` really runs: a recorded size, or above the largest one a
        multiple of ``tensor_parallel_size`` (sequence parallelism needs equal shares)."""
        if self.is_captured(num_tokens):
            return self.bs_to_padded_graph_size[num_tokens]
        return -(-num_tokens // self.tensor_parallel_size) * self.tensor_parallel_size

    def to_frame(self, batches: Sequence[int] | None = None) -> Any:
        """A row for each batch size of ``batches`` (default: 1 to one above the largest size).

        Two ratios of waste are in use and differ: ``waste_of_real`` divides the padding by the real
        tokens (the article's 33 -> 40 is 21 %), ``waste_of_padded`` by what runs (17.5 %).
        """
        import pandas as pd

        rows = []
        for batch in batches if batches is not None else range(1, self.largest + 2):
            padded = self.pad(batch)
            rows.append(
                {
                    "batch": batch,
                    "captured": self.is_captured(batch),
                    "padded": padded,
                    "padding_tokens": padded - batch,
                    "waste_of_real": (padded - batch) / batch if batch else 0.0,
                    "waste_of_padded": (padded - batch) / padded if padded else 0.0,
                }
            )
        return pd.DataFrame(rows)

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CaptureSizes) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __repr__(self) -> str:
        shown = list(self.sizes)
        text = str(shown) if len(shown) <= 12 else f"[{', '.join(map(str, shown[:7]))}, ..., {shown[-1]}]"
        return f"CaptureSizes({text}: {len(shown)} sizes{f', ladder {self.ladder!r}' if self.ladder else ''})"


def check_compile_sizes(config: CompilationConfig, sizes: CaptureSizes) -> None:
    """Refuses ``compile_sizes`` that no step would ever run, because padding changes them.

    Above the largest recorded size nothing is padded (but to ``tensor_parallel_size``), and without
    graphs nothing at all.

    Raises:
        ConfigError: names each size and what it would be padded to.
    """
    if not config.mode:
        return
    padded = {size: sizes.pad(size) for size in config.compile_sizes}
    changed = {size: to for size, to in padded.items() if size != to}
    if changed:
        listed = ", ".join(f"{size} would be padded to {to}" for size, to in changed.items())
        raise ConfigError(
            f"compile_sizes={list(config.compile_sizes)}: {listed}, so a compilation for it would never run. "
            "Add it to cudagraph_capture_sizes, take the padded size, or leave it out"
        )
