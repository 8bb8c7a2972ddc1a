import gzip
import json
import math

import pandas as pd
import pytest

from cgkit import recordings
from cgkit.errors import ConfigError
from cgkit.measuring.pool_model import SEGMENT, PoolModel, recorded_memory
from cgkit.measuring.step_cost import Curve, StepCost, recorded_step_cost

ROWS = pd.DataFrame(
    [
        {"mode": mode, "batch": batch, "wall_ms": value}
        for mode, values in {
            "eager": (9, 8),
            "compiled": (6, 4),
            "PIECEWISE": (2, 3),
            "FULL": (1, 2.5),
        }.items()
        for batch, value in zip((1, 16), values)
    ]
)


def test_a_curve_is_linear_between_flat_below_and_never_falls_above():
    curve = Curve({4: 2.0, 8: 6.0})
    assert [curve(n) for n in (1, 4, 5, 8, 10)] == [2, 2, 3, 6, 8]
    assert Curve({4: 6.0, 8: 2.0})(100) == 2.0
    assert Curve({4: 6.0})(1) == Curve({4: 6.0})(99) == 6.0


def test_of_frames_by_mode():
    assert StepCost.of(ROWS, "FULL").replayed(16) == 2.5
    assert StepCost.of(ROWS, "FULL_DECODE_ONLY").replayed(1) == 1
    piecewise = StepCost.of(ROWS, "PIECEWISE")
    assert piecewise.replayed(16) == 3 and piecewise.uncaptured(1) == 6 and piecewise.points == (1, 16)
    plain = pd.DataFrame({"batch": [1, 2], "replayed_ms": [1.0, 2.0], "uncaptured_ms": [5.0, 6.0]})
    assert StepCost.of(plain).uncaptured(2) == 6.0


def test_rows_that_did_not_run_in_turn_do_not_count():
    frame = pd.concat([ROWS.assign(order="in turn"), ROWS.assign(order="last", wall_ms=100.0)])
    assert StepCost.of(frame, "FULL").replayed(1) == 1


def test_above_the_measured_points_going_without_a_graph_is_never_the_cheaper_way():
    cost = StepCost({1: 1.0, 16: 4.0}, {1: 6.0, 16: 5.0})
    assert cost.uncaptured(16) == 5.0
    assert cost.uncaptured(1000) == cost.replayed(1000) == pytest.approx(1 + 0.2 * 999)


def test_of_functions_and_pairs():
    cost = StepCost.of(lambda n, captured: n if captured else 2 * n)
    assert (cost.replayed(3), cost.uncaptured(3), cost.points) == (3, 6, ())
    assert StepCost.of({1: (1, 2), 3: (3, 4)}).replayed(2) == 2
    assert StepCost(3.0, 4.0).uncaptured(77) == 4.0
    assert StepCost.of(cost) is cost


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda n: n, "two arguments"),
        ({1: 5}, "pairs"),
        ({}, "not one measured point"),
        ({1: (0, 1)}, "positive"),
        ({1: (math.nan, 1)}, "positive"),
        ({0: (1, 1)}, "point at 0"),
        (7, "step_cost=7"),
        (ROWS.drop(columns="batch"), "no column with the tokens"),
        (ROWS.drop(columns="wall_ms"), "wall_ms"),
        (ROWS[ROWS["mode"] != "FULL"], "no rows of the mode FULL"),
        (ROWS[ROWS["mode"] == "FULL"], "compiled or NONE or eager"),
        (ROWS.assign(wall_ms="slow"), "no number"),
    ],
)
def test_costs_that_make_no_sense(given, said):
    with pytest.raises(ConfigError, match=said):
        StepCost.of(given)


def test_a_function_that_gives_no_cost_is_told_with_the_size():
    with pytest.raises(ConfigError, match="replayed cost of 5 tokens is -1"):
        StepCost(lambda n: -1, 2.0).replayed(5)


def test_files(tmp_path):
    ROWS.to_csv(tmp_path / "bench.csv", index=False)
    assert StepCost.read(tmp_path / "bench.csv").replayed(1) == 1
    (tmp_path / "bench.json").write_text(json.dumps({"rows": ROWS.to_dict("records")}))
    assert StepCost.read(tmp_path / "bench.json", "PIECEWISE").replayed(1) == 2
    for name, text in (("empty.csv", ""), ("x.json", "{}"), ("y.json", "[")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            StepCost.read(tmp_path / name)
    with pytest.raises(ConfigError, match="nothing"):
        StepCost.read(tmp_path / "nothing.csv")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("surplus.csv", b"batch,replayed_ms,uncaptured_ms\n1,0,2,5\n", "does not match length of data"),
        (
            "hole.csv",
            b"batch,replayed_ms,uncaptured_ms\n1,2,3\n,4,5\n",
            "batch has no number in a row whose repl",
        ),
        ("cut.csv.gz", gzip.compress(b"batch,replayed_ms\n1,2\n", mtime=0)[:-9], "EOFError"),
        ("no.zip", b"x", "BadZipFile"),
        ("deep.json", b"[" * 100_000, "RecursionError"),
        (
            "list.json",
            b'[{"batch": 1, "mode": ["x"], "wall_ms": 2}]',
            "no rows of the mode FULL .there are .'x'",
        ),
    ],
)
def test_a_broken_file_is_no_cost(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"step cost .*{name}: .*{said}"):
        StepCost.read(tmp_path / name)


