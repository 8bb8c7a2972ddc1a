"""Ties the GPU's work to the call that launched it, and both to the piece and the stage they belong to.

One launch, many kernels: all kernels that a replay runs carry the correlation id of the one graph
launch, so the tie goes from the kernel to the call and never the other way round. Correlation ids count
within a process. Everything works on whole columns; only annotations of ours are walked one by one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cgkit.measuring.event_kinds import CODE

Ints = NDArray[np.integer]
Floats = NDArray[np.float64]

_LAUNCHING = np.array([CODE["launch"], CODE["graph_launch"], CODE["copy_call"]], np.int8)


def launched_by(
    kind: Ints, correlation: Ints, process: Ints, start_us: Floats, call: Ints, work: Ints
) -> Ints:
    """For each row of ``work`` (GPU) the row of ``call`` (runtime or driver) that launched it, or -1.

    ``process`` of GPU work may be -1 (unknown: its trace holds several processes); then any process
    counts. If several calls share an id, those that launch go before those that do not, and among these the
    latest that began before the work did.
    """
    found = np.full(len(work), -1, np.int64)
    launching = np.isin(kind[call], _LAUNCHING)
    for calls in (call[launching], call[~launching]):
        missing = np.flatnonzero(found < 0)
        missing = missing[correlation[work[missing]] > 0]
        if not len(calls) or not len(missing):
            continue
        calls = calls[correlation[calls] > 0]
        calls = calls[np.lexsort((start_us[calls], correlation[calls]))]
        ids, wanted = correlation[calls], correlation[work[missing]]
        left, right = np.searchsorted(ids, wanted, "left"), np.searchsorted(ids, wanted, "right")
        one = right - left == 1
        fits = np.zeros(len(missing), bool)
        candidate = calls[np.minimum(left, len(calls) - 1)] if len(calls) else left
        if len(calls):
            fits = one & _same(process[work[missing]], process[candidate])
        found[missing[fits]] = candidate[fits]
        for i in np.flatnonzero(right - left > 1):  # ids used twice: rare, hence one by one
            found[missing[i]] = _latest(calls[left[i] : right[i]], work[missing[i]], process, start_us)
    return found


def owners(
    kind: Ints, correlation: Ints, process: Ints, start_us: Floats, call: Ints, work: Ints, device: Ints
) -> dict[int, int]:
    """Which process each device belongs to, where a trace holds several and their ids may be equal.

    The one that launched most of the device's work before it began, as far as the ids say. Ranks in step with
    each other fit equally well: then the one at the device's own place (the second pid for the second device), unless
    another's launches are much nearer.
    """
    call = call[np.isin(kind[call], _LAUNCHING) & (correlation[call] > 0)]
    processes = np.unique(process[call]).tolist()
    chosen = {}
    for place, one in enumerate(np.unique(device[work]).tolist()):
        rows = work[(device[work] == one) & (correlation[work] > 0)]
        fits = {}
        for who in processes:
            calls = call[process[call] == who]
            calls = calls[np.argsort(correlation[calls], kind="stable")]
            at = np.minimum(np.searchsorted(correlation[calls], correlation[rows]), len(calls) - 1)
            delay_us = start_us[rows] - start_us[calls[at]]
            hit = (correlation[calls[at]] == correlation[rows]) & (delay_us >= 0)
            if hit.any():
                fits[who] = (int(hit.sum()), float(np.median(delay_us[hit])))
        most = max((hits for hits, _ in fits.values()), default=0)
        best = {who: delay for who, (hits, delay) in fits.items() if hits == most}
        near = [who for who, delay in best.items() if delay <= 2 * min(best.values()) + 20]
        if near:
            chosen[one] = processes[place] if processes[place:] and processes[place] in near else near[0]
    return chosen


def _same(a: Ints, b: Ints) -> NDArray[np.bool_]:
    return (a == b) | (a < 0)


def _latest(calls: Ints, work: int, process: Ints, start_us: Floats) -> int:
    calls = calls[_same(np.full(len(calls), process[work]), process[calls])]
    if not len(calls):
        return -1
    before = calls[start_us[calls] <= start_us[work]]
    return int(before[-1] if len(before) else calls[0])


def innermost(
    start_us: Floats, end_us: Floats, lane: Ints, when_us: Floats, when_lane: Ints
) -> NDArray[np.int64]:
    """For each time (on its lane) the index of the innermost of the given ranges around it, or -1.

    Ranges of one lane must be nested or apart, as a thread's are; of two equal ones the later counts as inner.
    """
    result = np.full(len(when_us), -1, np.int64)
    for one in np.unique(lane):
        mine = np.flatnonzero(lane == one)
        mine = mine[np.lexsort((-end_us[mine], start_us[mine]))]
        edges, owner = _segments(start_us[mine], end_us[mine])
        asked = np.flatnonzero(when_lane == one)
        at = np.searchsorted(edges, when_us[asked], side="right") - 1
        inside = at >= 0
        hit = owner[np.maximum(at, 0)]
        inside &= hit >= 0
        result[asked[inside]] = mine[hit[inside]]
    return result


def _segments(start_us: Floats, end_us: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """Where the innermost of nested ranges changes, and which it is from there on (-1: none)."""
    edges: list[float] = []
    owner: list[int] = []
    stack: list[tuple[float, int]] = []
    for i, (start, end) in enumerate(zip(start_us.tolist(), end_us.tolist())):
        while stack and stack[-1][0] <= start:
            at, _ = stack.pop()
            edges.append(at)
            owner.append(stack[-1][1] if stack else -1)
        edges.append(start)
        owner.append(i)
        stack.append((min(end, stack[-1][0]) if stack else end, i))
    while stack:
        at, _ = stack.pop()
        edges.append(at)
        owner.append(stack[-1][1] if stack else -1)
    return np.array(edges, np.float64), np.array(owner, np.int64)
