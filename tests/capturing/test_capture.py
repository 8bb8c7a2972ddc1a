"""The road to recorded graphs and back, on the emulated platform and (marked gpu) on CUDA."""

import pytest
import torch

from cgkit import events
from cgkit.capturing import CapturedGraphs, capture, free_all, get_platform
from cgkit.capturing.wrapper import CUDAGraphWrapper
from cgkit.config import CUDAGraphMode
from cgkit.counters import compilation_counter
from cgkit.errors import (
    CaptureError,
    CaptureLockedError,
    ConfigError,
    MovedInputError,
    ReplayError,
    TraceError,
)
from cgkit.forward_context import BatchDescriptor, set_forward_context
from tests.capturing.models import Batch, Layers, ManyArguments, Toy, compiled, host_calls, shared_toy, toy

PIECEWISE, FULL, NONE = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL, CUDAGraphMode.NONE


def step(mode, tokens, uniform=False, metadata=None):
    key = BatchDescriptor(tokens, uniform)
    return set_forward_context(metadata, cudagraph_runtime_mode=mode, batch_descriptor=key)


def attention_calls(fn):
    """How often the attention's host code runs during ``fn()``."""
    before = host_calls[0]
    fn()
    return host_calls[0] - before


def test_the_toy_model_of_the_article(device):
    x = torch.randn(2, 8, device=device)
    with compilation_counter.expect(
        num_graphs_seen=1,
        num_piecewise_graphs_seen=5,
        num_piecewise_capturable_graphs_seen=3,
        num_backend_compilations=3,
        num_cudagraph_captured=6,
        num_gpu_runner_capture_triggers=2,
    ):
        made = toy(device)
        piecewise = capture(made, [1, 2])
    assert attention_calls(lambda: piecewise(x)) == 2
    full = capture(made, [1, 2], mode="FULL")
    assert attention_calls(lambda: full(x)) == 0
    expected = Toy()(x)
    assert torch.equal(piecewise(x), expected) and torch.equal(full(x), expected)


@pytest.mark.parametrize("depth", [1, 3])
def test_graphs_by_layers_and_sizes(device, depth):
    with compilation_counter.expect(
        num_piecewise_graphs_seen=2 * depth + 1, num_cudagraph_captured=(depth + 1) * 3
    ):
        capture(toy(device, Layers(depth)), [1, 2, 4])
    with compilation_counter.expect(
        num_piecewise_graphs_seen=1, num_piecewise_capturable_graphs_seen=1, num_cudagraph_captured=3
    ):
        capture(toy(device, Layers(depth), ops=(), splitting_ops=(), cudagraph_mode="FULL"), [1, 2, 4])


def test_one_piece_in_piecewise_mode(device):
    captured = capture(toy(device, ops=()), [2], mode="PIECEWISE")
    x = torch.randn(2, 8, device=device)
    assert captured.num_graphs == 1 and torch.equal(captured(x), Toy()(x))


@pytest.mark.parametrize(
    "error", [RuntimeError("an even number of rows, please"), torch.OutOfMemoryError("full")]
)
def test_a_size_that_nobody_asked_for_may_be_refused_and_memory_that_ran_out_is_said(monkeypatch, error):
    """With one size a run at another tells which dimensions of the output follow it."""
    planned, sizes = CapturedGraphs._planned, []

    def refusing(self, run):
        def looking(x):
            sizes.append(len(x))
            if len(x) != 4:
                raise error
            return run(x)

        return planned(self, looking)

    monkeypatch.setattr(CapturedGraphs, "_planned", refusing)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(CaptureError, match="memory"):
            capture(shared_toy("cpu"), [4])
    else:
        x = torch.randn(4, 8)
        assert torch.equal(capture(shared_toy("cpu"), [4])(x), Toy()(x))
    assert 3 in sizes


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_recording_does_not_run(device, mode):
    """Inputs change between warm-up and recording; outputs are neither result before the first replay."""
    model = shared_toy(device)
    platform = get_platform("auto", device)
    pool = platform.new_pool()
    if mode is FULL:
        run = CUDAGraphWrapper(model.bind(), FULL, platform, pool)
    else:
        run = model.bind(model.stitch(lambda piece: CUDAGraphWrapper(piece, PIECEWISE, platform, pool)))
    buffer = torch.full((4, 8), 3.0, device=device)
    with torch.no_grad():
        with step(NONE, 4):
            old = run(buffer).clone()
        buffer.fill_(7.0)
        new = Toy()(buffer)
        with step(mode, 4):
            recorded = run(buffer)
            platform.synchronize()
            assert not torch.isclose(recorded, old).any() and not torch.isclose(recorded, new).any()
            assert torch.equal(run(buffer), new)
        buffer.fill_(3.0)
        with step(mode, 4):
            assert torch.equal(run(buffer), old)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_equal_to_the_last_bit_at_the_same_padded_shape(device, mode):
    model = Layers(3)
    captured = capture(toy(device, model), [1, 2, 4, 8], mode=mode)
    for tokens in range(1, 9):
        x = torch.randn(tokens, 8, device=device)
        padded = torch.zeros(captured.sizes.pad(tokens), 8, device=device)
        padded[:tokens] = x
        expected = captured.compiled(padded)[:tokens]
        for uniform in (False, True):
            with set_forward_context(batch_descriptor=BatchDescriptor(tokens, uniform)):
                assert torch.equal(captured(x), expected)


