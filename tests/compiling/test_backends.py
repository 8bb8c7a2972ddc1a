"""Which callable serves a batch, what is compiled when, and what is reported. No compiler needed."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from cgkit import events, torch_hooks
from cgkit.compiling import CompilerInterface, EagerAdaptor, compile_pieces
from cgkit.compiling.manager import CompilerManager
from cgkit.config import CompilationConfig
from cgkit.counters import compilation_counter
from cgkit.errors import CaptureLockedError, CompileError, ConfigError
from cgkit.recording import active
from cgkit.splitting import split_graph
from tests.compiling.toys import attend, calls, llama_inputs, split_llama, split_of


class Marking(CompilerInterface):
    """An adaptor whose callables note for which shape they were compiled whenever they run."""

    name = "marking"

    def __init__(self):
        self.compiled = []
        self.ran = []

    def compile(self, graph_module, inputs, fake_mode, runtime_shape):
        self.compiled.append(runtime_shape)
        if isinstance(runtime_shape, int):
            assert not any(isinstance(value, torch.SymInt) for value in inputs)
            assert all(isinstance(s, int) for v in inputs if isinstance(v, torch.Tensor) for s in v.shape)
        run = EagerAdaptor().compile(graph_module, inputs, fake_mode, runtime_shape)

        def marked(*args):
            self.ran.append(runtime_shape)
            return run(*args)

        return marked


def config(**kwargs):
    return CompilationConfig(compiler="eager", cudagraph_mode="NONE", **kwargs)


def one_piece(**kwargs):
    """A graph of one capturable piece, compiled by a Marking adaptor."""
    split = split_of(lambda self, x: x * 2 + 1, torch.ones(8, 4), ops=[])
    adaptor = Marking()
    return compile_pieces(split, config(**kwargs), adaptor=adaptor), adaptor


def test_compiled_pieces_compute_what_the_model_computes():
    model, split = split_llama(3)
    compiled = compile_pieces(split, config())
    for tokens in (1, 2, 7, 33):
        args = llama_inputs(tokens)
        torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-6, atol=1e-6)
        assert torch.equal(compiled(*args), compiled(*args))


def test_a_bare_graph_is_called_like_itself():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch_hooks.new_fake_mode().from_tensor(torch.ones(4), static_shapes=True)
    graph.output({"sum": graph.call_method("sum", (x,)), "twice": graph.call_function(torch.mul, (x, 2))})
    compiled = compile_pieces(split_graph(torch.fx.GraphModule(torch.nn.Module(), graph), []), config())
    result = compiled(torch.ones(4))
    assert result["sum"] == 4 and torch.equal(result["twice"], torch.full((4,), 2.0))


def test_inference_mode_changes_nothing():
    model, split = split_llama(3)
    with torch.inference_mode():
        compiled = compile_pieces(split, config(compile_sizes=[2]))
        for tokens in (2, 2, 5):
            args = llama_inputs(tokens)
            torch.testing.assert_close(compiled(*args), model(*args), rtol=1e-6, atol=1e-6)
    plain = compile_pieces(split, config(compile_sizes=[2]))
    assert [b.general.key for b in compiled.backends] == [b.general.key for b in plain.backends]


def test_requests_are_counted_apart_from_compilations():
    _, split = split_llama(5)
    with compilation_counter.expect(
        num_backend_compilations=6 * 3, num_eager_compiles=3 * 3, num_inductor_compiles=0
    ):
        compiled = compile_pieces(split, config(compile_sizes=[2, 4]))
    assert compiled.num_unique == 3
    assert [len(b.compiled) for b in compiled.backends] == [3] * 6
    shared = compiled.to_frame().query("shape == '4'")["shared_with"].tolist()
    assert shared == ["", "", "submod_2", "submod_2", "submod_2", ""]


def test_the_toy_of_two_attentions_has_three_pieces_to_compile():
    def forward(self, x):
        x = x + 1 + 2
        x = attend(x, x, x) - 2 - 1
        return attend(x, x, x) + 1

    with compilation_counter.expect(
        num_piecewise_graphs_seen=5, num_piecewise_capturable_graphs_seen=3, num_backend_compilations=3
    ):
        compiled = compile_pieces(split_of(forward, torch.ones(2)), config())
    before = calls["attention"]
    assert torch.equal(compiled(torch.zeros(2)), torch.full((2,), 3.0 * (3 * 3 - 3) + 1))
    assert calls["attention"] == before + 2


def test_the_first_run_takes_the_general_shape_and_later_ones_the_static():
    compiled, adaptor = one_piece(compile_sizes=[2, 4])
    assert adaptor.compiled == [None, 2, 4]
    for tokens in (4, 4, 3, 2):
        compiled(torch.ones(tokens, 4))
    assert adaptor.ran == [None, 4, None, 2]
    (backend,) = compiled.backends
    assert backend.runnable_for(2) is not backend.runnable_for(3)


def test_first_hit_compiles_when_a_size_comes_the_second_time():
    compiled, adaptor = one_piece(compile_sizes=[2, 4], compile_at="first_hit")
    (backend,) = compiled.backends
    assert adaptor.compiled == [None] and backend.to_be_compiled_sizes == {2, 4}
    for tokens in (4, 3, 4, 4):
        compiled(torch.ones(tokens, 4))
    assert adaptor.compiled == [None, 4] and adaptor.ran == [None, None, 4, 4]
    assert backend.first_run_finished and backend.to_be_compiled_sizes == {2}


@pytest.mark.parametrize("compile_at", ["start", "first_hit"])
@pytest.mark.parametrize("sizes", [[], [2, 4]])
def test_the_end_is_reported_once_and_last(compile_at, sizes):
    _, split = split_llama(2)
    with events.record(events.CompilationFinished, events.PieceCompiled) as log:
        compiled = compile_pieces(split, config(compile_sizes=sizes, compile_at=compile_at))
        finished = [isinstance(event, events.CompilationFinished) for event in log]
        assert sum(finished) == (compile_at == "start" or not sizes)
        for tokens in (4, 4, 2, 2):
            compiled(*llama_inputs(tokens))
    assert [isinstance(e, events.CompilationFinished) for e in log] == [False] * (len(log) - 1) + [True]
    assert log[-1].model == "Llama"


def test_progress_ends_complete():
    _, split = split_llama(2)
    with events.record(events.Progress) as log:
        compile_pieces(split, config(compile_sizes=[2]))
    assert log[0].done == 0 and log[-1].done == log[-1].total == 6
    assert [e.done for e in log] == sorted(e.done for e in log)


def test_after_the_lock_nothing_is_compiled_but_everything_runs():
    compiled, adaptor = one_piece(compile_sizes=[2, 4], compile_at="first_hit")
    compiled(torch.ones(8, 4))
    compiled.lock.locked = True
    for tokens in (2, 4, 5):
        compiled(torch.ones(tokens, 4))
    assert adaptor.compiled == [None] and adaptor.ran == [None] * 4
    with pytest.raises(CaptureLockedError, match="submod_0 would be compiled for 2 tokens"):
        compiled.compile_static_sizes()
    compiled.lock.locked = False
    compiled.compile_static_sizes()
    assert adaptor.compiled == [None, 2, 4]
    compiled.lock.locked = True
    compiled.compile_static_sizes()  # nothing is missing


def test_a_size_that_is_none_of_the_compile_sizes_is_refused():
    compiled, _ = one_piece(compile_sizes=[2])
    with pytest.raises(CompileError, match=r"compile size 3 \(it has \[2\]\)"):
        compiled.backends[0].compile_size(3)


def test_while_a_graph_is_recorded_nothing_is_compiled_and_the_call_is_handed_over():
    compiled, adaptor = one_piece(compile_sizes=[2], compile_at="first_hit")
    compiled(torch.ones(2, 4))
    (backend,) = compiled.backends
    seen = []

    class Recorder:
        def opaque_call(self, runnable, graph, args):
            seen.append((runnable, graph, args))
            return ("recorded",)

    active.recorder = Recorder()
    try:
        x = torch.ones(2, 4)
        assert backend(2, x) == ("recorded",)
    finally:
        active.recorder = None
    assert adaptor.compiled == [None] and adaptor.ran == [None]
    assert seen == [(backend.compiled_graph_for_general_shape, backend.graph, (2, x))]


def test_a_piece_without_a_symbol_has_no_compile_sizes():
    split = split_of(lambda self, x: x + 1, torch.ones(8, 4), ops=[], x=[])
    adaptor = Marking()
    compiled = compile_pieces(split, config(compile_sizes=[2]), adaptor=adaptor)
    assert compiled.backends[0].sym_shape_indices == () and adaptor.compiled == [None]
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(8, 4)), torch.full((8, 4), 2.0))


def test_compile_sizes_need_one_symbol():
    def forward(self, x, y):
        return x.sum() + y.sum()

    split = split_of(forward, torch.ones(8), torch.ones(6), ops=[])
    with pytest.raises(CompileError, match=r"submod_0 at 2 tokens: size s.*one symbolic size"):
        compile_pieces(split, config(compile_sizes=[2]))


def test_two_threads_at_first_hit_compile_once():
    compiled, adaptor = one_piece(compile_sizes=[4], compile_at="first_hit")
    compiled(torch.ones(4, 4))
    barrier, results = threading.Barrier(4), []

    def run():
        barrier.wait()
        results.append(compiled(torch.ones(4, 4)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert adaptor.compiled == [None, 4]
    assert all(torch.equal(r, torch.full((4, 4), 3.0)) for r in results) and len(results) == 4


def test_a_compiler_that_fails_names_piece_operators_and_way_out():
    class Broken(Marking):
        def compile(self, graph_module, inputs, fake_mode, runtime_shape):
            raise ZeroDivisionError("inside")

    _, split = split_llama(1)
    with compilation_counter.expect(num_backend_compilations=1, num_eager_compiles=0):
        says = r"(?s)submod_0 for the general shape: ZeroDivisionError: inside.*embedding.*compiler='eager'"
        with pytest.raises(CompileError, match=says):
            compile_pieces(split, config(), adaptor=Broken())
    compile_pieces(split, config())  # usable afterwards


def test_a_compiler_that_fixes_the_token_count_is_caught():
    class Fixing(Marking):
        def compile(self, graph_module, inputs, fake_mode, runtime_shape):
            int(inputs[0])
            return super().compile(graph_module, inputs, fake_mode, runtime_shape)

    split = split_of(lambda self, x: x + 1, torch.ones(8, 4), ops=[])
    with pytest.raises(CompileError, match=r"fixed s.* to 8 while it compiled piece submod_0"):
        compile_pieces(split, config(), adaptor=Fixing())


def test_unknown_inductor_options_are_refused_with_the_nearest():
    _, split = split_llama(1)
    wrong = CompilationConfig(inductor_compile_config={"max_autotun": True})
    with pytest.raises(ConfigError, match=r"'max_autotun'.*'max_autotune'"):
        compile_pieces(split, wrong)
    graphs = CompilationConfig(inductor_compile_config={"triton.cudagraphs": True})
    with pytest.raises(ConfigError, match="cudagraph_mode"):
        compile_pieces(split, graphs)


def test_it_reads_well():
    _, split = split_llama(5)
    compiled = compile_pieces(split, config(compile_sizes=[2]))
    assert "6 pieces, 3 different" in repr(compiled) and "x 4" in repr(compiled)
    assert "shared with submod_2, static sizes [2]" in repr(compiled.backends[2])


class CountsIn32Bits(CompilerInterface):
    """Takes for granted what Inductor takes for granted on a GPU: that a kernel's numbers can be counted in 32 bits."""

    name = "counting"
    saves = generates = True

    def __init__(self, ask=lambda tokens: tokens * 2048 <= 2**31 - 1):
        self.ask = ask

    def compile(self, graph_module, inputs, fake_mode, runtime_shape):
        assert self.ask(next(value for value in inputs if isinstance(value, torch.SymInt)))
        return EagerAdaptor().compile(graph_module, inputs, fake_mode, runtime_shape)

    def save(self, runnable):
        return b"code"


