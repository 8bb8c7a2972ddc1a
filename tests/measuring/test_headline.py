"""The headline table: its arithmetic on made-up rows, and dry runs of the real thing."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pandas as pd
import pytest
import torch

from cgkit.errors import CaptureError, ConfigError
from cgkit.measuring import headline
from cgkit.measuring.first_call import first_calls
from cgkit.measuring.headline_frame import (
    COLUMNS,
    MODES,
    floor_ms,
    goals,
    headline_frame,
    weight_bytes,
    with_ratios,
)
from cgkit.measuring.headline_model import Options, as_json, own_code
from cgkit.measuring.manifest import manifest_path
from cgkit.measuring.step_counts import counted
from cgkit.plotting import title_of
from cgkit.serving.llama import PRESETS
from cgkit.serving.opt import OPT_PRESETS
from cgkit.serving.weights import random_model

# --- arithmetic --------------------------------------------------------------------------------------


def row(mode, wall, **more):
    return {"model": "m", "case": "decode", "mode": mode, "batch": 1, "wall_ms": wall, **more}


def test_floors_and_ratios():
    held = {"weight_bytes": 4e9, "copy_bytes_per_s": 2e12}
    rows = [row("eager", 10.0, **held), row("compiled", 6.0), row("FULL", 4.0, gpu_busy_ms=3.2, **held)]
    eager, compiled, full = with_ratios(rows)
    assert full["floor_ms"] == pytest.approx(2.0) and full["ratio_to_floor"] == pytest.approx(2.0)
    assert full["ratio_to_eager"] == pytest.approx(0.4) and full["ratio_to_compiled"] == pytest.approx(4 / 6)
    assert full["ratio_to_busy"] == pytest.approx(1.25)
    assert eager["ratio_to_eager"] == 1 and eager["ratio_to_floor"] == pytest.approx(5)
    assert (
        compiled["floor_ms"] is None
        and compiled["ratio_to_floor"] is None
        and compiled["ratio_to_busy"] is None
    )
    assert "floor_ms" not in rows[0]  # what was given is left alone
    assert floor_ms({"weight_bytes": 0, "copy_bytes_per_s": 1e12}) is None


def test_a_row_of_another_process_goes_over_its_twin():
    rows = [row("eager", 10.0), row("FULL_AND_PIECEWISE", 2.0), row("reduce-overhead", 5.0, twin_ms=4.0)]
    last = with_ratios(rows)[-1]
    # there everything took twice as long: 5 of it are 2.5 of these
    assert last["ratio_to_eager"] == pytest.approx(0.25)
    assert goals(rows)[0]["full_over_reduce_overhead"] == pytest.approx(0.8)
    alone = with_ratios([row("eager", 10.0), row("reduce-overhead", 5.0, twin_ms=4.0)])[-1]
    assert alone["ratio_to_eager"] is None  # its twin was not measured in turn with eager


def test_the_frame_is_tidy():
    rows = [row("FULL", 4.0), {**row("eager", 9.0), "case": "generate", "batch": 8}, row("eager", 10.0)]
    frame = headline_frame(rows)
    assert list(frame.columns) == list(COLUMNS)
    assert list(zip(frame["case"], frame["mode"])) == [
        ("decode", "eager"),
        ("decode", "FULL"),
        ("generate", "eager"),
    ]
    assert not frame.duplicated(["model", "case", "mode", "batch"]).any()
    wanted = {"model", "mode", "batch", "wall_ms", "cpu_ms", "gpu_busy_ms", "kernels", "graph_launches", "capture_s",
              "pool_bytes", "floor_ms", "ratio_to_eager", "ratio_to_floor", "case", "tokens_s", "first_call_s",
              "wall_p10_ms", "wall_p90_ms", "emulated", "device"}  # fmt: skip
    assert wanted <= set(COLUMNS)


def test_the_ratios_that_the_table_is_read_for():
    rows = [
        row("compiled", 12.0),
        row("PIECEWISE", 6.0, cpu_ms=0.3),
        row("FULL_AND_PIECEWISE", 5.0, gpu_busy_ms=4.0),
    ]
    (found,) = goals(rows)
    assert found["compiled_over_piecewise"] == 2 and found["piecewise_over_full"] == pytest.approx(1.2)
    assert found["full_over_busy"] == pytest.approx(1.25) and found["piecewise_cpu_ms"] == 0.3
    assert found["full_over_reduce_overhead"] is None and found["full_over_floor"] is None


@pytest.mark.parametrize(
    "shape", [PRESETS["tiny-llama"], PRESETS["smollm2-135m"].scaled(num_hidden_layers=1)]
)
def test_a_steps_weights_leave_the_tables_out(shape):
    model = random_model(shape)
    step, head = weight_bytes(model)
    layers = [p for name, p in model.named_parameters() if ".layers." in name or name.endswith("norm.weight")]
    assert step == sum(p.nbytes for p in layers) and head == 4 * shape.vocab_size * shape.hidden_size


def test_opts_tables_are_left_out_too():
    shape = OPT_PRESETS["tiny-opt"]
    step, head = weight_bytes(random_model(shape))
    tables = 4 * shape.hidden_size * (shape.vocab_size + shape.max_position_embeddings + 2)
    assert step == 4 * shape.num_parameters - tables and head == 4 * shape.vocab_size * shape.hidden_size


def test_what_a_profile_holds():
    gpu, cpu = "DeviceType.CUDA", "DeviceType.CPU"
    events = [("triton_fused", gpu, 30.0), ("gemm", gpu, 50.0), ("Memcpy DtoD", gpu, 4.0), ("Memset", gpu, 2.0),
              ("cudaLaunchKernel", cpu, 5.0), ("cuLaunchKernelEx", cpu, 5.0), ("cudaGraphLaunch", cpu, 9.0),
              ("cudaDeviceSynchronize", cpu, 70.0)]  # fmt: skip
    assert counted(events * 2, 2) == {
        "gpu_busy_ms": pytest.approx(0.086), "kernels": 2, "copies": 2, "kernel_launches": 2, "graph_launches": 1,
    }  # fmt: skip


def test_a_copy_of_a_function_has_its_own_code():
    held = 3

    def plain(x: int) -> int:
        return x + held

    copy = own_code(plain)
    assert copy(1) == 4 and copy.__code__ is not plain.__code__


def test_options_reach_a_child_whole():
    options = Options("tiny-opt", (1, 4), ("eager", "FULL"), layers=2, device="cpu", generate=False)
    assert Options.from_json(as_json(options)) == options


# --- dry runs ----------------------------------------------------------------------------------------

SMALL = (
    "--device cpu --layers 1 --compiler eager --batches 1 2 --rounds 1 --context 16 --generate-rounds 1 "
    "--generate-batch 2 --prompt-tokens 4 --new-tokens 4 --no-first-calls"
)


def parsed(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    headline.add_arguments(parser)
    return parser.parse_args([*SMALL.split(), *map(str, more)])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[dict, Path]:
    folder = tmp_path_factory.mktemp("headline")
    saved = []
    save = headline.Headline.save

    def noting(self):
        save(self)
        saved.append(len(pd.read_csv(folder / "table.csv")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headline.Headline, "save", noting)
        files = ["--csv", folder / "table.csv", "--svg", folder / "table.svg"]
        facts = headline.run(parsed("--shapes", "tiny-llama", "tiny-opt", *files))
    return {**facts, "saved": saved}, folder


@pytest.mark.slow
def test_every_row_is_there_and_says_that_it_is_a_dry_run(run):
    frame = pd.read_csv(run[1] / "table.csv")
    assert list(frame.columns) == list(COLUMNS)
    for model in ("tiny-llama", "tiny-opt"):
        mine = frame[frame["model"] == model]
        for case, batches in (("decode", (1, 2)), ("generate", (2,))):
            for batch in batches:
                held = mine[(mine["case"] == case) & (mine["batch"] == batch)]
                assert list(held["mode"]) == list(MODES)
    assert frame["emulated"].all() and frame["device"].str.contains("emulated").all()
    assert (frame["wall_ms"] > 0).all() and (frame["wall_p10_ms"] <= frame["wall_p90_ms"]).all()
    for missing in ("gpu_busy_ms", "kernels", "graph_launches", "ratio_to_busy"):
        assert frame[missing].isna().all()  # a CPU knows nothing of them, and nothing is made up
    graphs = frame["mode"].isin(["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
    assert (frame.loc[graphs, "pool_bytes"] > 0).all() and frame.loc[~graphs, "pool_bytes"].isna().all()
    assert (frame.loc[graphs, "capture_s"] > 0).all()


@pytest.mark.slow
def test_floors_and_ratios_of_the_table_are_those_of_its_columns(run):
    for one in pd.read_csv(run[1] / "table.csv").to_dict("records"):
        assert one["floor_ms"] == pytest.approx(one["weight_bytes"] / one["copy_bytes_per_s"] * 1e3, rel=1e-4)
        assert one["ratio_to_floor"] == pytest.approx(one["wall_ms"] / one["floor_ms"], rel=1e-4)
        tokens = one["batch"] * (4 if one["case"] == "generate" else 1)
        assert one["tokens_s"] == pytest.approx(tokens / one["wall_ms"] * 1e3, rel=1e-4)
        assert (one["mode"] == "eager") == (one["ratio_to_eager"] == 1)
        assert math.isnan(one["twin_ms"]) == (one["mode"] != "reduce-overhead")


@pytest.mark.slow
def test_the_file_is_written_as_soon_as_a_part_is_done(run):
    # all modes but the last of a model, then that one; two decode batches and one generation each
    assert run[0]["saved"] == [21, 24, 45, 48]


@pytest.mark.slow
def test_the_manifest_is_one_that_recordings_read(run):
    from cgkit import recordings

    folder = run[1]
    manifest = json.loads(manifest_path(folder / "table.csv").read_text())
    assert manifest["command"].startswith("cgkit bench headline --shapes tiny-llama tiny-opt --batches 1 2")
    assert str(folder) not in json.dumps(manifest) and manifest["emulated"] is True
    assert manifest["torch"] == torch.__version__ and set(manifest["files"]) == {"table.csv"}
    frame = recordings.load("table", folder)
    assert len(frame) == 48 and "torch" in frame.attrs["recorded"]
    assert (folder / "table.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_facts_hold_the_table_and_what_it_is_read_for(run):
    facts = run[0]
    assert len(facts["rows"]) == len(facts["frame"]) == 48 and facts["emulated"] is True
    assert {"model", "case", "batch", "compiled_over_piecewise"} <= set(facts["goals"][0])
    assert facts["not_measured"] == {} and set(facts["seconds"]) == {
        f"{model} {part}" for model in ("tiny-llama", "tiny-opt") for part in ("rows", "last")
    }
    json.dumps({key: value for key, value in facts.items() if key != "frame"})


@pytest.mark.slow
def test_the_recorded_table_is_drawn(run):
    from cgkit.plotting import headline_chart

    ax = headline_chart.headline(pd.read_csv(run[1] / "table.csv"))
    figure = ax.get_figure()
    assert "emulated graphs: CPU figures" in " ".join(figure.get_suptitle().split())
    assert len(figure.axes) == 6 and [t.get_text() for t in ax.get_yticklabels()] == list(
        headline_chart.LOOKS
    )
    assert title_of(ax)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--shapes", "opt-126m"], "opt-125m"),
        (["--rounds", "0"], "positive"),
        (["--batches", "2", "2"], "different"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_built(more, says):
    with pytest.raises(ConfigError, match=says):
        headline.run(parsed(*more))


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of machines without a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(CaptureError, match="--device cpu"):
        headline.run(parsed("--device", "cuda"))


@pytest.mark.slow
def test_children_wait_for_their_turn_and_a_failed_one_is_told(tmp_path, monkeypatch):
    args = parsed(
        "--shapes", "tiny-llama", "tiny-opt", "--csv", tmp_path / "t.csv", "--no-generate", "--batches", "1"
    )
    found = headline.Headline(args)
    good = Options("tiny-llama", (1,), ("eager", "PIECEWISE"), 1, "cpu", "eager", 16, 1, generate=False)
    bad = Options("tiny-opt", (1,), ("eager",), 1, "cpu", "no such compiler", 16, 1, generate=False)
    found.in_children([good, bad])
    facts = found.facts()
    assert [(r["model"], r["mode"]) for r in facts["rows"]] == [
        ("tiny-llama", "eager"),
        ("tiny-llama", "PIECEWISE"),
    ]
    assert list(facts["not_measured"]) == ["tiny-opt rows"]
    assert "no such compiler" in facts["not_measured"]["tiny-opt rows"]
    assert len(pd.read_csv(tmp_path / "t.csv")) == 2
    assert "tiny-opt rows" in json.loads(manifest_path(tmp_path / "t.csv").read_text())["not_measured"]


@pytest.mark.slow
def test_a_cold_start_compiles_and_a_warm_one_loads():
    found = first_calls(["tiny-llama"], device="cpu", layers=2, context=16)["tiny-llama"]
    cold, warm = found["cold"], found["warm"]
    assert cold["compilations"] > 0 and cold["loaded"] == 0
    assert warm["compilations"] == 0 and warm["loaded"] == cold["compilations"]
    for start in (cold, warm):
        assert start["first_call_s"] == pytest.approx(start["compile_s"] + start["step_s"])
    assert warm["first_call_s"] < cold["first_call_s"]


@pytest.mark.slow
def test_a_first_call_that_fails_says_why():
    with pytest.raises(CaptureError, match=r"(?s)tiny-llama failed.*no such compiler"):
        first_calls(["tiny-llama"], device="cpu", layers=1, compiler="no such compiler")


@pytest.mark.gpu
def test_on_a_gpu_everything_is_measured():
    options = (
        "--device cuda --layers 2 --shapes tiny-opt --batches 1 8 --rounds 2 --context 32 --generate-rounds 1 "
        "--prompt-tokens 4 --new-tokens 8"
    )
    parser = argparse.ArgumentParser()
    headline.add_arguments(parser)
    facts = headline.run(parser.parse_args(options.split()))
    assert facts["not_measured"] == {}
    rows = {(r["case"], r["mode"], r["batch"]): r for r in facts["rows"]}
    assert len(rows) == 8 * 3 and not any(r["emulated"] for r in rows.values())
    decode = {key[1:]: r for key, r in rows.items() if key[0] == "decode"}
    assert all(r["gpu_busy_ms"] > 0 and r["kernels"] > 0 for r in decode.values())
    assert (
        decode["PIECEWISE", 1]["graph_launches"] == 3
        and decode["FULL_AND_PIECEWISE", 1]["graph_launches"] == 1
    )
    assert decode["FULL", 8]["graph_launches"] == 1 and decode["eager", 1]["graph_launches"] == 0
    assert decode["reduce-overhead", 8]["graph_launches"] >= 1 and decode["reduce-overhead", 8]["twin_ms"] > 0
    assert decode["FULL", 1]["cpu_ms"] < decode["PIECEWISE", 1]["cpu_ms"] < decode["eager", 1]["cpu_ms"]
    assert decode["compiled", 1]["first_call_warm_s"] < decode["compiled", 1]["first_call_s"]
