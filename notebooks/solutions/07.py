"""Solutions of notebook 07."""

from cgkit import plan_capture_sizes
from cgkit.exercises.nb07 import BUDGET_BYTES, BYTES_A_SIZE, HISTOGRAM, step_ms


def solution_07_1(num_tokens, sizes):
    return min((size for size in sizes if size >= num_tokens), default=None)


# 3 -> 4: FULL for decode, pieces for mixed. 9 -> 16: FULL ends at 8. 20 is above the largest size.
solution_07_2 = [("FULL", 4), ("PIECEWISE", 4), ("PIECEWISE", 16), ("PIECEWISE", 16), ("NONE", None)]


def solution_07_3(num_tokens, uniform, full_keys, piecewise_keys):
    exact, relaxed = (num_tokens, uniform), (num_tokens, False)
    for mode, key, keys in (
        ("FULL", exact, full_keys),
        ("FULL", relaxed, full_keys),
        ("PIECEWISE", relaxed, piecewise_keys),
    ):
        if key in keys:
            return mode, key
    return "NONE", None


solution_07_4 = list(plan_capture_sizes(HISTOGRAM, step_ms, BUDGET_BYTES, memory=BYTES_A_SIZE).sizes)