class Kept:
    """A compile cache that only remembers what it was given."""

    def __init__(self):
        self.largest = []

    def active(self):
        return nullcontext()

    def compiling(self):
        return nullcontext(False)

    def load(self, key, make):
        return None

    def save(self, key, payload, kernels, reports=None, largest=None):
        self.largest.append(largest)
        return None


def compiled_by(adaptor, monkeypatch):
    kept = Kept()
    made = CompilerManager.__init__
    monkeypatch.setattr(
        CompilerManager, "__init__", lambda self, adaptor, cache=None: made(self, adaptor, kept)
    )
    return compile_pieces(
        split_of(lambda self, x: x * 2 + 1, torch.ones(8, 4), ops=[]), config(), adaptor=adaptor
    ), kept


def test_what_counts_in_32_bits_is_kept_with_its_bound_and_refuses_more(monkeypatch):
    compiled, kept = compiled_by(CountsIn32Bits(), monkeypatch)
    assert kept.largest == [{0: 1048575}] and compiled.backends[0].general.held.largest == {0: 1048575}
    assert compiled(torch.ones(9, 4)).shape == (9, 4)
    run = compiled.backends[0].compiled_graph_for_general_shape
    with pytest.raises(CompileError, match="at most 1,048,575 tokens, and got 1,048,576"):
        run(1048576, torch.ones(1, 4))


