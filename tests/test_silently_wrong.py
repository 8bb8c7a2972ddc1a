"""Calls that once came back with a wrong result and no word: each is right now, or says what is wrong."""

from __future__ import annotations

import dataclasses
import enum
import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cgkit
from cgkit import CompilationConfig, compiled_model, register_op, set_forward_context, support_torch_compile
from cgkit.errors import (
    CaptureError,
    ConfigError,
    MovedInputError,
    ReplayError,
    ServingError,
    SplitError,
    TraceError,
)

MODES = ["PIECEWISE", "FULL"]


def triple(x: torch.Tensor, out: torch.Tensor) -> None:
    metadata = getattr(cgkit.forward_context.current_forward_context(), "attn_metadata", None)
    out.copy_(x * 3 if metadata is None else x * metadata)


register_op("triple", triple, ["out"], namespace="silently")


def attention(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    torch.ops.silently.triple(x, out)
    return out


@dataclasses.dataclass
class Between:
    hidden: torch.Tensor
    residual: torch.Tensor | None = None
    factor: int = 1


@support_torch_compile
class Nested(nn.Module):
    def forward(self, x: torch.Tensor, between: Between, pair=(2, 3)):  # type: ignore[no-untyped-def]
        x = attention(x) * pair[0] + between.hidden * between.factor
        return x if between.residual is None else x * between.residual


@support_torch_compile
class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return attention(x + 1) + y * 2


@support_torch_compile
class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity(), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(self.inner(x))


@support_torch_compile
class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return attention(x)


@support_torch_compile
class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(x).flatten()


@support_torch_compile
class WithSize(nn.Module):
    def forward(self, x: torch.Tensor):  # type: ignore[no-untyped-def]
        return attention(x), x.shape[0]


@support_torch_compile
class Capacity(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = attention(x)
        return x, x.new_zeros((x.shape[0] + 3) // 4, 2)  # as experts that choose their tokens do


class Activation(enum.Enum):
    RELU = 1
    TANH = 2


class Doubled:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Tripled(Doubled):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


@support_torch_compile
class Choosing(nn.Module):
    def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:
        if isinstance(how, dict):
            for factor in how.values():
                x = (x + 1) * factor
        elif isinstance(how, Activation):
            x = x.relu() if how is Activation.RELU else x.tanh()
        elif isinstance(how, set):
            x = x + 1 if "plus" in how else x - 1
        elif isinstance(how, types.SimpleNamespace):
            x = x + 1 if hasattr(how, "plus") else x - 1
        else:
            x = how(x)
        return attention(x)


def build(cls: type[nn.Module], *example: Any, record: bool = True, **changes: Any) -> nn.Module:
    settings = {
        "splitting_ops": ["silently::triple"],
        "compiler": "eager",
        "cudagraph_capture_sizes": [2, 4],
        "cudagraph_mode": "PIECEWISE" if record else "NONE",
        **changes,
    }
    model = cls(compilation_config=CompilationConfig(**settings))
    model(*example)
    if record:
        cgkit.capture_model(model)
    return model


def eager(model: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return type(model).forward(model, *args)


@pytest.fixture(autouse=True)
def _clean():
    yield
    cgkit.reset()


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"residual": torch.ones(3, 2)}, r"between\.residual"),
        ({"factor": 7}, r"between\.factor was 1 then and is 7"),
        ({"hidden": torch.ones(3, 2, dtype=torch.float64)}, r"between\.hidden\.dtype"),
    ],
)
def test_what_lies_inside_of_an_argument_is_checked(record: bool, change: dict, named: str) -> None:
    x = torch.ones(3, 2)
    model = build(Nested, x, Between(x), record=record)
    torch.testing.assert_close(model(x, Between(x * 5)), eager(model, x, Between(x * 5)))
    with pytest.raises(TraceError, match=named):
        model(x, Between(**{"hidden": x, **change}))
    with pytest.raises(TraceError, match=r"pair\[0\] was 2"):
        model(x, Between(x), (9, 3))
    torch.testing.assert_close(model(x, Between(x), (2, 9)), eager(model, x, Between(x)))  # not read: free


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize(
    ("first", "like", "other", "named"),
    [
        (Activation.RELU, Activation.RELU, Activation.TANH, r"how was <Activation.RELU: 1> then"),
        ({"a": 2, "b": 3}, {"a": 2, "b": 3}, {"b": 3, "a": 2}, r"tuple\(how\) was \('a', 'b'\)"),
        ({"a": 2}, {"a": 2}, {"a": 2, "b": 3}, r"tuple\(how\) was \('a',\)"),
        ({"plus"}, {"plus"}, {"minus"}, r"how was frozenset"),
        (
            types.SimpleNamespace(),
            types.SimpleNamespace(),
            types.SimpleNamespace(plus=1),
            r"hasattr\(how, 'plus'\)",
        ),
        (torch.relu, torch.relu, torch.tanh, r"how was <built-in"),
        (functional.relu, functional.relu, functional.silu, r"how\.__code__"),
        (Doubled(), Doubled(), Tripled(), r"type\(how\)"),
    ],
    ids=["enum", "order", "keys", "set", "hasattr", "builtin", "function", "class"],
)
def test_what_forward_chooses_by_is_checked(
    record: bool, first: Any, like: Any, other: Any, named: str
) -> None:
    x = torch.randn(3, 2)
    model = build(Choosing, x, first, record=record)
    torch.testing.assert_close(model(x, like), eager(model, x, like))
    with pytest.raises(TraceError, match=named):
        model(x, other)