def test_fresh_tensors_batches_out_of_order_and_above_the_largest(device):
    captured = capture(shared_toy(device), [2, 4])
    for tokens in (3, 1, 4, 2, 5, 9, 3):
        x = torch.randn(tokens, 8, device=device)
        assert torch.allclose(captured(x), Toy()(x))
    with events.record(events.GraphCaptured) as log:
        captured(torch.randn(100, 8, device=device))
    assert log == []


def test_only_the_wrapper_of_the_steps_mode_is_awake(device):
    captured = capture(shared_toy(device), [2, 4], mode="FULL_AND_PIECEWISE")
    assert len(captured.full.entries) == 2 and [len(piece.entries) for piece in captured.pieces] == [2, 2, 2]
    x = torch.randn(2, 8, device=device)
    expected = Toy()(x)

    def call(uniform):
        with set_forward_context(batch_descriptor=BatchDescriptor(2, uniform)):
            assert torch.equal(captured(x), expected)

    assert attention_calls(lambda: call(True)) == 0  # one graph, attention inside
    assert attention_calls(lambda: call(False)) == 2


def test_full_decode_only_leaves_other_batches_without_a_graph(device):
    captured = capture(shared_toy(device), [1, 2], mode="FULL_DECODE_ONLY")
    assert captured.num_graphs == 2 and captured.pieces == []
    x = torch.randn(2, 8, device=device)
    assert attention_calls(lambda: captured(x)) == 2


def test_after_the_lock_an_unseen_key_raises(device):
    captured = capture(shared_toy(device), [1, 2])
    x = torch.randn(3, 8, device=device)
    with (
        step(PIECEWISE, 3),
        pytest.raises(CaptureLockedError, match=r"submod_0 would be recorded at \(3, False\)"),
    ):
        captured.run(x)
    assert torch.allclose(captured(x), Toy()(x))


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_own_buffers_are_read_in_place_and_may_not_move(device, mode):
    buffer = torch.zeros(4, 8, device=device)
    made = toy(device, cudagraph_copy_inputs=False)
    captured = capture(made, [2, 4], mode=mode, make_inputs=lambda tokens: buffer[:tokens])
    buffer.normal_()
    assert torch.equal(captured(buffer[:2]), Toy()(buffer[:2]))
    with pytest.raises(MovedInputError, match=r"submod_0|Toy"):
        captured(buffer.clone()[:2])
    with pytest.raises(MovedInputError):
        captured(buffer[1:3])
    with pytest.raises(ReplayError, match="3 tokens are no recorded size"):
        captured(buffer[:3])
    assert torch.equal(captured(buffer), Toy()(buffer))


def test_own_buffers_hold_what_they_held_before_capture(device):
    buffer = torch.randn(4, 8, device=device)
    before = buffer.clone()
    capture(toy(device, cudagraph_copy_inputs=False), [4], make_inputs=lambda tokens: buffer[:tokens])
    assert torch.equal(buffer, before)


def test_own_buffers_must_be_named(device):
    with pytest.raises(CaptureError, match="make_inputs=lambda num_tokens"):
        capture(toy(device, cudagraph_copy_inputs=False), [4])


