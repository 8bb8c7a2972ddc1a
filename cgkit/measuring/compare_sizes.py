"""A plan of capture sizes beside the lists of the article and of three engines, each cut to the same budget.

The lists are those of :mod:`cgkit.measuring.padding`. A list that exceeds the budget loses its largest sizes, as with
the engines' own option for the largest size; because that is not the best that can be made of a list, the cost with the
best part of the same list is said as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cgkit.config import LADDERS
from cgkit.display import Shown
from cgkit.errors import ConfigError
from cgkit.measuring.capture_plan import CapturePlan
from cgkit.measuring.padding import named_ladder
from cgkit.measuring.plan_sizes import TRIMMED, best_part, cut_to_budget

#: The article's trimmed list, by a name beside the engines'.
TRIMMED_NAME = "trimmed"


@dataclass(frozen=True, repr=False)
class SizesComparison(Shown):
    """Lists side by side; made by :func:`compare_sizes`.

    Attributes:
        plan: what they are compared with.
        ladders: name -> the list, cut to the plan's budget (and to the largest size allowed, if there is one).
        best: name -> the best part of the list within the budget.
        whole: name -> the list as it is.
    """

    plan: CapturePlan
    ladders: dict[str, CapturePlan]
    best: dict[str, CapturePlan]
    whole: dict[str, CapturePlan]

    def to_frame(self) -> Any:
        """A row a list, the plan first: ``list``, ``sizes`` (their number), ``of`` (before it was cut),
        ``largest``, ``graphs``, ``expected_step_cost``, ``against_plan`` (a ratio), ``best_part_cost``,
        ``waste`` (of the tokens that run), ``captured_steps`` (a share), ``pool_bytes``."""
        import pandas as pd

        least = self.plan.expected_step_cost
        rows = []
        for name, one in {"plan": self.plan, **self.ladders}.items():
            best = self.best.get(name)
            rows.append(
                {
                    "list": name,
                    "sizes": len(one.sizes),
                    "of": len(self.whole[name].sizes) if name in self.whole else len(one.sizes),
                    "largest": one.sizes[-1] if one.sizes else 0,
                    "graphs": one.graphs,
                    "expected_step_cost": one.expected_step_cost,
                    "against_plan": one.expected_step_cost / least,
                    "best_part_cost": best.expected_step_cost if best is not None else None,
                    "waste": one.waste,
                    "captured_steps": one.captured_steps,
                    "pool_bytes": one.pool_bytes,
                }
            )
        return pd.DataFrame(rows)

    def facts(self) -> dict[str, Any]:
        """For JSON: ``plan`` and ``ladders`` by name."""
        ladders = {
            name: {
                **one.facts(),
                "whole": list(self.whole[name].sizes),
                "best_part": self.best[name].facts(),
            }
            for name, one in self.ladders.items()
        }
        return {"plan": {**self.plan.facts(), "options": self.plan.options()}, "ladders": ladders}

    def plot(self, about: Any = None, *, ax: Any = None) -> Any:
        """The expected cost of a step with each list."""
        from cgkit.plotting.plan_charts import compare

        unit = self.plan.workload.cost.unit
        return compare(self.to_frame(), about or self.plan._about(), unit=unit, ax=ax)

    def overview(self, about: Any = None) -> Any:
        """The batches with the plan's sizes, and below them :meth:`plot`."""
        from cgkit.plotting.plan_charts import overview

        plan = self.plan
        unit = plan.workload.cost.unit
        return overview(
            plan.histogram_frame(), list(plan.sizes), self.to_frame(), about or plan._about(), unit=unit
        )

    def __repr__(self) -> str:
        from cgkit.plotting.tables import text_table

        return f"{self.plan!r}\n{text_table(readable(self.to_frame()))}"


def compare_sizes(
    plan: CapturePlan,
    ladders: Mapping[str, Sequence[int] | None] | None = None,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int | None = None,
    largest: int | None = None,
) -> SizesComparison:
    """``plan`` beside other lists, each cut to its budget.

    Args:
        plan: of :func:`cgkit.measuring.plan_sizes.plan_capture_sizes`; its workload and budget hold for all.
        ladders: name -> sizes, or None for the ladder of that name. Default: the article's, those of vLLM, SGLang and
            TensorRT-LLM, and the article's trimmed list.
        max_num_seqs, max_num_batched_tokens: what the engines' lists depend on. Under FULL_DECODE_ONLY they end at
            the size to which a batch of ``max_num_seqs`` is padded: no decode step is larger.
        largest: the largest size that may be recorded, if the plan's candidates were chosen under such a limit: lists
            lose their sizes above it. ``whole`` keeps them.

    Raises:
        ConfigError: a name is unknown, or sizes make no sense.
    """
    chosen = dict(ladders) if ladders is not None else {**dict.fromkeys(LADDERS), TRIMMED_NAME: TRIMMED}
    cut: dict[str, CapturePlan] = {}
    best: dict[str, CapturePlan] = {}
    whole: dict[str, CapturePlan] = {}
    for name, given in chosen.items():
        if name == "plan":
            raise ConfigError("a list cannot be called 'plan': that is the plan's own name")
        sizes = _sizes(name, given, plan.mode, max_num_seqs, max_num_batched_tokens)
        whole[name] = CapturePlan(name, sizes, plan.workload)
        allowed = tuple(size for size in sizes if largest is None or size <= largest)
        part = CapturePlan(name, allowed, plan.workload)
        cut[name] = cut_to_budget(part, plan.memory_budget, plan.max_graphs)
        best[name] = best_part(part, plan.memory_budget, plan.max_graphs)
    return SizesComparison(plan, cut, best, whole)


def readable(frame: Any) -> Any:
    """The columns of :meth:`SizesComparison.to_frame` for a reader: shares in per cent, what was cut in words."""
    out = frame[["list"]].copy()
    out["sizes"] = [f"{n}" if n == of else f"{n} of {of}" for n, of in zip(frame["sizes"], frame["of"])]
    out["largest"], out["graphs"] = frame["largest"], frame["graphs"]
    out["step cost"] = [f"{cost:.4f}" for cost in frame["expected_step_cost"]]
    out["over plan"] = [f"{100 * (ratio - 1):+.2f} %" for ratio in frame["against_plan"]]
    out["its best part"] = [
        "" if cost != cost else f"{cost:.4f}" for cost in frame["best_part_cost"].astype(float)
    ]
    out["waste"] = [f"{waste:.1%}" for waste in frame["waste"]]
    out["replayed"] = [f"{share:.1%}" for share in frame["captured_steps"]]
    out["pool_bytes"] = frame["pool_bytes"]
    return out


def _sizes(
    name: str, given: Sequence[int] | None, mode: str, max_num_seqs: int, max_tokens: int | None
) -> tuple[int, ...]:
    sizes = named_ladder(name, max_num_seqs, max_tokens) if given is None else given
    listed = tuple(sorted({int(size) for size in sizes}))
    if mode != "FULL_DECODE_ONLY":
        return listed
    last = min((size for size in listed if size >= max_num_seqs), default=listed[-1] if listed else 0)
    return tuple(size for size in listed if size <= last)