def test_keys_with_braces_are_checked_like_others() -> None:
    @support_torch_compile(dynamic_arg_dims={"batch": 0})
    class Keyed(nn.Module):
        def forward(self, batch: dict) -> torch.Tensor:
            return attention(batch["{}"]) * (batch["{n}"] if "a{" in batch else 1)

    x = torch.ones(3, 2)
    model = build(Keyed, {"{}": x, "{n}": 2, "a{": 0}, record=False)
    assert torch.equal(model({"{}": x, "{n}": 2, "a{": 0}), x * 6)
    for other, named in (({"{n}": 3, "a{": 0}, "was 2 then and is 3"), ({"{n}": 2}, "'a{'")):
        with pytest.raises(TraceError, match=named):
            model({"{}": x, **other})


@pytest.mark.parametrize("other", [torch.float64, torch.int32])
def test_compiled_code_does_not_read_another_dtype_as_its_own(other: torch.dtype) -> None:
    x = torch.ones(4, 3)
    model = build(Two, x, x, record=False, compiler="inductor")
    with pytest.raises(TraceError, match=r"y\.dtype was torch\.float32"):
        model(x, x.to(other))
    with pytest.raises(TraceError, match="contiguous"):
        model(torch.ones(3, 5).t(), torch.ones(5, 3))
    with pytest.raises(TraceError, match="one symbol"):
        model(torch.ones(5, 3), x)
    torch.testing.assert_close(model(x, x), eager(model, x, x))


def test_modes_of_the_trace_stay() -> None:
    model = build(Dropping, torch.ones(4, 3))
    model.eval()
    with pytest.raises(TraceError, match=r"train\(\) when it was traced and is in eval\(\)"):
        model(torch.ones(4, 3))
    two = build(Two, torch.ones(4, 3), torch.ones(4, 3))
    two.eval()  # nothing in it asks
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TraceError, match="autocast was off"):
        two(torch.ones(4, 3), torch.ones(4, 3))


