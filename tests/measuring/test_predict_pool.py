"""Predicted pools beside measured ones: exactly equal on the emulated pool, within 10 % on a GPU."""

import gc
import json

import pytest
import torch

import cgkit
from cgkit import torch_hooks
from cgkit.capturing import capture
from cgkit.config import CompilationConfig, CUDAGraphMode
from cgkit.errors import ConfigError
from cgkit.measuring.caching_allocator import CUDA_RULES, EMULATED_RULES, PoolsApart
from cgkit.measuring.memory import Ledger
from cgkit.measuring.predict_pool import predict_pool, step_peak_bytes
from cgkit.measuring.segments import pool_segments
from cgkit.serving.llama import PRESETS
from cgkit.serving.runner import Runner
from cgkit.serving.weights import build_model, random_weights
from tests.capturing.models import Layers, toy

SIZES = (1, 2, 4, 8, 16)
STEP = ["mode", "num_tokens", "uniform_decode"]
BYTES = ["reserved_before_bytes", "reserved_after_bytes", "allocated_before_bytes", "allocated_after_bytes"]


def runner(shape="tiny-llama", device="cpu", dtype=torch.float32, sizes=SIZES, compiler="eager", **changes):
    config = PRESETS[shape].scaled(**changes) if changes else PRESETS[shape]
    model = build_model(config, random_weights(config, dtype, device), dtype=dtype, device=device)
    settings = CompilationConfig(
        compiler=compiler, cudagraph_mode="FULL_AND_PIECEWISE", cudagraph_capture_sizes=sizes
    )
    made = Runner(model, config=settings, max_num_seqs=sizes[-1], max_model_len=64, kv_cache_tokens=1024)
    made.executor.compile(made.inputs)
    return made


def recorded(made, mode, largest_first=True):
    made.executor.release()
    made.executor.mode = CUDAGraphMode.parse(mode, "mode")
    with Ledger() as ledger:
        made.executor.capture_model(made.inputs, largest_first=largest_first)
    return ledger


@pytest.fixture(scope="module")
def tiny():
    return runner()


def test_a_pool_for_each_piece_is_as_large_as_the_peaks_of_all(tiny):
    shared, apart = (
        predict_pool(tiny.executor.compiled, SIZES, mode="PIECEWISE", shared=shared)
        for shared in (True, False)
    )
    assert apart.reserved_bytes > shared.reserved_bytes
    assert apart.peak_allocated_bytes == shared.peak_allocated_bytes  # sharing changes where blocks lie
    frame = apart.to_frame()
    growth = frame["reserved_after_bytes"] - frame["reserved_before_bytes"]
    assert growth.sum() == apart.reserved_bytes
    assert growth.groupby(frame["name"]).sum().min() > 0  # each piece has one
    on_a_gpu = predict_pool(
        tiny.executor.compiled, SIZES, mode="PIECEWISE", shared=False, allocator="cuda"
    ).reserved_bytes
    assert on_a_gpu == len(tiny.executor.compiled.backends) * CUDA_RULES.small_segment


def test_pools_apart_give_a_block_back_to_the_pool_that_lent_it():
    pools = PoolsApart(EMULATED_RULES)
    pools.use("a")
    first = pools.alloc(1000)
    pools.use("b")
    second = pools.alloc(500)
    pools.free(first)
    assert {name: pool.allocated for name, pool in pools.pools.items()} == {"": 0, "a": 0, "b": 512}
    assert (pools.reserved, pools.allocated, pools.peak_allocated) == (1536, 512, 1536)
    pools.free(second)
    pools.reset_peak()
    assert pools.peak_allocated == pools.alloc(0) == 0


@pytest.mark.parametrize("largest_first", [True, False], ids=["large to small", "small to large"])
def test_the_emulated_pool_is_predicted_byte_for_byte(tiny, largest_first):
    predicted = predict_pool(tiny.executor.compiled, SIZES, mode="PIECEWISE", largest_first=largest_first)
    measured = recorded(tiny, "PIECEWISE", largest_first).to_frame()
    frame = predicted.to_frame()
    assert list(frame["name"]) == list(measured["name"]) and len(frame) == 5 * len(SIZES)
    for column in [*STEP, *BYTES, "peak_allocated_bytes"]:
        assert list(frame[column]) == list(measured[column]), column
    assert predicted.reserved_bytes == tiny.executor.captured.pool_bytes.reserved
    assert predicted.peak_allocated_bytes == tiny.executor.captured.peak_allocated_bytes
    assert (predicted.compare(measured)["reason"] == "").all()


@pytest.mark.parametrize("weak_outputs", [True, False])
def test_outputs_that_are_kept_are_predicted_too(weak_outputs):
    compiled = toy("cpu", Layers(3, 16), width=16)
    predicted = predict_pool(compiled, [1, 3, 8], mode="PIECEWISE", weak_outputs=weak_outputs)
    captured = capture(compiled, [1, 3, 8], mode="PIECEWISE", weak_outputs=weak_outputs)
    assert predicted.reserved_bytes == captured.pool_bytes.reserved
    assert predicted.allocated_after_bytes == captured.pool_bytes.allocated
    assert (captured.pool_bytes.allocated > 0) is not weak_outputs
    captured.free()


def test_predicting_captures_nothing_and_leaves_the_model_as_it_was(tiny):
    tiny.executor.release()
    with cgkit.events.record(cgkit.events.GraphCaptured, cgkit.events.PieceCompiled) as log:
        predict_pool(tiny.executor.compiled, SIZES, mode="FULL_AND_PIECEWISE", allocator="cuda")
    assert log == []
    assert not tiny.executor.compiled.lock.locked


