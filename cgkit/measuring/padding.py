"""Padding: what each batch size is padded to, what that wastes, and which batches have a graph at all.

Implements the article's "capture 尺寸：为什么默认不是所有 batch size" (capture sizes: why not every batch
size). The ladders are those of :mod:`cgkit.capturing.sizes`, which names where each was read; the coverage is
asked of the dispatcher itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgkit import events
from cgkit.capturing.dispatcher import CudagraphDispatcher
from cgkit.capturing.sizes import CaptureSizes, ladder
from cgkit.config import CUDAGraphMode
from cgkit.display import Shown
from cgkit.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

#: Where each ladder's rule was read.
SOURCES = {
    "article": "the article's printed list (vLLM's V0 engine)",
    "vllm-0.10.1": "vLLM 0.10.1, V1 engine, config/__init__.py",
    "vllm-0.33": "vLLM 0.33.0, config/vllm.py",
    "sglang": "SGLang 0.5.23, decode sizes, cuda_graph_config.py",
    "tensorrt-llm": "TensorRT-LLM, page 'torch.compile and piecewise CUDA graph'",
    "powers of two": "1, 2, 4, ... up to the least that covers max_num_seqs; no engine's, for comparison",
}
DIVISORS = ("real", "padded")


def powers_of_two(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the least power of two that covers ``max_num_seqs``: at most half of a step is padding."""
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs={max_num_seqs}: use a positive whole number")
    return tuple(2**power for power in range((max_num_seqs - 1).bit_length() + 1))


def named_ladder(
    name: str, max_num_seqs: int = 256, max_num_batched_tokens: int | None = None
) -> CaptureSizes:
    """The sizes of a ladder of :data:`SOURCES` by name.

    Raises:
        ConfigError: the name is unknown.
    """
    if name == "powers of two":
        return CaptureSizes(powers_of_two(max_num_seqs), ladder=name)
    if name not in SOURCES:
        raise ConfigError(f"ladder {name!r} is unknown; use one of {', '.join(SOURCES)}, or a list of sizes")
    return CaptureSizes(ladder(name, max_num_seqs, max_num_batched_tokens), ladder=name)


class Padding(Shown):
    """Several ladders side by side, for batches from 1 to ``most``; made by :func:`padding`.

    Above a ladder's largest size nothing is padded and nothing is captured.
    """

    def __init__(self, ladders: dict[str, CaptureSizes], most: int) -> None:
        self.ladders, self.most = ladders, most

    def to_frame(self) -> Any:
        """A row a ladder and batch: ``ladder``, ``batch``, ``captured``, ``padded`` (tokens that run),
        ``padding_tokens``, ``waste_of_real`` (padding over real tokens), ``waste_of_padded`` (over what runs)."""
        import pandas as pd

        frames = [
            sizes.to_frame(range(1, self.most + 1)).assign(ladder=name)
            for name, sizes in self.ladders.items()
        ]
        frame = pd.concat(frames, ignore_index=True)
        return frame[["ladder", *(column for column in frame.columns if column != "ladder")]]

    def summary(self) -> Any:
        """A row a ladder: ``sizes`` (their number), ``largest``, the share of batches to ``most`` that are
        captured, the mean waste over all batches to ``most`` by either divisor (each batch equally often), and
        ``source``."""
        import pandas as pd

        rows = []
        for name, part in self.to_frame().groupby("ladder", sort=False):
            sizes = self.ladders[str(name)]
            rows.append(
                {
                    "ladder": name,
                    "sizes": len(sizes),
                    "largest": sizes.largest,
                    "captured_share": part["captured"].mean(),
                    "mean_waste_of_real": part["padding_tokens"].sum() / part["batch"].sum(),
                    "mean_waste_of_padded": part["padding_tokens"].sum() / part["padded"].sum(),
                    "source": SOURCES.get(str(name), "given by the caller"),
                }
            )
        return pd.DataFrame(rows)

    def plot(self, about: Any = None, *, seen: Sequence[int] = (), ax: Any = None) -> Any:
        """The staircases; ``seen``: batch sizes that occurred, marked on them."""
        from cgkit.plotting.padding_charts import staircase

        return staircase(self.to_frame(), about, seen=seen, ax=ax)

    def plot_waste(self, divisor: str, about: Any = None, *, ax: Any = None) -> Any:
        """Waste against batch size; ``divisor``: "real" or "padded" tokens. It has no default: 33 -> 40 is 21 % of
        the real tokens and 17.5 % of the padded ones."""
        from cgkit.plotting.padding_charts import waste

        return waste(self.to_frame(), check_divisor(divisor), about, ax=ax)

    def __repr__(self) -> str:
        lines = [f"Padding of {len(self.ladders)} ladders, batches 1 to {self.most}"]
        for row in self.summary().to_dict("records"):
            lines.append(
                f"  {row['ladder']:<14} {row['sizes']:>4} sizes to {row['largest']:<5} padding over all batches: "
                f"{row['mean_waste_of_real']:.1%} of the real, {row['mean_waste_of_padded']:.1%} of the padded tokens; "
                f"{row['captured_share']:.0%} of the batches captured"
            )
        return "\n".join(lines)


