"""Sets of time as arrays: the union, the intersection and the length of many intervals at once.

A *set* is an array of shape ``(n, 2)`` of starts and ends in microseconds, sorted, disjoint and
without empty intervals: what :func:`union` returns. Everything is exact up to the rounding of
float64, does not depend on the order of what goes in, and takes ``n log n``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Set = NDArray[np.float64]
EMPTY: Set = np.empty((0, 2))


def union(start_us: NDArray[np.float64], end_us: NDArray[np.float64]) -> Set:
    """The set that intervals in any order cover, overlapping or not; empty ones cover nothing."""
    start_us, end_us = np.asarray(start_us, np.float64), np.asarray(end_us, np.float64)
    some = end_us > start_us
    start_us, end_us = start_us[some], end_us[some]
    if not len(start_us):
        return EMPTY
    order = np.argsort(start_us, kind="stable")
    start_us = start_us[order]
    reach = np.maximum.accumulate(end_us[order])  # how far any interval so far has come
    first = np.r_[True, start_us[1:] > reach[:-1]]
    last = np.r_[np.flatnonzero(first)[1:] - 1, len(start_us) - 1]
    return np.column_stack([start_us[first], reach[last]])


def clip(these: Set, start_us: float, end_us: float) -> Set:
    """What lies between two times."""
    cut = np.clip(these, start_us, end_us)
    return cut[cut[:, 1] > cut[:, 0]]


def length(these: Set) -> float:
    """How long a set is, in microseconds."""
    return float((these[:, 1] - these[:, 0]).sum())


def complement(these: Set, start_us: float, end_us: float) -> Set:
    """What lies between two times and outside of the set."""
    inside = clip(these, start_us, end_us)
    edges = np.r_[start_us, inside.ravel(), end_us].reshape(-1, 2)
    return edges[edges[:, 1] > edges[:, 0]]


def intersect(a: Set, b: Set) -> Set:
    """What lies in both sets."""
    if not len(a) or not len(b):
        return EMPTY
    edges = np.unique(np.r_[a.ravel(), b.ravel()])
    middle = (edges[1:] + edges[:-1]) / 2
    both = contains(a, middle) & contains(b, middle)
    return union(edges[:-1][both], edges[1:][both])


def subtract(a: Set, b: Set) -> Set:
    """What lies in ``a`` and not in ``b``."""
    if not len(a) or not len(b):
        return a
    return intersect(a, complement(b, float(a[0, 0]), float(a[-1, 1])))


def contains(these: Set, when_us: NDArray[np.float64]) -> NDArray[np.bool_]:
    """For each time whether it lies in the set (a start does, an end does not)."""
    if not len(these):
        return np.zeros(len(when_us), bool)
    at = np.searchsorted(these[:, 0], when_us, side="right") - 1
    return (at >= 0) & (when_us < these[np.maximum(at, 0), 1])