def test_what_was_assumed_for_one_piece_binds_the_next_ones_and_no_key_tells_of_it():
    """As on a GPU, where the first of three pieces lets its kernels count in 32 bits."""

    class OnlyTheFirst(CountsIn32Bits):
        def compile(self, graph_module, inputs, fake_mode, runtime_shape):
            if "embedding" not in str(graph_module.graph):
                return EagerAdaptor().compile(graph_module, inputs, fake_mode, runtime_shape)
            return super().compile(graph_module, inputs, fake_mode, runtime_shape)

    make = split_llama.__wrapped__  # traces of its own: they are written into
    _, plain_split = make(2)
    plain = compile_pieces(plain_split, config(), adaptor=EagerAdaptor())
    _, split = make(2)
    once, again = (
        compile_pieces(split, config(), adaptor=OnlyTheFirst(lambda tokens: tokens <= 1048575))
        for _ in range(2)
    )
    for compiled in (once, again):
        assert [set(backend.general.held.largest.values()) for backend in compiled.backends] == [
            {1048575}
        ] * 3
        assert [b.general.key.lines[-1:] for b in compiled.backends] == [
            b.general.key.lines[-1:] for b in plain.backends
        ]
    assert [b.general.key.digest for b in once.backends] == [b.general.key.digest for b in again.backends]


