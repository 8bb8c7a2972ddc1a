"""``compile_ranges``: which callable serves a token count, and that each range knows its own bounds."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgkit import events, torch_hooks
from cgkit.compiling import EagerAdaptor, compile_pieces, set_inductor_config
from cgkit.compiling.fakes import ranged_version
from cgkit.config import CompilationConfig, TokenRange
from cgkit.counters import compilation_counter
from cgkit.errors import CaptureLockedError, CompileError, ConfigError
from tests.compiling.test_backends import Marking, config, one_piece
from tests.compiling.toys import llama_inputs, split_llama, split_of

SMALL, LARGE = TokenRange(1, 8), TokenRange(9, 64)


def test_endpoints_make_ranges_without_gaps():
    assert CompilationConfig(compile_ranges=[64, 8]).token_ranges == (SMALL, LARGE)
    assert CompilationConfig().token_ranges == ()
    assert [n in LARGE for n in (8, 9, 64, 65, "9")] == [False, True, True, False, False]
    assert str(LARGE) == "9-64"
    with pytest.raises(ConfigError, match="compile_ranges has 0"):
        CompilationConfig(compile_ranges=[0])
    with pytest.raises(ConfigError, match=r"compile_ranges=\[8\] has no effect at level 2"):
        CompilationConfig(level=2, compile_ranges=[8])


def test_nothing_is_tuned_for_a_range():
    options = {}
    set_inductor_config(options, SMALL)
    assert options == {}


def test_an_exact_size_wins_then_its_range_then_the_general_one():
    compiled, adaptor = one_piece(compile_sizes=[4, 100], compile_ranges=[8, 64])
    assert adaptor.compiled == [None, 4, 100, SMALL, LARGE]
    for tokens in (4, 4, 3, 1, 8, 9, 64, 65, 100):
        compiled(torch.ones(tokens, 4))
    assert adaptor.ran == [None, 4, SMALL, SMALL, SMALL, LARGE, LARGE, None, 100]
    table = compiled.serving_frame()
    spans = list(zip(table["from_tokens"], table["to_tokens"].fillna(0), table["callable"]))
    assert spans == [
        (1, 3, "range 1-8"),
        (4, 4, "size 4"),
        (5, 8, "range 1-8"),
        (9, 64, "range 9-64"),
        (65, 99, "general"),
        (100, 100, "size 100"),
        (101, 0, "general"),
    ]
    assert table["compiled"].all() and table["to_tokens"].isna().sum() == 1
    assert compiled.to_frame()["shape"].tolist() == ["general", "4", "100", "1-8", "9-64"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=4), st.lists(st.integers(1, 40), max_size=3), st.integers(1, 60))
def test_the_table_says_what_a_run_takes(ends, sizes, tokens):
    compiled, adaptor = one_piece(compile_sizes=sizes, compile_ranges=ends)
    for _ in range(2):
        compiled(torch.ones(tokens, 4))
    took = adaptor.ran[-1]
    (row,) = [
        row
        for row in compiled.serving_frame().to_dict("records")
        if row["from_tokens"] <= tokens and (pd.isna(row["to_tokens"]) or tokens <= row["to_tokens"])
    ]
    kind = "general" if took is None else f"size {took}" if isinstance(took, int) else f"range {took}"
    assert row["callable"] == kind
    assert compiled.backends[0].runnable_for(tokens) is (
        compiled.backends[0].compiled_graph_for_general_shape
        if took is None
        else {str(one.shape): one.runnable for one in compiled.backends[0].compiled}[str(took)]
    )


def test_first_hit_compiles_the_range_that_is_hit():
    compiled, adaptor = one_piece(compile_ranges=[8, 64], compile_at="first_hit")
    (backend,) = compiled.backends
    assert adaptor.compiled == [None] and backend.unfinished and backend.compiles_when_hit(3)
    assert not compiled.serving_frame()["compiled"].iloc[:2].any()
    with events.record(events.CompilationFinished) as log:
        for tokens in (3, 3, 70, 10):
            compiled(torch.ones(tokens, 4))
    assert adaptor.compiled == [None, SMALL, LARGE] and adaptor.ran == [None, SMALL, None, LARGE]
    assert len(log) == 1 and not backend.unfinished


def test_after_the_lock_a_missing_range_is_served_by_the_general_callable():
    compiled, adaptor = one_piece(compile_ranges=[8], compile_at="first_hit")
    compiled(torch.ones(8, 4))
    compiled.lock.locked = True
    compiled(torch.ones(8, 4))
    assert adaptor.ran == [None, None]
    with pytest.raises(CaptureLockedError, match="submod_0 would be compiled for 1-8 tokens"):
        compiled.compile_static_sizes()
    compiled.lock.locked = False
    compiled.compile_static_sizes([])
    assert adaptor.compiled == [None]
    compiled.compile_static_sizes()
    assert adaptor.compiled == [None, SMALL]
    with pytest.raises(CompileError, match="no range 9-64"):
        compiled.backends[0].compile_range(LARGE)


def test_a_range_is_shared_between_equal_pieces():
    _, split = split_llama(5)
    with compilation_counter.expect(num_backend_compilations=6 * 2, num_eager_compiles=3 * 2):
        compiled = compile_pieces(split, config(compile_ranges=[8]))
    assert len({backend.range_entries[SMALL].compiled.key for backend in compiled.backends}) == 3
    with events.record(events.Progress) as log:
        compile_pieces(split, config(compile_ranges=[8]))
    assert log[-1].done == log[-1].total == 12


class Bounds(EagerAdaptor):
    """Notes what is known of the token count at each compilation."""

    def __init__(self):
        self.known = []

    def compile(self, graph_module, inputs, fake_mode, runtime_shape):
        tokens = next(value for value in inputs if isinstance(value, torch.SymInt))
        symbol = torch_hooks.symbolic_expression(tokens)
        self.known.append((runtime_shape, *torch_hooks.symbol_facts(fake_mode, symbol)))
        return super().compile(graph_module, inputs, fake_mode, runtime_shape)


@pytest.mark.parametrize(
    ("ends", "bounds"),
    [
        ([8, 64], ["VR[2, 8]", "VR[9, 64]"]),
        ([1, 2, 3], ["VR[2, 3]", "VR[2, 3]", "VR[3, 4]"]),  # never one number alone
    ],
)
def test_the_symbol_is_narrowed_to_the_range(ends, bounds):
    adaptor = Bounds()
    split = split_of(lambda self, x: x[: x.shape[0] // 2] * 2, torch.ones(8, 4), ops=[])
    compiled = compile_pieces(split, config(compile_ranges=ends), adaptor=adaptor)
    assert [known for _, known, _ in adaptor.known[1:]] == bounds
    lines = [line for one in compiled.backends[0].compiled[1:] for line in one.key.lines]
    assert [line for line in lines if line.startswith("shape")] == [
        f"shape {tokens}" for tokens in compiled.config.token_ranges
    ]
    for tokens in (2, 2, 3, 7):
        assert compiled(torch.ones(tokens, 4)).shape == (tokens // 2, 4)


def test_sizes_strides_and_shared_memory_follow_the_new_symbol():
    compiled, _ = one_piece()
    x = next(value for value in compiled.backends[0].call.args if isinstance(value, torch.Tensor))
    tokens = x.shape[0]
    with torch_hooks.running_fake(compiled._fake_mode):
        base = x.new_empty(2 * tokens + 1, 3)
        values = [tokens, base, base[1:].t(), 5]
    symbol = torch_hooks.symbolic_expression(tokens)
    narrowed, mode = ranged_version(values, symbol, LARGE, "a test")
    new, whole, view, five = narrowed
    assert five == 5 and torch_hooks.fake_mode_of(narrowed) is mode is not compiled._fake_mode
    assert str(whole.shape[0]) == f"2*{new} + 1" and view.stride() == (1, 3) and view.storage_offset() == 3
    assert torch_hooks.storage_key(whole) == torch_hooks.storage_key(view)
    other = torch_hooks.symbolic_expression(new)
    with pytest.raises(CompileError, match="does not follow from the token count alone"):
        ranged_version(values, other, LARGE, "a test")


def test_slices_of_larger_buffers_get_sizes_and_ranges_too():
    """Where a slice begins is a symbol as well; no piece reads it."""
    buffer = torch.arange(80.0).view(20, 4)
    adaptor = Marking()
    split = split_of(lambda self, x, y: x * 2 + y, buffer[2:10], buffer[10:18], ops=[])
    compiled = compile_pieces(split, config(compile_sizes=[3], compile_ranges=[8]), adaptor=adaptor)
    assert len(compiled.backends[0].sym_shape_indices) > 1
    for tokens in (3, 3, 8):
        x, y = buffer[1 : 1 + tokens], buffer[5 : 5 + tokens]
        assert torch.equal(compiled(x, y), x * 2 + y)
    assert adaptor.ran == [None, 3, SMALL]


@pytest.mark.parametrize("shapes", [{"compile_sizes": [4]}, {"compile_ranges": [8]}])
def test_the_runner_takes_sizes_and_ranges(shapes):
    from cgkit.serving.runner import Runner
    from tests.serving.helpers import TOY, prompts_of, toy

    model, answers = toy(TOY), []
    for more in ({}, shapes):
        options = CompilationConfig(compiler="eager", cudagraph_mode="NONE", max_num_seqs=4, **more)
        runner = Runner(model, config=options, max_model_len=48)
        answers.append([a.token_ids for a in runner.generate(prompts_of([4, 1, 7, 3]), max_tokens=6)])
    assert answers[0] == answers[1]
    assert len(runner.executor.compiled.to_frame()) == 2 * len(runner.executor.compiled.backends)


@pytest.mark.slow
@pytest.mark.skipif(torch_hooks.find_cpp_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("compiler", ["inductor", "inductor_patched"])
def test_inductors_ranges_compute_what_eager_computes(compiler):
    model, split = split_llama(2)
    options = {"compiler": compiler, "cudagraph_mode": "NONE", "compile_ranges": [8, 64]}
    compiled = compile_pieces(split, CompilationConfig(**options))
    assert set(compiled.to_frame()["adaptor"]) == {compiler}
    assert not any(
        "max_autotune" in line for b in compiled.backends for one in b.compiled for line in one.key.lines
    )
    for tokens in (8, 1, 2, 8, 9, 64, 65):
        args = llama_inputs(tokens)
        torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-4, atol=1e-5)


def test_recording_takes_the_ranges_callable():
    from cgkit.capturing import capture

    split = split_of(lambda self, x: x * 2 + 1, torch.ones(8, 4), ops=[])
    adaptor = Marking()
    options = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [4, 16], "splitting_ops": None}
    compiled = compile_pieces(
        split,
        CompilationConfig(compiler="eager", compile_ranges=[8], graph_platform="emulated", **options),
        adaptor=adaptor,
    )
    capture(compiled)
    assert adaptor.ran.count(SMALL) >= 1 and adaptor.ran.count(None) >= 1
