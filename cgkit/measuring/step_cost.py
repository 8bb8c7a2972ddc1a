"""``StepCost``: what one step costs at each number of tokens, replayed from a graph and run without one.

The two sides of the article's "capture 尺寸：为什么默认不是所有 batch size" (capture sizes: why not every
batch size): padding makes a replayed step as dear as the size that it is padded to, and a batch above the
largest size pays for its launches. Costs come from a function, from numbers, or from what ``cgkit bench crossover`` and
``cgkit bench modes`` measured.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cgkit.display import Shown
from cgkit.errors import ConfigError

#: Names of the column that holds the number of tokens.
_SIZE_COLUMNS = ("batch", "size", "num_tokens", "batch_size")
#: The rows that say what a step costs where no graph is replayed, the first that is there.
UNCAPTURED = ("compiled", "NONE", "eager")
#: The rows that say what a replayed step costs under a mode.
REPLAYED = {"FULL": "FULL", "FULL_DECODE_ONLY": "FULL", "PIECEWISE": "PIECEWISE"}


class Curve:
    """A cost at some sizes, and by rule at all others.

    Between two points: on the line between them. Below the first: the first point's cost (nothing says that a
    smaller step is cheaper). Above the last: on along the line through the last two points if it rises, else the last
    point's cost.

    Args:
        points: size -> cost.
        what: how an error calls it.
        may_be_zero: whether 0 is a cost (of bytes it is, of time not).

    Raises:
        ConfigError: no points, a size that is no positive whole number, or a cost that is not positive and finite.
    """

    def __init__(self, points: Mapping[int, float], what: str = "cost", *, may_be_zero: bool = False) -> None:
        if not points:
            raise ConfigError(f"{what}: there is not one measured point")
        for size, cost in points.items():
            if not (size == size and int(size) == size and size >= 1):
                raise ConfigError(
                    f"{what} has a point at {size!r}: sizes are positive whole numbers of tokens"
                )
            if not (cost > 0 or (may_be_zero and cost == 0)) or not math.isfinite(cost):
                raise ConfigError(
                    f"{what} at {size} tokens is {cost!r}: it must be a positive, finite number"
                )
        self.sizes = sorted(int(size) for size in points)
        self.costs = [float(points[size]) for size in self.sizes]

    def __call__(self, size: int) -> float:
        sizes, costs = self.sizes, self.costs
        if size <= sizes[0]:
            return costs[0]
        if size > sizes[-1]:
            if len(sizes) == 1:
                return costs[0]
            slope = (costs[-1] - costs[-2]) / (sizes[-1] - sizes[-2])
            return costs[-1] + max(slope, 0.0) * (size - sizes[-1])
        right = bisect_left(sizes, size)
        if sizes[right] == size:
            return costs[right]
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return costs[right - 1] + share * (costs[right] - costs[right - 1])


class StepCost(Shown):
    """The cost of a step of ``n`` tokens: ``replayed(n)`` from a graph recorded for ``n``, ``uncaptured(n)`` without.

    Above the largest measured point an uncaptured step is never said to be cheaper than a replayed one: the same
    kernels run, and their launches come on top.

    Args:
        replayed, uncaptured: functions of the number of tokens, mappings of sizes to costs (:class:`Curve`), or a
            number for "always the same".
        unit: of the costs; a label only.
        source: where they come from; a label only.
    """

    def __init__(self, replayed: Any, uncaptured: Any, *, unit: str = "ms", source: str = "") -> None:
        self._replayed = _curve(replayed, "the replayed cost")
        self._uncaptured = _curve(uncaptured, "the uncaptured cost")
        self.unit, self.source = unit, source

    def replayed(self, size: int) -> float:
        """What replaying a graph recorded for ``size`` tokens costs, however many of them are padding."""
        return _checked(self._replayed(size), "replayed", size)

    def uncaptured(self, size: int) -> float:
        """What a step of ``size`` tokens costs that runs without a graph."""
        cost = _checked(self._uncaptured(size), "uncaptured", size)
        known = getattr(self._uncaptured, "sizes", None)
        return max(cost, self.replayed(size)) if known and size > known[-1] else cost

    @property
    def points(self) -> tuple[int, ...]:
        """The sizes at which the replayed cost was given, ascending; none for a function."""
        return tuple(getattr(self._replayed, "sizes", ()))

    @classmethod
    def of(cls, given: Any, mode: str = "FULL", *, source: str = "") -> StepCost:
        """A cost from whatever says it.

        Args:
            given: a :class:`StepCost`; a function ``(num_tokens, captured) -> cost``; a mapping of sizes to pairs
                (replayed, uncaptured); a DataFrame, or an object with ``to_frame()``, with the columns
                ``batch``, ``mode``, ``wall_ms`` (as ``cgkit bench crossover`` and ``modes`` give it) or
                ``batch``, ``replayed_ms``, ``uncaptured_ms``.
            mode: which rows of a frame are the replayed ones; the uncaptured ones are ``compiled``.
            source: where the figures come from.

        Raises:
            ConfigError: it is none of these, or lacks a column, a mode or a point.
        """
        if isinstance(given, StepCost):
            return given
        if hasattr(given, "to_frame"):
            given = given.to_frame()
        if hasattr(given, "columns"):
            return _of_frame(given, mode, source or str(given.attrs.get("recorded", "")))
        if isinstance(given, Mapping):
            return _of_pairs(given, source)
        if callable(given):
            return _of_function(given, source)
        raise ConfigError(
            f"step_cost={given!r}: give a function (num_tokens, captured) -> cost, a mapping of sizes to pairs "
            "(replayed, uncaptured), a frame of cgkit bench crossover, or StepCost(replayed, uncaptured)"
        )

    @classmethod
    def read(cls, path: str | Path, mode: str = "FULL") -> StepCost:
        """From a file: CSV as :meth:`of` takes the frame, or the JSON of ``cgkit bench crossover --json``.

        Raises:
            ConfigError: it cannot be read, or is none of the two.
        """
        import pandas as pd

        path = Path(path)
        try:
            if path.suffix.lower() == ".json":
                facts = json.loads(path.read_text(encoding="utf-8-sig"))
                frame = pd.DataFrame(facts["rows"] if isinstance(facts, dict) else facts)
            else:
                frame = _csv(path)
        except Exception as error:  # whatever a broken file makes pandas and its unpackers raise
            raise ConfigError(
                f"step cost {path}: it cannot be read as CSV with a header or as the JSON of cgkit bench crossover "
                f"({type(error).__name__}: {error})"
            ) from error
        try:
            return cls.of(frame, mode, source=path.name)
        except ConfigError as error:
            raise ConfigError(f"step cost {path}: {error}") from error

    def to_frame(self, sizes: Sequence[int] | None = None) -> Any:
        """``size``, ``replayed``, ``uncaptured`` at ``sizes`` (default: the measured points, or powers of two)."""
        import pandas as pd

        chosen = sizes if sizes is not None else self.points or [2**power for power in range(10)]
        rows = [(size, self.replayed(size), self.uncaptured(size)) for size in chosen]
        return pd.DataFrame(rows, columns=["size", "replayed", "uncaptured"])

    def __repr__(self) -> str:
        points = "a function"
        if self.points:
            points = f"{len(self.points)} points, {self.points[0]} to {self.points[-1]} tokens"
        source = f", {self.source}" if self.source else ""
        return f"StepCost({points}, in {self.unit}{source})"


def recorded_step_cost(shape: str = "llama-3.1-8b", mode: str = "FULL") -> StepCost:
    """What ``cgkit bench crossover`` measured on an H200 (``cgkit.recordings``), of a decode step without output
    projection, 256 tokens of context, random weights.

    Raises:
        RecordingError: there is no recording of ``shape``.
    """
    import pandas as pd

    from cgkit import recordings

    name = f"h200-crossover-{shape}"
    facts = recordings.load(name)
    made_on = recordings.about(name).recorded
    return StepCost.of(pd.DataFrame(facts["rows"]), mode, source=f"{shape} shape, recorded on {made_on}")


# --- inside ----------------------------------------------------------------------------------------------


def _curve(given: Any, what: str) -> Callable[[int], float]:
    if isinstance(given, Mapping):
        return Curve(given, what)
    if callable(given):
        return given
    if isinstance(given, (int, float)):
        return Curve({1: given}, what)
    raise ConfigError(
        f"{what} is {given!r}: give a function of the tokens, a mapping of sizes to costs, or a number"
    )


def _checked(cost: Any, what: str, size: int) -> float:
    if not (isinstance(cost, (int, float)) or hasattr(cost, "__float__")) or not 0 < float(cost) < math.inf:
        raise ConfigError(
            f"the {what} cost of {size} tokens is {cost!r}: a cost is a positive, finite number"
        )
    return float(cost)


def _of_function(given: Callable[..., Any], source: str) -> StepCost:
    try:
        inspect.signature(given).bind(1, True)
    except TypeError as error:
        raise ConfigError(
            "step_cost must take two arguments, (num_tokens, captured): captured=False asks for the cost of a step "
            "without a graph. With two functions of the tokens use StepCost(replayed, uncaptured)"
        ) from error
    except ValueError:  # no signature to look at
        pass
    name = getattr(given, "__name__", "")
    said = source or (name if name.isidentifier() else "")
    return StepCost(lambda size: given(size, True), lambda size: given(size, False), source=said)


def _of_pairs(given: Mapping[Any, Any], source: str) -> StepCost:
    try:
        replayed = {size: pair[0] for size, pair in given.items()}
        uncaptured = {size: pair[1] for size, pair in given.items()}
    except (TypeError, IndexError, KeyError) as error:
        raise ConfigError(
            "step_cost as a mapping has sizes as keys and pairs (replayed cost, uncaptured cost) as values; for two "
            "mappings use StepCost(replayed, uncaptured)"
        ) from error
    return StepCost(replayed, uncaptured, source=source)


def _csv(path: Path) -> Any:
    """The table in ``path``. Where rows have more cells than the header, pandas would take the first column for an
    index and each other for its neighbour: empty cells at their end are left out, and others are an error."""
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        return pd.read_csv(path, index_col=False)


def _of_frame(frame: Any, mode: str, source: str) -> StepCost:
    columns = list(frame.columns)
    size = next((name for name in _SIZE_COLUMNS if name in columns), None)
    if size is None:
        raise ConfigError(
            f"no column with the tokens of a step: one of {', '.join(_SIZE_COLUMNS)} (there are {columns})"
        )
    if {"replayed_ms", "uncaptured_ms"} <= set(columns):
        return StepCost(
            _points(frame, size, "replayed_ms"), _points(frame, size, "uncaptured_ms"), source=source
        )
    if not {"mode", "wall_ms"} <= set(columns):
        raise ConfigError(
            f"neither the columns mode and wall_ms (as cgkit bench crossover gives them) nor replayed_ms and "
            f"uncaptured_ms (there are {columns})"
        )
    if (
        "order" in columns and (frame["order"] == "in turn").any()
    ):  # of cgkit bench modes: only what ran interleaved
        frame = frame[frame["order"] == "in turn"]
    there = list(dict.fromkeys(map(str, frame["mode"])))
    wanted = REPLAYED.get(mode, mode)
    slow = next((name for name in UNCAPTURED if name in there), None)
    if wanted not in there or slow is None:
        missing = wanted if wanted not in there else " or ".join(UNCAPTURED)
        raise ConfigError(f"no rows of the mode {missing} (there are {', '.join(there)})")
    return StepCost(
        _points(frame[frame["mode"] == wanted], size, "wall_ms"),
        _points(frame[frame["mode"] == slow], size, "wall_ms"),
        source=source,
    )


def _points(frame: Any, size: str, cost: str) -> dict[int, float]:
    """Size -> the median of its rows."""
    import pandas as pd

    try:
        numbers = frame.assign(**{name: pd.to_numeric(frame[name]) for name in (size, cost)})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"column {size} or {cost} holds something that is no number ({error})") from error
    if (numbers[size].isna() & numbers[cost].notna()).any():
        raise ConfigError(f"column {size} has no number in a row whose {cost} has one")
    return dict(numbers.groupby(size)[cost].median().items())