def test_what_takes_anything_else_for_granted_is_not_kept(monkeypatch):
    compiled, kept = compiled_by(
        CountsIn32Bits(lambda tokens: tokens * 2048 <= 2**31 - 1 and tokens % 2 == 0), monkeypatch
    )
    assert kept.largest == [] and compiled.backends[0].general.held.more
    with pytest.raises(
        CompileError, match="at most 1,048,575 tokens"
    ):  # what is understood of it is asked all the same
        compiled.backends[0].compiled_graph_for_general_shape(1048576, torch.ones(1, 4))


@pytest.mark.parametrize(
    ("ask", "bound"),
    [
        (lambda s: s <= 7000, 7000),
        (lambda s: s < 7000, 6999),
        (lambda s: 3 * s + 1 <= 7000, 2333),
        (lambda s: 64 * s - 6 < 2**31, 33554432),
        (lambda s: s * s <= 10**9, 31622),
        (lambda s: s * s + 2 * s <= 3720, 60),
        (lambda s: s >= 5, None),
        (lambda s: s % 2 == 0, None),
        (lambda s: 100 * s - s * s <= 10**4, None),
    ],
)
def test_the_bound_of_a_symbol(ask, bound):
    split = split_of(lambda self, x: x * 2 + 1, torch.ones(60, 4), ops=[])
    seen = []

    class Asks(EagerAdaptor):
        def compile(self, graph_module, inputs, fake_mode, runtime_shape):
            before = torch_hooks.count_shape_guards(fake_mode)
            assert ask(next(value for value in inputs if isinstance(value, torch.SymInt)))
            new = range(before, torch_hooks.count_shape_guards(fake_mode))
            seen.extend(guard.largest for guard in torch_hooks.shape_guard_facts(fake_mode, new))
            return super().compile(graph_module, inputs, fake_mode, runtime_shape)

    compile_pieces(split, config(), adaptor=Asks())
    assert seen == [bound]


class Assumes(CountsIn32Bits):
    """Compiles the n-th piece by the n-th of ``asks`` (the last one for all that follow): each is given the SymInts."""

    def __init__(self, *asks):
        self.asks = list(asks)

    def compile(self, graph_module, inputs, fake_mode, runtime_shape):
        ask = self.asks.pop(0) if len(self.asks) > 1 else self.asks[0]
        if ask is not None:
            ask([value for value in inputs if isinstance(value, torch.SymInt)], fake_mode)
        return EagerAdaptor().compile(graph_module, inputs, fake_mode, runtime_shape)


def own_llama(layers=2):
    """A trace of its own: compilations write into it."""
    return split_llama.__wrapped__(layers)[1]


def symbol_lines(compiled):
    return [
        [line for line in backend.general.key.lines if line.startswith("symbol")]
        for backend in compiled.backends
    ]


