"""``measure_launch_overhead()``: what a launch, a guard and a module call cost on this machine.

Everything is host time, measured around the call with the queue of the GPU empty. Cases run in turn, round
after round, because a machine's speed drifts; the medians are shown. What this machine cannot show (it has no
GPU, no Triton) is listed as missing and never filled in.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgkit.display import Shown

if TYPE_CHECKING:
    import pandas as pd

NODES = (1, 4, 16, 64, 256, 1024)
GUARDS = (0, 10, 100, 1000)
DEPTHS = (0, 1, 10, 100)

#: The article's figures, as what they are: claims. Microseconds, from and to; then who says so, where.
CLAIMS: tuple[dict[str, Any], ...] = (
    {
        "what": "kernel launch",
        "low_us": 5.0,
        "high_us": 10.0,
        "source": "the article, heading 一次 decode 步的 CPU 账单 (the CPU bill of one decode step), which names "
        "PyTorch's CUDA Graphs post; that post has no such number",
    },
    {
        "what": "guard evaluation",
        "low_us": 10.0,
        "high_us": 100.0,
        "source": 'the article ("tens of microseconds"), heading 自定义 dispatcher：绕过 Dynamo guard 的全部原理 '
        "(the custom dispatcher)",
    },
)


@dataclass
class Case:
    """Something to call ``calls`` times in a row; ``count``: nodes, guarded values, depth (else 1)."""

    what: str
    count: int
    call: Callable[[], Any]
    calls: int = 20
    unit: str = ""
    samples_us: list[float] = field(default_factory=list)


@dataclass(repr=False)
class LaunchOverhead(Shown):
    """What was measured, where, and what was not.

    Attributes:
        rows: a dict a case, as :meth:`to_frame` gives them.
        missing: sentences: what could not be measured here, and why.
        about: device and versions.
    """

    rows: list[dict[str, Any]]
    missing: list[str]
    about: dict[str, Any]

    def to_frame(self) -> pd.DataFrame:
        """A row a case: ``what``, ``count`` with its ``unit``, ``median_us``, ``low_us`` and ``high_us``
        (10th and 90th percentile), ``over_none_us`` (over the case of the kind with count 0), ``samples``."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def facts(self) -> dict[str, Any]:
        """Everything as plain data, for JSON."""
        return {**self.about, "rows": self.rows, "claims": list(CLAIMS), "missing": self.missing}

    @classmethod
    def from_facts(cls, facts: dict[str, Any], **about: Any) -> LaunchOverhead:
        """Back from :meth:`facts`, for instance of a recording; ``about`` adds to what it says of itself."""
        own = {k: v for k, v in facts.items() if k not in ("rows", "claims", "missing")}
        return cls(facts["rows"], facts["missing"], own | about)

    def claims(self) -> pd.DataFrame:
        """The article's figures: ``what``, ``low_us``, ``high_us``, ``source``."""
        import pandas as pd

        return pd.DataFrame(list(CLAIMS))

    def plot(self, ax: Any = None) -> Any:
        """Every case as a bar, the claims as bands; see :func:`cgkit.plotting.launch_charts.launch_overhead`."""
        from cgkit.plotting import launch_charts

        return launch_charts.launch_overhead(self.to_frame(), self._about(), claims=self.claims(), ax=ax)

    def plot_nodes(self, ax: Any = None) -> Any:
        """A graph's launch against its number of nodes; needs a GPU's measurement."""
        from cgkit.plotting import launch_charts

        return launch_charts.against_nodes(self.to_frame(), self._about(), ax=ax)

    def _about(self) -> Any:
        from cgkit.plotting.style import About

        return About(device=str(self.about.get("device", "")), recorded=str(self.about.get("recorded", "")))

    def __repr__(self) -> str:
        lines = [f"LaunchOverhead on {self.about.get('device', '?')}, host time, medians"]
        for row in self.rows:
            count = f" x {row['count']} {row['unit']}" if row["unit"] else ""
            lines.append(f"  {row['what'] + count:<44} {row['median_us']:10.2f} us")
        for claim in CLAIMS:
            span = f"{claim['low_us']:g} to {claim['high_us']:g} us"
            lines.append(f"  claimed: {claim['what']:<35} {span:>13}")
        return "\n".join(lines + [f"  not measured: {sentence}" for sentence in self.missing])


def measure_launch_overhead(
    *,
    rounds: int = 50,
    nodes: Sequence[int] = NODES,
    guards: Sequence[int] = GUARDS,
    depths: Sequence[int] = DEPTHS,
) -> LaunchOverhead:
    """Measures what stands in the way of a kernel on this machine.

    On a GPU: an empty kernel as a torch operator and as a Triton kernel (through ``kernel[grid]`` and through
    :class:`cgkit.kernels.launch.CachedLaunch`), and a graph's launch against its number of nodes. On any machine: an
    operator through torch's dispatcher, an empty operator written in Python, Dynamo's guards against the number of
    values that they watch, and a module's call against the depth of nesting. Not to be run in a process in which
    the profiler has run: launches cost more there (:func:`cgkit.measuring.profile_step`).

    Args:
        rounds: samples of each case.
        nodes, guards, depths: the sizes to measure at. Guards and depths want a 0, from which ``over_none_us`` counts.

    Source: the article's "一次 decode 步的 CPU 账单" (the CPU bill of one decode step) and "三段开销，三个对应的武器"
    (three costs, three weapons); its figures are in :data:`CLAIMS`.
    """
    cuda = torch.cuda.is_available()
    missing: list[str] = []
    with torch.no_grad():
        cases = [*_operators(cuda), *_guards(guards), *_modules(depths)]
        if cuda:
            cases += [*_triton(missing), *_graphs(nodes)]
        else:
            missing += [
                "the launch of an empty kernel (torch operator, Triton kernel): needs a GPU",
                f"cudaGraphLaunch against {', '.join(map(str, nodes))} nodes: needs a GPU",
            ]
        _run(cases, rounds, torch.cuda.synchronize if cuda else _nothing)
    return LaunchOverhead(_rows(cases), missing, _machine())


