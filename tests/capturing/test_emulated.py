"""The emulated platform: the contract of a recorded graph, and each of its hazards."""

import gc
import threading

import pytest
import torch
from torch import nn

from cgkit import recording
from cgkit.capturing.emulated import EmulatedPlatform
from cgkit.errors import CaptureError, CaptureOutOfMemoryError, HostReadError, ReplayError

INT_SENTINEL = 0x5A5A5A5A5A5A5A5A


@pytest.fixture
def platform():
    return EmulatedPlatform()


@pytest.fixture
def pool(platform):
    return platform.new_pool()


def same_bits(a, b):
    dense = torch.contiguous_format
    raw = [t.detach().resolve_conj().clone(memory_format=dense).reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


# -- recording ------------------------------------------------------------------------------------


def test_recording_runs_nothing(platform, pool):
    x, buffer = torch.ones(4, 8), torch.zeros(4, 8)

    def step():
        buffer.add_(1)
        return x * 2, (x > 0), torch.arange(3), x.to(torch.bfloat16) + 1, torch.tensor([7])

    graph, (doubled, mask, count, half, constant) = platform.record(step, pool)
    assert torch.equal(x, torch.ones(4, 8)) and torch.equal(buffer, torch.zeros(4, 8))
    assert doubled.isnan().all() and half.isnan().all() and mask.all()
    assert count.tolist() == [INT_SENTINEL] * 3 and constant.tolist() == [INT_SENTINEL]
    graph.replay()
    assert torch.equal(buffer, torch.ones(4, 8)) and torch.equal(doubled, x * 2)
    assert count.tolist() == [0, 1, 2] and constant.tolist() == [7] and half[0, 0] == 2
    assert graph.num_nodes() == 7  # add_, mul, gt, arange, cast, add, the constant


def test_views_are_real_and_cost_no_node(platform, pool):
    x = torch.randn(4, 6)

    def step():
        y = x @ x.T
        q, k = y.chunk(2, dim=-1)
        return y, q, k, x[1:], x.view(2, 12)

    graph, (y, q, k, rest, wide) = platform.record(step, pool)
    assert graph.num_nodes() == 1
    assert q.data_ptr() == y.data_ptr() and k.data_ptr() == y.data_ptr() + 2 * 4
    assert rest.data_ptr() == x[1:].data_ptr() and wide.data_ptr() == x.data_ptr()


def test_in_place_and_out_return_the_very_tensors(platform, pool):
    x, out = torch.ones(3), torch.zeros(3)
    values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
    _, (a, b, c) = platform.record(
        lambda: (x.add_(1), torch.mul(x, 3, out=out), torch.sort(x, out=(values, indices))), pool
    )
    assert a is x and b is out and c[0] is values and c[1] is indices


def test_inference_mode_inside_and_outside(platform, pool):
    with torch.inference_mode():
        x = torch.ones(3)
        graph, y = platform.record(
            lambda: x.add_(torch.matmul(torch.eye(3), x.reshape(3, 1)).squeeze(1)), pool
        )
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    z = torch.ones(3)
    graph, w = platform.record(lambda: z * 2, pool)
    with torch.inference_mode():
        graph.replay()
    assert w.tolist() == [2, 2, 2]


def test_autocast_is_recorded_not_repeated(platform, pool):
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph, y = platform.record(lambda: layer(x), pool)
        expected = layer(x)  # would read a sentinel if autocast had kept a recorded cast
    graph.replay()
    assert same_bits(y, expected)
    graph, y = platform.record(lambda: layer(x), pool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph.replay()
    assert y.dtype == torch.float32 and same_bits(y, layer(x).detach())


def test_random_numbers_are_new_at_each_replay(platform, pool):
    graph, y = platform.record(lambda: torch.rand(4), pool)
    torch.manual_seed(3)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(4))


def test_conjugates_and_tensor_subclasses(platform, pool):
    from torch.testing._internal.two_tensor import TwoTensor

    c = torch.randn(3, 3, dtype=torch.complex64)
    graph, outputs = platform.record(lambda: (c.conj() @ c, c.conj().imag * 2, (c * 2).conj()), pool)
    graph.replay()
    for got, expected in zip(outputs, (c.conj() @ c, c.conj().imag * 2, (c * 2).conj())):
        assert torch.equal(got, expected)
    pair = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
    graph, twice = platform.record(lambda: pair * 2, pool)
    assert twice.a.isnan().all()
    graph.replay()
    assert twice.a.tolist() == [2, 2, 2] and twice.b.tolist() == [4, 4, 4]


def test_compiled_code_that_nobody_announced_is_recorded_op_by_op(platform, pool):
    calls = []

    @torch.compile(backend="eager")
    def f(x):
        return torch.relu(x) * 2 + x.sum()

    x = torch.randn(5)
    f(x)
    graph, y = platform.record(lambda: (calls.append(1), f(x))[1], pool)
    assert y.isnan().all()
    graph.replay()
    assert same_bits(y, torch.relu(x) * 2 + x.sum())


# -- the hazards, as on CUDA ------------------------------------------------------------------------


def test_an_input_that_moved_is_read_at_its_old_address(platform, pool):
    x = torch.ones(3)
    graph, y = platform.record(lambda: x + 1, pool)
    old = x
    x = torch.full((3,), 10.0)
    graph.replay()
    assert y.tolist() == [2, 2, 2]
    old.fill_(5)
    graph.replay()
    assert y.tolist() == [6, 6, 6]


def test_a_parameter_given_other_memory_is_read_at_its_old_address(platform, pool):
    weight = nn.Parameter(torch.ones(3))
    graph, y = platform.record(lambda: weight * 2, pool)
    weight.data = torch.full((3,), 7.0)
    graph.replay()
    assert y.tolist() == [2, 2, 2]


def test_a_python_number_is_frozen(platform, pool):
    scale, x = 3, torch.ones(2)
    graph, y = platform.record(lambda: x * scale, pool)
    scale = 100
    graph.replay()
    assert y.tolist() == [3, 3]


def test_an_output_is_overwritten_by_the_next_replay(platform, pool):
    x = torch.ones(2)
    graph, y = platform.record(lambda: x + 1, pool)
    graph.replay()
    kept = y
    x.fill_(9)
    graph.replay()
    assert kept.tolist() == [10, 10]


def test_a_smaller_graph_overwrites_the_weak_output_of_a_larger_one(platform, pool):
    def record(n):
        x = torch.full((n,), float(n))
        graph, y = platform.record(lambda: x * 2, pool)
        return graph, platform.weak_ref(y, pool)

    large, large_out = record(1024)
    small, small_out = record(256)
    assert small_out.data_ptr() == large_out.data_ptr()
    large.replay()
    assert (large_out == 2048).all()
    small.replay()
    assert (small_out == 512).all() and not (large_out == 2048).all()
    large.replay()
    assert (large_out == 2048).all()


def test_a_strong_output_is_not_overwritten(platform, pool):
    x = torch.ones(1024)
    graph, y = platform.record(lambda: x * 2, pool)
    other, _ = platform.record(lambda: x * 3, pool)
    graph.replay()
    other.replay()
    assert (y == 2).all()


# -- operators written in Python ------------------------------------------------------------------


@pytest.fixture
def python_ops():
    """Three ways to register one, each with a host counter; the names are gone afterwards."""
    lib = torch.library.Library("cgkit_emulated_test", "FRAGMENT")
    counts = {"composite": 0, "cpu": 0, "custom": 0}

    def count(name):
        counts[name] += 1
        return counts[name]

    lib.define("composite(Tensor x, Tensor(a!) out, int shift=1) -> ()")
    lib.impl(
        "composite",
        lambda x, out, shift=1: (out.copy_(x.reshape(-1).view_as(x) * count("composite") + shift), None)[1],
        "CompositeExplicitAutograd",
    )
    lib.define("cpu(Tensor x) -> (Tensor, Tensor)")
    lib.impl("cpu", lambda x: (x + count("cpu"), x.sum()), "CPU")

    @torch.library.custom_op("cgkit_emulated_test::custom", mutates_args={"out"})
    def custom(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 10 + count("custom"))

    yield torch.ops.cgkit_emulated_test, counts
    lib._destroy()


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_host_code_of_a_python_operator_runs_at_record_only(platform, pool, python_ops, guard):
    ops, counts = python_ops
    x, out = torch.ones(2, 2), torch.zeros(2, 2)

    def step():
        ops.composite(x, out, shift=5)
        fresh = torch.empty_like(x)
        ops.custom(out, fresh)
        moved, total = ops.cpu(fresh)
        return fresh, moved, total

    with guard():
        graph, (fresh, moved, total) = platform.record(step, pool)
    assert counts == {"composite": 1, "cpu": 1, "custom": 1}
    assert fresh.isnan().all() and (out == 0).all()
    graph.replay()
    graph.replay()
    assert counts == {"composite": 1, "cpu": 1, "custom": 1}
    assert (out == 6).all() and (fresh == 61).all() and (moved == 62).all() and total == 244
    x.fill_(2)
    ops.custom(x, torch.empty(2, 2))  # the counter moves on outside; the graph keeps its number
    graph.replay()
    assert counts["custom"] == 2 and (fresh == 71).all()


def test_a_host_read_inside_a_python_operator_names_its_line(platform, pool):
    @torch.library.custom_op("cgkit_emulated_test_read::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:  # the line to be named
            return x + 1
        return x - 1

    with pytest.raises(HostReadError, match=r"test_emulated\.py:\d+: if x\.sum\(\)\.item\(\) > 0"):
        platform.record(lambda: op(torch.ones(2)), pool)

    @torch.library.custom_op("cgkit_emulated_test_read::listing", mutates_args=())
    def listing(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(x.tolist())

    with pytest.raises(HostReadError, match=r"return torch\.tensor\(x\.tolist\(\)\)"):
        platform.record(lambda: listing(torch.ones(2)), pool)


# -- what cannot be recorded -----------------------------------------------------------------------

HOST_READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x[0, 0]),
    "index": lambda x: [0, 1, 2][x[0].argmax()],
    "if": lambda x: 1 if (x > 0).any() else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: repr(x),
    "format": lambda x: f"{x.sum()}",
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask_assignment": lambda x: x.__setitem__(x > 0, torch.ones(5)),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "repeats": lambda x: torch.repeat_interleave(torch.tensor([1, 2])),
    "tensor_split": lambda x: torch.tensor_split(x, torch.tensor([1])),
    "inverse": lambda x: torch.linalg.inv(x[:, :4]),
}


@pytest.mark.parametrize("name", HOST_READS)
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_host_reads_raise_with_the_line(platform, pool, name, guard):
    x = torch.randn(4, 8)

    def step():
        return HOST_READS[name](x)

    with guard(), pytest.raises(HostReadError, match=rf'test_emulated\.py:\d+: "{name}": lambda x'):
        platform.record(step, pool)


def test_what_looks_like_a_host_read_and_is_none(platform, pool):
    x = torch.randn(4, 8)

    def step():
        y = x.clone()
        y[y > 0] = 0.0  # one value: a masked fill
        y.masked_fill_(y < -1, -1.0)
        return torch.where(y > 0, y, -y), y[torch.arange(2)], len(y), y.shape, y.is_contiguous(), y.dim()

    graph, (positive, rows, *facts) = platform.record(step, pool)
    graph.replay()
    y = x.clamp(-1, 0)
    assert torch.equal(positive, -y) and torch.equal(rows, y[:2])
    assert facts == [4, (4, 8), True, 2]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda x: x.resize_(100, 100), "gives a tensor other memory"),
        (lambda x: x.set_(torch.ones(2)), "gives a tensor other memory"),
        (lambda x: torch.add(x, x, out=torch.empty(0)), "would resize"),
        (lambda x: torch.eye(3).to_sparse(), "only strided"),
        (lambda x: torch.empty(3, device="meta"), "records CPU tensors"),
    ],
)
def test_what_a_graph_cannot_repeat_raises(platform, pool, step, message):
    x = torch.ones(2, 2)
    with pytest.raises(CaptureError, match=rf"(?s){message}") as caught:
        platform.record(lambda: step(x), pool)
    assert "test_emulated.py" in str(caught.value)
    assert x.shape == (2, 2)


