"""Each mode recorded once: the table against the dispatcher's plan, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch

import cgkit
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import ConfigError
from cgkit.measuring.mode_table import ModeTable, capture_modes
from cgkit.plotting import title_of
from cgkit.serving.llama import PRESETS
from cgkit.serving.runner import Runner
from cgkit.serving.weights import random_model

SIZES = [1, 2, 4]


def runner_of(device="cpu", **changes) -> Runner:
    shape = PRESETS["tiny-llama"].scaled(num_hidden_layers=2)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = CompilationConfig(**{"cudagraph_capture_sizes": SIZES, "compiler": "eager", **changes})
    return Runner(random_model(shape, dtype, device), config=config, max_num_seqs=4, max_model_len=64)


@pytest.fixture(scope="module")
def found() -> tuple[Runner, ModeTable]:
    runner = runner_of()
    return runner, capture_modes(runner)


def test_what_was_captured_in_what_order(found):
    frame = found[1].to_frame()
    pieces, whole = 3, 1
    mixed = [(size, False) for size in (4, 2, 1)]
    decode = [(size, True) for size in (4, 2, 1)]
    wanted = {
        "PIECEWISE": [("PIECEWISE", *key, pieces) for key in mixed],
        "FULL": [("FULL", *key, whole) for key in mixed],
        "FULL_DECODE_ONLY": [("FULL", *key, whole) for key in decode],
        "FULL_AND_PIECEWISE": [("PIECEWISE", *key, pieces) for key in mixed]
        + [("FULL", *key, whole) for key in decode],
    }
    for asked, rows in frame.groupby("asked"):
        assert list(rows["order"]) == list(range(1, len(rows) + 1))
        assert (
            list(
                rows[["runtime_mode", "num_tokens", "uniform_decode", "graphs"]].itertuples(
                    index=False, name=None
                )
            )
            == (wanted[asked])
        )
        assert rows["pool_growth_bytes"].sum() <= rows["pool_reserved_bytes"].iloc[-1]
        assert (rows["seconds"] > 0).all() and rows["pool_reserved_bytes"].is_monotonic_increasing
    assert set(frame["asked"]) == set(wanted) and frame["emulated"].all()


def test_a_row_a_mode_with_its_sentence(found):
    modes = found[1].modes_frame().set_index("asked")
    assert list(modes.index) == [mode.name for mode in CUDAGraphMode]
    assert dict(modes["graphs"]) == {
        "NONE": 0, "PIECEWISE": 9, "FULL": 3, "FULL_DECODE_ONLY": 3, "FULL_AND_PIECEWISE": 12,
    }  # fmt: skip
    assert (modes["total_s"] >= modes["recording_s"]).all() and modes["emulated"].all()
    assert (modes.loc[modes["graphs"] > 0, "pool_reserved_bytes"] > 0).all()
    assert all(f"asked for {name}, given {name}" in said for name, said in modes["said"].items())


def test_routes_are_the_articles(found):
    routes = found[1].routes_frame()

    def taken(asked, batch, tokens):
        rows = routes[(routes["asked"] == asked) & (routes["batch"] == batch)]
        row = rows[(rows["from_tokens"] <= tokens) & (tokens <= rows["to_tokens"])].iloc[0]
        return row["runtime_mode"], row["key"]

    assert taken("PIECEWISE", "decode", 3) == ("PIECEWISE", "(4, False)")
    assert taken("FULL", "decode", 3) == ("FULL", "(4, False)")
    assert taken("FULL_DECODE_ONLY", "decode", 3) == ("FULL", "(4, True)")
    assert taken("FULL_DECODE_ONLY", "mixed", 3) == ("NONE", "")
    assert taken("FULL_AND_PIECEWISE", "decode", 1) == ("FULL", "(1, True)")
    assert taken("FULL_AND_PIECEWISE", "mixed", 1) == ("PIECEWISE", "(1, False)")
    assert {taken(mode, kind, 5) for mode in set(routes["asked"]) for kind in ("decode", "mixed")} == {
        ("NONE", "")
    }


def test_it_shows_itself_and_says_emulated(found):
    table = found[1]
    assert "emulated" in repr(table) and "FULL_AND_PIECEWISE" in repr(table)
    html = table._repr_mimebundle_()["text/html"]
    assert "could not be drawn" not in table._repr_mimebundle_()["text/plain"]
    assert "<svg" in html and "which graph a batch takes" in html and "asked for FULL" in html
    assert "emulated graphs" in title_of(table.plot())


def test_the_runner_is_left_as_it_was(found):
    runner, _ = found
    assert runner.executor.captured is None
    before = runner.generate([[1, 2, 3]], max_tokens=4, stop_at_eos=False)[0].token_ids
    runner.capture_model()
    held = runner.executor.captured
    capture_modes(runner, ["FULL"])
    assert runner.executor.captured is held and held.lock.locked
    assert runner.generate([[1, 2, 3]], max_tokens=4, stop_at_eos=False)[0].token_ids == before
    runner.executor.release()


def test_weaker_attention_changes_the_table(found):
    table = capture_modes(found[0], support="NEVER")
    modes = table.modes_frame().set_index("asked")
    assert dict(modes["given"]) == {
        "NONE": "NONE", "PIECEWISE": "PIECEWISE", "FULL": "refused", "FULL_DECODE_ONLY": "PIECEWISE",
        "FULL_AND_PIECEWISE": "PIECEWISE",
    }  # fmt: skip
    assert modes.loc["FULL", "graphs"] == 0 and "NEVER" in modes.loc["FULL", "said"]
    assert "asked for FULL_AND_PIECEWISE, given PIECEWISE" in repr(table)


def test_what_makes_no_sense_is_refused(found):
    with pytest.raises(ConfigError, match="twice"):
        capture_modes(found[0], ["FULL", "full"])
    with pytest.raises(ConfigError, match="level"):
        capture_modes(runner_of(level=0))
    assert cgkit.capture_modes is capture_modes


@pytest.mark.gpu
def test_on_a_gpu_the_figures_are_the_devices():
    table = capture_modes(runner_of("cuda", compiler="inductor"))
    frame, modes = table.to_frame(), table.modes_frame().set_index("asked")
    assert not frame["emulated"].any() and (frame["seconds"] > 0).all()
    assert modes.loc["FULL_AND_PIECEWISE", "graphs"] == 12
    assert (modes.loc[modes["graphs"] > 0, "pool_reserved_bytes"] > 0).all()
