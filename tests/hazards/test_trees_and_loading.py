"""Exhibits of what a start leaves out, and of CUDAGraph Trees beside graphs of one's own."""

import pytest
import torch

from cgkit.errors import CgkitError
from cgkit.hazards import loading
from cgkit.hazards.trees import replay_beside_trees

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_load_without_wrappers_gives_right_results_and_no_graph(device):
    visit = loading.UNWRAPPED_LOAD.run(device)
    assert visit.as_described, visit
    assert "result is right, from 0 recorded graphs" in visit.symptom.seen
    assert "result is right, from 6 recorded graphs" in visit.fixed_symptom.seen
    assert "num_cudagraph_captured is 0, expected 6" in visit.says


def test_trees_say_what_they_need():
    with pytest.raises(CgkitError, match="order='after' is unknown"):
        replay_beside_trees("after")
    if not torch.cuda.is_available():
        with pytest.raises(CgkitError, match="need a GPU"):
            replay_beside_trees("between")


@pytest.mark.gpu
def test_trees_between_recording_and_replay_take_the_workspace_that_the_replay_writes_to():
    before, between = replay_beside_trees("before"), replay_beside_trees("between")
    assert (before["replayed"], before["equal"], before["kept"]) == (True, True, True), before
    assert before["workspace"] == "held" and between["workspace"] not in (None, "held"), (before, between)


@pytest.mark.gpu
def test_a_cleared_workspace_that_went_back_to_the_driver_is_an_illegal_access():
    cleared = replay_beside_trees("cleared")
    assert cleared["workspace"] == "given back", cleared
    assert cleared["replayed"] is False and "illegal memory access" in cleared["error"], cleared