def test_metadata_of_a_full_graph_may_not_move(device):
    cache, slot = torch.zeros(4, device=device), torch.zeros(1, dtype=torch.long, device=device)
    captured = capture(shared_toy(device), [2], mode="FULL", context=(cache, slot))
    x = torch.randn(2, 8, device=device)
    with set_forward_context((cache, slot)):
        captured(x)
    with set_forward_context((cache, slot.clone())), pytest.raises(MovedInputError, match=r"metadata\[1\]"):
        captured(x)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_no_real_state_is_written_while_recording(device, mode):
    """Dummy metadata points at slot 0, nobody's; its sentinel must not reach a real slot."""
    cache = torch.arange(4.0, device=device)
    slot = torch.zeros(1, dtype=torch.long, device=device)
    captured = capture(shared_toy(device), [1, 2], mode=mode, context=lambda key: (cache, slot))
    assert torch.equal(cache[1:], torch.arange(1.0, 4.0, device=device))
    slot.fill_(2)
    with set_forward_context((cache, slot)):
        captured(torch.ones(2, 8, device=device))
    assert cache[2] != 2 and torch.equal(cache[[1, 3]], torch.tensor([1.0, 3.0], device=device))


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("sizes", [[2, 4], [4]])
def test_nested_arguments_keywords_and_outputs(device, mode, sizes):
    def call(tokens):
        batch = Batch(torch.randn(tokens, 8, device=device), torch.randn(tokens, 8, device=device))
        return (batch, torch.randn(3, tokens, device=device)), {"scale": torch.randn(8, device=device)}

    model = ManyArguments()
    args, kwargs = call(5)
    dims = {"batch": 0, "positions": -1}
    made = compiled(model, *args, trace_options={"dynamic_arg_dims": dims, **kwargs})
    captured = capture(made, sizes, mode=mode)
    for tokens in (1, 3, 4, 6):
        args, kwargs = call(tokens)
        got, expected = captured(*args, **kwargs), model(*args, **kwargs)
        assert got["hidden"].shape == (tokens, 8) and got["pair"][0].shape == (3, tokens)
        torch.testing.assert_close(got, expected)
    with pytest.raises(TraceError, match="flag"):
        captured(*args, **kwargs, flag=False)
    with pytest.raises(TraceError, match="scale"):
        captured(*args, scale=torch.randn(7, device=device))


def test_a_weight_is_read_in_place_and_may_not_move(device):
    model = Layers(2)
    captured = capture(toy(device, model), [2])
    x = torch.randn(2, 8, device=device)
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
        assert torch.allclose(captured(x), model(x))
        captured.check_weights()
        model.layers[1].weight = torch.nn.Parameter(torch.zeros(8, 8, device=device), False)
    assert not torch.allclose(captured(x), model(x))  # the old weights, silently
    with pytest.raises(MovedInputError, match=r"layers.*1.*weight"):
        captured.check_weights()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_debug_notices_a_moved_weight_at_the_next_step(device, mode):
    model = Layers(2)
    captured = capture(toy(device, model, debug=True), [2], mode=mode)
    x = torch.randn(2, 8, device=device)
    assert torch.allclose(captured(x), model(x))
    model.layers[1].weight = torch.nn.Parameter(torch.zeros(8, 8, device=device), False)
    with pytest.raises(MovedInputError, match=r"layers.*1.*weight"):
        captured(x)


def test_outputs_are_overwritten_by_the_next_replay_unless_copied(device):
    captured = capture(shared_toy(device), [2])
    x = torch.randn(2, 8, device=device)
    first = captured(x)
    kept = first.clone()
    captured(x + 1)
    assert torch.equal(first, kept)
    captured.clone_outputs = False
    first = captured(x)
    captured(x + 1)
    assert not torch.equal(first, kept)


def test_padded_rows_do_not_remember_earlier_steps(device):
    captured = capture(shared_toy(device), [4])
    captured.clone_outputs = False
    captured(torch.full((4, 8), float("nan"), device=device))
    x = torch.ones(2, 8, device=device)
    assert torch.equal(captured(x), Toy()(x))
    key = captured.dispatcher.route(2).key
    assert not captured.pieces[-1].entries[key].output[0].isnan().any()


def test_arguments_that_do_not_fit_what_was_recorded(device):
    captured = capture(shared_toy(device), [4])
    with pytest.raises(TraceError, match=r"x.shape\[1\] was 8 then and is 7 now"):
        captured(torch.ones(2, 7, device=device))
    with pytest.raises(TraceError, match="float64"):
        captured(torch.ones(2, 8, dtype=torch.float64, device=device))
    with pytest.raises(TraceError, match="None"):
        captured(None)
    with pytest.raises(TypeError):
        captured(y=torch.ones(2, 8, device=device))


def test_keywords_and_positions_are_the_same_call(device):
    captured = capture(shared_toy(device), [2], mode="FULL")
    x = torch.randn(2, 8, device=device)
    assert torch.equal(captured(x=x), captured(x))


def test_capturing_again_and_freeing(device):
    made = shared_toy(device)
    first = capture(made, [1, 2])
    second = capture(made, [4], mode="FULL")  # a cell run again: the lock opens for it
    x = torch.randn(2, 8, device=device)
    assert torch.equal(first(x), second(x)) and made.lock.locked
    first.free()
    with pytest.raises(ReplayError, match="were freed: capture again"):
        first(x)
    assert torch.equal(second(x), made(x))
    assert "0 " in repr(first)


def test_two_models_in_one_pool_and_free_all(device):
    first = capture(toy(device), [2])
    second = capture(toy(device, Layers(1)), [2], pool=first.pool, platform=first.platform)
    second.free()
    x = torch.randn(2, 8, device=device)
    assert torch.equal(first(x), Toy()(x))
    assert free_all() >= 1 and free_all() == 0
    with pytest.raises(ReplayError, match="were freed"):
        first(x)