@support_torch_compile
class Casting(nn.Module):
    def __init__(self, around: bool = True) -> None:
        super().__init__()
        self.linear, self.around = nn.Linear(2, 2), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.around:
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(attention(self.linear(x)))
        return self.linear(attention(self.linear(x)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_recorded_and_called_under_autocast(mode: str, compiler: str) -> None:
    x = torch.randn(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        model = Casting(
            around=False,
            compilation_config=CompilationConfig(
                splitting_ops=["silently::triple"], compiler=compiler, cudagraph_mode=mode
            ),
        )
        model(x)
        cgkit.capture_model(model, [2, 4])
        torch.testing.assert_close(model(x[:3]), eager(model, x[:3]))


def test_a_region_of_autocast_is_not_cut() -> None:
    with pytest.raises(
        SplitError,
        match=r"(?s)autocast that holds\n  at .*test_silently_wrong.py:\d+.*beyond a cut \(silently::tr",
    ):
        build(Casting, torch.randn(4, 2))
    assert not torch.is_autocast_enabled("cpu")
    uncut = CompilationConfig(level=2, compiler="eager", cudagraph_mode="FULL")
    model, x = Casting(compilation_config=uncut), torch.randn(4, 2)
    model(x)
    cgkit.capture_model(model, [2, 4])
    torch.testing.assert_close(model(x[:3]), eager(model, x[:3]))


@pytest.mark.parametrize("mode", MODES)
def test_one_tensor_as_two_arguments_of_the_example(mode: str) -> None:
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    model = build(Two, x, x, cudagraph_mode=mode)
    torch.testing.assert_close(model(x, y), eager(model, x, y))
    cgkit.capture_model(model, make_inputs=lambda n: (torch.zeros(n, 2),) * 2)
    torch.testing.assert_close(model(x, y), eager(model, x, y))


@pytest.mark.parametrize("mode", MODES)
def test_sizes_that_belong_together(mode: str) -> None:
    model = build(Two, torch.ones(4, 2), torch.ones(4, 2), cudagraph_mode=mode)
    with pytest.raises(ReplayError, match=r"args\[1\] has 4 .* there are 3 tokens"):
        model(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(ReplayError):
        model(torch.ones(4, 2), torch.ones(3, 2))


@pytest.mark.parametrize("mode", MODES)
def test_a_write_into_an_argument_reaches_the_caller(mode: str) -> None:
    model = build(InPlace, torch.zeros(4, 2), cudagraph_mode=mode)
    for tokens in (3, 4):
        x = torch.ones(tokens, 2)
        assert torch.equal(model(x), torch.full((tokens, 2), 6.0))
        assert torch.equal(x, torch.full((tokens, 2), 2.0))


@pytest.mark.parametrize("mode", MODES)
def test_outputs_that_hold_padding_in_disguise(mode: str) -> None:
    x = torch.randn(4, 2)
    for cls, named in (
        (Flat, "dimension 0 of output is"),
        (WithSize, r"output\[1\] is the number"),
        (Capacity, r"dimension 0 of output\[1\] is"),
    ):
        model = build(cls, x, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4, 8])
        with pytest.raises(ReplayError, match=named):
            model(x[:3])
        torch.testing.assert_close(model(x), eager(model, x))  # a recorded size needs no cut


def test_a_full_graph_without_metadata_refuses_metadata() -> None:
    x = torch.ones(4, 2)
    model = build(Two, x, x, cudagraph_mode="FULL")
    with set_forward_context(torch.full((1,), 9.0)), pytest.raises(MovedInputError, match="was None"):
        model(x, x)


def test_threads_take_turns_at_the_buffers() -> None:
    model = build(Two, torch.ones(4, 2), torch.ones(4, 2))
    wrong: list[int] = []

    def serve() -> None:
        for step in range(200):
            x, y = torch.randn(3, 2), torch.randn(3, 2)
            if not torch.allclose(model(x, y), eager(model, x, y)):
                wrong.append(step)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=serve) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_a_capture_that_fails_leaves_a_model_that_works() -> None:
    x = torch.randn(3, 2)
    model = build(Two, x, x)
    with pytest.raises(ConfigError):
        cgkit.capture_model(model, [0])
    assert compiled_model(model).captured.num_graphs  # type: ignore[union-attr]
    for make in (lambda n: (torch.zeros(n, 5),) * 2, lambda n: (torch.zeros(4, 2),) * 2, lambda n: None):
        with pytest.raises(CaptureError):
            cgkit.capture_model(model, make_inputs=make)
        torch.testing.assert_close(model(x, x), eager(model, x, x))
    cgkit.capture_model(model)
    torch.testing.assert_close(model(x, x), eager(model, x, x))


def test_recorded_in_inference_mode_and_called_outside() -> None:
    x = torch.randn(3, 2)
    with torch.inference_mode():
        model = build(Two, torch.ones(4, 2), torch.ones(4, 2))
    torch.testing.assert_close(model(x, x), eager(model, x, x))


def test_hooks_of_a_decorated_subclass_of_a_decorated_class() -> None:
    @support_torch_compile
    class Twice(Two):
        pass

    x = torch.ones(3, 2)
    model = build(Twice, x, x)
    model.register_forward_hook(lambda module, args, output: output * 2)
    torch.testing.assert_close(model(x, x), eager(model, x, x) * 2)


def test_first_hit_sizes_are_hit_without_warm_ups() -> None:
    x = torch.ones(6, 2)
    model = build(Two, x, x, compile_sizes=[2, 4], compile_at="first_hit", cudagraph_num_of_warmups=0)
    assert all(not backend.to_be_compiled_sizes for backend in compiled_model(model).compiled.backends)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("splitting_ops", 3),
        ("custom_ops", 0.5),
        ("cudagraph_copy_inputs", "no"),
        ("debug", 1),
        ("inductor_compile_config", [1]),
        ("debug_dump_path", 3),
    ],
)
def test_fields_of_a_wrong_type(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        CompilationConfig(**{field: value})


def test_sizes_that_are_no_token_counts() -> None:
    with pytest.raises(ConfigError, match="token counts"):
        cgkit.CaptureSizes([10**12])


def test_prompts_and_sampling_of_a_wrong_type() -> None:
    from cgkit.serving import Runner, load_model

    runner = Runner(load_model("tiny-llama").model, max_num_seqs=2, max_model_len=32)
    for wrong in (None, {"a": 1}, 3):
        with pytest.raises(ServingError, match="prompts"):
            runner.generate(wrong, 2)  # type: ignore[arg-type]
    with pytest.raises(ServingError, match="sampling"):
        runner.generate([[1]], 2, None)  # type: ignore[arg-type]
