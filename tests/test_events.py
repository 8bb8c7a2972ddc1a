"""Events, their first reader, and what a step tells everything below it."""

from __future__ import annotations

import threading

import pytest

import cgkit
from cgkit import BatchDescriptor, CompilationCounter, CUDAGraphMode, compilation_counter, events
from cgkit.errors import CaptureLockedError, CgkitError
from cgkit.forward_context import current_forward_context


@pytest.fixture(autouse=True)
def _clean():
    yield
    compilation_counter.reset()


def test_readers_get_events_of_their_type_in_order_until_they_leave():
    seen: list[tuple[str, events.Event]] = []
    undo = [
        events.subscribe(events.Progress, lambda e, name=name: seen.append((name, e))) for name in ("a", "b")
    ]
    one = events.Progress("tracing", 0, 1)
    events.emit(one)
    events.emit(events.DynamoAsIs("other"))
    undo[0]()
    events.emit(one)
    undo[1]()
    events.emit(one)
    assert seen == [("a", one), ("b", one), ("b", one)]


def test_nobody_reads_steps_unless_asked():
    assert not events.has_readers(events.StepRan)
    with events.record(events.StepRan) as log:
        assert events.has_readers(events.StepRan)
        events.emit(events.StepRan("decode", 1, 1, 1, "FULL", 0.1))
    assert len(log) == 1 and not events.has_readers(events.StepRan)


def test_expect_names_every_counter_that_differs():
    with compilation_counter.expect(num_graphs_seen=1, num_cudagraph_captured=0):
        events.emit(events.GraphTraced("model", 3, 1, 0.1))
    with (
        pytest.raises(AssertionError, match=r"num_graphs_seen: expected \+2, got \+1"),
        compilation_counter.expect(num_graphs_seen=2),
    ):
        events.emit(events.GraphTraced("model", 3, 1, 0.1))
    with pytest.raises(TypeError, match="no such counter"), compilation_counter.expect(num_graph_seen=1):
        pass


def test_counters_count_pieces_and_tell_compilers_apart():
    before = compilation_counter.clone()
    events.emit(events.GraphSplit("model", 5, 3, 0.1))
    for adaptor in ("eager", "inductor", "inductor"):
        events.emit(events.PieceCompiled("submod_0", None, adaptor, "key", 0.1))
    now = compilation_counter
    assert now.num_piecewise_graphs_seen - before.num_piecewise_graphs_seen == 5
    assert now.num_piecewise_capturable_graphs_seen - before.num_piecewise_capturable_graphs_seen == 3
    assert now.num_eager_compiles - before.num_eager_compiles == 1
    assert now.num_inductor_compiles - before.num_inductor_compiles == 2
    frame = now.to_frame()
    assert list(frame["counter"]) == list(now.as_dict())
    assert "num_inductor_compiles" in repr(now)
    compilation_counter.reset()
    assert set(compilation_counter.as_dict().values()) == {0}
    assert isinstance(before, CompilationCounter)


def test_contexts_nest_and_belong_to_their_thread():
    with pytest.raises(CgkitError, match="set_forward_context"):
        cgkit.get_forward_context()
    with cgkit.set_forward_context("outer") as outer:
        with cgkit.set_forward_context("inner", cudagraph_runtime_mode=CUDAGraphMode.FULL):
            assert cgkit.get_forward_context().attn_metadata == "inner"
        assert cgkit.get_forward_context() is outer
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(current_forward_context()))
        thread.start()
        thread.join()
        assert elsewhere == [None]
        with pytest.raises(ValueError, match="boom"), cgkit.set_forward_context("failing"):
            raise ValueError("boom")
        assert cgkit.get_forward_context() is outer
    assert current_forward_context() is None


def test_descriptors_are_keys():
    decode = BatchDescriptor(8, uniform_decode=True)
    assert decode.non_uniform == BatchDescriptor(8) != decode
    assert len({decode, BatchDescriptor(8, True), BatchDescriptor(8)}) == 2


def test_the_lock_names_the_model_and_the_way_out():
    lock = cgkit.CaptureLock("Llama")
    lock.check("something")
    lock.locked = True
    with pytest.raises(CaptureLockedError, match=r"(?s)something.*Llama.*cudagraph_capture_sizes"):
        lock.check("something")


def test_what_is_counted_says_how_far_it_is():
    with events.record(events.Progress) as log:
        assert list(events.counted("cases", [3, 5], lambda n: f"{n} layers")) == [3, 5]
    assert [(e.stage, e.done, e.total, e.what) for e in log] == [
        ("cases", 0, 2, "3 layers"),
        ("cases", 1, 2, "5 layers"),
        ("cases", 2, 2, ""),
    ]