def test_an_operator_without_a_fake_implementation(platform, pool):
    lib = torch.library.Library("cgkit_emulated_nofake", "FRAGMENT")
    try:
        lib.define("op(Tensor x) -> Tensor")  # no kernel at all: as foreign as a C++ operator without a fake
        with pytest.raises(CaptureError, match="no fake implementation"):
            platform.record(lambda: torch.ops.cgkit_emulated_nofake.op(torch.ones(2)), pool)
    finally:
        lib._destroy()


def test_a_failed_recording_leaves_nothing(platform, pool):
    x = torch.ones(1000)
    platform.record(lambda: x + 1, pool)  # its output is dropped at once: 4096 bytes lie free
    gc.collect()
    before = platform.pool_bytes(pool)

    def step():
        one = x * 2
        two = torch.cat([one, one, one])
        raise KeyError("mine", one, two)

    with pytest.raises(KeyError, match="mine") as caught:
        platform.record(step, pool)
    assert platform.pool_bytes(pool) == before == (4096, 0)
    assert recording.active.recorder is None
    one, two = caught.value.args[1:]  # the exception still holds them; nothing dangles
    one.fill_(1), two.fill_(2)
    del caught, one, two
    gc.collect()
    assert platform.pool_bytes(pool) == before  # and their late end changes nothing
    graph, _ = platform.record(lambda: x + 1, pool)
    assert graph.num_nodes() == 1
    assert (x + 1).tolist()[0] == 2.0  # no mode was left on