def padding(
    ladders: Mapping[str, Sequence[int] | CaptureSizes | None] | Sequence[str] | None = None,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int | None = None,
    most: int | None = None,
) -> Padding:
    """Ladders side by side.

    Args:
        ladders: names of :data:`SOURCES`, or name -> sizes (None: the ladder of that name). Default: all of them.
        max_num_seqs, max_num_batched_tokens: what the ladders of engines depend on.
        most: the largest batch to look at; default: ``max_num_seqs``.

    Raises:
        ConfigError: an unknown name, or sizes that make no sense.
    """
    chosen = list(SOURCES) if ladders is None else ladders
    pairs = chosen.items() if isinstance(chosen, Mapping) else ((name, None) for name in chosen)
    found: dict[str, CaptureSizes] = {}
    for name, sizes in pairs:
        if sizes is None:
            found[name] = named_ladder(name, max_num_seqs, max_num_batched_tokens)
        else:
            found[name] = sizes if isinstance(sizes, CaptureSizes) else CaptureSizes(sizes, ladder=name)
    if not found:
        raise ConfigError("no ladder was named: give names, or a mapping of names to sizes")
    (most,) = (most or max_num_seqs,)
    if most < 1:
        raise ConfigError(f"most={most}: the largest batch to look at is at least 1")
    return Padding(found, most)


def check_divisor(divisor: str) -> str:
    """``divisor`` if it is "real" or "padded".

    Raises:
        ConfigError: it is neither.
    """
    if divisor not in DIVISORS:
        raise ConfigError(
            f"divisor={divisor!r}: use 'real' (padding over the tokens asked for) or 'padded' (over those that run)"
        )
    return divisor