def test_the_cuda_model_sees_the_code_that_inductor_generated():
    if torch_hooks.find_cpp_compiler() is None:
        pytest.skip("no C++ compiler")
    compiled = runner(compiler="inductor").executor.compiled
    predicted = predict_pool(compiled, SIZES, mode="PIECEWISE", allocator="cuda")
    frame = predicted.to_frame()
    assert set(frame["found_in"]) == {"generated code"}
    assert any("generated for cpu" in note for note in predicted.notes)
    # inside a piece there is more than its outputs: the buffers between its kernels
    assert (frame["peak_allocated_bytes"] >= frame["allocated_after_bytes"]).all()
    assert (frame["peak_allocated_bytes"] > frame["allocated_after_bytes"]).any()
    assert predicted.reserved_bytes % CUDA_RULES.segment_granule == 0
    assert (frame["allocated_after_bytes"] <= frame["reserved_after_bytes"]).all()


def test_larger_sizes_need_no_less(tiny):
    compiled = tiny.executor.compiled
    peaks = [predict_pool(compiled, [n], mode="PIECEWISE").peak_allocated_bytes for n in (1, 8, 64, 256)]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]
    steps = [step_peak_bytes(compiled, n) for n in (1, 8, 64)]
    assert steps == sorted(steps) and steps[0] > 0


def test_differences_have_a_reason(tiny):
    predicted = predict_pool(tiny.executor.compiled, SIZES, mode="FULL_AND_PIECEWISE", uniform_sizes=SIZES)
    ledger = recorded(tiny, "FULL_AND_PIECEWISE")
    frame = predicted.compare(ledger, pool_segments(tiny.executor.captured))
    same = frame["predicted_allocated_bytes"] == frame["measured_allocated_bytes"]
    assert list(frame.loc[same, "mode"].unique()) == ["PIECEWISE"]
    # the attention on the CPU is made of torch's operators, which allocate inside the full graph
    assert frame.loc[~same, "reason"].str.contains("temporaries of operators").all()
    assert "<svg" in predicted._repr_mimebundle_()["text/html"]
    assert predicted.plot(ledger).has_data() and predicted.plot_segments().has_data()


def test_settings_of_the_allocator_are_named(tiny, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    predicted = predict_pool(tiny.executor.compiled, [1], mode="PIECEWISE", allocator="cuda")
    assert any("expandable_segments:True" in note for note in predicted.notes)
    assert "expandable_segments" in repr(predicted)


def test_what_cannot_be_predicted(tiny):
    with pytest.raises(ConfigError, match="nothing would be recorded"):
        predict_pool(tiny.executor.compiled, SIZES, mode="NONE")
    with pytest.raises(ConfigError, match="'cuda', 'emulated'"):
        predict_pool(tiny.executor.compiled, SIZES, mode="FULL", allocator="jemalloc")


# --- on a GPU ----------------------------------------------------------------------------------------

H200_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


def report(predicted, ledger, blocks, driver_bytes):
    """Everything that one run can teach, as text: for the message of a failed assertion."""
    frame = predicted.compare(ledger, blocks)
    graphs = predicted.to_frame().merge(
        ledger.to_frame(), on=["name", *STEP], suffixes=("_predicted", "_measured")
    )
    worst = graphs.assign(
        off=(graphs["peak_allocated_bytes_predicted"] - graphs["peak_allocated_bytes_measured"]).abs()
    ).nlargest(8, "off")
    live = blocks[blocks["state"] == "live"]
    return "\n".join(
        [
            repr(predicted),
            repr(ledger),
            frame.to_string(),
            worst.drop(columns=["seconds", "emulated", "order"], errors="ignore").to_string(),
            f"live blocks after capture: {live['block_bytes'].tolist()[:40]}",
            f"segments: {blocks.drop_duplicates('segment')['segment_bytes'].tolist()}",
            f"bytes by the driver: {driver_bytes}",
            json.dumps(sorted(set(predicted.to_frame()["found_in"].dropna()))),
        ]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "mode", "largest_first"),
    [
        ("tiny-llama", "PIECEWISE", True),
        ("llama-3.2-1b", "PIECEWISE", True),
        ("llama-3.2-1b", "PIECEWISE", False),
        ("llama-3.2-1b", "FULL_AND_PIECEWISE", True),
        ("llama-3.1-8b", "PIECEWISE", True),
    ],
)
@torch.no_grad()
def test_on_a_gpu_allocated_bytes_are_within_ten_percent(shape, mode, largest_first):
    layers = (
        {"num_hidden_layers": 4} if shape == "llama-3.1-8b" else {}
    )  # what a layer takes, all of them take
    made = runner(shape, "cuda", torch.bfloat16, H200_SIZES, "inductor", **layers)
    predicted = predict_pool(made.executor.compiled, H200_SIZES, mode=mode, largest_first=largest_first)
    recorded(
        made, mode, largest_first
    )  # the first capture of a process also loads kernels and takes workspaces
    made.executor.release()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    ledger = recorded(made, mode, largest_first)
    torch.cuda.synchronize()
    driver = before - torch.cuda.mem_get_info()[0]
    blocks = pool_segments(made.executor.captured)
    frame = predicted.compare(ledger, blocks)
    said = report(predicted, ledger, blocks, driver)
    print(said)
    assert set(predicted.to_frame()["found_in"].dropna()) == {"generated code"}, said
    measured_peak = ledger.to_frame()["peak_allocated_bytes"].max()
    assert predicted.peak_allocated_bytes == pytest.approx(measured_peak, rel=0.1), said
    assert frame["allocated_ratio"].between(0.9, 1.1).all(), said
    differs = frame["predicted_reserved_bytes"] != frame["measured_reserved_bytes"]
    assert (frame.loc[differs, "reason"] != "").all(), said
    made.executor.release()
    del made, ledger
    gc.collect()
    torch.cuda.empty_cache()
