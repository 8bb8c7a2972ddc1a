"""What the counters must be, from layers, sizes and pieces, beside what they are.

A benchmark says "slow"; a counter that is off says which stage did not do its work. The laws are the
article's ("调试与观测：两个官方入口"): L splitting calls make 2L + 1 pieces, L + 1 of them to compile, and
sizes × pieces graphs. They are stated with what makes them differ here (splitting calls in a row, none at all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgkit.compiling import CompiledGraph
from cgkit.config import COMPILERS
from cgkit.counters import CompilationCounter, compilation_counter
from cgkit.display import Shown
from cgkit.errors import CgkitError
from cgkit.tracing.loaded import LoadedTrace

if TYPE_CHECKING:
    import pandas as pd

    from cgkit.splitting import SplitGraph

#: What stands before a row: as expected, not so, or nothing to compare with.
SIGNS = {True: "=", False: "≠", None: "·"}


@dataclass(frozen=True)
class Law:
    """One counter's expected value (None: it follows from nothing here), and why."""

    expected: int | None
    why: str


class CountersTable(Shown):
    """Expected beside seen, one row a counter."""

    def __init__(self, model: str, laws: Mapping[str, Law], seen: Mapping[str, int], over: str) -> None:
        self.model_name = model
        self.laws = dict(laws)
        self.seen = dict(seen)
        self.over = over

    @property
    def wrong(self) -> list[str]:
        """The counters that are not what they must be."""
        return [name for name in self.laws if self._fits(name) is False]

    def _fits(self, name: str) -> bool | None:
        expected = self.laws[name].expected
        return None if expected is None else self.seen[name] == expected

    def to_frame(self) -> pd.DataFrame:
        """``sign`` ("=", "≠", "·" where nothing is expected), ``counter``, ``expected``, ``seen``, ``law``."""
        import pandas as pd

        rows = [
            (SIGNS[self._fits(name)], name, law.expected, self.seen[name], law.why)
            for name, law in self.laws.items()
        ]
        frame = pd.DataFrame(rows, columns=["sign", "counter", "expected", "seen", "law"])
        return frame.astype({"expected": "Int64", "seen": "int64"})

    def __repr__(self) -> str:
        verdict = (
            f"{len(self.wrong)} of {len(self.laws)} counters differ" if self.wrong else "all as expected"
        )
        lines = [f"Counters of {self.model_name} ({self.over}): {verdict}"]
        width = max(len(name) for name in self.laws)
        lines.append(f"    {'counter':<{width}}  {'expected':>8}  {'seen':>6}  law")
        for name, law in self.laws.items():
            expected = "" if law.expected is None else str(law.expected)
            lines.append(
                f"  {SIGNS[self._fits(name)]} {name:<{width}}  {expected:>8}  {self.seen[name]:>6}  {law.why}"
            )
        return "\n".join(lines)


def counters_table(of: Any, seen: Any = None) -> CountersTable:
    """The counters that ``of`` must have caused, beside those that were seen.

    Args:
        of: a :class:`CompiledGraph`, or what has one as ``.compiled`` (recorded graphs, a decorated
            model's stages, a runner's executor).
        seen: a counter, a mapping by name, or a :class:`cgkit.measuring.compile_log.CompilationLog`. None: the
            process' own counter, which must then have been reset before this model.

    Raises:
        CgkitError: ``of`` holds no compiled pieces.
    """
    captured = of if hasattr(of, "dispatcher") else getattr(of, "captured", None)
    compiled = of if isinstance(of, CompiledGraph) else getattr(of, "compiled", None)
    if not isinstance(compiled, CompiledGraph):
        raise CgkitError(
            f"counters_table() was given {type(of).__name__}, which holds no compiled pieces; pass what "
            "cgkit.compile_pieces or cgkit.capture gave"
        )
    over = "in this process since the last reset" if seen is None else "in the block that was recorded"
    counts = compilation_counter if seen is None else getattr(seen, "counters", seen)
    values = dict(counts) if isinstance(counts, Mapping) else counts.as_dict()
    laws = {**_before_compiling(compiled.split), **_compiling(compiled), **_capturing(compiled, captured)}
    order = {name: laws[name] for name in CompilationCounter().as_dict() if name in laws}
    return CountersTable(compiled.model_name, order, {name: int(values.get(name, 0)) for name in order}, over)