# --- coverage --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coverage(Shown):
    """Which mode each batch size gets, decode batches and others apart; made by :func:`coverage`."""

    mode: str
    rows: list[dict[str, Any]]

    def to_frame(self) -> Any:
        """A row a batch and kind: ``kind`` ("decode": uniform, "mixed"), ``batch``, ``mode`` ("FULL", "PIECEWISE" or
        "not captured"), ``padded``."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=["kind", "batch", "mode", "padded"])

    def plot(self, about: Any = None, *, ax: Any = None) -> Any:
        """The strip from 1 to the largest batch, a row a kind."""
        from cgkit.plotting.padding_charts import coverage
        from cgkit.plotting.style import About

        return coverage(self.to_frame(), about or About(mode=self.mode), ax=ax)

    def __repr__(self) -> str:
        frame = self.to_frame()
        lines = [f"Coverage of {self.mode}, batches 1 to {frame['batch'].max()}"]
        for kind, part in frame.groupby("kind", sort=False):
            counts = ", ".join(
                f"{count} {mode}" for mode, count in part["mode"].value_counts(sort=False).items()
            )
            lines.append(f"  {kind}: {counts}")
        return "\n".join(lines)


def coverage(dispatcher: CudagraphDispatcher | Any, most: int | None = None) -> Coverage:
    """What the dispatcher answers for each batch size from 1 to ``most``.

    Args:
        dispatcher: one with its keys set, or what has one as ``.dispatcher`` (:class:`CapturedGraphs`).
        most: default: a sixteenth above the largest recorded size.

    Raises:
        ConfigError: its keys are not set yet: every batch would come out as not captured.
    """
    found = getattr(dispatcher, "dispatcher", dispatcher)
    if not found.keys_initialized:
        raise ConfigError(
            "the dispatcher's keys are not set, so it would replay nothing yet: capture first, or call "
            "initialize_cudagraph_keys()"
        )
    most = most or (found.sizes.largest + max(1, found.sizes.largest // 16) if found.sizes else 1)
    rows = []
    for kind, uniform in (("decode", True), ("mixed", False)):
        for batch in range(1, most + 1):
            route = found.route_of(batch, uniform)
            name = route.mode.name if route.mode else "not captured"
            rows.append({"kind": kind, "batch": batch, "mode": name, "padded": route.num_tokens})
    return Coverage(found.mode.name, rows)


def planned_coverage(
    sizes: CaptureSizes | Sequence[int] | str, mode: CUDAGraphMode | str, *, max_num_seqs: int = 256,
    most: int | None = None,
) -> Coverage:  # fmt: skip
    """The coverage that ``sizes`` (a list, or a ladder's name) would give under ``mode``; nothing is captured.

    A decode batch has at most ``max_num_seqs`` requests, so FULL graphs of decode batches end there.
    """
    if isinstance(sizes, str):
        sizes = named_ladder(sizes, max_num_seqs)
    resolved = sizes if isinstance(sizes, CaptureSizes) else CaptureSizes(sizes)
    dispatcher = CudagraphDispatcher(mode, resolved)
    uniform = [size for size in resolved if size <= resolved.pad(min(max_num_seqs, resolved.largest))]
    dispatcher.initialize_cudagraph_keys(dispatcher.planned_keys(uniform_sizes=uniform))
    return coverage(dispatcher, most)


# --- under a distribution of batches -----------------------------------------------------------------------


class BatchHistogram:
    """Counts the tokens of each step that a runner executes inside the ``with`` block.

    ::

        with BatchHistogram() as histogram:
            runner.generate(prompts)
        expected_waste(histogram.to_frame(), padding())
    """

    def __init__(self, kind: str | None = None) -> None:
        """``kind``: only "decode" or only "prefill" steps; None: all."""
        self.kind = kind
        self._counts: dict[int, int] = {}
        self._undo: Any = None

    def __enter__(self) -> BatchHistogram:
        self._undo = events.subscribe(events.StepRan, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        self._undo()

    def _note(self, step: events.StepRan) -> None:
        if self.kind in (None, step.kind):
            self._counts[step.num_tokens] = self._counts.get(step.num_tokens, 0) + 1

    def to_frame(self) -> Any:
        """``batch`` (tokens of the step) and ``count``, ascending."""
        import pandas as pd

        return pd.DataFrame(sorted(self._counts.items()), columns=["batch", "count"])

    def __repr__(self) -> str:
        return f"BatchHistogram({sum(self._counts.values())} steps of {len(self._counts)} different sizes)"


def as_histogram(histogram: pd.DataFrame | pd.Series | Mapping[int, float] | BatchHistogram) -> Any:
    """A histogram of batch sizes as a DataFrame ``batch``, ``count``.

    ``histogram``: such a frame, a Series indexed by batch, a dict batch -> how often, or a :class:`BatchHistogram`.

    Raises:
        ConfigError: a batch is no positive whole number, a count is negative, or there is nothing in it.
    """
    import pandas as pd

    if isinstance(histogram, BatchHistogram):
        histogram = histogram.to_frame()
    if isinstance(histogram, pd.Series):
        pairs = list(histogram.items())
    elif isinstance(histogram, pd.DataFrame):
        missing = {"batch", "count"} - set(histogram.columns)
        if missing:
            raise ConfigError(
                f"the histogram has no column {', '.join(sorted(missing))}; it needs batch and count"
            )
        pairs = list(zip(histogram["batch"], histogram["count"]))
    else:
        pairs = list(histogram.items())
    wrong = [batch for batch, _ in pairs if not (batch == batch and int(batch) == batch and batch >= 1)]
    if wrong:
        raise ConfigError(
            f"the histogram has the batch {wrong[0]!r}: batches are positive whole numbers of tokens"
        )
    if any(not count >= 0 for _, count in pairs) or not any(count for _, count in pairs):
        raise ConfigError("the histogram's counts must not be negative, and one of them must be above 0")
    frame = pd.DataFrame([(int(b), float(c)) for b, c in pairs], columns=["batch", "count"])
    return frame.groupby("batch", as_index=False)["count"].sum()


class ExpectedWaste(Shown):
    """How much is padding, and how much falls off the graphs, under a distribution; made by :func:`expected_waste`."""

    def __init__(self, rows: list[dict[str, Any]], histogram: Any) -> None:
        self._rows, self.histogram = rows, histogram

    def to_frame(self) -> Any:
        """A row a ladder: ``ladder``, ``sizes``, ``waste_of_real`` and ``waste_of_padded`` (all padding over all
        real tokens, or over all that run), ``captured_steps`` and ``captured_tokens`` (shares with a graph)."""
        import pandas as pd

        columns = ["ladder", "sizes", "waste_of_real", "waste_of_padded", "captured_steps", "captured_tokens"]
        return pd.DataFrame(self._rows, columns=columns)

    def plot(self, divisor: str, about: Any = None, *, ax: Any = None) -> Any:
        """A bar a ladder; ``divisor``: "real" or "padded" tokens."""
        from cgkit.plotting.padding_charts import expected

        return expected(self.to_frame(), check_divisor(divisor), about, ax=ax)

    def __repr__(self) -> str:
        steps = int(self.histogram["count"].sum())
        lines = [f"ExpectedWaste over {steps:,} steps, {self.histogram['batch'].min()} to "
                 f"{self.histogram['batch'].max()} tokens"]  # fmt: skip
        for row in self._rows:
            lines.append(
                f"  {row['ladder']:<14} {row['waste_of_real']:.1%} of the real, {row['waste_of_padded']:.1%} of the "
                f"padded tokens; {row['captured_steps']:.1%} of the steps have a graph"
            )
        return "\n".join(lines)


def expected_waste(
    histogram: Any, ladders: Padding | Mapping[str, Sequence[int] | CaptureSizes | None] | Sequence[str]
) -> ExpectedWaste:
    """The waste of each of ``ladders`` if batches come as often as ``histogram`` says (:func:`as_histogram`).

    Args:
        histogram: batch size -> how often.
        ladders: what :func:`padding` gave, or what it takes.

    Raises:
        ConfigError: an unknown name, or sizes or a histogram that make no sense.
    """
    counts = as_histogram(histogram)
    ladders = ladders if isinstance(ladders, Padding) else padding(ladders)
    rows = []
    for name, sizes in ladders.ladders.items():
        real = padded = captured_steps = captured_tokens = 0.0
        for batch, count in zip(counts["batch"], counts["count"]):
            real += batch * count
            padded += sizes.pad(int(batch)) * count
            if sizes.is_captured(int(batch)):
                captured_steps += count
                captured_tokens += batch * count
        rows.append(
            {
                "ladder": name,
                "sizes": len(sizes),
                "waste_of_real": (padded - real) / real,
                "waste_of_padded": (padded - real) / padded,
                "captured_steps": captured_steps / counts["count"].sum(),
                "captured_tokens": captured_tokens / real,
            }
        )
    return ExpectedWaste(rows, counts)