def test_a_comma_at_the_end_of_each_row_moves_no_column(tmp_path):
    """Else pandas takes the first column for an index, and the first cost for the batch."""
    (tmp_path / "x.csv").write_text("batch,replayed_ms,uncaptured_ms\n1,2,3,\n64,4,5,\n")
    cost = StepCost.read(tmp_path / "x.csv")
    assert cost.points == (1, 64) and (cost.replayed(64), cost.uncaptured(64)) == (4, 5)


def test_a_mark_of_the_byte_order_is_no_part_of_the_file(tmp_path):
    row = '[{"batch": 1, "replayed_ms": 1, "uncaptured_ms": 2}]'
    (tmp_path / "x.JSON").write_text(row, encoding="utf-8-sig")
    assert StepCost.read(tmp_path / "x.JSON").uncaptured(1) == 2


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.1-8b"])
def test_recorded_costs_are_those_of_the_recording_and_say_so(shape):
    rows = {
        (row["mode"], row["batch"]): row["wall_ms"]
        for row in recordings.load(f"h200-crossover-{shape}")["rows"]
    }
    for mode in ("FULL", "PIECEWISE"):
        cost = recorded_step_cost(shape, mode)
        assert cost.replayed(32) == rows[mode, 32] and cost.uncaptured(32) == rows["compiled", 32]
        assert shape in cost.source and "H200" in cost.source
    assert "StepCost(5 points, 1 to 256 tokens" in repr(cost)


# --- memory ----------------------------------------------------------------------------------------------


def test_a_pools_high_water_mark_does_not_add_up():
    model = PoolModel(lambda largest: 10.0 * largest, lambda size: 1.0)
    assert model.bytes([1, 2, 4]) == 40 + 3
    assert model.bytes([4]) == 41 and model.bytes([]) == 0


def test_plain_bytes_are_what_each_size_adds():
    assert PoolModel.of(5).bytes([1, 2]) == 10
    assert PoolModel.of(lambda size: 2 * size).bytes([1, 2]) == 6
    assert PoolModel.of({1: 10, 3: 30}).bytes([1, 2, 3]) == 60
    assert PoolModel.of(5, graph_bytes=1).bytes([1, 2]) == 12


def predicted(rows):
    columns = ["num_tokens", "reserved_before_bytes", "reserved_after_bytes", "peak_allocated_bytes"]
    return pd.DataFrame(rows, columns=columns)


def test_of_a_prediction_recorded_large_to_small():
    frame = predicted([(64, 0, 10 * SEGMENT, 9 * SEGMENT), (8, 10 * SEGMENT, 11 * SEGMENT, SEGMENT // 2)])
    model = PoolModel.of(frame)
    assert model.bytes([8, 64]) == model.bytes([64]) == 11 * SEGMENT
    assert (
        model.bytes([8]) == 2 * SEGMENT
    )  # its own peak in whole segments, and what it made the pool grow by
    assert PoolModel.of(frame, graph_bytes=7).bytes([8, 64]) == 11 * SEGMENT + 14


def test_of_a_prediction_recorded_small_to_large():
    model = PoolModel.of(predicted([(8, 0, SEGMENT, 5), (64, SEGMENT, 3 * SEGMENT, 9)]))
    assert model.bytes([8]) == SEGMENT and model.bytes([8, 64]) == 3 * SEGMENT


def test_frames_that_lack_something():
    with pytest.raises(ConfigError, match="peak_allocated_bytes"):
        PoolModel.of(pd.DataFrame({"num_tokens": [1]}))
    with pytest.raises(ConfigError, match="rows"):
        PoolModel.of(predicted([]))


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.1-8b"])
def test_the_recorded_memory_is_what_the_ledger_says(shape):
    facts = recordings.load(f"h200-memory-{shape}")
    model = recorded_memory(shape, "PIECEWISE", graph_bytes=0)
    assert model.bytes(facts["sizes"]) == facts["runs"]["large to small"]["pool_reserved_bytes"]
    assert model.bytes([64, 512]) > model.bytes([64])
    first = facts["runs"]["first of the process"]
    outside = (first["driver_bytes"] - first["torch_reserved_growth_bytes"]) / len(facts["sizes"])
    assert recorded_memory(shape).each_bytes(8) == outside