def _run(cases: list[Case], rounds: int, synchronize: Callable[[], None]) -> None:
    """Samples every case ``rounds`` times, in turn; the first two rounds warm up."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds + 2):
            for case in cases:
                call, calls = case.call, case.calls
                call()
                synchronize()
                started = time.perf_counter_ns()
                for _ in range(calls):
                    call()
                taken = time.perf_counter_ns() - started
                synchronize()
                if number >= 2:
                    case.samples_us.append(taken / calls / 1e3)
    finally:
        if collecting:
            gc.enable()


def _rows(cases: list[Case]) -> list[dict[str, Any]]:
    none = {case.what: statistics.median(case.samples_us) for case in cases if case.count == 0}
    rows = []
    for case in cases:
        ordered = sorted(case.samples_us)
        median = statistics.median(ordered)
        rows.append(
            {
                "what": case.what,
                "count": case.count,
                "unit": case.unit,
                "median_us": median,
                "low_us": ordered[len(ordered) // 10],
                "high_us": ordered[len(ordered) * 9 // 10],
                "over_none_us": median - none[case.what] if case.what in none else None,
                "samples": len(ordered),
            }
        )
    return rows


# --- the cases -----------------------------------------------------------------------------------


def _operators(cuda: bool) -> Iterator[Case]:
    """One element, so that there is nothing to compute."""
    one = torch.zeros(1, device="cuda" if cuda else "cpu")
    yield Case(
        "torch operator, an empty kernel" if cuda else "torch operator (add_ on the CPU)",
        1,
        lambda: one.add_(0),
    )
    library = torch.library.Library("cgkit_launch", "FRAGMENT")
    if not hasattr(torch.ops.cgkit_launch, "nothing"):
        library.define("nothing(Tensor x) -> ()")
        library.impl("nothing", lambda x: None, "CompositeExplicitAutograd")
        _kept.append(library)
    packet, overload = torch.ops.cgkit_launch.nothing, torch.ops.cgkit_launch.nothing.default
    yield Case("empty Python operator, torch.ops.ns.name", 1, lambda: packet(one))
    yield Case("empty Python operator, its overload", 1, lambda: overload(one))


#: Libraries whose operators must stay.
_kept: list[Any] = []


def _triton(missing: list[str]) -> Iterator[Case]:
    try:
        from cgkit.kernels.triton_empty import empty_kernel
    except ImportError as error:
        missing.append(f"an empty Triton kernel: Triton is not installed ({error})")
        return
    from cgkit.kernels.launch import CachedLaunch

    one, cached = torch.zeros(16, device="cuda"), CachedLaunch(empty_kernel)
    tensors, grid = (one,), (1, 1, 1)
    yield Case("empty Triton kernel, kernel[grid](...)", 1, lambda: empty_kernel[grid](one))
    cached(grid, tensors)
    cached(grid, tensors)
    if cached.direct:
        yield Case("empty Triton kernel, cached direct launch", 1, lambda: cached(grid, tensors))
    else:
        missing.append("the cached direct launch: not known for this version of Triton")


def _graphs(nodes: Sequence[int]) -> Iterator[Case]:
    """A graph of n small kernels, launched once with the GPU idle, as a decode step launches it."""
    one = torch.zeros(1, device="cuda")
    one.add_(0)  # loads the kernel: that may not happen while recording
    for count in nodes:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(count):
                one.add_(0)
        yield Case("cudaGraphLaunch", count, graph.replay, calls=1, unit="nodes")


def _guards(counts: Sequence[int]) -> Iterator[Case]:
    """A compiled function that does nothing but was compiled for the values of ``count`` flags."""
    x = torch.zeros(1)
    for count in counts:
        # its own code object: Dynamo keeps what it compiled by code, and looks through all of it
        own = FunctionType(_watched.__code__.replace(), _watched.__globals__)
        compiled, flags = torch.compile(own, backend="eager"), [True] * count
        compiled(x, flags)
        yield Case("Dynamo's guards", count, lambda f=compiled, w=flags: f(x, w), unit="values watched")  # type: ignore[misc]


def _watched(x: torch.Tensor, flags: list[bool]) -> torch.Tensor:
    for flag in flags:
        if not flag:
            return x * 2
    return x + 1


class _Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def _modules(depths: Sequence[int]) -> Iterator[Case]:
    """Modules that only call the next one; depth 0 is a plain function."""
    x = torch.zeros(1)
    for depth in depths:
        module: Any = _identity
        if depth:
            module = nn.Identity()
            for _ in range(depth - 1):
                module = _Nested(module)
        yield Case("nn.Module call", depth, lambda m=module: m(x), unit="deep")  # type: ignore[misc]


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _machine() -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "cpu (no GPU)",
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def _nothing() -> None:
    pass


# --- cgkit bench launch-overhead -----------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``cgkit bench launch-overhead``."""
    parser.add_argument("--rounds", type=int, default=50, help="samples of each case (default: %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures; returns ``frame``, ``rows``, ``claims``, ``missing`` and the machine."""
    found = measure_launch_overhead(rounds=args.rounds)
    return {**found.facts(), "frame": found.to_frame()}
