import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cgkit.measuring import intervals

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12)


def made(these) -> tuple[intervals.Set, set[int]]:
    """The set, and the whole microseconds that it covers."""
    start = np.array([s for s, _ in these], float)
    end = np.array([s + d for s, d in these], float)
    return intervals.union(start, end), {at for s, d in these for at in range(s, s + d)}


def covers(these: intervals.Set) -> set[int]:
    assert (these[:, 0] < these[:, 1]).all()
    assert (these[1:, 0] > these[:-1, 1]).all()  # sorted, disjoint, and those that touch are one
    return {at for s, e in these.astype(int).tolist() for at in range(s, e)}


@given(spans, spans)
def test_against_sets_of_whole_microseconds(first, second):
    (a, in_a), (b, in_b) = made(first), made(second)
    assert covers(a) == in_a and intervals.length(a) == len(in_a)
    assert covers(intervals.intersect(a, b)) == in_a & in_b
    assert covers(intervals.subtract(a, b)) == in_a - in_b
    assert covers(intervals.complement(a, 5, 30)) == set(range(5, 30)) - in_a
    assert covers(intervals.clip(a, 5, 30)) == in_a & set(range(5, 30))
    assert intervals.contains(a, np.arange(60.0)).tolist() == [at in in_a for at in range(60)]