def test_a_recording_cannot_hold_another(platform, pool):
    x = torch.ones(2)
    graph, _ = platform.record(lambda: x + 1, pool)
    with pytest.raises(CaptureError, match="already recording"):
        platform.record(lambda: platform.record(lambda: x + 1, pool), pool)
    with pytest.raises(CaptureError, match="replayed inside a recording"):
        platform.record(graph.replay, pool)
    assert recording.active.recorder is None


def test_recording_is_per_thread(platform, pool):
    x, results = torch.ones(2), []

    def other():
        results.append((x + 1).tolist())  # eager, while the main thread records
        results.append(platform.record(lambda: x + 2, platform.new_pool())[0].num_nodes())

    def step():
        y = x * 2
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return y

    graph, _ = platform.record(step, pool)
    assert results == [[2, 2], 1] and graph.num_nodes() == 1


def test_out_of_memory_frees_what_the_recording_took():
    platform = EmulatedPlatform(limit_bytes=10_000)
    pool = platform.new_pool()
    x = torch.ones(1024)
    graph, y = platform.record(lambda: x + 1, pool)
    with pytest.raises(CaptureOutOfMemoryError, match=r"holds 8192 bytes and needs 4096 more") as caught:
        platform.record(lambda: (x + 1, x + 2), pool)
    assert caught.value.requested_bytes == 4096
    assert platform.pool_bytes(pool) == (4096, 4096)
    graph.replay()
    assert (y == 2).all()


