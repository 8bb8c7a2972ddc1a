"""Law: recorded and replayed, any program of tensor operators gives the bits of the eager run."""

from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgkit.capturing.emulated import EmulatedPlatform

LIBRARY = torch.library.Library("cgkit_emulated_property", "FRAGMENT")
LIBRARY.define("scaled(Tensor x, Tensor(a!) out) -> ()")
LIBRARY.impl("scaled", lambda x, out: (out.copy_(x.tanh() * 3), None)[1], "CompositeExplicitAutograd")


def _writable(t):
    return all(step > 0 or n <= 1 for n, step in zip(t.shape, t.stride()))


def _in_place(change):
    def step(t, u, n):
        if _writable(t):
            change(t, u, n)
        return t

    return step


def _out(function, shape):
    def step(t, u, n):
        out = torch.empty(shape(t))
        function(t, u, out)
        return out

    return step


def _index_put(accumulate):
    def change(t, u, n):
        rows = torch.arange(0, len(t), 2) if not accumulate else torch.zeros(2, dtype=torch.long)
        t.index_put_((rows,), u.mean() + 1, accumulate=accumulate)

    return _in_place(change)


def _topk(t, u, n):
    values, indices = torch.topk(t, min(2, t.size(1)), dim=1)
    return values + indices.to(torch.float32)


# Each takes two matrices and a number and gives a matrix; values stay bounded or become inf and nan,
# which are bits like others.
STEPS = {
    "t": lambda t, u, n: t.t(),
    "rows": lambda t, u, n: t[n % len(t) :],
    "columns": lambda t, u, n: t[:, :: 1 + n % 2],
    "chunk": lambda t, u, n: t.chunk(2, dim=n % 2)[-1],
    "split": lambda t, u, n: t.split(1 + n % 3, dim=0)[0],
    "reshape": lambda t, u, n: t.reshape(-1, len(t)),
    "expand": lambda t, u, n: t[:1].expand(1 + n % 4, -1),
    "flip": lambda t, u, n: t.flip(0),
    "add_": _in_place(lambda t, u, n: t.add_(n)),
    "mul_view_": _in_place(lambda t, u, n: t[n % len(t)].mul_(0.5)),
    "copy_": _in_place(lambda t, u, n: t.copy_(u.mean())),
    "copy_row_": _in_place(lambda t, u, n: t[0].copy_(t[-1].clone())),
    "set_item": _in_place(lambda t, u, n: t.__setitem__(t > 0.5, 0.25)),
    "index_put_": _index_put(False),
    "index_put_accumulate": _index_put(True),
    "zeros": lambda t, u, n: torch.zeros(1 + n, len(t)),
    "full": lambda t, u, n: torch.full((2, 1 + n), 1.5),
    "arange": lambda t, u, n: torch.arange(float(2 + 2 * n)).view(2, -1),
    "constant": lambda t, u, n: torch.tensor([[1.0, float(n)]]),
    "matmul": lambda t, u, n: (t @ t.t()).tanh(),
    "matmul_t": lambda t, u, n: (t.t() @ t).tanh(),
    "linear": lambda t, u, n: torch.nn.functional.linear(t, t[: 1 + n % 3], t.sum(1)[: 1 + n % 3]).tanh(),
    "cat": lambda t, u, n: torch.cat([t, t * 2], dim=n % 2),
    "stack": lambda t, u, n: torch.stack([t.sum(0), t.amax(0)]),
    "softmax": lambda t, u, n: torch.softmax(t, -1),
    "norm": lambda t, u, n: torch.nn.functional.rms_norm(t, (t.size(1),)),
    "cumsum": lambda t, u, n: t.cumsum(0),
    "sort": lambda t, u, n: torch.sort(t, dim=1).values,
    "topk": _topk,
    "where": lambda t, u, n: torch.where(t > u.mean(), t, -t),
    "half": lambda t, u, n: (t.to(torch.bfloat16) * n).float(),
    "foreach": lambda t, u, n: torch._foreach_mul([t, u], 0.5)[n % 2],
    "out_add": _out(lambda t, u, out: torch.add(t, 1, out=out), lambda t: t.shape),
    "out_mm": _out(lambda t, u, out: torch.mm(t, t.t(), out=out), lambda t: (len(t), len(t))),
    "python_op": _out(lambda t, u, out: torch.ops.cgkit_emulated_property.scaled(t, out), lambda t: t.shape),
}


@dataclass
class Program:
    """Steps (name, first operand, second operand, number); the last few values are the result."""

    steps: list[tuple[str, int, int, int]]

    def __call__(self, x, state):
        values = [x, state, x * 1.0]
        for name, first, second, number in self.steps:
            made = STEPS[name](values[first % len(values)], values[second % len(values)], number)
            if 0 < made.numel() <= 400:
                values.append(made)
        return values[-4:]


STEP = st.tuples(
    st.sampled_from(sorted(STEPS)),
    st.integers(0, 30).map(lambda i: -i),
    st.integers(0, 30),
    st.integers(0, 4),
)
PROGRAM = st.lists(STEP, min_size=1, max_size=14).map(Program)


def bits(tensors):
    plain = [t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8) for t in tensors]
    return [(t.shape, t.stride(), t.dtype, p.tolist()) for t, p in zip(tensors, plain)]


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(PROGRAM, st.integers(2, 5)), min_size=1, max_size=3), st.booleans(), st.integers(0, 9)
)
def test_replay_gives_the_bits_of_the_eager_run(programs, inference, seed):
    guard = torch.inference_mode if inference else torch.no_grad
    generator = torch.Generator().manual_seed(seed)
    platform = EmulatedPlatform()
    pool, recorded = platform.new_pool(), []
    with guard():
        for program, n in programs:
            x, state = torch.randn(n, 4, generator=generator), torch.randn(n, 4, generator=generator)
            before = bits([x, state])
            graph, outputs = platform.record(lambda p=program, x=x, s=state: p(x, s), pool)
            assert bits([x, state]) == before
            recorded.append((program, x, state, graph, platform.weak_ref(outputs, pool)))
            del outputs
        assert platform.pool_bytes(pool).allocated == 0  # each program may use the memory of the others
    for _ in range(3):
        for program, x, state, graph, outputs in recorded:
            with guard():
                x.copy_(torch.randn(x.shape, generator=generator))
                eager_x, eager_state = x.clone(), state.clone()
                expected = program(eager_x, eager_state)
            graph.replay()
            assert bits(outputs) == bits(expected)
            assert bits([x, state]) == bits([eager_x, eager_state])
