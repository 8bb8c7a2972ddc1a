import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit.capturing import CaptureSizes, CudagraphDispatcher
from cgkit.config import LADDERS
from cgkit.errors import ConfigError
from cgkit.forward_context import BatchDescriptor
from cgkit.measuring.padding import (
    SOURCES,
    BatchHistogram,
    as_histogram,
    coverage,
    expected_waste,
    named_ladder,
    padding,
    planned_coverage,
    powers_of_two,
)

SIZES = st.lists(st.integers(1, 300), min_size=1, max_size=12, unique=True).map(sorted)
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@given(sizes=SIZES, most=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_padded_is_never_less_than_real_and_the_waste_is_below_one(sizes, most):
    frame = padding({"mine": sizes}, most=most).to_frame()
    assert list(frame["batch"]) == list(range(1, most + 1))
    assert (frame["padded"] >= frame["batch"]).all()
    assert frame["waste_of_padded"].between(0, 1, inclusive="left").all()
    assert (frame["waste_of_real"] >= frame["waste_of_padded"]).all()
    assert (frame["captured"] == (frame["batch"] <= sizes[-1])).all()
    held = frame[frame["captured"]]
    assert set(held["padded"]) <= set(sizes)
    assert (frame.loc[~frame["captured"], "padding_tokens"] == 0).all()


@given(sizes=SIZES, mode=st.sampled_from(MODES), max_num_seqs=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_the_strip_says_what_the_dispatcher_says_of_every_padded_batch(sizes, mode, max_num_seqs):
    captured = CaptureSizes(sizes)
    strip = planned_coverage(captured, mode, max_num_seqs=max_num_seqs).to_frame()
    dispatcher = CudagraphDispatcher(mode, captured)
    uniform = [size for size in sizes if size <= captured.pad(min(max_num_seqs, sizes[-1]))]
    dispatcher.initialize_cudagraph_keys(dispatcher.planned_keys(uniform_sizes=uniform))
    for row in strip.to_dict("records"):
        padded = captured.pad(row["batch"])
        answer, _ = dispatcher.dispatch(BatchDescriptor(padded, row["kind"] == "decode"))
        assert row["mode"] == (answer.name if answer else "not captured")
        assert row["padded"] == (padded if answer else row["batch"])
    assert strip["batch"].max() > sizes[-1]
    above = strip[strip["batch"] > sizes[-1]]
    assert (above["mode"] == "not captured").all()


def test_every_ladder_of_an_engine_is_there_with_its_source():
    assert set(LADDERS) <= set(SOURCES)
    frame = padding().summary()
    assert list(frame["ladder"]) == list(SOURCES)
    assert frame["source"].str.len().min() > 20
    article = frame.set_index("ladder").loc["article"]
    assert (article["sizes"], article["largest"]) == (35, 256)


def test_thirty_three_padded_to_forty_by_both_divisors():
    frame = padding(["article"], max_num_seqs=64).to_frame().set_index("batch").loc[33]
    assert frame["padded"] == 40
    assert frame["waste_of_real"] == pytest.approx(7 / 33)
    assert frame["waste_of_padded"] == pytest.approx(7 / 40)


@pytest.mark.parametrize(("most", "expected"), [(1, (1,)), (2, (1, 2)), (5, (1, 2, 4, 8)), (8, (1, 2, 4, 8))])
def test_powers_of_two_cover_the_largest_batch(most, expected):
    assert powers_of_two(most) == expected
    assert tuple(named_ladder("powers of two", most)) == expected


def test_the_divisor_has_to_be_named():
    found = padding({"mine": [1, 4]})
    with pytest.raises(TypeError):
        found.plot_waste()
    with pytest.raises(ConfigError, match=r"'real'.*'padded'"):
        found.plot_waste("both")
    assert "% of the real tokens" in found.plot_waste("real").get_ylabel()
    assert "% of the padded tokens" in found.plot_waste("padded").get_ylabel()


def test_the_drawn_stairs_are_the_frame_s():
    ax = padding({"mine": [1, 4], "other": [2, 6]}, most=6).plot(seen=[3])
    drawn = [list(patch.get_data().values) for patch in ax.patches]
    assert drawn == [[1, 4, 4, 4], [2, 2, 6, 6, 6, 6]]


def test_expected_waste_by_hand():
    found = expected_waste({3: 2, 4: 1, 9: 1}, padding({"mine": [4, 8]})).to_frame().iloc[0]
    assert found["waste_of_real"] == pytest.approx(2 / (3 + 3 + 4 + 9))
    assert found["waste_of_padded"] == pytest.approx(2 / (4 + 4 + 4 + 9))
    assert found["captured_steps"] == pytest.approx(3 / 4)
    assert found["captured_tokens"] == pytest.approx(10 / 19)
    assert expected_waste({3: 2, 4: 1, 9: 1}, {"mine": [4, 8]}).to_frame().iloc[0].equals(found)


@given(counts=st.dictionaries(st.integers(1, 200), st.integers(1, 50), min_size=1, max_size=20), sizes=SIZES)
@settings(max_examples=40, deadline=None)
def test_expected_waste_is_a_mean_over_the_steps(counts, sizes):
    found = expected_waste(counts, padding({"mine": sizes})).to_frame().iloc[0]
    captured = CaptureSizes(sizes)
    steps = [batch for batch, count in counts.items() for _ in range(count)]
    real, padded = sum(steps), sum(captured.pad(step) for step in steps)
    assert found["waste_of_padded"] == pytest.approx(1 - real / padded)
    assert found["captured_steps"] == pytest.approx(sum(map(captured.is_captured, steps)) / len(steps))


def test_a_histogram_may_be_a_dict_a_series_or_a_frame():
    expected = pd.DataFrame({"batch": [1, 5], "count": [3.0, 2.0]})
    series = pd.Series({5: 2, 1: 3})
    frame = pd.DataFrame({"batch": [5, 1, 1], "count": [2, 1, 2]})
    for given_ in ({1: 3, 5: 2}, series, frame):
        pd.testing.assert_frame_equal(as_histogram(given_), expected)


@pytest.mark.parametrize(
    ("histogram", "said"),
    [
        ({}, "above 0"),
        ({0: 1}, "positive whole"),
        ({1.5: 1}, "positive whole"),
        ({float("nan"): 1}, "positive whole"),
        ({1: -1, 2: 3}, "negative"),
        ({1: 0}, "above 0"),
        (pd.DataFrame({"size": [1]}), "no column batch, count"),
    ],
)
def test_a_histogram_that_makes_no_sense(histogram, said):
    with pytest.raises(ConfigError, match=said):
        as_histogram(histogram)


def test_steps_of_a_runner_become_a_histogram():
    from cgkit import events

    with BatchHistogram("decode") as histogram:
        for kind, tokens in (("prefill", 99), ("decode", 5), ("decode", 5), ("decode", 1)):
            events.emit(events.StepRan(kind, 1, tokens, 8, "FULL", 0.1))
    assert histogram.to_frame().to_dict("list") == {"batch": [1, 5], "count": [1, 2]}
    assert not events.has_readers(events.StepRan)
    assert "mine" in repr(expected_waste(histogram, padding({"mine": [8]})))


def test_names_and_limits_that_are_wrong():
    with pytest.raises(ConfigError, match=r"'nothing' is unknown; use one of article"):
        padding(["nothing"])
    with pytest.raises(ConfigError, match="no ladder"):
        padding([])
    with pytest.raises(ConfigError, match="most=-1"):
        padding(most=-1)
    with pytest.raises(ConfigError, match="keys are not set"):
        coverage(CudagraphDispatcher("FULL", CaptureSizes([1])))


def test_what_is_shown_in_a_cell_has_pictures_where_no_question_is_open():
    assert "<svg" in padding({"mine": [1, 4]}, most=6)._repr_mimebundle_()["text/html"]
    assert "<svg" in planned_coverage([1, 4], "FULL")._repr_mimebundle_()["text/html"]
    waste = expected_waste({3: 1}, padding({"mine": [4]}))
    assert "mine" in waste._repr_mimebundle_()["text/html"]
