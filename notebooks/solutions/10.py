"""Solutions of notebook 10."""

import math


def solution_10_1(num_tokens, decode, sizes, max_num_seqs):
    padded = next((size for size in sizes if size >= num_tokens), None)
    if padded is None:
        return "NONE", num_tokens
    return ("FULL" if decode and padded <= max_num_seqs else "PIECEWISE"), padded


def solution_10_2(counts, sizes):
    real = ran = 0
    for tokens, steps in counts.items():
        padded = min((size for size in sizes if size >= tokens), default=tokens)
        real += tokens * steps
        ran += padded * steps
    return (ran - real) / ran


def solution_10_3(counts, k):
    batches = sorted(counts)
    held = [0]  # held[i]: steps with one of the first i batches
    for batch in batches:
        held.append(held[-1] + counts[batch])
    number = len(batches)
    cost = [0] + [math.inf] * number  # with no size: only "no batch at all" is served
    lists = [[] for _ in range(number + 1)]
    best_cost, best_list = math.inf, []
    for _ in range(k):
        longer, chosen = [math.inf] * (number + 1), [[] for _ in range(number + 1)]
        for i in range(1, number + 1):
            p = min(range(i), key=lambda p: cost[p] + batches[i - 1] * (held[i] - held[p]))
            longer[i] = cost[p] + batches[i - 1] * (held[i] - held[p])
            chosen[i] = [*lists[p], batches[i - 1]]
        cost, lists = longer, chosen
        if cost[number] < best_cost:
            best_cost, best_list = cost[number], lists[number]
    return best_list


#: By hand: close together where most steps are, a few large sizes for steps with prefill.
solution_10_4 = [4, 8, 12, 16, 20, 24, 32, 128, 160, 192, 224, 256]
