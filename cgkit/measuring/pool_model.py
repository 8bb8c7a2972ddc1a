"""``PoolModel``: what a list of capture sizes takes of the device's memory.

After the article's "显存账：CUDA Graph 的池化与每档成本" (the memory bill: pooling and what each size costs). All
graphs of a list share one pool and are recorded from large to small, so the smaller ones fit into what the
largest left: a pool's high-water mark does not add up. The model is therefore

    bytes(sizes) = shared(largest size) + the sum of each(size) over all sizes

``shared`` is what the pool reserves for the largest size and for whatever smaller ones come with it; ``each``
is what a size adds in any case: executable graphs, which the driver keeps outside of the pool, static buffers
of its own. Measured and predicted pools are entered as ``shared``, with **all** smaller candidates recorded:
what smaller sizes make a pool grow by (segments for small blocks, holes that nothing fits) is no sum either, it
comes with the first of them. So a list with fewer small sizes may take less than the model says, by a segment
or two; that one takes more was not seen (an allocator that fragments gives no guarantee).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgkit.errors import ConfigError
from cgkit.measuring.step_cost import Curve

if TYPE_CHECKING:
    from cgkit.compiling import CompiledGraph

#: The least that CUDA's caching allocator takes from the driver at once.
SEGMENT = 2 * 2**20
_PREDICTED = {"num_tokens", "reserved_before_bytes", "reserved_after_bytes", "peak_allocated_bytes"}


@dataclass(frozen=True)
class PoolModel:
    """``shared(largest) + sum(each(size))``; see the module.

    Attributes:
        shared: largest size -> bytes that the pool reserves.
        each: size -> bytes that it adds beside all others.
        source: where the figures come from.
    """

    shared: Callable[[int], float]
    each: Callable[[int], float]
    source: str = ""

    def __repr__(self) -> str:
        return f"PoolModel({self.source or 'given'}: shared(largest) + sum(each(size)); .bytes(sizes))"

    def bytes(self, sizes: Sequence[int]) -> int:
        """What recording ``sizes``, large to small, takes; 0 for none. Rounded up."""
        if not sizes:
            return 0
        return math.ceil(self.shared_bytes(max(sizes)) + sum(self.each_bytes(size) for size in sizes))

    def shared_bytes(self, largest: int) -> float:
        """``shared``, checked."""
        return _checked(self.shared(largest), "shared", largest)

    def each_bytes(self, size: int) -> float:
        """``each``, checked."""
        return _checked(self.each(size), "each", size)

    @classmethod
    def of(cls, given: Any, *, graph_bytes: float = 0.0) -> PoolModel:
        """A model from whatever says it.

        Args:
            given: a :class:`PoolModel`; a number, a function or a mapping (interpolated) of bytes **that each
                size adds** (nothing is shared then); the frame of :func:`cgkit.predict_pool`, of a ``Ledger``,
                or an object that gives one (``to_frame()``).
            graph_bytes: added for each size: what lies outside of the pool.

        Raises:
            ConfigError: it is none of these, or a number is negative.
        """
        extra = _checked(graph_bytes, "graph_bytes", 0)
        if isinstance(given, PoolModel):
            if not extra:
                return given
            return cls(given.shared, lambda size: given.each(size) + extra, given.source)
        if hasattr(given, "to_frame"):
            given = given.to_frame()
        if hasattr(given, "columns"):
            return _of_frame(given, extra)
        if isinstance(given, Mapping):
            curve = _bytes_curve(given)
            return cls(_nothing, lambda size: curve(size) + extra, "bytes of each size, given")
        if callable(given):
            return cls(_nothing, lambda size: given(size) + extra, "bytes of each size, given")
        if isinstance(given, (int, float)):
            return cls(_nothing, lambda size: given + extra, f"{given:,.0f} bytes a size, given")
        raise ConfigError(
            f"memory={given!r}: give bytes that each size adds (a number, a function, a mapping), the result of "
            "predict_pool, or PoolModel(shared, each)"
        )


def predicted_memory(compiled: CompiledGraph, sizes: Sequence[int], **arguments: Any) -> PoolModel:
    """The model of ``compiled``: for each of ``sizes`` the pool of all sizes up to it is predicted.

    ``arguments`` are those of :func:`cgkit.predict_pool` (mode, allocator, ...). Between sizes it is interpolated.
    Executable graphs are not in it: ``PoolModel.of(model, graph_bytes=...)`` adds them.

    Raises:
        ConfigError, CompileError: as :func:`cgkit.predict_pool`.
    """
    from cgkit.measuring.predict_pool import predict_pool

    ordered = sorted(set(sizes))
    pools = {
        largest: float(predict_pool(compiled, ordered[: index + 1], **arguments).reserved_bytes)
        for index, largest in enumerate(ordered)
    }
    return PoolModel(_bytes_curve(_rising(pools)), _nothing, "predicted by predict_pool")


def recorded_memory(
    shape: str = "llama-3.1-8b", mode: str = "FULL", graph_bytes: float | None = None
) -> PoolModel:
    """What the memory ledger of an H200 says of ``shape`` (11 sizes up to 64 tokens; ``cgkit.recordings``).

    ``shared`` is the pool's reserve when recorded from small to large: there each size was the largest so far.
    Above 64 tokens the measured peak is continued along a line and rounded up to segments of 2 MiB: a lower bound.
    ``graph_bytes``: what each size adds outside of the pool; None: what the driver gave out beyond torch's own reserve
    when the first graphs of the process were recorded, over the number of sizes. That is an upper bound: kernels that
    were loaded meanwhile are in it. (Recorded again in the same process it was 0.)

    Raises:
        RecordingError: there is no recording of ``shape``.
    """
    from cgkit import recordings

    ledger = recordings.load(f"h200-memory-ledger-{shape}")
    facts = recordings.load(f"h200-memory-{shape}")
    rising = ledger[ledger["run"] == "small to large"]
    shared = _bytes_curve(_rising(rising.groupby("num_tokens")["reserved_after_bytes"].max().to_dict()))
    rows = ledger[ledger["mode"] == ("PIECEWISE" if mode == "PIECEWISE" else "FULL")]
    peaks = _bytes_curve(rows.groupby("num_tokens")["peak_allocated_bytes"].max().to_dict())
    measured = max(rising["num_tokens"])
    if graph_bytes is None:
        first = facts["runs"]["first of the process"]
        sizes = len(facts["sizes"])
        graph_bytes = max(first["driver_bytes"] - first["torch_reserved_growth_bytes"], 0) / sizes
    extra = float(graph_bytes)

    def reserve(largest: int) -> float:
        if largest <= measured:
            return shared(min(size for size in shared.sizes if size >= largest))
        return max(shared(measured), _segments(peaks(largest)))

    made_on = recordings.about(f"h200-memory-ledger-{shape}").recorded
    return PoolModel(reserve, lambda size: extra, f"{shape} shape, recorded on {made_on}")


# --- inside ----------------------------------------------------------------------------------------------


def _nothing(largest: int) -> float:
    return 0.0


def _checked(value: Any, what: str, size: int) -> float:
    if (
        not (isinstance(value, (int, float)) or hasattr(value, "__float__"))
        or not 0 <= float(value) < math.inf
    ):
        raise ConfigError(f"memory: {what} of {size} tokens is {value!r} bytes; it must be 0 or more")
    return float(value)


def _bytes_curve(points: Mapping[Any, Any]) -> Curve:
    whole = {int(size): float(value) for size, value in points.items()}
    return Curve(whole, "memory (bytes)", may_be_zero=True)


def _rising(points: Mapping[Any, Any]) -> dict[int, float]:
    """A list with a larger largest size never reserves less."""
    most, out = 0.0, {}
    for size in sorted(points):
        most = max(most, float(points[size]))
        out[int(size)] = most
    return out


def _segments(count: float) -> float:
    return math.ceil(count / SEGMENT) * SEGMENT


def _growth(frame: Any) -> dict[int, float]:
    """Size -> what the pool grew by while it was recorded, over all modes."""
    grown = (
        (frame["reserved_after_bytes"] - frame["reserved_before_bytes"]).groupby(frame["num_tokens"]).sum()
    )
    return {int(size): float(value) for size, value in grown.items()}


def _of_frame(frame: Any, extra: float) -> PoolModel:
    """From recordings in a row. Small to large, each size was the largest so far: its pool is known. Large to
    small, that of all sizes together is; of a list that ends lower, the peak in whole segments and what its
    sizes made the pool grow by."""
    missing = _PREDICTED - set(frame.columns)
    if missing or not len(frame):
        raise ConfigError(
            f"memory as a frame needs the columns of predict_pool(...).to_frame(), and rows; it lacks "
            f"{', '.join(sorted(missing)) or 'rows'}"
        )
    order = list(dict.fromkeys(int(size) for size in frame["num_tokens"]))
    after = frame.groupby("num_tokens")["reserved_after_bytes"].max()
    if order[0] != max(order):
        reserve = {size: float(after[size]) for size in order}
    else:
        top, growth, grown = float(frame["reserved_after_bytes"].max()), _growth(frame), 0.0
        peaks = frame.groupby("num_tokens")["peak_allocated_bytes"].max()
        reserve = {order[0]: top}
        for size in sorted(order[1:]):
            grown += growth[size]
            reserve[size] = min(_segments(float(peaks[size])) + grown, top)
    return PoolModel(_bytes_curve(_rising(reserve)), lambda size: extra, "predicted by predict_pool")
