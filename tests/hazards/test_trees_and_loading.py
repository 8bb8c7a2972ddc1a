"""Exhibits of what a start leaves out, and of CUDAGraph Trees beside graphs of one's own."""

import pytest
import torch

from cgkit.errors import CgkitError
from cgkit.hazards import loading, trees
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


def test_the_workspace_is_a_block_in_use_and_not_what_the_products_result_left(monkeypatch):
    """The product's result lay in a segment of its own stream: as new as the workspace, and free again."""
    mib = 1 << 20

    def segment(address, stream, *blocks):
        blocks = [{"size": size, "state": state} for size, state in blocks]
        return {"address": address, "stream": stream, "blocks": blocks}

    operands = segment(0, 0, (mib, "active_allocated"), (mib, "inactive"))
    left = segment(4 * mib, 1, (2 * mib, "inactive"))
    used = segment(8 * mib, 1, (2 * mib, "active_allocated"))
    cleared = segment(8 * mib, 1, (2 * mib, "inactive"))
    taken = segment(8 * mib, 0, (mib, "active_allocated"), (mib, "inactive"))

    def seen(*segments):
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: list(segments))

    seen(operands)
    had = trees._used()
    seen(operands, left, used)
    workspace = trees._workspace(had)
    assert workspace == (8 * mib, 2 * mib, 1) and trees._state(workspace) == "held"
    states = []
    for now in ([used], [left, cleared], [taken], [operands]):
        seen(*now)
        states.append(trees._state(workspace))
    assert states == ["held", "free", "somebody else's", "given back"]
    with pytest.raises(CgkitError, match="no workspace"):
        trees._workspace(had)


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