def test_a_strange_assumption_takes_no_later_bound_away():
    odd, bound = (lambda s, _: bool(s[0] % 2 == 0)), (lambda s, _: bool(s[0] <= 1048575))
    compiled = compile_pieces(own_llama(), config(), adaptor=Assumes(odd, bound, None))
    first, second, third = (backend.general.held for backend in compiled.backends)
    assert first.largest == {} and set(second.largest.values()) == set(third.largest.values()) == {1048575}
    assert first.more and second.more and third.more


def two_sizes(adaptor):
    def forward(self, a, b):
        return attend(a * 2, a, a) * 2, attend(b + 1, b, b) * 3

    return compile_pieces(split_of(forward, torch.ones(8, 4), torch.ones(9, 4)), config(), adaptor=adaptor)


def test_a_bound_holds_against_its_own_symbol_alone():
    compiled = two_sizes(Assumes(lambda s, _: bool(s[0] <= 50), None))
    a, b = compiled(torch.ones(8, 4), torch.ones(60, 4))
    assert (len(a), len(b)) == (8, 60)
    with pytest.raises(CompileError, match="at most 50 tokens, and got 60"):
        compiled(torch.ones(60, 4), torch.ones(8, 4))
    assert not any(backend.general.held.more for backend in compiled.backends)


def test_a_range_that_shrinks_without_a_word_is_more_than_a_bound():
    def shrink(symints, fake_mode):
        fake_mode.shape_env.constrain_symbol_range(symints[0].node.expr, 2, 100)

    compiled = compile_pieces(own_llama(), config(), adaptor=Assumes(shrink, None))
    assert all(backend.general.held.more for backend in compiled.backends)


def test_ranges_in_keys_are_those_before_all_that_was_assumed():
    plain = symbol_lines(compile_pieces(own_llama(), config(), adaptor=EagerAdaptor()))
    split, bounds = own_llama(), [lambda s, _, n=n: bool(s[0] <= n) for n in (1048575, 65535)]
    assert symbol_lines(compile_pieces(split, config(), adaptor=Assumes(*bounds))) == plain
    assert symbol_lines(compile_pieces(split, config(), adaptor=Assumes(None))) == plain
    own = compile_pieces(split, config(), adaptor=Assumes(None))
    assert {n for backend in own.backends for n in backend.general.held.largest.values()} == {65535}

    def fails(symints, _):
        assert symints[0] <= 4095
        raise CompileError("by itself")

    with pytest.raises(CompileError, match="by itself"):
        compile_pieces(split, config(), adaptor=Assumes(fails))
    after = compile_pieces(split, config(), adaptor=Assumes(None))
    assert symbol_lines(after) == plain
    assert {n for backend in after.backends for n in backend.general.held.largest.values()} == {4095}
    eager = compile_pieces(split, config(), adaptor=EagerAdaptor())
    assert all(backend.general.held.largest == {} for backend in eager.backends)


def test_what_narrows_a_range_between_compilations_stays_in_the_keys():
    split = own_llama()
    compile_pieces(split, config(), adaptor=Assumes(lambda s, _: bool(s[0] <= 1048575)))
    seen = []

    def by_somebody_else(symints, fake_mode):
        seen.append(fake_mode)

    compile_pieces(split, config(), adaptor=Assumes(by_somebody_else))
    (symbol,) = {
        s for s in torch_hooks.symbol_ranges(seen[0]) if "1048575" in torch_hooks.symbol_ranges(seen[0])[s]
    }
    seen[0].shape_env.constrain_symbol_range(symbol, 2, 99)
    assert "99" in str(symbol_lines(compile_pieces(split, config(), adaptor=Assumes(None))))


def test_a_part_that_is_compiled_by_itself_is_noted():
    split = own_llama()
    compiled = compile_pieces(
        split, config(), adaptor=Assumes(None, None, None, lambda s, _: bool(s[0] <= 1048575))
    )
    compiled.compile_part(compiled.backends[0], compiled.backends[0].lifted.graph_module)
    again = compile_pieces(split, config(), adaptor=Assumes(None))
    assert symbol_lines(again) == symbol_lines(compiled)
    assert set(again.backends[0].general.held.largest.values()) == {1048575}


def test_a_symbol_that_was_fixed_is_refused_the_second_time_too():
    split = own_llama()
    fix = Assumes(lambda s, _: bool(s[0] == 8))
    with pytest.raises(CompileError, match=r"counting fixed s\d+ to 8 while it compiled piece submod_0"):
        compile_pieces(split, config(), adaptor=fix)
    with pytest.raises(CompileError, match=r"s\d+ was fixed to 8 when this trace was compiled before"):
        compile_pieces(split, config(), adaptor=Assumes(None))
