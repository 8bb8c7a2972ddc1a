"""Prepared launches: what reaches the driver, and how they give way. The driver is a stand-in here."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cgkit.errors import ReplayError
from cgkit.kernels.launch import CachedLaunch
from cgkit.torch_hooks import LaunchStream, fixed_graph_launch, fixed_launch, launches

METADATA = {"num_warps": 4, "shared": 512, "num_ctas": 1, "cluster_dims": (1, 1, 1), "launch_pdl": False}


class Driver:
    """cuLaunchKernel and cuFuncGetParamInfo as C calls them: pointers to the values, nothing converted for us."""

    def __init__(self, sizes: list[int], result: int = 0) -> None:
        self.sizes, self.result = sizes, result
        self.launches: list[tuple[Any, ...]] = []
        shape = [ctypes.c_uint] * 7
        self.cuLaunchKernel = ctypes.PYFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, *shape, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
        )(self._launch)
        self.cuLaunchKernel.restype = launches._Results({0: None}).__getitem__

    def _launch(self, function: int, *rest: Any) -> int:
        *shape, stream, block, extra = rest
        pointers = ctypes.cast(block, ctypes.POINTER(ctypes.c_void_p))
        kinds = {8: ctypes.c_uint64, 4: ctypes.c_int32}
        values = [
            ctypes.cast(pointers[i], ctypes.POINTER(kinds[size])).contents.value
            for i, size in enumerate(self.sizes)
        ]
        self.launches.append((function, tuple(shape), stream, values, extra))
        return self.result

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:  # noqa: N802
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    current = [5]
    monkeypatch.setattr(launches, "current_raw_stream", lambda device: current[0])
    made = LaunchStream(0)
    return SimpleNamespace(made=made, current=current)


def kernel(calls: list[Any], **changes: Any) -> Any:
    metadata = SimpleNamespace(**{**METADATA, **changes})
    return SimpleNamespace(
        run=lambda *args: calls.append(args), function=77, packed_metadata="packed", metadata=metadata
    )


def made(monkeypatch: pytest.MonkeyPatch, driver: Driver, compiled: Any, stream: Any) -> Any:
    monkeypatch.setattr(launches, "_driver", lambda: driver)
    return fixed_launch(compiled, (3, 2, 1), [1 << 40, 16], [7, -1], (64, 0.5), stream.made)


def test_the_driver_gets_every_argument_and_the_stream_of_the_step(
    monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    driver = Driver([8, 8, 4, 4, 8, 8])
    launch = made(monkeypatch, driver, kernel([]), stream)
    assert launch.how == "cuLaunchKernel"
    gc.collect()  # what the parameter block points at lives as long as the launch
    launch()
    stream.current[0] = 9
    launch()  # the same step: its stream was looked up at its beginning
    stream.made.follow()
    launch()
    values = [1 << 40, 16, 7, -1, 0, 0]
    shape = (3, 2, 1, 128, 1, 1, 512)
    assert driver.launches == [(77, shape, each, values, None) for each in (5, 5, 9)]


def test_the_default_stream_is_a_null_pointer(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    driver = Driver([8, 8, 4, 4])
    launch = made(monkeypatch, driver, kernel([]), stream)
    stream.current[0] = 0
    stream.made.follow()
    launch()
    assert driver.launches[0][2] is None and stream.made.raw == 0


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    launch = made(monkeypatch, Driver([8, 8, 4, 4], result=700), kernel([]), stream)
    with pytest.raises(ReplayError, match=r"error 700.*replay_path='module'"):
        launch()


@pytest.mark.parametrize("sizes", [[8, 8, 4], [8, 8, 4, 8], [8, 8, 4, 4, 4], [8, 8, 4, 4, 8, 8, 8], []])
def test_other_parameters_than_expected_go_through_tritons_run(
    monkeypatch: pytest.MonkeyPatch, stream: Any, sizes: list[int]
) -> None:
    calls: list[Any] = []
    launch = made(monkeypatch, Driver(sizes), kernel(calls), stream)
    assert launch.how.startswith("Triton's run (the kernel has parameters of [")
    stream.current[0] = 11
    stream.made.follow()
    launch()
    assert calls == [(3, 2, 1, 11, 77, "packed", None, None, None, 1 << 40, 16, 7, -1, 64, 0.5)]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_ctas": 2}, {"cluster_dims": (2, 1, 1)}, {"launch_pdl": True}, {"global_scratch_size": 128},
        {"shared": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_packed_launch_cannot_give_goes_through_tritons_run(
    monkeypatch: pytest.MonkeyPatch, stream: Any, changes: dict[str, Any]
) -> None:
    launch = made(monkeypatch, Driver([8, 8, 4, 4]), kernel([], **changes), stream)
    assert launch.how.startswith("Triton's run (")


def test_without_a_driver_it_is_tritons_run(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    launches._driver.cache_clear()

    def gone(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(launches.ctypes, "PyDLL", gone)
    launch = fixed_launch(kernel([]), (1, 1, 1), [16], [], (), stream.made)
    assert launch is not None and "cannot open" in launch.how  # type: ignore[attr-defined]


def test_an_unknown_triton_gives_no_launch(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert fixed_launch(kernel([]), (1, 1, 1), [16], [], (), stream.made) is None


def test_a_fixed_launch_of_a_kernel_launches_once_to_compile(
    monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    driver, public = Driver([8, 8, 4]), []
    monkeypatch.setattr(launches, "_driver", lambda: driver)

    class Jitted:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: public.append((grid, args)) or kernel([])

    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    cached = CachedLaunch(Jitted(), num_warps=4)
    launch = cached.fixed((2, 1, 1), (x, y), (3,), (64,), stream.made)
    assert public == [((2, 1, 1), (x, y, 3, 64))] and driver.launches == []
    assert launch is not None
    launch()
    assert driver.launches[0][3] == [x.data_ptr(), y.data_ptr(), 3]


@pytest.mark.gpu
@pytest.mark.parametrize("news", [[1, 1, 1, 1], [5, 1, 30]], ids=["decode", "mixed"])
def test_prepared_and_ordinary_attention_agree(news: list[int]) -> None:
    import triton

    from cgkit.kernels import attend
    from cgkit.kernels.paged_attention import prepare_attend
    from tests.kernels.cases import arguments, make_case

    case = make_case(news, [90, 70, 600, 33][: len(news)], device="cuda", dtype=torch.bfloat16, head_dim=64)
    given = arguments(case)
    attend(*given)
    expected = case.output.clone()
    step_stream = LaunchStream(0)
    calls = prepare_attend(*given, step_stream)
    assert calls is not None
    if triton.__version__.startswith("3.6."):
        assert {call.how for call in calls} == {"cuLaunchKernel"}  # type: ignore[attr-defined]
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        case.output.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            step_stream.follow()
            for call in calls:
                call()
        stream.synchronize()
        assert torch.equal(case.output, expected)


class Graph:
    """A recorded graph; each replay moves the generator on by ``draws``."""

    def __init__(self, generator: Any, draws: int) -> None:
        self.generator, self.draws, self.replays = generator, draws, 0

    def raw_cuda_graph_exec(self) -> int:
        return 1 << 40

    def replay(self) -> None:
        self.replays += 1
        self.generator.offset += self.draws


@pytest.mark.parametrize("draws", [0, 4])
def test_a_graph_is_launched_directly_unless_it_draws_random_numbers(
    monkeypatch: pytest.MonkeyPatch, stream: Any, draws: int
) -> None:
    launched: list[tuple[int, int | None]] = []
    kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    launch = kind(lambda graph, raw: launched.append((graph, raw)) or 0)
    launch.restype = launches._Results({0: None}).__getitem__
    monkeypatch.setattr(launches, "_driver", lambda: SimpleNamespace(cuGraphLaunch=launch))
    generator = SimpleNamespace(offset=8, get_offset=lambda: generator.offset)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    graph = Graph(generator, draws)
    direct = fixed_graph_launch(graph, 0, stream.made)
    assert graph.replays == 1 and not launched
    if draws:
        assert direct is None
        return
    direct()
    stream.current[0] = 9
    stream.made.follow()
    direct()
    assert launched == [(1 << 40, 5), (1 << 40, 9)] and graph.replays == 1


def test_a_graph_without_a_raw_handle_is_replayed_by_torch(
    monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    monkeypatch.setattr(launches, "_driver", lambda: SimpleNamespace(cuGraphLaunch=None))
    assert fixed_graph_launch(SimpleNamespace(replay=lambda: None), 0, stream.made) is None


@pytest.mark.gpu
def test_recorded_graphs_through_the_driver() -> None:
    x, drawn = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    graphs = []
    for work in (lambda: x.add_(1), lambda: drawn.normal_()):
        work()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            work()
    made = LaunchStream(torch.cuda.current_device())
    direct = fixed_graph_launch(graphs[0], torch.cuda.current_device(), made)
    x.zero_()
    made.follow()
    for _ in range(3):
        direct()
    assert x.tolist() == [3.0] * 8
    assert fixed_graph_launch(graphs[1], torch.cuda.current_device(), made) is None
