"""Which one setting of the decode kernel suits all cases: from what :mod:`cgkit.measuring.bench_kernels` timed."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

from cgkit.kernels.splits import splits_for

if TYPE_CHECKING:
    import pandas as pd

CHUNKS, MOST_SPLITS, PROGRAMS = (32, 64, 128, 256), (8, 16, 32), (132, 264, 528)
CASE = ["shape", "kv_heads", "batch", "context"]
SETTING = ["tile", "num_warps", "num_stages"]


def rank_rules(frame: pd.DataFrame) -> pd.DataFrame:
    """Every rule for tile, warps, stages, least chunk, most splits and wanted programs that all cases were timed for.

    Args:
        frame: the rows of ``cgkit bench kernels``.

    Returns:
        Best first: the rule, ``times_best`` (geometric mean over the cases of its time over the case's best) and
        ``worst`` (the largest of these). Rules that choose alike in all cases stand there once, as the first of them.
        Empty where no candidates were timed.
    """
    import pandas as pd

    columns = [*SETTING, "min_chunk", "max_splits", "programs", "times_best", "worst"]
    timed = frame[(frame["subject"] == "attention") & frame["splits"].notna()] if len(frame) else frame
    if not len(timed):
        return pd.DataFrame(columns=columns)
    several = timed.groupby(CASE)["us"].transform("size") > 1  # else the time was up: nothing to compare
    timed = timed[several] if several.any() else timed
    us = {
        tuple(row[name] for name in [*CASE, *SETTING, "splits"]): row["us"]
        for row in timed.to_dict("records")
    }
    best = timed.groupby(CASE)["us"].min().to_dict()
    found: list[dict[str, Any]] = []
    seen = set()
    settings = timed[SETTING].drop_duplicates().itertuples(index=False, name=None)
    for setting, chunk, most, wanted in product(settings, CHUNKS, MOST_SPLITS, PROGRAMS):
        if chunk < setting[0]:
            continue
        chosen = {
            case: splits_for(int(case[1] * case[2]), int(case[3]), chunk=chunk, most=most, wanted=wanted)
            for case in best
        }
        ratios = [us.get((*case, *setting, splits), math.nan) / best[case] for case, splits in chosen.items()]
        if any(map(math.isnan, ratios)) or (setting, *chosen.values()) in seen:
            continue
        seen.add((setting, *chosen.values()))
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        rule = dict(zip(columns, (*map(int, setting), chunk, most, wanted, mean, max(ratios))))
        found.append(rule)
    return pd.DataFrame(found, columns=columns).sort_values("times_best", ignore_index=True)