def _before_compiling(split: SplitGraph) -> dict[str, Law]:
    splitting = [piece for piece in split.pieces if piece.is_splitting]
    calls = sum(_splits(op, split) for piece in splitting for op in piece.ops)
    count, inner = len(splitting), 2 * len(splitting) + 1
    gone = int(bool(split.pieces) and split.pieces[0].is_splitting) if count else 0
    gone += int(split.pieces[-1].is_splitting) if count else 0
    gone += max(0, inner - gone - len(split.pieces))
    ends = f", less {gone} where nothing lies before, between or behind" if gone else ""
    said = f"L = {count}" if calls == count else f"L = {count} ({calls} calls: those in a row share a piece)"
    traced = split.traced is not None
    stored = split.traced if isinstance(split.traced, LoadedTrace) else None
    loaded = stored is not None
    dynamo = traced and (stored is None or stored.is_remade)
    return {
        "num_models_seen": Law(
            None, "1 for a decorated model or a runner, 0 where stages are called by hand"
        ),
        "num_graphs_seen": Law(
            int(dynamo),
            "a bare fx graph: Dynamo saw none"
            if not traced
            else "its trace was loaded"
            + (", and it was traced to be looked at" if dynamo else ": Dynamo saw none")
            if loaded
            else "one graph a model",
        ),
        "num_traces_loaded": Law(int(loaded), "models whose trace another process stored"),
        "num_piecewise_graphs_seen": Law(inner - gone, f"2L + 1 pieces, {said}{ends}"),
        "num_piecewise_capturable_graphs_seen": Law(
            count + 1 - gone, f"L + 1 of them to compile and record{ends}"
        ),
        "dynamo_as_is_count": Law(0, "only models at level 1"),
    }


def _splits(op: str, split: SplitGraph) -> bool:
    """Whether ``op`` (``ns::name[.overload]``) is one of those that the graph was cut at."""
    names = {name.partition(".")[0] for name in split.splitting_ops}
    return op.partition(".")[0] in names


def _compiling(compiled: CompiledGraph) -> dict[str, Law]:
    pieces = [one for backend in compiled.backends for one in backend.compiled]
    static = list(dict.fromkeys(one.shape for one in pieces if one.shape is not None))
    shapes = f" × {1 + len(static)} shapes (any, {', '.join(map(str, static))})" if static else ""
    kinds = {name: "eager" if name == "eager" else "inductor" for name in COMPILERS}
    different = {
        kind: len({p.key for p in pieces if kinds.get(p.adaptor) == kind and not p.loaded})
        for kind in ("inductor", "eager")
    }
    others = sum(p.adaptor not in kinds for p in pieces)
    loaded = len({p.key for p in pieces if p.loaded})
    law = f"different contents × shapes, by Inductor{f', less {loaded} loaded' if loaded else ''}"
    return {
        "num_backend_compilations": Law(
            len(pieces), f"{len(compiled.backends)} pieces{shapes}: one request each"
        ),
        "num_inductor_compiles": Law(None if others else different["inductor"], law),
        "num_eager_compiles": Law(different["eager"], "the same, by the eager adaptor"),
        "num_compiled_artifacts_loaded": Law(loaded, "of these, read from the compile cache instead"),
    }


def _capturing(compiled: CompiledGraph, captured: Any) -> dict[str, Law]:
    if captured is None:
        law = Law(None, "what was recorded from these pieces is known where the recorded graphs are given")
        return {"num_gpu_runner_capture_triggers": law, "num_cudagraph_captured": law}
    keys = captured.dispatcher.cudagraph_keys
    sizes = {mode.name: len(held) for mode, held in keys.items() if held}
    pieces = len(compiled.backends)
    graphs = sum(count * (pieces if mode == "PIECEWISE" else 1) for mode, count in sizes.items())
    each = ", ".join(f"{count} {mode}" for mode, count in sizes.items()) or "nothing is recorded"
    terms = [
        f"{count} sizes × {pieces} pieces" if mode == "PIECEWISE" else f"{count} sizes"
        for mode, count in sizes.items()
    ]
    return {
        "num_gpu_runner_capture_triggers": Law(sum(sizes.values()), f"sizes asked for: {each}"),
        "num_cudagraph_captured": Law(graphs, " + ".join(terms) or "nothing is recorded"),
    }
