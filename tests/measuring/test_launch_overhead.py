"""Launch overhead: what a machine without a GPU can measure, and what it may not invent."""

from __future__ import annotations

import json

import pytest
import torch

import cgkit
from cgkit.measuring.launch_overhead import CLAIMS, LaunchOverhead, measure_launch_overhead

NO_GPU = not torch.cuda.is_available()


@pytest.fixture(scope="module")
def found() -> LaunchOverhead:
    return measure_launch_overhead(rounds=8, nodes=(1, 4), guards=(0, 5, 2000), depths=(0, 1, 40))


def by_count(found: LaunchOverhead, what: str, column: str = "median_us") -> dict[int, float]:
    frame = found.to_frame()
    rows = frame[frame["what"] == what]
    return dict(zip(rows["count"], rows[column]))


def test_every_case_is_there_with_its_spread(found):
    frame = found.to_frame()
    assert (frame["median_us"] > 0).all() and (frame["samples"] == 8).all()
    assert (frame["low_us"] <= frame["median_us"]).all() and (frame["median_us"] <= frame["high_us"]).all()
    assert set(by_count(found, "Dynamo's guards")) == {0, 5, 2000}


def test_depth_and_guards_cost(found):
    # the quickest rounds: others may be at work on this machine
    least, guards = by_count(found, "nn.Module call", "low_us"), by_count(found, "Dynamo's guards", "low_us")
    assert least[40] > 5 * least[1] > least[0]
    assert guards[2000] > guards[0]
    depth, over = (
        by_count(found, "nn.Module call"),
        found.to_frame().set_index(["what", "count"])["over_none_us"],
    )
    assert over["nn.Module call", 40] == pytest.approx(depth[40] - depth[0])


@pytest.mark.skipif(not NO_GPU, reason="speaks of machines without a GPU")
def test_without_a_gpu_launches_are_missing_and_not_invented(found):
    frame = found.to_frame()
    assert not frame["what"].str.contains("raphLaunch|Triton|empty kernel").any()
    assert len(found.missing) == 2 and all("needs a GPU" in sentence for sentence in found.missing)
    assert "not measured" in repr(found) and "cpu" in repr(found).splitlines()[0]


def test_claims_stand_beside_and_name_their_heading(found):
    claims = found.claims()
    assert list(claims["what"]) == ["kernel launch", "guard evaluation"]
    assert all("heading" in claim["source"] for claim in CLAIMS)
    assert not set(claims["what"]) & set(found.to_frame()["what"])


def test_facts_come_back(found):
    again = LaunchOverhead.from_facts(json.loads(json.dumps(found.facts())), recorded="a test")
    assert again.to_frame().equals(found.to_frame()) and again.missing == found.missing
    assert again.about["recorded"] == "a test"


def test_it_draws_itself(found):
    ax = found.plot()
    labels = [text.get_text() for text in ax.get_yticklabels()]
    assert "article: kernel launch" in labels and "nn.Module call: 40 deep" in labels
    assert "not measured" in str(found.plot_nodes().get_figure().get_suptitle()) or not NO_GPU
    assert "<svg" in found._repr_mimebundle_()["text/html"]


def test_it_is_public():
    assert cgkit.measure_launch_overhead is measure_launch_overhead


@pytest.mark.gpu
def test_on_a_gpu_launches_are_measured():
    found = measure_launch_overhead(rounds=20, nodes=(1, 64, 1024))
    graphs = by_count(found, "cudaGraphLaunch")
    assert 0 < graphs[1] < graphs[1024] and not [m for m in found.missing if "GPU" in m]
    one = by_count(found, "torch operator, an empty kernel")[1]
    assert graphs[1024] < 1024 * one  # what a graph is for
    assert by_count(found, "empty Triton kernel, kernel[grid](...)")[1] > 0
