"""CachedLaunch: what it keys on, when it launches directly, and that both ways agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cgkit import torch_hooks
from cgkit.kernels import launch as module
from cgkit.kernels.launch import CachedLaunch


class StandIn:
    """In place of a Triton kernel: notes public launches and hands out a compiled kernel."""

    def __init__(self) -> None:
        self.public: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.public.append((grid, args, options))
            run = lambda *all_args: self.direct.append(all_args)  # noqa: E731
            return SimpleNamespace(run=run, function=11, packed_metadata="packed")

        return call


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(module, "current_raw_stream", lambda device: 5)
    return StandIn()


def test_the_second_launch_of_a_kind_is_direct(kernel: StandIn) -> None:
    launch = CachedLaunch(kernel, num_warps=2)
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.int32)
    for rows in (3, 8):
        launch((rows, 1, 1), (x, y), (rows,), (64, 0.5))
    assert kernel.public == [((3, 1, 1), (x, y, 3, 64, 0.5), {"num_warps": 2})]
    pointers = (x.data_ptr(), y.data_ptr())
    assert kernel.direct == [(8, 1, 1, 5, 11, "packed", None, None, None, *pointers, 8, 64, 0.5)]
    assert (launch.plain, launch.direct) == (1, 1)


def test_what_triton_specialises_on_is_a_kind_of_its_own(kernel: StandIn) -> None:
    launch = CachedLaunch(kernel)
    x = torch.zeros(64)
    assert x.data_ptr() % 16 == 0
    for tensor, constants in [(x, (1,)), (x[1:], (1,)), (x.double(), (1,)), (x, (2,)), (x[4:], (1,))]:
        launch((1, 1, 1), (tensor,), (), constants)
    assert launch.plain == 4
    assert launch.direct == 1  # x[4:] is aligned as x is


@pytest.mark.parametrize("version", ["3.5.1", "3.7.0", "4.0", "3.60.0"])
def test_an_unknown_triton_launches_the_public_way(
    kernel: StandIn, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    import triton

    monkeypatch.setattr(triton, "__version__", version)
    launch = CachedLaunch(kernel)
    for _ in range(3):
        launch((1, 1, 1), (torch.zeros(1),))
    assert (launch.plain, launch.direct) == (3, 0)


def test_a_compiled_kernel_without_the_private_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    assert torch_hooks.triton_direct_launch(SimpleNamespace(run=print, function=1)) is None


def test_numbers_beyond_32_bits_are_refused(kernel: StandIn) -> None:
    with pytest.raises(OverflowError, match="2\\*\\*31"):
        CachedLaunch(kernel)((1, 1, 1), (torch.zeros(1),), (2**31,))


@pytest.mark.gpu
def test_direct_and_plain_launches_agree() -> None:
    from cgkit.kernels import triton_prefill
    from tests.kernels.cases import arguments, make_case
    from tests.kernels.checks import prefill

    case = make_case([5, 30], [90, 70], device="cuda", dtype=torch.bfloat16, head_dim=64)
    launch = triton_prefill._launch_prefill
    prefill(*arguments(case))
    plain, direct = case.output.clone(), launch.direct
    case.output.zero_()
    prefill(*arguments(case))
    assert torch.equal(case.output, plain)
    import triton

    if triton.__version__.startswith("3.6."):
        assert launch.direct == direct + 1
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        case.output.zero_()
        prefill(*arguments(case))
    side.synchronize()
    assert torch.equal(case.output, plain)


@pytest.mark.gpu
def test_the_launch_benchmark_runs() -> None:
    from cgkit.kernels.bench import bench_launch

    frame = bench_launch(rounds=20)
    assert set(frame) >= {"plain", "direct"}
    assert all(us > 0 for us in frame.values())