def test_a_freed_pool_refuses(platform, pool):
    x = torch.ones(100)
    graph, y = platform.record(lambda: x + 1, pool)
    graph.replay()
    platform.free(pool)
    assert platform.pool_bytes(pool) == (0, 0)
    assert graph.num_nodes() == 0  # weights and inputs are let go
    assert (y == 2).all()  # who still holds an output may read it
    with pytest.raises(ReplayError, match="freed"):
        graph.replay()
    with pytest.raises(CaptureError, match="freed"):
        platform.record(lambda: x + 1, pool)
    platform.free(pool)


def test_an_error_at_replay_says_which_call(platform, pool):
    index, table = torch.tensor([0]), torch.ones(2, 2)
    graph, _ = platform.record(lambda: table.index_select(0, index) + 1, pool)
    index.fill_(99)
    with pytest.raises(IndexError) as caught:
        graph.replay()
    assert "replaying call 0 of 2: index_select" in caught.value.__notes__[0]


def test_frame_and_repr(platform, pool):
    x = torch.ones(2)
    graph, _ = platform.record(lambda: (x + 1).mul_(2), pool)
    frame = graph.to_frame()
    assert list(frame["name"]) == ["add.Tensor", "mul_.Tensor"] and list(frame["outputs"]) == [[(2,)], []]
    assert "2 recorded calls" in repr(graph) and "emulated" in repr(graph) and "no GPU" in repr(platform)