def test_without_graphs_the_artefact_still_runs(device):
    captured = capture(shared_toy(device), [2], mode="NONE")
    x = torch.randn(2, 8, device=device)
    assert captured.num_graphs == 0 and torch.equal(captured(x), Toy()(x))


def test_a_static_size_is_what_is_recorded_even_without_warm_ups(device):
    made = toy(device, compile_sizes=(2,), cudagraph_num_of_warmups=0)
    ran = []
    for backend in made.backends:
        entry = backend.concrete_size_entries[2]
        static = entry.runnable
        entry.runnable = lambda *args, static=static: (ran.append(args[0]), static(*args))[1]
    captured = capture(made, [2, 4])
    x = torch.randn(2, 8, device=device)
    ran.clear()
    assert torch.equal(captured(x), Toy()(x))
    expected = 3 if captured.platform.emulated else 0  # a GPU replays kernels, not Python
    assert len(ran) == expected


def test_a_static_size_is_warmed_up_itself_and_not_the_general_shape_in_its_place():
    made = toy("cpu", compile_sizes=(2,))
    static_runs = []
    for backend in made.backends:
        entry = backend.concrete_size_entries[2]
        static = entry.runnable
        entry.runnable = lambda *args, static=static: (static_runs.append(args[0]), static(*args))[1]
    before = []
    unsubscribe = events.subscribe(events.CaptureTriggered, lambda event: before.append(len(static_runs)))
    try:
        capture(made, [2])
    finally:
        unsubscribe()
    assert before == [len(made.backends)]  # the very first run takes the general shape, so it is no warm-up


def test_large_sizes_are_recorded_first(device):
    with events.record(events.CaptureTriggered, events.CaptureFinished, events.Progress) as log:
        captured = capture(shared_toy(device), [1, 4, 2], mode="FULL_AND_PIECEWISE", uniform_sizes=[1, 2])
    order = [(e.mode, e.num_tokens) for e in log if isinstance(e, events.CaptureTriggered)]
    assert order == [("PIECEWISE", 4), ("PIECEWISE", 2), ("PIECEWISE", 1), ("FULL", 2), ("FULL", 1)]
    (finished,) = [e for e in log if isinstance(e, events.CaptureFinished)]
    assert finished.graphs == captured.num_graphs == 11
    progress = [(e.done, e.total) for e in log if isinstance(e, events.Progress) and e.stage == "capturing"]
    assert progress[0] == (0, 5) and progress[-1] == (5, 5)
    frame = captured.to_frame()
    assert len(frame) == 11 and frame["pool_growth_bytes"].sum() <= captured.pool_bytes.reserved


def test_weak_outputs_let_sizes_share_memory(device):
    sizes = [8, 16, 24, 32]
    weak = capture(toy(device, Layers(3, 512), width=512), sizes)
    strong = capture(toy(device, Layers(3, 512), width=512), sizes, weak_outputs=False)
    assert weak.pool_bytes.allocated < strong.pool_bytes.allocated
    assert weak.pool_bytes.reserved <= strong.pool_bytes.reserved
    x = torch.randn(9, 512, device=device)
    assert torch.equal(weak(x), strong(x))


def test_make_inputs_that_lies(device):
    made = toy(device)
    with pytest.raises(CaptureError, match=r"make_inputs\(4\) gave a tensor of shape \(3, 8\)"):
        capture(made, [4], make_inputs=lambda tokens: torch.zeros(3, 8, device=device))
    with pytest.raises(CaptureError, match="too many positional"):
        capture(made, [4], make_inputs=lambda tokens: (torch.zeros(tokens, 8, device=device), 1))
    assert not made.lock.locked
    assert capture(made, [4]).num_graphs == 3


@pytest.mark.parametrize("sizes", [[0], [-2], [1.5], [], "none"])
def test_sizes_that_make_no_sense(device, sizes):
    with pytest.raises(ConfigError):
        capture(shared_toy(device), sizes)


def test_a_platform_that_does_not_fit():
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs a GPU"):
            capture(shared_toy("cpu"), [1], platform="cuda")
    with pytest.raises(ConfigError, match="unknown"):
        capture(shared_toy("cpu"), [1], platform="metal")


@pytest.mark.slow  # a C++ compiler at work
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_with_inductor(device, mode, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    captured = capture(toy(device, compiler="inductor"), [1, 2, 4], mode=mode)
    for tokens in (1, 2, 3, 4, 5):
        x = torch.randn(tokens, 8, device=device)
        padded = torch.zeros(captured.sizes.pad(tokens), 8, device=device)
        padded[:tokens] = x
        assert torch.equal(captured(x), captured.compiled(padded)[:tokens])
        torch.testing.assert_close(captured(x), Toy()(x))
