import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgkit.capturing import CaptureSizes, CudagraphDispatcher
from cgkit.config import CUDAGraphMode
from cgkit.forward_context import BatchDescriptor

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE


def dispatcher(mode, sizes=(1, 2, 4), uniform_sizes=None):
    made = CudagraphDispatcher(mode, CaptureSizes(sizes))
    made.initialize_cudagraph_keys(made.planned_keys(uniform_sizes=uniform_sizes))
    return made


def in_the_articles_order(keys, asked):
    """The article's dispatch, written out."""
    if asked in keys[FULL]:
        return FULL, asked
    if asked.non_uniform in keys[FULL]:
        return FULL, asked.non_uniform
    if asked.non_uniform in keys[PIECEWISE]:
        return PIECEWISE, asked.non_uniform
    return NONE, None


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        ("NONE", (NONE, None), (NONE, None)),
        ("PIECEWISE", (PIECEWISE, (2, False)), (PIECEWISE, (2, False))),
        ("FULL", (FULL, (2, False)), (FULL, (2, False))),
        ("FULL_DECODE_ONLY", (FULL, (2, True)), (NONE, None)),
        ("FULL_AND_PIECEWISE", (FULL, (2, True)), (PIECEWISE, (2, False))),
    ],
)
def test_each_mode(mode, decode, mixed):
    made = dispatcher(mode)
    assert made.dispatch(BatchDescriptor(2, True)) == decode
    assert made.dispatch(BatchDescriptor(2, False)) == mixed


def test_planned_keys_go_from_large_to_small_mixed_batches_first():
    made = CudagraphDispatcher("FULL_AND_PIECEWISE", CaptureSizes([1, 2, 4]))
    assert made.planned_keys(uniform_sizes=[1, 2]) == [
        (PIECEWISE, (4, False)), (PIECEWISE, (2, False)), (PIECEWISE, (1, False)),
        (FULL, (2, True)), (FULL, (1, True)),
    ]  # fmt: skip


def test_a_decode_batch_beyond_the_uniform_sizes_takes_the_general_graph():
    made = dispatcher("FULL_AND_PIECEWISE", uniform_sizes=[1, 2])
    assert made.dispatch(BatchDescriptor(4, True)) == (PIECEWISE, (4, False))


def test_nothing_is_replayed_before_keys_are_set_or_after_they_are_cleared():
    made = CudagraphDispatcher("PIECEWISE", CaptureSizes([1, 2]))
    assert made.dispatch(BatchDescriptor(2)) == (NONE, None)
    assert made.route(2).mode is NONE
    made.initialize_cudagraph_keys()
    assert made.dispatch(BatchDescriptor(2)) == (PIECEWISE, (2, False))
    made.clear()
    assert made.dispatch(BatchDescriptor(2)) == (NONE, None)


KEYS = st.builds(BatchDescriptor, st.integers(1, 6), st.booleans())


@given(full=st.sets(KEYS), piecewise=st.sets(KEYS), asked=KEYS)
def test_the_table_answers_as_the_articles_three_look_ups(full, piecewise, asked):
    made = CudagraphDispatcher("FULL_AND_PIECEWISE", CaptureSizes([6]))
    made.initialize_cudagraph_keys([(FULL, key) for key in full] + [(PIECEWISE, key) for key in piecewise])
    expected = in_the_articles_order(made.cudagraph_keys, asked)
    assert made.dispatch(asked) == expected
    explained = made.explain(asked)
    assert explained["mode"].iloc[-1] == expected[0].name
    assert list(explained["found"]) == [False] * (len(explained) - 1) + [True]


@pytest.mark.filterwarnings("ignore:a decode batch")
@given(st.sets(st.integers(1, 40), min_size=1), st.integers(0, 60), st.booleans())
def test_route_is_padding_then_dispatch(sizes, num_tokens, uniform):
    made = dispatcher("FULL_AND_PIECEWISE", sorted(sizes))
    route = made.route(num_tokens, uniform)
    if not 0 < num_tokens <= max(sizes):
        assert route == (NONE, None, num_tokens)
        return
    padded = min(size for size in sizes if size >= num_tokens)
    assert route == (*made.dispatch(BatchDescriptor(padded, uniform)), padded)
    assert route.key is made.route(padded, uniform).key  # the same object: wrappers may compare by identity


def test_explain_says_why_a_key_was_not_taken():
    made = dispatcher("FULL_AND_PIECEWISE", uniform_sizes=[1])
    outcomes = list(made.explain(BatchDescriptor(3, True))["outcome"])
    assert outcomes == [
        "above the largest FULL size",
        "FULL graphs exist only for decode batches",
        "not a recorded size: pad first",
        "runs without a graph",
    ]
    fresh = CudagraphDispatcher("FULL").explain(BatchDescriptor(1))
    assert fresh["outcome"].iloc[0] == "keys are not initialised"
