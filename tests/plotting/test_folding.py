from hypothesis import given
from hypothesis import strategies as st

from cgkit.plotting import fold
from cgkit.plotting.folding import Run


@given(st.lists(st.sampled_from("abc"), max_size=60))
def test_unfolding_gives_the_row_back(keys):
    unfolded = []
    for run in fold(keys):
        assert run.start == len(unfolded)
        unfolded += keys[run.start : run.start + run.length] * run.times
    assert unfolded == keys


@given(st.lists(st.sampled_from("ab"), max_size=8), st.integers(3, 40))
def test_a_block_repeated_often_is_drawn_once(block, times):
    shown = sum(run.length for run in fold(block * times))
    assert shown <= len(block)


def test_a_deep_llama_folds_to_five_boxes():
    keys = ["first", *["attention", "middle"] * 29, "attention", "last"]
    assert fold(keys) == [Run(0, 1, 1), Run(1, 2, 29), Run(59, 1, 1), Run(60, 1, 1)]


def test_two_of_the_same_are_not_folded():
    assert [run.times for run in fold(["a", "a"])] == [1, 1]
